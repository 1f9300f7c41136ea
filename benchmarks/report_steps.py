# SPDX-License-Identifier: BSD-3-Clause
# The README's tables of whole training steps: how fast, which part does what, and where it fades.
from itertools import pairwise

from report_records import (
    ENDS,
    SPREAD,
    Range,
    Record,
    cell,
    command,
    fold,
    machine,
    quotient,
    repeats,
    span,
    spread_cell,
    table,
    times_cell,
    where,
)

OURS = ("TrainStep", "TrainStep compile")
STEP_VARIANTS = ("eager", "eager fused", "compile", "hand graph", *OURS)
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


def headline(rows: dict[str, dict], ours: str) -> str:
    """How many times as fast one variant is, of all models that have it; empty where none has."""
    bases = {
        "eager": "PyTorch's eager loop",
        "hand graph": "the same stock step in a graph captured by hand",
    }
    parts = []
    for base, words in bases.items():
        ratios = [found[0] for t in rows.values() if (found := gain(t, base, ours))]
        if ratios:
            number = f"{len(ratios)} model" + "s" * (len(ratios) > 1)
            parts.append(f"{span(ratios)} times as fast as {words} ({number})")
    return f"`{ours}` is {' and '.join(parts)}" if parts else ""


def steps(records: list[Record]) -> list[str]:
    rows = step_rows(records)
    shown = [v for v in STEP_VARIANTS if any(v in times for times in rows.values())]
    several = " Rows are from several runs, so compare within a row." * (len(records) > 1)
    found = "; ".join(filter(None, (headline(rows, ours) for ours in OURS)))
    return [
        f"A whole training step in mixed precision: {found}.",
        "",
        "![Speed-up of whole training steps](benchmarks/plots/steps.png)",
        "",
        *table(
            [SPREAD, *shown, *(f"× eager: {ours}" for ours in OURS)],
            [
                [
                    label,
                    *(cell(t.get(v)) for v in shown),
                    *(times_cell(gain(t, "eager", ours)) for ours in OURS),
                ]
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
        "the rest of TrainStep (hand graph → TrainStep)": ("hand graph", OURS[0]),
        "both (eager → TrainStep)": ("eager", OURS[0]),
        "what is compiled (TrainStep → TrainStep compile)": OURS,
        "all three (eager → TrainStep compile)": ("eager", OURS[1]),
    }
    rows = [
        [label, *(spread_cell(gain(t, *pair)) for pair in pairs.values())]
        for label, t in step_rows(records).items()
    ]
    return [*table(["× faster by", *pairs], rows), "", f"Each ratio is one of medians, {ENDS}."]


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
