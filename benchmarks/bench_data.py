# SPDX-License-Identifier: BSD-3-Clause
# Data: tr.data.augment against a copy of as many bytes, torchvision and kornia; loaders with
# training steps, images a second. Run it as `python benchmarks/bench_data.py`.
import argparse
import sys
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1]))  # an in-place build, if none is installed
sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

import common
import data_loaders
import data_report as report
import data_stock as stock
import timers
import train_step_variants as variants_of
from data_loaders import transforms_of
from tables import progress

import torch_renaissance as tr

AUGMENT = {
    "mnist_200": ("mnist", 200),
    "mnist_8192": ("mnist", 8192),
    "cifar_1024": ("cifar", 1024),
}
QUICK_IMAGES = 32
ONE_BY_ONE = 256  # images of a CPU's turn
CASES = [
    *(f"augment/{name}" for name in AUGMENT),
    *(f"cpu/{recipe}" for recipe in stock.SHAPES),
    *(f"loader/{recipe}" for recipe in data_loaders.BATCH),
]
MOST_BUFFERS = 256
BUDGET = 40.0  # seconds for the turns of one augmentation on a GPU
TOLERANCE = 1e-5


def check(recipe: str, images: Tensor) -> dict:
    """What nothing random moves is torchvision's; what is drawn is the same at each call."""
    plain = (tr.data.ToFloat(), tr.data.Normalize(stock.MEAN[recipe], stock.STD[recipe]))
    expected = stock.torchvision_transforms(recipe).transforms[-1](images.float() / 255)
    difference = float((tr.data.augment(images, plain) - expected).abs().max())
    drawn = [tr.data.augment(images, transforms_of(recipe), seed=1) for _ in range(2)]
    agrees = difference <= TOLERANCE and torch.equal(*drawn)
    return {"tolerance": TOLERANCE, "difference": difference, "agrees": agrees}


def over(call: Callable, buffers: list) -> Callable[[], None]:
    """All buffers in turn. The results are kept, so that each has memory of its own."""
    kept: list = []

    def run() -> None:
        kept[:] = [call(buffer) for buffer in buffers]

    return run


def graph_times(ours: Callable, buffers: list[Tensor], moved: int, quick: bool) -> dict:
    """µs of one batch, and of a copy that reads and writes as many bytes in all, each captured over
    buffers that exceed the L2 cache together."""
    device, count = buffers[0].device, len(buffers)
    row = (moved // 2 + 511) // 512 * 512  # aligned as an allocation
    parts = torch.empty(2, count, row, dtype=torch.uint8, device=device)
    pairs = list(zip(*parts, strict=True))
    runs = {"ours": over(ours, buffers), "copy": over(lambda pair: pair[1].copy_(pair[0]), pairs)}
    graphs = {name: timers.capture(timers.Timed(run)) for name, run in runs.items()}
    rounds, budget = (3, 0.02) if quick else (7, 0.1)
    found = timers.time_replays(graphs, rounds, budget)
    return {
        name: {k: v if k == "samples" else round(v / count, 3) for k, v in times.items()}
        for name, times in found.items()
    }


def buffers_for(moved: int, device: torch.device) -> int:
    """So many that twice the L2 cache is moved in a round."""
    if device.type != "cuda":
        return 2
    return max(4, min(MOST_BUFFERS, timers.flush_bytes(device) // moved + 1))


def measure_augment(name: str, device: torch.device, quick: bool, seconds: float) -> dict:
    recipe, batch = AUGMENT[name]
    batch = min(batch, QUICK_IMAGES) if quick and device.type == "cpu" else batch
    first = stock.random_images(recipe, batch, device)
    rows = torch.arange(batch, device=device)
    ours = partial(tr.data.augment, transforms=transforms_of(recipe), indices=rows)
    moved = first.nbytes + rows.nbytes + ours(first).nbytes
    count = buffers_for(moved, device)
    buffers = [first, *(stock.random_images(recipe, batch, device, i) for i in range(1, count))]
    turns = cycle(buffers)
    calls = {"ours": ours} | stock.on_device(recipe, device)
    steps = {n: timers.Timed(lambda call=call: call(next(turns))) for n, call in calls.items()}
    # A host's moods last a second: many turns, and time enough for many moods.
    rounds, budget, longest = (3, 0.02, timers.LONGEST) if quick else (150, 0.1, seconds)
    taken = {"images": batch, "bytes": moved, "buffers": count, "check": check(recipe, first)}
    taken["us"] = {"b2b": timers.time_b2b(steps, device, rounds, budget, longest)}
    if device.type == "cuda":
        taken["us"]["graph"] = graph = graph_times(ours, buffers, moved, quick)
        share = 100 * graph["copy"]["median"] / graph["ours"]["median"]
        taken["percent_of_copy"] = round(share, 1)
    return taken


def measure_cpu(recipe: str, quick: bool) -> dict:
    """On one core."""
    cpu = torch.device("cpu")
    images = stock.random_images(recipe, QUICK_IMAGES if quick else ONE_BY_ONE, cpu)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        calls = {"ours": partial(tr.data.augment, images, transforms_of(recipe))}
        calls |= stock.one_by_one(recipe, images)
        steps = {name: timers.Timed(call) for name, call in calls.items()}
        us = timers.time_b2b(steps, cpu, 3 if quick else 7, 0.02 if quick else 0.2)
    finally:
        torch.set_num_threads(threads)
    return {"images": len(images), "us": {"one core": us}}


# --- running --------------------------------------------------------------------------------------


class Data(common.Benchmark):
    description = "Time augmentation and loaders."
    settings = ("precision", "budget", "cases")

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--cases", help=f"comma-separated, of: {', '.join(CASES)}")
        helps = f"seconds for the timing of one augmentation; {BUDGET:g}"
        parser.add_argument("--budget", type=float, default=BUDGET, help=helps)
        parser.add_argument(
            "--precision", choices=variants_of.DTYPES, help="of steps: fp16; on a CPU fp32"
        )

    def complete(self, args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        args.precision = args.precision or ("fp16" if args.device == "cuda" else "fp32")
        args.cases = common.names(args.cases, CASES, parser) or CASES
        common.check_seconds("budget", args, parser)

    def new_record(self) -> dict:
        return {"key": f"{self.args.device}/{self.args.precision}"}

    def run_case(self, case: str, record: dict) -> None:
        progress(case)
        kind, name = case.split("/")
        if kind == "augment":
            taken = measure_augment(name, self.device, self.args.quick, self.args.budget)
        elif kind == "cpu":
            taken = measure_cpu(name, self.args.quick)
        else:
            taken = data_loaders.measure(name, self.args, self.device)
        record["cases"][case] = taken
        report.print_case(case, taken)

    def ratios_of(self, case: str, record: dict) -> dict[str, float]:
        return report.ratios_of(record["key"], case, record["cases"].get(case))

    def bars(self, record: dict) -> list[dict]:
        return report.evaluate_bars(record)

    def print_summary(self, record: dict) -> None:
        report.print_summary(record)

    def agrees(self, record: dict) -> bool:
        return all(t["check"]["agrees"] for t in record["cases"].values() if "check" in t)


if __name__ == "__main__":
    torch.backends.cudnn.benchmark = True  # for all steps alike
    sys.exit(Data().main())
