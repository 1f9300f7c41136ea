# SPDX-License-Identifier: BSD-3-Clause
# What every benchmark shares: one main (arguments, cases in turn, repeats, JSON, comparison with an
# earlier run, exit status), made of machine.py, tables.py, comparison.py and timers.py.
import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import timers
import torch
from comparison import middle, print_repeat, repeated, report_comparison
from machine import environment
from tables import START, print_bars, progress

import torch_renaissance as tr


def write_json(path: Path, record: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, default=str) + "\n")


def reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"[:400]


class Benchmark:
    """A subclass says what is measured; `main` does what all benchmarks have in common.

    `args` and `device` are there from `new_record` on. A case that raises is named in the record's
    `failed` and leaves the others; the record is written after each case.
    """

    description = ""
    settings: tuple[str, ...] = ()  # the arguments that a record keeps
    args: argparse.Namespace
    device: torch.device

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Options of its own."""

    def complete(self, args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        """Set `args.cases`, and defaults that depend on other options; refuse what is wrong."""

    def new_record(self) -> dict:
        """Entries of its own, of a record in which nothing was measured yet."""
        return {}

    def run_case(self, case: str, record: dict) -> None:
        """Measure one case, put it into the record and print it."""
        raise NotImplementedError

    def ratios_of(self, case: str, record: dict) -> dict[str, float]:
        """Of what the record holds of a case, perhaps nothing: above 1 ours is faster."""
        return {}

    def finish(self, record: dict) -> None:
        """After every timing: what needs all cases, and what disturbs timing as profilers do."""

    def bars(self, record: dict) -> list[dict]:
        return []

    def print_summary(self, record: dict) -> None:
        """A last table of all cases."""

    def agrees(self, record: dict) -> bool:
        """Whether everything computed what it should."""
        return True

    # What follows is the same for all.

    def parse(self, argv: list[str] | None) -> argparse.Namespace:
        parser = argparse.ArgumentParser(description=self.description)
        add_arguments(parser)
        self.add_arguments(parser)
        args = parser.parse_args(argv)
        if args.fail_if_regression is not None and not args.compare:
            parser.error("--fail-if-regression needs --compare OLD.json")
        if args.repeat < 1:
            parser.error(f"--repeat {args.repeat}: must be at least 1")
        if args.processes < 1:
            parser.error(f"--processes {args.processes}: must be at least 1")
        check_seconds("limit", args, parser)
        self.complete(args, parser)
        return args

    def save(self) -> None:
        if self.args.json:
            write_json(self.args.json, self.record)

    def whole_record(self) -> dict:
        kept = ("device", "quick", "repeat", "processes", *self.settings)
        return {
            "environment": environment(self.device),
            "build": tr.build_info(),
            "settings": {k: getattr(self.args, k) for k in kept}
            | {"threads": torch.get_num_threads()},
            "cases": {},
            "failed": {},
            "left_out": [],
            "ratios": {},
            "bars": [],
        } | self.new_record()

    def run_cases(self, record: dict) -> None:
        for case in self.args.cases:
            if self.args.limit and time.perf_counter() - START > self.args.limit:
                progress(f"{case} is left out: {self.args.limit:g} s are over")
                record["left_out"].append(case)
                continue
            try:
                self.run_case(case, record)
            except Exception as error:  # the other cases are still worth having; the status tells
                traceback.print_exc()
                record["failed"][case] = reason(error)
            record["ratios"] |= self.ratios_of(case, record)
            timers.release(self.device)
            self.save()
        record["environment"] |= environment(self.device)  # the clocks just after load

    def once_more(self, argv: list[str]) -> dict:
        """The record of the same benchmark in a process of its own: in one that has run it already,
        graphs and streams that were there before make later ones slower."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "record.json")
            program = [sys.executable, inspect.getfile(type(self)), *argv]
            once = ["--repeat", "1", "--processes", "1", "--json", str(path)]
            done = subprocess.run([*program, *once], stdout=subprocess.DEVNULL)
            if not path.exists():
                raise RuntimeError(f"{' '.join(program)} ended with {done.returncode}")
            return json.loads(path.read_text())

    def together(self, records: list[dict]) -> dict:
        """One record of what several processes measured."""
        if len(records) == 1:
            return records[0]
        found = {
            case: [r["cases"][case] for r in records if case in r["cases"]]
            for case in records[0]["cases"]
        }
        failed = {case: why for r in reversed(records) for case, why in r["failed"].items()}
        record = records[0] | {"cases": {}, "ratios": {}, "failed": failed}
        for case, taken in found.items():
            record["cases"][case] = middle(taken)
            record["ratios"] |= self.ratios_of(case, record)
        return record

    def main(self, argv: list[str] | None = None) -> int:
        argv = sys.argv[1:] if argv is None else argv
        self.args = args = self.parse(argv)
        if args.threads:
            torch.set_num_threads(args.threads)
        on_gpu = args.device == "cuda"
        current = torch.cuda.current_device() if on_gpu else None
        self.device = torch.device(args.device, current)
        old = json.loads(args.compare.read_text()) if args.compare else None
        warn_if_busy()
        self.record = record = self.whole_record()
        self.run_cases(record)
        # Runs take turns: how fast the host is changes over minutes, and from process to process.
        runs: list[list[dict]] = [[dict(record)], *([] for _ in range(args.repeat - 1))]
        for i in range(1, args.repeat * args.processes):
            progress(f"process {i + 1} of {args.repeat * args.processes}")
            runs[i % args.repeat].append(self.once_more(argv))
        whole = [self.together(run) for run in runs]
        record |= whole[0]
        if args.repeat > 1:
            record["repeat"] = repeated(whole)
        self.finish(record)
        record["bars"] = self.bars(record)
        self.save()
        self.print_summary(record)
        print_bars(record["bars"])
        if args.repeat > 1:
            print_repeat(record)
        fallen = old is not None and report_comparison(old, record, args.fail_if_regression)
        bad = any(r["failed"] or not self.agrees(r) for run in runs for r in run)
        return int(fallen or bad)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--quick", action="store_true", help="small cases, few repeats")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="run all N times")
    parser.add_argument(
        "--processes", type=int, default=1, metavar="N", help="of a run, one after the other"
    )
    parser.add_argument("--limit", type=float, metavar="S", help="begin no case after S seconds")
    parser.add_argument("--json", type=Path, help="where to write the record")
    parser.add_argument("--compare", type=Path, metavar="OLD.json", help="an earlier record")
    parser.add_argument(
        "--fail-if-regression",
        type=float,
        metavar="PCT",
        help="exit with 1 if a ratio fell by more than PCT %% against --compare",
    )


def check_seconds(name: str, args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Ends the program where `--name`, if it is given, is no time."""
    seconds = getattr(args, name)
    if seconds is not None and not seconds > 0:
        parser.error(f"--{name} {seconds}: must be more than 0 seconds")


def names(text: str | None, known: list[str], parser: argparse.ArgumentParser) -> list[str] | None:
    """The parts of a comma-separated option; None where it wasn't given."""
    found = [name.strip() for name in text.split(",")] if text else None
    unknown = [name for name in found or [] if name not in known]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; expected some of {', '.join(known)}")
    return found


def warn_if_busy() -> None:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores:
        progress(f"note: load average {load:.1f} on {cores} cores; other work disturbs these times")
