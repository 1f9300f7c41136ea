# SPDX-License-Identifier: BSD-3-Clause
# One optimizer step: torch's foreach and fused (for LARS timm's, or stand-ins) against ours.
# Run it as `python benchmarks/bench_optim.py`; README.md beside it says what the columns mean.
import argparse
import json
import sys
import traceback
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # an in-place build, if none is installed

import common
import optim_variants as variants_of
import timers
from optim_report import evaluate_bars, print_case, print_summary
from optim_variants import Problem
from shapes import CASES, GROUPS

import torch_renaissance as tr

CUDA_CASES = [
    *("mnist_mlp", "resnet50", "thousand"),
    *("vit_b_16", "gpt2_124m", "vgg16_bn", "gpt2_774m"),
]
CPU_CASES = ["mnist_mlp", "cpu_500x1000", "cpu_25m"]
MEMORY_CASES = ("resnet50", "gpt2_124m")
LAUNCH_CASES = ("mnist_mlp", "resnet50", "thousand")
QUICK_CASES = 3
FROZEN = {"all": 0.0, "frozen99": 0.99}


# --- measuring -----------------------------------------------------------------------------------


def graph_times(problem: Problem, rounds: int, budget: float, notes: list[str]) -> dict:
    """A fresh set of variants, since stock optimizers must be capturable from their first step."""
    graphs = {}
    variants = variants_of.build_all(problem, capturable=True)
    for name, step in variants_of.timed_steps(variants).items():
        try:
            graphs[name] = timers.capture(step)
        except Exception as error:  # one variant that can't be captured must not end the run
            notes.append(f"{name} can't be captured: {str(error).splitlines()[0]}")
    return timers.time_replays(graphs, rounds, budget)


def measure(problem: Problem, args: argparse.Namespace, device: torch.device) -> dict:
    rounds, budget, repeats = (3, 0.02, 15) if args.quick else (7, 0.05, 41)
    if device.type == "cpu":
        repeats, budget = (3, 0.06) if args.quick else (7, 0.2)
    record = {
        "tensors": len(problem.start),
        "parameters": problem.size,
        "groups": GROUPS.get(problem.case, 1),
        "notes": [],
    }
    variants = variants_of.build_all(problem)
    record["check"] = variants_of.check(problem, variants)
    steps = variants_of.timed_steps(variants)
    before = timers.l2_flusher(device) if args.cold and device.type == "cuda" else None
    us = {"b2b": timers.time_b2b(steps, device, rounds, budget)}
    us |= timers.time_single(steps, device, repeats, before)
    if device.type == "cuda":
        del variants, steps
        timers.release(device)
        us["graph"] = graph_times(problem, rounds, budget, record["notes"])
    record["us"] = us
    reference = variants_of.reference_of(problem.optimizer)
    record["ratios"] = {t: over_reference(found, reference) for t, found in us.items()}
    return record


def launches(problem: Problem, notes: list[str]) -> dict:
    """Of a third step: the first two make the state and the hyper-parameters."""
    found = {}
    stock = [n for n in variants_of.stock_of(problem.optimizer) if n != "for-loop"]
    for name in (*stock, "gather", "flat"):
        step = variants_of.build(problem, name).optimizer.step
        step()
        step()
        try:
            counts = variants_of.count_launches(step)
            found |= {name: counts} if counts else {}
        except Exception as error:  # no profiler on this machine: the times stand without it
            notes.append(f"launches of {name} weren't counted: {str(error).splitlines()[0]}")
    return found


def over_reference(found: dict, reference: str) -> dict[str, float]:
    if reference not in found:
        return {}
    taken = found[reference]["median"]
    rows = [n for n in found if n not in (reference, "flat pack")]
    return {n: round(taken / found[n]["median"], 3) for n in rows}


def percent_of_copy(problem: Problem, record: dict, copy: float) -> dict[str, float]:
    """From the graph's time where there is one, else from back to back."""
    found = {}
    for name, size in variants_of.bytes_per_parameter(problem).items():
        times = record["us"].get("graph", {}).get(name) or record["us"]["b2b"].get(name)
        if times:
            rate = size * problem.size / (times["median"] * 1e-6)
            found[name] = round(100 * rate / copy, 1)
    return found


