# SPDX-License-Identifier: BSD-3-Clause
# The README's tables of data: augmentation, epochs by how they are loaded, and the MNIST recipe.
import statistics

from data_report import FASTEST_STOCK, IN_STEP
from report_records import (
    ENDS,
    HALF,
    SPREAD,
    Record,
    cell,
    fold,
    quotient,
    span,
    spread_cell,
    table,
    times_cell,
    where,
)

EAGER, PREFETCHED = "DataLoader + eager", "prefetch + TrainStep"
STOCK_ON_DEVICE, RESIDENT = "torchvision on the device + TrainStep", "DeviceLoader + TrainStep"
WAYS = (EAGER, FASTEST_STOCK, PREFETCHED, STOCK_ON_DEVICE, RESIDENT, IN_STEP)
# Of an epoch; the first times the second is all of it, the others are ways to the second.
THE_STEPS, THE_DATAS = (EAGER, FASTEST_STOCK), (FASTEST_STOCK, IN_STEP)
FACTORS = {
    "TrainStep alone, the DataLoader kept": THE_STEPS,
    "the data (DataLoader → made in the step)": THE_DATAS,
    "all (DataLoader + eager → made in the step)": (EAGER, IN_STEP),
    "of the data's: prefetch": (FASTEST_STOCK, PREFETCHED),
    "torchvision on the device": (FASTEST_STOCK, STOCK_ON_DEVICE),
    "DeviceLoader": (FASTEST_STOCK, RESIDENT),
}


def data(records: list[Record]) -> list[str]:
    (record,) = records
    rows = []
    cases = {c: taken for c, taken in record["cases"].items() if not c.startswith("loader/")}
    for case, taken in cases.items():
        for timer, times in taken["us"].items():
            for name, found in times.items():
                speed = f"{taken['images'] / found['median'] * 1e6:,.0f}"
                ratio = times_cell(quotient(found, times["ours"]))
                rows.append([f"{case}, {timer}: {name}", cell(found), speed, ratio])
    shares = [
        f"{case.split('/')[1]} {taken['percent_of_copy']:.0f} %"
        for case, taken in cases.items()
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


def loader(records: list[Record]) -> list[str]:
    """Which part of an epoch's gain is the step's and which the data's."""
    (record,) = records
    found = {
        f"{case.split('/')[1]}, {taken['images']:,} images, batch {taken['batch']:,}": taken
        for case, taken in record["cases"].items()
        if case.startswith("loader/")
    }
    if not found:
        return []
    times = {name: taken["us"]["epoch"] for name, taken in found.items()}

    def factors(pair: tuple[str, str]) -> list:
        base, ours = pair
        return [quotient(us.get(base), us.get(ours)) for us in times.values()]

    ranges = {name: factors(pair) for name, pair in FACTORS.items()}
    step, datas = (
        span([ratio[0] for ratio in factors(pair) if ratio]) for pair in (THE_STEPS, THE_DATAS)
    )
    workers = max(taken["workers"] for taken in found.values())
    return [
        "### What is the data's",
        "",
        f"Whole epochs from a `DataLoader` with {workers} workers and PIL transforms: as long as it"
        f" stays, `TrainStep` makes them {step} times as fast as eager steps with the fused "
        f"optimizer do. Data on the device, augmented there, make them another {datas} times as "
        "fast. These factors belong to this order, since the slower of loader and step hides what "
        "the other gains. "
        "torchvision on the device moves all images of a batch alike, which is less work than the "
        "others do.",
        "",
        *table(
            [f"ms an epoch, {HALF}", *WAYS],
            [[name, *(cell(us.get(way), 1e3) for way in WAYS)] for name, us in times.items()],
        ),
        "",
        *table(
            ["× faster by", *FACTORS],
            [
                [name, *(spread_cell(ratios[i]) for ratios in ranges.values())]
                for i, name in enumerate(times)
            ],
        ),
        "",
        f"Each ratio is one of medians, {ENDS}. {record['settings']['precision']}. {where(record)}",
    ]


# --- the recipe -----------------------------------------------------------------------------------


def of_several(values: list[float], middle: float) -> str:
    """With its range, where there is one."""
    if len(values) == 1:
        return f"{middle:.2f} (one)"
    return f"{middle:.2f} ({min(values):.2f} to {max(values):.2f})"


def epoch_cell(seconds: list[float]) -> str:
    """Of the epochs that `epochs_per_second` counts."""
    later = [1e3 * s for s in seconds[min(2, len(seconds) - 1) :]]
    if len(later) == 1:
        return f"{later[0]:,.{0 if later[0] >= 100 else 1}f} (one)"
    q1, median, q3 = statistics.quantiles(later, n=4, method="inclusive")
    return cell({"median": median, "q1": q1, "q3": q3})


def recipe(records: list[Record]) -> list[str]:
    (record,) = records
    taken = record["cases"]["mnist"]
    rows, timed = [], []
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
                of_several(speeds, statistics.median(speeds)),
                of_several(last, statistics.mean(last)),
            ]
        )
        timed += [[f"{backend}, seed {run['seed']}", epoch_cell(run["seconds"])] for run in runs]
    return [
        "The recipe of `examples/mnist_recipe.py`, with validation after each epoch, and the same "
        f"as plain PyTorch has it, on {taken['images']:,} images. Both erase with grey, as black "
        "is the background. Epochs/s leave out the first two, which compile, capture and start "
        "workers.",
        "",
        *table(["", "trainings", "epochs/s, median", "% right at the end, mean"], rows),
        "",
        where(record),
        *fold("Times and spread", table(["training", f"ms an epoch, {HALF}"], timed)),
    ]
