# SPDX-License-Identifier: BSD-3-Clause
# The MNIST recipe of examples/mnist_recipe.py: epochs a second, each validated, and the accuracy at
# the end, against the same recipe as plain PyTorch has it. Run it as
# `python benchmarks/bench_recipe.py --data DIR`, with the full MNIST in DIR.
import argparse
import dataclasses
import statistics
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # an in-place build, if none is installed
sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

import common
import mnist_recipe
from rich.console import Console
from tables import WIDTH, bar, progress

FULL = 60_000  # images that the bars are for
LEAST_SPEED, LEAST_ACCURACY, LEAST_RATIO = 40, 0.9945, 60
LEAST_SEEDS, ALL_EPOCHS = 5, 100


def mean_accuracy(runs: list[dict]) -> float:
    """Of the last epochs."""
    return statistics.mean(run["accuracy"][-1] for run in runs)


def speed(runs: list[dict]) -> float | None:
    """Epochs a second, the median training's."""
    return statistics.median(run["epochs_per_second"] for run in runs) if runs else None


def times_native(taken: dict) -> float | None:
    ours, native = (speed(taken[backend]) for backend in ("ours", "native"))
    return ours / native if ours and native else None


class Recipe(common.Benchmark):
    description = "Train the MNIST recipe."
    settings = ("precision", "epochs", "native_epochs", "seeds", "batch", "workers", "compile")

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--data", type=Path, metavar="DIR", help="the full MNIST as IDX files")
        parser.add_argument("--seeds", type=int, help="trainings of ours (5)")
        parser.add_argument("--epochs", type=int, help="of ours (100)")
        parser.add_argument("--native-epochs", type=int, default=3, help="0: ours alone")
        parser.add_argument("--workers", type=int, default=8, help="of native's DataLoader")

    def complete(self, args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        args.cases = ["mnist"]
        if args.seeds is None:
            args.seeds = 1 if args.quick else LEAST_SEEDS
        if args.epochs is None:
            args.epochs = 3 if args.quick else ALL_EPOCHS
        if min(args.seeds, args.epochs) < 1 or min(args.native_epochs, args.workers) < 0:
            parser.error("--seeds and --epochs must be at least 1, the others at least 0")
        on_gpu = args.device == "cuda"
        args.precision, args.compile = ("fp16" if on_gpu else None), on_gpu and not args.quick
        args.batch = 200
        try:
            args.sets = mnist_recipe.read_sets(args.data)
        except (OSError, ValueError) as error:
            parser.error(str(error))

    def new_record(self) -> dict:
        return {"key": f"{self.args.device}/{self.args.precision or 'fp32'}"}

    def run_case(self, case: str, record: dict) -> None:
        args = self.args
        taken = record["cases"][case] = {"images": len(args.sets[0]), "ours": [], "native": []}
        plan = [("ours", mnist_recipe.train_ours, seed, args.epochs) for seed in range(args.seeds)]
        if args.native_epochs:
            plan.append(("native", mnist_recipe.train_native, 0, args.native_epochs))
        for backend, train, seed, epochs in plan:
            progress(f"{backend}, seed {seed}, {epochs} epochs")
            run = train(args, seed, epochs, lambda run: None)
            taken[backend].append(
                {**dataclasses.asdict(run), "epochs_per_second": run.epochs_per_second}
            )
            self.save()

    def ratios_of(self, case: str, record: dict) -> dict[str, float]:
        ratio = times_native(record["cases"].get(case, {"ours": [], "native": []}))
        return {f"{record['key']}/recipe/native over ours": round(ratio, 3)} if ratio else {}

    def print_summary(self, record: dict) -> None:
        taken = record["cases"].get("mnist", {})
        fields = [f.name for f in dataclasses.fields(mnist_recipe.Run)]
        runs = [
            mnist_recipe.Run(**{name: run[name] for name in fields})
            for backend in ("ours", "native")
            for run in taken.get(backend, [])
        ]
        if runs:
            mnist_recipe.report(runs, self.args, Console(width=WIDTH))

    def bars(self, record: dict) -> list[dict]:
        taken, settings = record["cases"].get("mnist"), record["settings"]
        full = taken and taken["images"] == FULL and settings["epochs"] == ALL_EPOCHS
        if settings["device"] != "cuda" or not full or len(taken["ours"]) < LEAST_SEEDS:
            return []
        reached = {
            ("epochs a second", LEAST_SPEED): speed(taken["ours"]),
            ("accuracy in the last epoch, mean", LEAST_ACCURACY): mean_accuracy(taken["ours"]),
            ("ours / native, epochs a second", LEAST_RATIO): times_native(taken),
        }
        return [
            bar(f"recipe: {name}", f">= {bound}", round(value, 5), value >= bound)
            for (name, bound), value in reached.items()
            if value is not None
        ]


if __name__ == "__main__":
    sys.exit(Recipe().main())
