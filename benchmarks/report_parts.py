# SPDX-License-Identifier: BSD-3-Clause
# The README's tables of what a step is made of: optimizer, its chain, loss, data; and of losses.
import statistics

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

    columns = [*(f"× {TIMERS[t]}" for t in timers), f"× {TIMERS['graph']}, one group"]
    columns += [f"ours in a graph, {SPREAD}", "% of copy", "kernels: timm / ours"]
    rows = {case: row(case, t) for record in records for case, t in record["cases"].items()}
    return [
        "`tr.optim.LARS` against timm's `Lars`, which is given bias-like tensors as a group "
        "without ratio and decay, so that both do the same; and against timm's as it is mostly "
        "called, with all parameters in one group.",
        "",
        *table(["model", *columns], list(rows.values())),
        "",
        "\n\n".join(where(record) for record in records),
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
    columns = ["logits", "plain", "memory", "smoothed labels", "memory, smoothed"]
    worst = max(
        50 * (t["q3"] - t["q1"]) / t["median"]
        for taken in record["cases"].values()
        for t in taken["us"]["graph"].values()
    )
    return [
        "`tr.cross_entropy`, forward and backward in a CUDA graph: torch's time over ours, and our "
        "peak of memory over torch's.",
        "",
        *table(columns, [[name, *row] for name, row in rows.items()]),
        "",
        f"Half the quartiles' distance is {worst:.1f} % of a time at most. {where(record)}",
    ]


def data(records: list[Record]) -> list[str]:
    (record,) = records
    rows = []
    for case, taken in record["cases"].items():
        for timer, times in taken["us"].items():
            ours = "ours" if "ours" in times else "DeviceLoader in the step"
            for name, found in times.items():
                speed = f"{taken['images'] / found['median'] * 1e6:,.0f}"
                ratio = times_cell(quotient(found, times[ours]))
                rows.append([f"{case}, {timer}: {name}", cell(found), speed, ratio])
    shares = [
        f"{case.split('/')[1]} {taken['percent_of_copy']:.0f} %"
        for case, taken in record["cases"].items()
        if "percent_of_copy" in taken
    ]
    return [
        "### Data",
        "",
        f"Augmentation on the device, as a share of a copy's bandwidth: {', '.join(shares)}. Back "
        "to back (b2b), Python launches each batch; in a graph, as `TrainStep` has it, it doesn't. "
        "torchvision's transforms draw on the host and can't be captured.",
        "",
        *table(["what", SPREAD, "images/s", "time over ours"], rows),
        "",
        where(record),
    ]


def recipe(records: list[Record]) -> list[str]:
    (record,) = records
    taken = record["cases"]["mnist"]
    rows = []
    for backend in ("ours", "native"):
        runs = taken[backend]
        if not runs:
            continue
        last = [100 * run["accuracy"][-1] for run in runs]
        speeds = [run["epochs_per_second"] for run in runs]
        rows.append(
            [
                backend,
                f"{len(runs)} of {len(runs[0]['accuracy'])} epochs",
                f"{statistics.median(speeds):.2f} ({min(speeds):.2f} to {max(speeds):.2f})",
                f"{statistics.mean(last):.2f} ({min(last):.2f} to {max(last):.2f})",
            ]
        )
    return [
        "The recipe of `examples/mnist_recipe.py`, with validation after each epoch, and the same "
        f"as plain PyTorch has it, on {taken['images']:,} images. Both erase with grey, as black "
        "is the background. Epochs/s leave out the first two, which compile, capture and start "
        "workers.",
        "",
        *table(["", "trainings", "epochs/s, median", "% right at the end, mean"], rows),
        "",
        where(record),
    ]


def losses(records: list[Record]) -> list[str]:
    """Every kept ratio of ours below 1; what a hand-made graph loses is its own."""
    rows = [
        [f"`{key}`", f"{ratio:.2f}"]
        for record in records
        for key, ratio in record["ratios"].items()
        if ratio < 1 and not key.endswith("over hand graph")
    ]
    return fold("Every kept ratio below 1: ours is slower", table(["device/…/ours", "×"], rows))[1:]