def measure_memory(problem: Problem) -> dict:
    """Peaks of the reference and of ours, with everything trained and with 99 % frozen."""
    names = (variants_of.reference_of(problem.optimizer), "gather")
    return {
        key: {n: variants_of.step_memory(problem, n, share) for n in names}
        for key, share in FROZEN.items()
    }


# --- running -------------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time one optimizer step.")
    common.add_arguments(parser)
    parser.add_argument("--optimizer", default="adamw", choices=variants_of.OPTIMIZERS)
    dtypes = ("float32", "float64", "bfloat16", "float16")
    parser.add_argument("--dtype", default="float32", choices=dtypes)
    parser.add_argument("--cases", help=f"comma-separated, of: {', '.join(CASES)}")
    parser.add_argument("--cold", action="store_true", help="flush L2 before each single step")
    args = parser.parse_args(argv)
    default = CUDA_CASES if args.device == "cuda" else CPU_CASES
    default = default[:QUICK_CASES] if args.quick else default
    args.cases = args.cases.split(",") if args.cases else default
    unknown = [c for c in args.cases if c not in CASES]
    if unknown:
        parser.error(f"no such case: {', '.join(unknown)}")
    if args.fail_if_regression is not None and not args.compare:
        parser.error("--fail-if-regression needs --compare OLD.json")
    return args


def new_record(args: argparse.Namespace, device: torch.device) -> dict:
    kept = ("device", "optimizer", "dtype", "quick", "cold", "cases")
    return {
        "environment": common.environment(device),
        "build": tr.build_info(),
        "key": f"{args.device}/{args.optimizer}/{args.dtype}",
        "reference": variants_of.reference_of(args.optimizer),
        "settings": {k: getattr(args, k) for k in kept} | {"threads": torch.get_num_threads()},
        "copy_bytes_per_second": timers.copy_bandwidth(device) if args.device == "cuda" else None,
        "cases": {},
        "ratios": {},
        "bars": [],
    }


def run_case(case: str, args: argparse.Namespace, device: torch.device, record: dict) -> None:
    dtype = getattr(torch, args.dtype)
    if not variants_of.fits(case, dtype, device):
        common.progress(f"{case} is left out: too little memory")
        return
    common.progress(case)
    problem = variants_of.make_problem(case, args.optimizer, dtype, device)
    taken = measure(problem, args, device)
    if device.type == "cuda":
        taken["percent_of_copy"] = percent_of_copy(problem, taken, record["copy_bytes_per_second"])
        timers.release(device)
        if case in MEMORY_CASES:
            taken["memory"] = measure_memory(problem)
    taken["padding_fraction"] = variants_of.padding_fraction(problem)
    record["cases"][case] = taken
    for timer, ratios in taken["ratios"].items():
        for name in (n for n in ratios if n in variants_of.OURS):
            record["ratios"][f"{record['key']}/{case}/{timer}/{name}"] = ratios[name]
    print_case(case, taken)


def count_all_launches(args: argparse.Namespace, device: torch.device, record: dict) -> None:
    """After every timing, since a profiler may leave its hooks behind."""
    for case in (c for c in LAUNCH_CASES if c in record["cases"]):
        common.progress(f"{case}: counting launches")
        dtype = getattr(torch, args.dtype)
        problem = variants_of.make_problem(case, args.optimizer, dtype, device)
        record["cases"][case]["launches"] = launches(problem, record["cases"][case]["notes"])


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
    for case in args.cases:
        try:
            run_case(case, args, device, record)
        except Exception:  # the other cases are still worth having; the exit status tells
            traceback.print_exc()
            failed = True
        timers.release(device)
        save(args, record)
    if on_gpu:
        record["environment"] = common.environment(device)  # the clocks just after load
        count_all_launches(args, device, record)
    record["bars"] = evaluate_bars(record)
    save(args, record)
    print_summary(record)
    fallen = old is not None and common.report_comparison(old, record, args.fail_if_regression)
    agrees = all(all(c["check"]["agrees"].values()) for c in record["cases"].values())
    return int(failed or fallen or not agrees)


def save(args: argparse.Namespace, record: dict) -> None:
    if args.json:
        common.write_json(args.json, record)


if __name__ == "__main__":
    sys.exit(main())
