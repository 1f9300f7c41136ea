# SPDX-License-Identifier: BSD-3-Clause
# Where the gain fades: training steps at growing batch sizes, stock eager and in a hand-made graph,
# against tr.TrainStep. Run it as `python benchmarks/bench_sweep.py`.
import argparse
import dataclasses
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # an in-place build, if none is installed

import common
import train_step_measure as measuring
from bench_train_step import complete_budget
from tables import microseconds, number, print_table, progress
from train_step_cases import CASES
from train_step_report import print_notes, ratio, ratios_of
from train_step_variants import DTYPES

BATCHES = {
    "mlp": (8, 16, 32, 64, 128, 256, 512, 1024, 2048),
    "gpt_small": (1, 2, 4, 8, 16, 32, 64),
    "resnet18_cifar": (8, 16, 32, 64, 128, 256, 512, 1024, 2048),
    "resnet50": (8, 16, 32, 64, 128, 256),
}
QUICK_MODELS, QUICK_BATCHES = ("mlp", "gpt_small"), (4, 16)
# What each ratio is the gain of; 16-bit weights are TrainStep's where precision isn't fp32.
EAGER, GRAPH, OURS, COMPILED = "eager fused", "hand graph", "TrainStep", "TrainStep compile"
PARTS = {
    "graph": (EAGER, GRAPH),
    "fused step, 16-bit weights": (GRAPH, OURS),
    "together": (EAGER, OURS),
}
LEAST_GAIN = 1.1
BUDGET, QUICK_BUDGET = 4.0, 0.3


def gain_ends(gains: dict[int, float]) -> int | None:
    """The largest batch that gains `LEAST_GAIN`; 0 where none does, None where the last does, so
    that the end wasn't reached."""
    batches = sorted(gains)
    helped = [b for b in batches if gains[b] >= LEAST_GAIN]
    if not helped:
        return 0
    return None if helped[-1] == batches[-1] else helped[-1]


def fades(record: dict) -> dict[str, dict]:
    """Of each model the gain of each part by batch size, and the last batch that gains."""
    found: dict[str, dict] = {}
    for taken in record["cases"].values():
        gains = {part: ratio(taken, *pair) for part, pair in PARTS.items()}
        for part, gain in gains.items():
            if gain is not None:
                parts = found.setdefault(taken["model"], {})
                parts.setdefault(part, {})[taken["batch"]] = gain
    return {
        model: {part: {"gains": g, "ends": gain_ends(g)} for part, g in parts.items()}
        for model, parts in found.items()
    }


def ending(ends: int | None) -> str:
    if ends is None:
        return "gains at the largest batch"
    return f"no gain beyond batch {ends:,}" if ends else "no gain at any batch"


def batches_of(text: str, apart: str, option: str) -> list[int]:
    """Sizes with `apart` between them, ascending, each once.

    Raises:
        ValueError: with a sentence, for what isn't a whole number of at least 1.
    """
    try:
        found = sorted({int(batch) for batch in text.split(apart)})
    except ValueError:
        example = apart.join(("8", "64", "512"))
        raise ValueError(f"{option}: expected whole numbers, as in {example}") from None
    if found[0] < 1:
        raise ValueError(f"{option}: a batch must be at least 1, got {found[0]}")
    return found


def own_batches(text: str) -> dict[str, list[int] | None]:
    """Of `--models`: each model's own sizes, None where none follow its name.

    Raises:
        ValueError: with a sentence, for sizes that aren't, or a model that is named twice.
    """
    found: dict[str, list[int] | None] = {}
    for part in text.split(","):
        model, colon, sizes = part.strip().partition(":")
        if model in found:
            raise ValueError(f"--models {text}: {model} is named twice; write {model}:8/64/512")
        found[model] = batches_of(sizes, "/", f"--models {part.strip()}") if colon else None
    return found


