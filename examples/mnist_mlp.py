# SPDX-License-Identifier: BSD-3-Clause
# Trains one network on handwritten digits natively and accelerated, on a GPU also with the whole
# step as one graph, from the same weights on the same batches, and compares. The lines that make
# the difference stand in `prepare`.
import argparse
import math
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

import torch_renaissance as tr

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Table
except ImportError:
    sys.exit("The demo draws with rich: `pip install rich`, or the project's `demo` extra.")

# Rounding alone parts two fp32 runs, more so the longer they are: the losses of torch's own fused
# and for-loop AdamW by up to 8e-4 of their value (3 epochs of all of MNIST on a CPU).
AGREE = 5e-3


def prepare(name, args, steps):
    torch.manual_seed(args.seed)  # all sides start from the same weights
    model = nn.Sequential(
        nn.Linear(28 * 28, 1024),
        nn.ReLU(),
        nn.Linear(1024, 512),
        nn.ReLU(),
        nn.Linear(512, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    ).to(args.device)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 1e-4},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, fused=args.fused or None)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_cosine(steps))

    step = None
    if name != "native":
        model, optimizer = tr.accelerate(model, optimizer)  # <- the one line
    if name == "one graph":
        step = tr.TrainStep(lambda images, labels: loss_of(model, images, labels), optimizer)

    return SimpleNamespace(
        name=name,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        step=step,
        seconds=[],
        losses=[],
    )


def loss_of(model, images, labels):
    return nn.functional.cross_entropy(model(normalize(images)), labels, label_smoothing=0.1)


def train_epoch(side, images, labels, batches):
    """An ordinary training loop, or a call that stands for it; the mean loss, on the device."""
    total = torch.zeros((), device=images.device)
    for batch in batches:
        if side.step is not None:
            loss = side.step(images[batch], labels[batch])
        else:
            loss = loss_of(side.model, images[batch], labels[batch])
            side.optimizer.zero_grad()
            loss.backward()
            side.optimizer.step()
        side.scheduler.step()
        total += loss.detach() * len(batch)
    return total / len(images)


def warmup_then_cosine(steps):
    warmup = max(1, steps // 10)

    def factor(step):
        done = max(0, step - warmup) / max(1, steps - warmup)
        return min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * done))

    return factor


def normalize(images):
    return images.float().sub_(0.1307 * 255).div_(0.3081 * 255)


def counted(batches, progress, task):
    for batch in batches:
        yield batch
        progress.advance(task)


