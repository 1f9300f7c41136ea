# SPDX-License-Identifier: BSD-3-Clause
"""What to use, and why, in a few sentences with the numbers that say so."""

from __future__ import annotations

from .report import AbResult, Row
from .variants import SIMPLEST

LITTLE = 1.05  # below, a change of the training loop isn't worth its while
MORE = "more steps, a larger budget or a quieter machine would tell"
LAUNCH_BOUND = 1.25  # time of an eager step over the device's own work in it
PARTLY = 1.10  # below this the graph gives so little that launches aren't what bounds the step
FUSING = 1.10  # what fewer passes over memory give, once launches are out of the way
GRAPHS = ("hand graph", "TrainStep")  # with the kernels of an eager step, or nearly
FUSED = ("TrainStep", "TrainStep compile", "compile", "compile max-autotune")


def advise(result: AbResult) -> str:
    """From measured numbers alone; a variant that computes something else is never recommended."""
    good = [row for row in result.rows if row.status == "ok" and row.ratio is not None]
    wrong = [row.name for row in result.rows if row.status == "differs"]
    left = f" Not considered, since it computes something else: {', '.join(wrong)}."
    left = left if wrong else ""
    if not good:
        return _nothing(result) + left
    if len(good) == 1:
        return f"Only {good[0].name} was measured; there is nothing to compare it with." + left
    base = good[0]
    fastest = max(good[1:], key=lambda row: row.ratio.median)
    gaining = [row for row in good[1:] if row.ratio.median >= LITTLE and not _doubt(row)]
    if gaining:
        best = max(gaining, key=lambda row: row.ratio.median)
        chosen = _simplest(gaining, best)
        text = f"Use {chosen.name}: {_compared(chosen, base)}."
        if chosen is not best:
            text += f" {best.name} is no faster beyond the spread."
        if fastest is not best:
            text += f" Not considered: {_compared(fastest, base)}{_doubt(fastest)}; {MORE}."
    elif fastest.ratio.median < LITTLE:
        within = _within(fastest)
        text = (
            f"There is little to gain here: {_compared(fastest, base)}{within}. Keep {base.name}."
        )
    else:
        text = (
            f"No gain can be told from this run: {_compared(fastest, base)}{_doubt(fastest)}. Keep "
            f"{base.name}; {MORE}."
        )
    return f"{text} {why(result)}{left}"


def _nothing(result: AbResult) -> str:
    if result.interrupted:
        return "Nothing was measured before the interruption."
    unchecked = [row for row in result.rows if row.status == "unchecked"]
    if unchecked:
        return f"Nothing is recommended: {unchecked[0].reason}."
    reasons = [f"{row.name} {row.status}: {row.reason}" for row in result.rows if row.reason]
    return f"Nothing could be measured: {reasons[0] if reasons else 'there were no variants'}."


def _simplest(rows: list[Row], best: Row) -> Row:
    """Of those that are as fast as the best, within the spread: the one that asks for least."""
    near = [r for r in rows if r.ratio.median >= best.ratio.median - best.ratio.spread]
    order = {name: i for i, name in enumerate(SIMPLEST)}
    return min(near, key=lambda row: order.get(row.name, len(order)))


def _doubt(row: Row) -> str:
    """Why a gain may be chance, as the end of a sentence, or nothing."""
    gain = row.ratio.median - 1
    if within := _within(row):
        return within
    if row.ratio.samples < 2:
        return ", but in a single turn, which nothing confirms"
    if len(row.halves) == 2 and abs(row.halves[0] - row.halves[1]) >= gain:
        first, second = row.halves
        return f", but {first:.2f} in the first half of the turns and {second:.2f} in the second"
    return ""


def _within(row: Row) -> str:
    return ", within the spread" if abs(row.ratio.median - 1) <= row.ratio.spread else ""


def _compared(row: Row, base: Row) -> str:
    ratio = row.ratio
    return f"{row.name} is {ratio.median:.2f} ± {ratio.spread:.2f} times as fast as {base.name}"


def why(result: AbResult) -> str:
    """What bounds the step, by the ratio of host to device."""
    rows = {r.name: r for r in result.rows if r.measured and r.status == "ok"}
    base = next(iter(rows.values()), None)
    if base is None:
        return ""
    if result.device != "cuda":
        return (
            "On a CPU there is no device to keep busy and no graph to replay: of ours, only the "
            "optimizer's pass over memory differs."
        )
    graph = next((rows[name] for name in GRAPHS if name in rows), None)
    eager_ms, host_ms = base.wall.median / 1e3, base.host.median / 1e3
    if graph is None:
        share = 100 * base.host.median / base.wall.median
        return (
            f"The host needs {host_ms:.3g} ms to issue a step of {eager_ms:.3g} ms ({share:.0f} %);"
            " no graph could be measured that would show the device's own share."
        )
    busy = graph.device.median
    busy_ms, share = busy / 1e3, 100 * busy / base.wall.median
    if base.wall.median >= PARTLY * busy:
        partly = "" if base.wall.median >= LAUNCH_BOUND * busy else "partly "
        return (
            f"The step is {partly}launch-bound: eager takes {eager_ms:.3g} ms (the host "
            f"{host_ms:.3g} ms to issue it) for work that keeps the device busy for "
            f"{busy_ms:.3g} ms ({graph.name}); host/device is {host_ms / busy_ms:.2g}."
        )
    fused = [rows[n] for n in FUSED if n in rows and rows[n] is not graph]
    fastest = min(fused, key=lambda row: row.wall.median, default=None)
    if fastest is not None and busy >= FUSING * fastest.wall.median:
        return (
            f"The step is memory-bound: the device is busy for {share:.0f} % of eager's time, and "
            f"fewer passes over memory make {fastest.name} {busy / fastest.wall.median:.2f} times "
            f"as fast as {graph.name}."
        )
    return (
        f"The step is compute-bound: the device is busy for {share:.0f} % of eager's time (host/"
        f"device is {host_ms / busy_ms:.2g}), and neither a graph nor fewer passes over memory "
        "change much."
    )
