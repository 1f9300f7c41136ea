# SPDX-License-Identifier: BSD-3-Clause
# The README's tables of what a step is made of: optimizer, its chain, loss.
from report_records import (
    SPREAD,
    Record,
    cell,
    fold,
    quotient,
    table,
    times_cell,
    where,
)

TIMERS = {"b2b": "back to back", "single": "single step", "graph": "CUDA graph", "host": "host"}
OPTIM_VARIANTS, OURS = ("foreach", "fused", "gather", "flat"), ("gather", "flat")
LARS_VARIANTS = {"timm": "timm", "timm plain": "timm, one group", "gather": "ours"}


def optim(records: list[Record]) -> list[str]:
    (record,) = records
    cases, s = record["cases"], record["settings"]
    copy = record["copy_bytes_per_second"] / 1e12

    def speed_ups(case: str, taken: dict) -> list[str]:
        def ratios(timer: str) -> str:
            us = taken["us"][timer]
            return " / ".join(times_cell(quotient(us["fused"], us[v])) for v in OURS)

        share = " / ".join(f"{taken['percent_of_copy'][v]:.0f}" for v in ("fused", *OURS))
        name = f"{case}, {taken['tensors']:,} tensors, {taken['parameters'] / 1e6:.1f} M"
        return [name, *map(ratios, TIMERS), share]

    return [
        f"One `{s['optimizer']}` step, {s['dtype']}: time of `fused=True` over ours, `gather` / "
        "`flat`; above 1 is faster.",
        "",
        "![Speed-up of optimizer steps](benchmarks/plots/optim.png)",
        "",
        *table(
            ["model", *TIMERS.values(), "% of copy: fused / gather / flat"],
            [speed_ups(case, taken) for case, taken in cases.items()],
        ),
        "",
        f"{where(record)} A device-to-device copy reaches {copy:.2f} TB/s there.",
        *fold(
            "Times and spread",
            table(
                [SPREAD, *OPTIM_VARIANTS],
                [
                    [f"{case}, {TIMERS[t]}", *(cell(taken["us"][t].get(v)) for v in OPTIM_VARIANTS)]
                    for case, taken in cases.items()
                    for t in TIMERS
                ],
            ),
        ),
    ]


def lars(records: list[Record]) -> list[str]:
    timers = ("b2b", "single", "graph")

    def row(case: str, taken: dict) -> list[str]:
        us, launches = taken["us"], taken.get("launches", {})
        kernels = [launches.get(name, {}).get("kernel") for name in ("timm", "gather")]
        ours, plain = us["graph"].get("gather"), us["graph"].get("timm plain")
        return [
            f"{case}, {taken['tensors']:,} tensors, {taken['parameters'] / 1e6:.1f} M",
            *(times_cell(quotient(us[t].get("timm"), us[t].get("gather"))) for t in timers),
            times_cell(quotient(plain, ours)),
            cell(ours),
            f"{taken['percent_of_copy']['gather']:.0f}",
            " / ".join(f"{n:,}" if n else "–" for n in kernels),
        ]

    def times(case: str, taken: dict) -> list[list[str]]:
        us = taken["us"]
        return [
            [f"{case}, {TIMERS[t]}", *(cell(us[t].get(v)) for v in LARS_VARIANTS)] for t in timers
        ]

    columns = [*(f"× {TIMERS[t]}" for t in timers), f"× {TIMERS['graph']}, one group"]
    columns += [f"ours in a graph, {SPREAD}", "% of copy", "kernels: timm / ours"]
    cases = {case: taken for record in records for case, taken in record["cases"].items()}
    timed = [line for case, taken in cases.items() for line in times(case, taken)]
    return [
        "`tr.optim.LARS` against timm's `Lars`, which is given bias-like tensors as a group "
        "without ratio and decay, so that both do the same; and against timm's as it is mostly "
        "called, with all parameters in one group.",
        "",
        *table(["model", *columns], [row(case, taken) for case, taken in cases.items()]),
        "",
        "\n\n".join(where(record) for record in records),
        *fold("Times and spread", table([SPREAD, *LARS_VARIANTS.values()], timed)),
    ]


def chain(records: list[Record]) -> list[str]:
    cases = {case: taken for record in records for case, taken in record["chain"].items()}
    rows = []
    for case, taken in cases.items():
        times = {name: v.get("us") for name, v in taken["variants"].items()}
        for end in ("", " + EMA"):
            pair = times.get(f"stock{end}"), times.get(f"ours{end}")
            rows.append([f"{case}{end}", *map(cell, pair), times_cell(quotient(*pair))])
    return [
        "What follows backward in a mixed-precision loop, launched eagerly: `GradScaler`'s unscale "
        "and check, clipping, fused AdamW, the update of the scale, and optionally an average of "
        "the weights.",
        "",
        *table([SPREAD, "stock", "ours", "× faster"], rows),
        "",
        "\n\n".join(where(record) for record in records),
    ]


def loss(records: list[Record]) -> list[str]:
    (record,) = records
    rows: dict[str, list[str]] = {}
    for case, taken in record["cases"].items():
        us, peak = taken["us"]["graph"], taken["peak_bytes"]
        _, dtype, shape, _ = case.split("/")
        row = rows.setdefault(f"{shape}, {dtype}", [])
        row += [times_cell(quotient(us["torch"], us["ours"]))]
        row += [f"{peak['ours'] / peak['torch']:.2f}"]
    timed = [
        [f"{shape}, {dtype}, {kind}", *(cell(taken["us"]["graph"][n]) for n in ("torch", "ours"))]
        for case, taken in record["cases"].items()
        for _, dtype, shape, kind in [case.split("/")]
    ]
    columns = ["logits", "plain", "memory", "smoothed labels", "memory, smoothed"]
    return [
        "`tr.cross_entropy`, forward and backward in a CUDA graph: torch's time over ours, and our "
        "peak of memory over torch's.",
        "",
        *table(columns, [[name, *row] for name, row in rows.items()]),
        "",
        where(record),
        *fold("Times and spread", table([SPREAD, "torch", "ours"], timed)),
    ]