def run(args, console):
    """Trains all sides, an epoch of one after an epoch of the other."""
    names = ("native", "accelerated", *(("one graph",) if args.device == "cuda" else ()))
    images, labels, *validation = (tensor.to(args.device) for tensor in args.data)
    synchronize = (lambda: None) if args.device == "cpu" else torch.cuda.synchronize
    steps = args.epochs * math.ceil(len(images) / args.batch)
    few = torch.arange(len(images), device=args.device).split(args.batch)[:5]
    for name in names:  # what happens only once stays outside the times
        train_epoch(prepare(name, args, steps), images, labels, few)
    sides = [prepare(name, args, steps) for name in names]
    generator = torch.Generator().manual_seed(args.seed)
    columns = (TextColumn("{task.description:11}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        tasks = [progress.add_task(side.name, total=steps) for side in sides]
        for epoch in range(1, args.epochs + 1):
            order = torch.randperm(len(images), generator=generator).to(args.device)
            for side, task in zip(sides, tasks, strict=True):
                synchronize()
                begin = time.perf_counter()
                batches = counted(order.split(args.batch), progress, task)
                loss = train_epoch(side, images, labels, batches)
                synchronize()
                side.seconds.append(time.perf_counter() - begin)
                side.losses.append(loss.item())
                with torch.no_grad():
                    correct = side.model(normalize(validation[0])).argmax(1) == validation[1]
                side.accuracy = correct.float().mean().item()
                progress.print(
                    f"epoch {epoch}/{args.epochs}  {side.name:11}  {side.seconds[-1]:.3f} s  "
                    f"loss {side.losses[-1]:.4f}  accuracy {side.accuracy:.2%}"
                )
    return sides


def report(native, *ours, args, console):
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    sizes = f"{len(args.data[0]):,} images, batch {args.batch}"
    table = Table(
        *("training", "time per epoch", "speed-up", "train loss", "accuracy"),
        "largest parameter difference",
        title=f"MNIST MLP, AdamW{' (fused=True)' * args.fused}, {sizes}, {where}",
        caption="Time: median (range) of the whole loop; its matrix products are the same on all "
        f"sides. Loss: mean of the last epoch. Accuracy: on {len(args.data[2]):,} other images.",
    )
    base, worst = statistics.median(native.seconds), 0.0
    for side in (native, *ours):
        middle, low, high = statistics.median(side.seconds), min(side.seconds), max(side.seconds)
        times = f"{middle:.3f} s\n({low:.3g}–{high:.3g})", f"{base / middle:.2f}×"
        pairs = zip(native.model.parameters(), side.model.parameters(), strict=True)
        apart = max((p - q).abs().max().item() for p, q in pairs)
        apart = "–" if side is native else f"{apart:.2g}"
        table.add_row(side.name, *times, f"{side.losses[-1]:.4f}", f"{side.accuracy:.2%}", apart)
        theirs = torch.tensor(native.losses)
        differences = ((torch.tensor(side.losses) - theirs) / theirs).abs()
        worst = max(worst, differences.max().item(), key=lambda x: (math.isnan(x), x))
    console.print(table)
    if worst <= AGREE:
        console.print(f"The losses agree: in no epoch are they further apart than {worst:.1e}.")
    elif math.isnan(worst):
        console.print("The losses are not finite: try a smaller --lr.")
    else:
        console.print(
            f"The losses differ by {worst:.1e}, more than the {AGREE} that rounding explains."
        )


def read_set(directory, train):
    data = tr.data.DeviceDataset.from_mnist(directory, train)
    if data.images.shape[1:] != (1, 28, 28):
        raise ValueError(f"{directory}: expected images of 1 × 28 × 28, got {data}.")
    return data.images.flatten(1), data.labels


def load(directory, download):
    """Images and labels to train on, images and labels to validate on."""
    if directory is None:
        images, labels = read_set(Path(__file__).parent / "data", train=False)
        return images[:8000], labels[:8000], images[8000:], labels[8000:]
    if download:
        try:
            from torchvision.datasets import MNIST

            MNIST(directory, download=True)
        except (ImportError, OSError, RuntimeError) as error:
            raise ValueError(f"MNIST could not be fetched into {directory}: {error}") from error
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory; --download would make and fill it.")
    return *read_set(directory, train=True), *read_set(directory, train=False)


def main():
    parser = argparse.ArgumentParser(description="Trains on MNIST natively and accelerated.")
    parser.add_argument("--data", type=Path, metavar="DIR", help="a full MNIST, not just 10,000")
    parser.add_argument("--download", action="store_true", help="fetch it into DIR (torchvision)")
    parser.add_argument("--fused", action="store_true", help="compare with torch's fused AdamW")
    parser.add_argument("--epochs", type=int, default=5, help="default: 5")
    parser.add_argument("--batch", type=int, default=200, help="default: 200")
    parser.add_argument("--lr", type=float, default=1e-3, help="after warm-up, default: 1e-3")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU here.")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.epochs < 1 or args.batch < 1:
        parser.error(f"--epochs {args.epochs} --batch {args.batch}: both must be at least 1.")
    if not (0 < args.lr < math.inf and 0 <= args.seed < 2**32):
        parser.error(f"--lr {args.lr} --seed {args.seed}: lr must be > 0, seed 0 to 2**32 - 1.")
    if args.download and args.data is None:
        parser.error("--download needs --data DIR, the directory to fetch MNIST into.")
    try:
        args.data = load(args.data, args.download)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if args.batch > len(args.data[0]):
        parser.error(f"--batch {args.batch}: there are only {len(args.data[0])} training images.")
    console = Console()
    report(*run(args, console), args=args, console=console)


if __name__ == "__main__":
    main()
