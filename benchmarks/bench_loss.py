# SPDX-License-Identifier: BSD-3-Clause
# Cross entropy, forward + backward: torch's own against torch_renaissance's.
# Run it as `python benchmarks/bench_loss.py`; README.md beside it says what the columns mean.
import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).resolve().parents[1]))  # an in-place build, if none is installed

import common
import timers
from loss_report import evaluate_bars, print_case, print_summary
from tables import progress

import torch_renaissance as tr

VARIANTS = {"torch": F.cross_entropy, "ours": tr.cross_entropy}
SMOOTHING = {"plain": 0.0, "smooth": 0.1}
DTYPES = ("float32", "float16", "bfloat16")
CUDA_SHAPES = ("200x10", "256x1000", "8192x50257")
CPU_SHAPES = ("200x10", "256x1000", "64x50257", "4x21x64x64")
QUICK_ELEMENTS = 1_000_000
TOLERANCE = 16  # roundings of the loss, and of the largest gradient


@dataclass(frozen=True)
class Problem:
    """Logits (N, C, d1, ...) of shape "NxCxd1..." and their labels."""

    x: torch.Tensor
    target: torch.Tensor
    label_smoothing: float


def make_problem(
    shape: str, dtype: torch.dtype, label_smoothing: float, device: torch.device
) -> Problem:
    sizes = sizes_of(shape)
    generator = torch.Generator(device).manual_seed(0)
    x = torch.empty(sizes, dtype=dtype, device=device).normal_(generator=generator)
    labels = (sizes[0], *sizes[2:])
    target = torch.randint(sizes[1], labels, generator=generator, device=device)
    return Problem(x.requires_grad_(), target, label_smoothing)


def sizes_of(shape: str) -> list[int]:
    sizes = [int(size) for size in shape.split("x")]
    if len(sizes) < 2 or min(sizes) < 1:
        raise ValueError(f"a shape is NxC or NxCxd1…, got {shape}")
    return sizes


def run(problem: Problem, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    loss = VARIANTS[name](problem.x, problem.target, label_smoothing=problem.label_smoothing)
    return loss.detach(), *torch.autograd.grad(loss, problem.x)


# --- measuring -----------------------------------------------------------------------------------


def check(problem: Problem) -> dict:
    """Our loss and gradient against torch's for the same logits in at least single precision, since
    torch's own sum of a smoothed loss overflows in float16 on a CPU."""
    wide = torch.promote_types(problem.x.dtype, torch.float32)
    exact = replace(problem, x=problem.x.detach().to(wide).requires_grad_())
    theirs, ours = run(exact, "torch"), run(problem, "ours")
    epsilon = torch.finfo(problem.x.dtype).eps
    found = {"tolerance": f"{TOLERANCE} eps x the largest value", "agrees": True}
    for what, native, value in zip(("loss", "gradient"), theirs, ours, strict=True):
        size = float(native.abs().max())
        difference = float((native - value).abs().max()) / (epsilon * size)
        found[what] = round(difference, 3)  # in roundings of the largest value
        found["agrees"] &= difference <= TOLERANCE
    found["torch_is_finite"] = bool(run(problem, "torch")[0].isfinite())
    return found


def graph_times(steps: dict, rounds: int, budget: float, notes: list[str]) -> dict:
    graphs = {}
    for name, step in steps.items():
        try:
            graphs[name] = timers.capture(step)
        except Exception as error:  # one variant that can't be captured must not end the run
            notes.append(f"{name} can't be captured: {str(error).splitlines()[0]}")
    return timers.time_replays(graphs, rounds, budget)


def peak_memory(call: Callable[[], object], device: torch.device) -> int:
    """Bytes above logits and labels."""
    timers.release(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    timers.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def measure(problem: Problem, quick: bool, device: torch.device) -> dict:
    on_gpu = device.type == "cuda"
    rounds, budget, repeats = (3, 0.02, 15) if quick else (7, 0.1, 41)
    record = {"check": check(problem), "notes": []}
    calls = {name: partial(run, problem, name) for name in VARIANTS}
    if on_gpu:
        record["peak_bytes"] = {n: peak_memory(call, device) for n, call in calls.items()}
    steps = {name: timers.Timed(call) for name, call in calls.items()}
    us = {"b2b": timers.time_b2b(steps, device, rounds, budget)}
    us |= timers.time_single(steps, device, repeats)
    if on_gpu:
        timers.release(device)
        us["graph"] = graph_times(steps, rounds, budget, record["notes"])
    record["us"] = us
    record["ratios"] = {
        timer: round(found["torch"]["median"] / found["ours"]["median"], 3)
        for timer, found in us.items()
        if found.keys() == VARIANTS.keys()
    }
    return record


# --- running -------------------------------------------------------------------------------------


class Losses(common.Benchmark):
    description = "Time cross entropy, forward and backward."
    settings = ("shapes", "dtypes")

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--shapes", help="comma-separated NxC or NxCxd1…")
        parser.add_argument("--dtypes", default=",".join(DTYPES), help="comma-separated")

    def complete(self, args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        default = CUDA_SHAPES if args.device == "cuda" else CPU_SHAPES
        if args.quick:
            default = [s for s in default if prod(sizes_of(s)) <= QUICK_ELEMENTS]
        args.shapes = args.shapes.split(",") if args.shapes else list(default)
        args.dtypes = common.names(args.dtypes, [*DTYPES, "float64"], parser)
        try:
            list(map(sizes_of, args.shapes))
        except ValueError as error:
            parser.error(str(error))
        parts = product((args.device,), args.dtypes, args.shapes, SMOOTHING)
        by_shape = sorted(parts, key=lambda part: args.shapes.index(part[2]))
        args.cases = ["/".join(part) for part in by_shape]

    def run_case(self, case: str, record: dict) -> None:
        progress(case)
        _, dtype, shape, smoothing = case.split("/")
        problem = make_problem(shape, getattr(torch, dtype), SMOOTHING[smoothing], self.device)
        record["cases"][case] = measure(problem, self.args.quick, self.device)
        print_case(case, record["cases"][case])

    def ratios_of(self, case: str, record: dict) -> dict[str, float]:
        ratios = record["cases"].get(case, {"ratios": {}})["ratios"]
        return {f"{case}/{timer}": ratio for timer, ratio in ratios.items()}

    def bars(self, record: dict) -> list[dict]:
        return evaluate_bars(record)

    def print_summary(self, record: dict) -> None:
        print_summary(record)

    def agrees(self, record: dict) -> bool:
        return all(case["check"]["agrees"] for case in record["cases"].values())


if __name__ == "__main__":
    sys.exit(Losses().main())