class Sweep(common.Benchmark):
    description = "Time training steps at growing batch sizes."
    settings = ("precision", "budget", "models", "batches", "variants", "cases")

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--models",
            help=f"comma-separated, of: {', '.join(CASES)}; mlp:32/256 has batches of its own",
        )
        parser.add_argument(
            "--batches", help="of the other models, comma-separated (default: up to 2048, by model)"
        )
        parser.add_argument("--compile", action="store_true", help=f"{COMPILED} too")
        parser.add_argument("--precision", choices=DTYPES, help="fp16; on a CPU fp32")
        parser.add_argument("--budget", type=float, help="seconds for the timing of one batch size")

    def complete(self, args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        if args.budget is None:
            args.budget = QUICK_BUDGET if args.quick else BUDGET
        complete_budget(args, parser)
        default = list(QUICK_MODELS if args.quick else BATCHES)
        try:
            own = own_batches(args.models or ",".join(default))
            if args.batches:
                args.batches = batches_of(args.batches, ",", f"--batches {args.batches}")
        except ValueError as error:
            parser.error(str(error))
        args.models = common.names(",".join(own), list(CASES), parser)
        args.variants = [EAGER, GRAPH, OURS] + [COMPILED] * args.compile
        args.cases = [
            f"{model}/{batch}"
            for model in args.models
            for batch in own[model] or self.sizes(model, args)
        ]

    @staticmethod
    def sizes(model: str, args: argparse.Namespace) -> tuple[int, ...]:
        usual = QUICK_BATCHES if args.quick else BATCHES.get(model, BATCHES["resnet50"])
        return args.batches or usual

    def new_record(self) -> dict:
        return {
            "key": f"{self.args.device}/{self.args.precision}",
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "least_gain": LEAST_GAIN,
            "fades": {},
        }

    def run_case(self, case: str, record: dict) -> None:
        progress(case)
        args = self.args
        model, batch = case.split("/")
        taken = record["cases"][case] = {"model": model, "batch": int(batch), "variants": {}}
        sized = dataclasses.replace(CASES[model], batch=int(batch), quick_batch=int(batch))
        setting = measuring.setting_of(sized, args.quick, args.precision, self.device)
        measuring.measure(setting, args.variants, args.quick, args.budget, taken)
        for found in taken["variants"].values():
            if "us" in found:
                found["samples_per_s"] = round(int(batch) / (found["us"]["median"] * 1e-6), 1)
        record["fades"] = fades(record)
        self.print_model(model, record)
        print_notes(taken, EAGER)

    def print_model(self, model: str, record: dict) -> None:
        rows = []
        for taken in (c for c in record["cases"].values() if c["model"] == model):
            shown = taken["variants"]
            cells = [microseconds(shown.get(n, {}).get("us")) for n in self.args.variants]
            cells += [number(shown.get(OURS, {}).get("samples_per_s"), 0)]
            cells += [number(ratio(taken, *pair)) for pair in PARTS.values()]
            rows.append([f"{taken['batch']:,}", *cells])
        columns = ["batch", *(f"{n} µs" for n in self.args.variants), "samples/s"]
        print_table(f"{model}: time, gain", [*columns, "x graph", "x rest", "x both"], rows)

    def ratios_of(self, case: str, record: dict) -> dict[str, float]:
        return ratios_of(record["key"], case, record["cases"].get(case))

    def print_summary(self, record: dict) -> None:
        rows = [
            [model, *(ending(parts[part]["ends"]) if part in parts else "-" for part in PARTS)]
            for model, parts in record["fades"].items()
        ]
        title = f"where each part's gain falls below {LEAST_GAIN}"
        print_table(title, ["model", "graph", "the rest", "together"], rows)

    def agrees(self, record: dict) -> bool:
        return measuring.all_good(list(record["cases"].values()))


if __name__ == "__main__":
    torch.backends.cudnn.benchmark = True  # for all alike
    sys.exit(Sweep().main())
