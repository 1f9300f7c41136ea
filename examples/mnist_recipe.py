# SPDX-License-Identifier: BSD-3-Clause
# 100 epochs of MNIST with augmentation, validated after each: with everything on the device and in
# one graph a step (--backend ours), as plain PyTorch has it (--backend native), or both.
import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

import torch_renaissance as tr
from torch_renaissance import data

try:
    import native_mnist
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Column, Table
except ImportError as error:
    sys.exit(f"{error.name} is missing: `pip install rich torchvision`, or the `demo` extra.")

CLASSES, SMOOTHING, DECAY = 10, 0.1, 1e-4
MEAN, STD = 0.1307, 0.3081
LR, LAST_LR, WARMUP = 1e-3, 1e-6, 5
# At this batch size a second stage of a reduction costs more than it saves.
COMPILE = {"options": {"split_reductions": False}}


@dataclass
class Run:
    """What one training came to, epoch by epoch: validation loss and accuracy, and the seconds that
    training and validating took."""

    backend: str
    seed: int
    seconds: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)

    @property
    def epochs_per_second(self) -> float:
        """Of all epochs but the first two, in which the step and then the validation are compiled,
        captured and started."""
        later = self.seconds[min(2, len(self.seconds) - 1) :]
        return len(later) / sum(later)


def make_model() -> nn.Sequential:
    widths = (784, 1024, 512, 256)
    layers = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], CLASSES))


def schedule(steps_per_epoch: int, epochs: int) -> tr.lr.Cosine:
    """By epoch; the last one runs at LAST_LR."""
    warmup = min(WARMUP, max(epochs - 2, 0))
    return tr.lr.Cosine(
        LR,
        total=max(epochs, 2),
        steps_per_epoch=steps_per_epoch,
        by="epoch",
        eta_min=LAST_LR,
        warmup=warmup,
        warmup_factor=1 / (warmup + 1) if warmup else None,
    )


def read_sets(folder: Path | None) -> list[data.DeviceDataset]:
    """To train on and to validate on; of the 10,000 images beside the examples if there is no
    folder."""
    if folder is not None:
        return [data.DeviceDataset.from_mnist(folder, train=t) for t in (True, False)]
    whole = data.DeviceDataset.from_mnist(Path(__file__).parent / "data", train=False)
    return [
        data.DeviceDataset(whole.images[part], whole.labels[part], num_classes=CLASSES)
        for part in (slice(8000), slice(8000, None))
    ]


def augmentation(dtype: torch.dtype) -> list:
    return [
        data.Pad(2),
        data.RandomCrop(28),
        data.RandomRotation(20, interpolation="bilinear"),
        data.RandomScale((0.8, 1.2), interpolation="bilinear"),
        # With grey, neither paper nor ink: a digit that lost a part to black may be another one.
        data.RandomErasing(p=0.5, value=255 / 2),
        data.Normalize(MEAN, STD),
        data.ToFloat(dtype),
    ]


def train_ours(args, seed: int, epochs: int, advance) -> Run:
    device = args.device
    low = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(args.precision, torch.float32)
    tr.seed(seed)
    train, test = (d.to(device) for d in args.sets)
    loader = data.DeviceLoader(train, args.batch, transforms=augmentation(low), seed=seed)
    plain = [data.Normalize(MEAN, STD), data.ToFloat(low)]
    validation = data.CachedValidation(
        data.DeviceLoader(test, len(test), shuffle=False, transforms=plain), device=device
    )

    model = tr.init.Recipe(tr.init.kaiming_uniform()).initialize(make_model().to(device))
    optimizer = tr.optim.AdamW(model, lr=LR, weight_decay=DECAY)  # two groups: no decay of biases
    scheduler = schedule(len(loader), epochs).attach(optimizer)
    criterion = tr.CrossEntropyLoss(label_smoothing=SMOOTHING)
    step = tr.TrainStep(
        lambda x, y: criterion(model(x), y),
        optimizer,
        data=loader,
        precision=args.precision,
        compile=COMPILE if args.compile else False,
    )
    evaluator = tr.Evaluator(model, precision=args.precision, topk=(1,))

    run = Run("ours", seed)
    begin = time.perf_counter()

    def read(evaluation) -> None:
        nonlocal begin
        found = evaluation.result()  # waits for the device
        now = time.perf_counter()
        run.seconds.append(now - begin)
        run.loss.append(found.loss)
        run.accuracy.append(found.top1)
        begin = now
        advance(run)

    evaluation = None
    for _ in range(epochs):
        for _ in range(len(loader)):
            step()
            scheduler.step()
        if evaluation is not None:
            read(evaluation)  # of the epoch before: the device has the steps of this one meanwhile
        evaluation = evaluator.submit(validation)
        if evaluation.done():  # on a CPU
            read(evaluation)
            evaluation = None
    if evaluation is not None:
        read(evaluation)
    step.reset()
    evaluator.reset()
    return run


def train_native(args, seed: int, epochs: int, advance) -> Run:
    run = Run("native", seed)
    torch.manual_seed(seed)
    factors = schedule(1, max(epochs, args.epochs))
    begin = time.perf_counter()
    for loss, accuracy in native_mnist.train(make_model(), args, factors, epochs):
        now = time.perf_counter()
        run.seconds.append(now - begin)
        run.loss.append(loss)
        run.accuracy.append(accuracy)
        begin = now
        advance(run)
    return run


