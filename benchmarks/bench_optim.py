# SPDX-License-Identifier: BSD-3-Clause
# One optimizer step: torch's foreach and fused (for LARS timm's, or stand-ins) against ours.
# Run it as `python benchmarks/bench_optim.py`; README.md beside it says what the columns mean.
import argparse
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # an in-place build, if none is installed

import common
import optim_variants as variants_of
import timers
from optim_costs import count_launches, padding_fraction, step_memory
from optim_report import evaluate_bars, print_case, print_summary
from optim_variants import Problem
from shapes import CASES, GROUPS
from tables import progress

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
    before = timers.l2_flusher(device) if args.cold else None
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
            counts = count_launches(step)
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
        key: {n: step_memory(problem, n, share) for n in names} for key, share in FROZEN.items()
    }


# --- running -------------------------------------------------------------------------------------


class OptimizerSteps(common.Benchmark):
    description = "Time one optimizer step."
    settings = ("optimizer", "dtype", "cold", "cases")

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--optimizer", default="adamw", choices=variants_of.OPTIMIZERS)
        dtypes = ("float32", "float64", "bfloat16", "float16")
        parser.add_argument("--dtype", default="float32", choices=dtypes)
        parser.add_argument("--cases", help=f"comma-separated, of: {', '.join(CASES)}")
        parser.add_argument("--cold", action="store_true", help="flush L2 before each single step")

    def complete(self, args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        if args.cold and args.device != "cuda":
            parser.error(
                f"--cold flushes a GPU's L2 cache; leave it out with --device {args.device}"
            )
        default = CUDA_CASES if args.device == "cuda" else CPU_CASES
        default = default[:QUICK_CASES] if args.quick else default
        args.cases = common.names(args.cases, list(CASES), parser) or default

    def new_record(self) -> dict:
        args = self.args
        return {
            "key": f"{args.device}/{args.optimizer}/{args.dtype}",
            "reference": variants_of.reference_of(args.optimizer),
            "copy_bytes_per_second": timers.copy_bandwidth(self.device)
            if args.device == "cuda"
            else None,
        }

    def problem(self, case: str) -> Problem:
        dtype = getattr(torch, self.args.dtype)
        return variants_of.make_problem(case, self.args.optimizer, dtype, self.device)

    def run_case(self, case: str, record: dict) -> None:
        if not variants_of.fits(case, getattr(torch, self.args.dtype), self.device):
            progress(f"{case} is left out: too little memory")
            record["left_out"].append(case)
            return
        progress(case)
        problem = self.problem(case)
        taken = measure(problem, self.args, self.device)
        if self.device.type == "cuda":
            copy = record["copy_bytes_per_second"]
            taken["percent_of_copy"] = percent_of_copy(problem, taken, copy)
            timers.release(self.device)
            if case in MEMORY_CASES:
                taken["memory"] = measure_memory(problem)
        taken["padding_fraction"] = padding_fraction(problem)
        record["cases"][case] = taken
        print_case(case, taken)

    def ratios_of(self, case: str, record: dict) -> dict[str, float]:
        taken = record["cases"].get(case, {"ratios": {}})
        return {
            f"{record['key']}/{case}/{timer}/{name}": ratio
            for timer, ratios in taken["ratios"].items()
            for name, ratio in ratios.items()
            if name in variants_of.OURS
        }

    def finish(self, record: dict) -> None:
        """Launches are counted after every timing, since a profiler may leave its hooks behind."""
        if self.device.type == "cuda":
            for case in (c for c in LAUNCH_CASES if c in record["cases"]):
                progress(f"{case}: counting launches")
                taken = record["cases"][case]
                taken["launches"] = launches(self.problem(case), taken["notes"])

    def bars(self, record: dict) -> list[dict]:
        return evaluate_bars(record)

    def print_summary(self, record: dict) -> None:
        print_summary(record)

    def agrees(self, record: dict) -> bool:
        return all(all(c["check"]["agrees"].values()) for c in record["cases"].values())


if __name__ == "__main__":
    sys.exit(OptimizerSteps().main())
