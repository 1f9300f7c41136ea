# SPDX-License-Identifier: BSD-3-Clause
# The README's tables of whole training steps: how fast, which part does what, and where it fades.
from itertools import pairwise

from report_records import (
    SPREAD,
    Range,
    Record,
    cell,
    command,
    fold,
    machine,
    quotient,
    repeats,
    table,
    times_cell,
    where,
)

STEP_VARIANTS = ("eager", "eager fused", "compile", "hand graph", "TrainStep", "TrainStep compile")
SWEEP = ("eager fused", "hand graph", "TrainStep")


# --- training steps -------------------------------------------------------------------------------


def step_rows(records: list[Record]) -> dict[str, dict]:
    """Times by variant of each model; a model that several records have is told by the clock."""
    cases = [case for record in records for case in record["cases"]]
    found = {}
    for record in records:
        when = record["environment"]["date"][11:16]
        for case, taken in record["cases"].items():
            label = f"{case}, batch {taken['inputs'][0]}"
            label += f" ({when})" if cases.count(case) > 1 else ""
            found[label] = {n: v["us"] for n, v in taken["variants"].items() if "us" in v}
    return found


def gain(times: dict, base: str, ours: str) -> Range | None:
    return quotient(times.get(base), times.get(ours))


def best(times: dict, base: str) -> Range | None:
    """Of TrainStep with and without `compile`, the faster one over `base`."""
    found = [gain(times, base, name) for name in ("TrainStep", "TrainStep compile")]
    return max((f for f in found if f), default=None)


# --- the sweep ------------------------------------------------------------------------------------


def sweep_models(record: Record) -> dict[str, list[dict]]:
    """The sizes of each model, by batch."""
    found: dict[str, list[dict]] = {}
    for taken in record["cases"].values():
        found.setdefault(taken["model"], []).append(taken)
    return {model: sorted(sizes, key=lambda s: s["batch"]) for model, sizes in found.items()}


def sweep_times(taken: dict) -> dict:
    return {name: found["us"] for name, found in taken["variants"].items() if "us" in found}


# --- tables ---------------------------------------------------------------------------------------


def span(ratios: list[float]) -> str:
    least, most = f"{min(ratios):.1f}", f"{max(ratios):.1f}"
    return least if least == most else f"{least} to {most}"


def steps(records: list[Record]) -> list[str]:
    rows = step_rows(records)
    ranges = [[r[0] for t in rows.values() if (r := best(t, b))] for b in ("eager", "hand graph")]
    over_eager, over_graph = map(span, ranges)
    shown = [v for v in STEP_VARIANTS if any(v in times for times in rows.values())]
    several = " Rows are from several runs, so compare within a row." * (len(records) > 1)
    return [
        f"A whole training step in mixed precision is {over_eager} times as fast as PyTorch's "
        f"eager one, and {over_graph} times as fast as the same stock step captured by hand.",
        "",
        "![Speed-up of whole training steps](benchmarks/plots/steps.png)",
        "",
        *table(
            [SPREAD, *shown, "× eager"],
            [
                [label, *(cell(t.get(v)) for v in shown), times_cell(best(t, "eager"))]
                for label, t in rows.items()
            ],
        ),
        "",
        f"On {machine(records[0])}; {records[0]['settings']['precision']}.{several}"
        + "".join(f" {', '.join(r['cases'])}:{found}" for r in records if (found := repeats(r))),
        *fold("The commands", [f"* {command(record)}" for record in records]),
    ]


def split(records: list[Record]) -> list[str]:
    pairs = {
        "the graph (eager → hand graph)": ("eager", "hand graph"),
        "fused step, 16-bit weights (hand graph → TrainStep)": ("hand graph", "TrainStep"),
        "Inductor's kernels (→ TrainStep compile)": ("TrainStep", "TrainStep compile"),
    }
    rows = [
        [label, *(times_cell(gain(t, *p)) for p in pairs.values()), times_cell(best(t, "eager"))]
        for label, t in step_rows(records).items()
    ]
    return table(["× faster by", *pairs, "together"], rows)


def ending(last: int | None) -> str:
    """Of a gain, as bench_sweep.py's `gain_ends` says it."""
    if last is None:
        return "up to the largest measured"
    return f"up to {last:,}" if last else "at none"


def sweep(records: list[Record]) -> list[str]:
    (record,) = records
    least, rows, ends = record["least_gain"], [], []
    for model, sizes in sweep_models(record).items():
        together = record["fades"].get(model, {}).get("together")
        if together:
            ends.append(f"{model} {ending(together['ends'])}")
        for taken in sizes:
            t = sweep_times(taken)
            speed = taken["variants"].get("TrainStep", {}).get("samples_per_s")
            parts = [gain(t, *p) for p in pairwise(SWEEP)]
            both = [*parts, gain(t, SWEEP[0], SWEEP[2])]
            cells = [*(cell(t.get(v)) for v in SWEEP), "–" if speed is None else f"{speed:,.0f}"]
            rows.append([f"{model}, {taken['batch']:,}", *cells, *map(times_cell, both)])
    columns = [f"model, batch; {SPREAD}", *SWEEP, "samples/s", "graph", "the rest", "together"]
    return [
        f"Batches that gain a factor of {least} or more over eager steps with the fused optimizer: "
        f"{'; '.join(ends)}.",
        "",
        "![Speed-up by batch size](benchmarks/plots/sweep.png)",
        "",
        where(record),
        *fold("All batch sizes", table(columns, rows)),
    ]