# --- the program ----------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The MNIST recipe.")
    parser.add_argument("--data", type=Path, metavar="DIR", help="the full MNIST as IDX files")
    parser.add_argument("--backend", default="ours", choices=("ours", "native", "both"))
    parser.add_argument("--epochs", type=int, default=100, help="default: 100")
    parser.add_argument("--native-epochs", type=int, default=3, help="with --backend both")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of ours, one after another")
    parser.add_argument("--seed", type=int, default=0, help="of the first training")
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--precision", default=None, choices=("fp16", "bf16", "fp32"))
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--workers", type=int, default=8, help="of native's DataLoader")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--plot", type=Path, metavar="PNG", help="the curves (needs matplotlib)")
    parser.add_argument("--json", type=Path, help="where to write what was measured")
    args = parser.parse_args()
    if min(args.epochs, args.native_epochs, args.seeds, args.batch) < 1 or args.workers < 0:
        parser.error("--epochs, --native-epochs, --seeds and --batch must be at least 1.")
    if args.seed < 0:
        parser.error(f"--seed must not be negative, got {args.seed}.")
    # Found now, not after the training.
    for path in filter(None, (args.plot, args.json)):
        if not path.absolute().parent.is_dir():
            parser.error(f"{path}: there is no folder {path.absolute().parent}.")
    if args.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: `pip install matplotlib`, or the `plot` extra.")
    if args.plot and args.plot.suffix.lower() != ".png":
        parser.error(f"--plot writes a PNG; {args.plot} must end with .png.")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU here.")
    on_gpu = args.device == "cuda"
    args.compile = on_gpu if args.compile is None else args.compile
    args.precision = args.precision or ("fp16" if on_gpu else "fp32")
    args.precision = None if args.precision == "fp32" else args.precision
    try:
        args.sets = read_sets(args.data)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return args


def train(args, console: Console) -> list[Run]:
    plan = []
    if args.backend != "native":
        plan += [(train_ours, args.seed + i, args.epochs) for i in range(args.seeds)]
    if args.backend != "ours":
        epochs = args.epochs if args.backend == "native" else args.native_epochs
        plan.append((train_native, args.seed, epochs))
    runs = []
    # A thread of its own would hold Python up in the middle of epochs that take 25 ms.
    with Progress(console=console, auto_refresh=False) as progress:
        for function, seed, epochs in plan:
            shown = time.perf_counter()
            name = function.__name__.removeprefix("train_")
            task = progress.add_task(f"{name}, seed {seed}", total=epochs)

            def advance(run, task=task, total=epochs):
                nonlocal shown
                progress.advance(task)
                done = len(run.seconds)
                if done == total or time.perf_counter() - shown > 0.5:
                    progress.refresh()
                    shown = time.perf_counter()
                if done in (1, total) or done % max(1, total // 10) == 0:
                    progress.print(
                        f"{run.backend}, seed {run.seed}, epoch {done}/{total}: "
                        f"loss {run.loss[-1]:.4f}, accuracy {run.accuracy[-1]:.2%}, "
                        f"{run.seconds[-1] * 1e3:,.1f} ms"
                    )

            runs.append(function(args, seed, epochs, advance))
    return runs


def report(runs: list[Run], args, console: Console) -> None:
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    table = Table(
        Column("training", no_wrap=True),
        *("epochs", "last accuracy", "best", "first epoch", "all", "epochs/s"),
        title=f"MNIST, {len(args.sets[0]):,} images, batch {args.batch}, "
        f"{args.precision or 'fp32'}, {where}",
        caption="Each epoch is validated. The first two compile, capture and start what they need; "
        "epochs/s counts the others.",
    )
    for run in runs:
        table.add_row(
            f"{run.backend}, seed {run.seed}",
            str(len(run.seconds)),
            f"{run.accuracy[-1]:.2%}",
            f"{max(run.accuracy):.2%}",
            f"{run.seconds[0]:.2f} s",
            f"{sum(run.seconds):.2f} s",
            f"{run.epochs_per_second:.2f}",
        )
    console.print(table)
    ours = [r for r in runs if r.backend == "ours"]
    native = [r for r in runs if r.backend == "native"]
    if ours:
        last = statistics.mean(r.accuracy[-1] for r in ours)
        speed = statistics.median(r.epochs_per_second for r in ours)
        console.print(
            f"ours: {last:.3%} in the last epoch (mean of {len(ours)}), {speed:.1f} epochs/s"
        )
        if native:
            console.print(f"{speed / native[0].epochs_per_second:,.0f} times native's epochs/s")


def plot(runs: list[Run], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for run in runs:
        name, epochs = f"{run.backend}, seed {run.seed}", range(1, len(run.loss) + 1)
        left.plot(epochs, run.loss, label=name)
        right.plot(epochs, [100 * (1 - a) for a in run.accuracy], label=name)
    left.set(xlabel="epoch", ylabel="validation loss")
    right.set(xlabel="epoch", ylabel="validation error, %", yscale="log")
    right.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    args = arguments()
    console = Console()
    runs = train(args, console)
    report(runs, args, console)
    if args.json:
        kept = ("backend", "epochs", "batch", "device", "workers", "precision", "compile")
        settings = {k: getattr(args, k) for k in kept} | {"images": len(args.sets[0])}
        speeds = [{**asdict(r), "epochs_per_second": r.epochs_per_second} for r in runs]
        args.json.write_text(json.dumps({"settings": settings, "runs": speeds}, indent=1) + "\n")
    if args.plot:
        plot(runs, args.plot)


if __name__ == "__main__":
    main()
