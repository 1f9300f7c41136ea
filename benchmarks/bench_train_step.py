# SPDX-License-Identifier: BSD-3-Clause
# Whole training steps: torch's loop eager, compiled and captured by hand, against tr.TrainStep.
# Run it as `python benchmarks/bench_train_step.py`; --chain times the optimizer's chain alone.
import argparse
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # an in-place build, if none is installed

import amp_chain
import common
import shapes
import timers
import train_step_measure as measuring
import train_step_report as report
import train_step_variants as variants_of
from tables import progress
from train_step_cases import CASES, make_batches

BUDGET, QUICK_BUDGET = 60.0, 2.0


def complete_budget(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Precision and seconds of timing, where the command didn't say."""
    args.precision = args.precision or ("fp16" if args.device == "cuda" else "fp32")
    if args.budget is None:
        args.budget = QUICK_BUDGET if args.quick else BUDGET
    common.check_seconds("budget", args, parser)


class TrainSteps(common.Benchmark):
    description = "Time whole training steps."
    settings = ("precision", "budget", "chain", "cases", "variants")

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        chain = f"time the optimizer's chain alone; its default cases: {', '.join(amp_chain.CASES)}"
        parser.add_argument("--chain", action="store_true", help=chain)
        parser.add_argument("--cases", help=f"comma-separated, of: {', '.join(CASES)}")
        variants = ", ".join(variants_of.VARIANTS)
        parser.add_argument("--variants", help=f"comma-separated, of: {variants}")
        parser.add_argument("--precision", choices=variants_of.DTYPES, help="fp16; on a CPU fp32")
        parser.add_argument("--budget", type=float, help="seconds for the timing of one case")
        parser.add_argument("--no-kernels", action="store_true", help="don't count kernels")

    def complete(self, args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        complete_budget(args, parser)
        args.variants = common.names(args.variants, list(variants_of.VARIANTS), parser)
        args.cases = common.names(args.cases, list(shapes.CASES if args.chain else CASES), parser)
        if args.cases is None and args.chain:
            args.cases = ["mnist_mlp"] if args.quick else list(amp_chain.CASES)
        args.cases = args.cases or list(CASES)

    def new_record(self) -> dict:
        return {
            "key": f"{self.args.device}/{self.args.precision}",
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "chain": {},
        }

    def setting(self, case: str) -> variants_of.Setting:
        args = self.args
        return measuring.setting_of(CASES[case], args.quick, args.precision, self.device)

    def run_case(self, case: str, record: dict) -> None:
        args = self.args
        if args.chain:
            return self.run_chain(case, record)
        progress(case)
        names = args.variants or variants_of.names_for(case, self.device, args.quick)
        setting = self.setting(case)
        taken = record["cases"][case] = {"variants": {}}
        measuring.measure(setting, names, args.quick, args.budget, taken)
        report.print_case(case, taken)

    def run_chain(self, case: str, record: dict) -> None:
        progress(f"{case}: the optimizer's chain")
        timers.release(self.device)
        rounds = measuring.QUICK_ROUNDS if self.args.quick else measuring.ROUNDS
        taken = amp_chain.measure(case, self.device, rounds, self.args.budget)
        record["chain"][case] = taken
        report.print_chain(case, taken)

    def ratios_of(self, case: str, record: dict) -> dict[str, float]:
        taken = record["chain" if self.args.chain else "cases"].get(case)
        return report.ratios_of(record["key"], case, taken)

    def finish(self, record: dict) -> None:
        """Kernels are counted after every timing, since a profiler may leave its hooks behind; and
        of variants built anew."""
        if self.device.type != "cuda" or self.args.no_kernels:
            return
        for case, taken in record["cases"].items():
            setting = self.setting(case)
            batches = make_batches(setting.case, self.args.quick, self.device)
            for name, found in taken["variants"].items():
                if "us" in found:
                    progress(f"{case}: counting the kernels of {name}")
                    found |= measuring.kernels_of(name, setting, batches)
                    timers.release(self.device)
            self.save()

    def bars(self, record: dict) -> list[dict]:
        return report.evaluate_bars(record)

    def print_summary(self, record: dict) -> None:
        report.print_summary(record)

    def agrees(self, record: dict) -> bool:
        return measuring.all_good([*record["cases"].values(), *record["chain"].values()])


if __name__ == "__main__":
    torch.backends.cudnn.benchmark = True  # for all alike; a test that calls main keeps its own
    sys.exit(TrainSteps().main())
