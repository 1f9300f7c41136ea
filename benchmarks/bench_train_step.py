# SPDX-License-Identifier: BSD-3-Clause
# Whole training steps: torch's loop eager, compiled and captured by hand, against tr.TrainStep.
# Run it as `python benchmarks/bench_train_step.py`; --chain times the optimizer's chain alone.
import argparse
import itertools
import json
import sys
import traceback
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # an in-place build, if none is installed

import amp_chain
import common
import shapes
import timers
import train_step_variants as variants_of
from train_step_cases import CASES, make_batches, make_model
from train_step_measure import kernels_of, prepare, reason, time_rounds
from train_step_report import (
    difference,
    evaluate_bars,
    print_case,
    print_chain,
    print_summary,
    ratios_of,
)
from train_step_variants import Setting

import torch_renaissance as tr

ROUNDS, QUICK_ROUNDS = 7, 5
BUDGET, QUICK_BUDGET = 60.0, 2.0


# --- arguments ------------------------------------------------------------------------------------


def names(text: str | None, known: list[str], parser: argparse.ArgumentParser) -> list[str] | None:
    found = [name.strip() for name in text.split(",")] if text else None
    unknown = [name for name in found or [] if name not in known]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; expected some of {', '.join(known)}")
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time whole training steps.")
    common.add_arguments(parser)
    chain = f"time the optimizer's chain alone; its default cases: {', '.join(amp_chain.CASES)}"
    parser.add_argument("--chain", action="store_true", help=chain)
    parser.add_argument("--cases", help=f"comma-separated, of: {', '.join(CASES)}")
    variants = ", ".join(variants_of.VARIANTS)
    parser.add_argument("--variants", help=f"comma-separated, of: {variants}")
    parser.add_argument("--precision", choices=variants_of.DTYPES, help="fp16; on a CPU fp32")
    parser.add_argument("--budget", type=float, help="seconds for the timing rounds of one case")
    parser.add_argument("--no-kernels", action="store_true", help="don't count kernels at the end")
    args = parser.parse_args(argv)
    args.precision = args.precision or ("fp16" if args.device == "cuda" else "fp32")
    if args.budget is None:
        args.budget = QUICK_BUDGET if args.quick else BUDGET
    if not args.budget > 0:
        parser.error(f"--budget {args.budget}: must be more than 0 seconds")
    if args.fail_if_regression is not None and not args.compare:
        parser.error("--fail-if-regression needs --compare OLD.json")
    args.variants = names(args.variants, list(variants_of.VARIANTS), parser)
    args.cases = names(args.cases, list(shapes.CASES if args.chain else CASES), parser)
    if args.cases is None and args.chain:
        args.cases = ["mnist_mlp"] if args.quick else list(amp_chain.CASES)
    args.cases = args.cases or list(CASES)
    return args


# --- running --------------------------------------------------------------------------------------


def setting_of(case: str, args: argparse.Namespace, device: torch.device) -> Setting:
    """Compiled code of earlier cases is dropped, else another batch size of a model that has been
    compiled already would get dynamic shapes."""
    torch.compiler.reset()
    timers.release(device)
    chosen = CASES[case]
    return Setting(chosen, make_model(chosen, args.quick), args.precision, device)


def run_case(case: str, args: argparse.Namespace, device: torch.device, record: dict) -> None:
    """Every variant's first steps, compared with eager's; then rounds in which all take turns."""
    setting = setting_of(case, args, device)
    batches = make_batches(setting.case, args.quick, device)
    found: dict[str, dict] = {}
    record["cases"][case] = {
        "inputs": setting.case.inputs(args.quick),
        "parameters": sum(p.numel() for p in setting.start.parameters()),
        "optimizer": setting.case.optimizer.__name__,
        "tolerance": variants_of.TOLERANCE[args.precision],
        "variants": found,
    }
    alive = {}
    for name in args.variants or variants_of.names_for(case, device, args.quick):
        common.progress(f"{case}: {name}")
        found[name], variant = prepare(name, setting, batches)
        if variant is not None:
            alive[name] = variant
    check(record["cases"][case])
    save(args, record)
    common.progress(f"{case}: timing {len(alive)} variants")
    turns = itertools.cycle(batches)
    runs = {n: lambda step=v.step: step(*next(turns)) for n, v in alive.items()}
    rounds = QUICK_ROUNDS if args.quick else ROUNDS
    for name, times in time_rounds(runs, device, rounds, args.budget).items():
        found[name] |= times
    for variant in alive.values():
        variant.close()
    print_case(case, record["cases"][case])


