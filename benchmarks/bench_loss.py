# SPDX-License-Identifier: BSD-3-Clause
# Cross entropy, forward + backward: torch's own against torch_renaissance's.
# Run it as `python benchmarks/bench_loss.py`; README.md beside it says what the columns mean.
import argparse
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).resolve().parents[1]))  # an in-place build, if none is installed

import common
import timers
from optim_report import TIMERS, bar, microseconds

import torch_renaissance as tr

VARIANTS = {"torch": F.cross_entropy, "ours": tr.cross_entropy}
SMOOTHING = {"plain": 0.0, "smooth": 0.1}
DTYPES = ("float32", "float16", "bfloat16")
CUDA_SHAPES = ("200x10", "256x1000", "8192x50257")
CPU_SHAPES = ("200x10", "256x1000", "64x50257", "4x21x64x64")
QUICK_ELEMENTS = 1_000_000
TOLERANCE = 16  # roundings of the loss, and of the largest gradient

# Least ratios of torch's time over ours, in a graph, and the largest of our peak over torch's.
SPEED_BARS = {"200x10": 1.0, "256x1000": 1.0, "8192x50257": 1.5}
HALF_ONLY = ("8192x50257",)
MEMORY_BARS = {"8192x50257": 0.5}


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
    """Loss and gradient of both, compared."""
    theirs, ours = (run(problem, name) for name in VARIANTS)
    epsilon = torch.finfo(problem.x.dtype).eps
    found = {"tolerance": f"{TOLERANCE} eps x the largest value", "agrees": True}
    for what, native, value in zip(("loss", "gradient"), theirs, ours, strict=True):
        size = float(native.abs().max())
        difference = float((native - value).abs().max()) / (epsilon * size)
        found[what] = round(difference, 3)  # in roundings of the largest value
        found["agrees"] &= difference <= TOLERANCE
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


# --- what was promised, and tables ---------------------------------------------------------------


def evaluate_bars(record: dict) -> list[dict]:
    """What could be measured here of what the project promises; nothing is assumed."""
    found = []
    for case, taken in record["cases"].items():
        device, dtype, shape, _ = case.split("/")
        if device != "cuda" or (shape in HALF_ONLY and dtype == "float32"):
            continue
        least, reached = SPEED_BARS.get(shape), taken["ratios"].get("graph")
        if least is not None and reached is not None:
            found.append(bar(f"{case}: graph", f">= {least}", reached, reached >= least))
        most, peaks = MEMORY_BARS.get(shape), taken["peak_bytes"]
        if most is not None:
            share = round(peaks["ours"] / peaks["torch"], 4)
            found.append(bar(f"{case}: peak memory", f"<= {most}", share, share <= most))
    return found


def print_case(case: str, record: dict) -> None:
    shown = [t for t in TIMERS if t in record["us"]]
    columns = ["µs", *VARIANTS, "torch / ours"]
    rows = []
    for timer in shown:
        cells = [microseconds(record["us"][timer].get(name)) for name in VARIANTS]
        ratio = record["ratios"].get(timer)
        rows.append([timer, *cells, "-" if ratio is None else f"{ratio:.2f}"])
    common.print_table(f"{case}: forward + backward", columns, rows)
    for name, peak in record.get("peak_bytes", {}).items():
        print(f"peak memory above the logits, {name}: {peak / 2**20:.2f} MiB")
    found = record["check"]
    print(f"difference in roundings: loss {found['loss']}, gradient {found['gradient']}")
    if not found["agrees"]:
        print(f"DISAGREES beyond {found['tolerance']}")
    print(*record["notes"], sep="\n", end="\n" if record["notes"] else "")


def print_summary(record: dict) -> None:
    cases = record["cases"]
    shown = [t for t in TIMERS if any(t in c["us"] for c in cases.values())]
    rows = []
    for case, taken in cases.items():
        ratios = [taken["ratios"].get(t) for t in shown]
        peaks = taken.get("peak_bytes")
        share = f"{peaks['ours'] / peaks['torch']:.3f}" if peaks else "-"
        rows.append([case, *("-" if r is None else f"{r:.2f}" for r in ratios), share])
    title = "torch's time / ours (below 1: slower); our peak memory / torch's"
    common.print_table(title, ["case", *shown, "memory"], rows)
    if record["bars"]:
        rows = [
            [b["name"], b["bar"], f"{b['reached']:g}", "yes" if b["holds"] else "NO"]
            for b in record["bars"]
        ]
        common.print_table("bars", ["what", "bar", "reached", "holds"], rows)


# --- running -------------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time cross entropy, forward and backward.")
    common.add_arguments(parser)
    parser.add_argument("--shapes", help="comma-separated NxC or NxCxd1…")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="comma-separated")
    args = parser.parse_args(argv)
    default = CUDA_SHAPES if args.device == "cuda" else CPU_SHAPES
    if args.quick:
        default = [s for s in default if prod(sizes_of(s)) <= QUICK_ELEMENTS]
    args.shapes = args.shapes.split(",") if args.shapes else list(default)
    args.dtypes = args.dtypes.split(",")
    unknown = [d for d in args.dtypes if d not in (*DTYPES, "float64")]
    if unknown:
        parser.error(f"no such dtype: {', '.join(unknown)}")
    try:
        list(map(sizes_of, args.shapes))
    except ValueError as error:
        parser.error(str(error))
    if args.fail_if_regression is not None and not args.compare:
        parser.error("--fail-if-regression needs --compare OLD.json")
    return args


def new_record(args: argparse.Namespace, device: torch.device) -> dict:
    kept = ("device", "quick", "shapes", "dtypes")
    return {
        "environment": common.environment(device),
        "build": tr.build_info(),
        "settings": {k: getattr(args, k) for k in kept} | {"threads": torch.get_num_threads()},
        "cases": {},
        "ratios": {},
        "bars": [],
    }


def run_case(shape: str, dtype: str, smoothing: str, args, device, record: dict) -> None:
    case = f"{args.device}/{dtype}/{shape}/{smoothing}"
    common.progress(case)
    problem = make_problem(shape, getattr(torch, dtype), SMOOTHING[smoothing], device)
    taken = measure(problem, args.quick, device)
    record["cases"][case] = taken
    record["ratios"] |= {f"{case}/{timer}": ratio for timer, ratio in taken["ratios"].items()}
    print_case(case, taken)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    on_gpu = args.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    old = json.loads(args.compare.read_text()) if args.compare else None
    common.warn_if_busy()
    record = new_record(args, device)
    failed = False
    for shape in args.shapes:
        for dtype in args.dtypes:
            for smoothing in SMOOTHING:
                try:
                    run_case(shape, dtype, smoothing, args, device, record)
                except Exception:  # the other cases are still worth having; the status tells
                    traceback.print_exc()
                    failed = True
                timers.release(device)
                save(args, record)
    if on_gpu:
        record["environment"] = common.environment(device)  # the clocks just after load
    record["bars"] = evaluate_bars(record)
    save(args, record)
    print_summary(record)
    fallen = old is not None and common.report_comparison(old, record, args.fail_if_regression)
    agrees = all(case["check"]["agrees"] for case in record["cases"].values())
    return int(failed or fallen or not agrees)


def save(args: argparse.Namespace, record: dict) -> None:
    if args.json:
        common.write_json(args.json, record)


if __name__ == "__main__":
    sys.exit(main())