def check(taken: dict) -> None:
    """The first losses of each variant against eager's, from equal weights on equal batches."""
    reference = taken["variants"].get("eager", {}).get("losses")
    for found in taken["variants"].values():
        if reference and "losses" in found:
            apart = difference(found["losses"], reference)
            found |= {"difference": apart, "agrees": apart <= taken["tolerance"]}


def run_chain(case: str, args: argparse.Namespace, device: torch.device, record: dict) -> None:
    common.progress(f"{case}: the optimizer's chain")
    timers.release(device)
    rounds = QUICK_ROUNDS if args.quick else ROUNDS
    record["chain"][case] = amp_chain.measure(case, device, rounds, args.budget)
    print_chain(case, record["chain"][case])


def count_kernels(args: argparse.Namespace, device: torch.device, record: dict) -> None:
    """After every timing, since a profiler may leave its hooks behind; of variants built anew."""
    for case, taken in record["cases"].items():
        setting = setting_of(case, args, device)
        batches = make_batches(setting.case, args.quick, device)
        for name in (n for n, found in taken["variants"].items() if "us" in found):
            common.progress(f"{case}: counting the kernels of {name}")
            try:
                taken["variants"][name]["kernels"] = kernels_of(name, setting, batches)
            except Exception as error:  # no profiler on this machine: the times stand without it
                taken["variants"][name]["kernels_failed"] = reason(error)
            timers.release(device)
        save(args, record)


def new_record(args: argparse.Namespace, device: torch.device) -> dict:
    kept = ("device", "precision", "quick", "budget", "chain", "cases", "variants")
    return {
        "environment": common.environment(device),
        "build": tr.build_info(),
        "key": f"{args.device}/{args.precision}",
        "settings": {k: getattr(args, k) for k in kept},
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cases": {},
        "chain": {},
        "failed": {},
        "ratios": {},
        "bars": [],
    }


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    on_gpu = args.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    old = json.loads(args.compare.read_text()) if args.compare else None
    common.warn_if_busy()
    record = new_record(args, device)
    part, run = ("chain", run_chain) if args.chain else ("cases", run_case)
    for case in args.cases:
        try:
            run(case, args, device, record)
        except Exception as error:  # the other cases are still worth having
            traceback.print_exc()
            record["failed"][case] = reason(error)
        record["ratios"] |= ratios_of(record["key"], case, record[part].get(case))
        record["environment"] |= common.environment(device)  # the clocks just after load
        save(args, record)
    record["bars"] = evaluate_bars(record)
    save(args, record)
    if on_gpu and not args.no_kernels:
        count_kernels(args, device, record)
    print_summary(record)
    fallen = old is not None and common.report_comparison(old, record, args.fail_if_regression)
    return int(fallen or not all_good(record))


def all_good(record: dict) -> bool:
    """No case and no variant of ours failed, and none has other losses than eager."""
    cases = [*record["cases"].values(), *record["chain"].values()]
    rows = [row for case in cases for row in case["variants"].items()]
    agree = all(found.get("agrees", True) for _, found in rows)
    ours = [found for name, found in rows if name.startswith(("TrainStep", "ours"))]
    return agree and not record["failed"] and not any("failed" in found for found in ours)


def save(args: argparse.Namespace, record: dict) -> None:
    if args.json:
        common.write_json(args.json, record)


if __name__ == "__main__":
    torch.backends.cudnn.benchmark = True  # for all alike; a test that calls main keeps its own
    sys.exit(main())
