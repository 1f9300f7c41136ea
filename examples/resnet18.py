# SPDX-License-Identifier: BSD-3-Clause
# A ResNet-18 trained by tr.TrainStep on coloured gratings (32 x 32) that are drawn here, and judged
# with its last weights and with their moving average (tr.Ema).
import argparse
import math
import sys
import time

import torch
from torch import nn

import torch_renaissance as tr

try:
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table
    from torchvision.models import resnet18
except ImportError as error:
    sys.exit(f"{error.name} is missing: `pip install rich torchvision`, or the `demo` extra.")

DEFAULTS = {
    "cpu": {"epochs": 2, "images": 192, "batch": 12, "lr": 1e-3, "ema": 0.8},
    "cuda": {"epochs": 5, "images": 20480, "batch": 128, "lr": 1e-3, "ema": 0.99},
}
CLASSES = 10  # five orientations, each in a warm and in a cold colour


def gratings(count, seed):
    """Images [count, 3, 32, 32] and labels [count]; phase, pitch, tint and noise are random."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    jitter, pitch, phase, green = torch.rand(4, count, 1, 1, generator=generator)
    angle = math.pi / 5 * ((labels % 5).view(-1, 1, 1) + 0.3 * (jitter - 0.5))
    place = torch.arange(32.0) - 15.5
    along = angle.cos() * place + angle.sin() * place.view(-1, 1)
    waves = torch.sin((0.5 + 0.4 * pitch) * along + 2 * math.pi * phase)
    warm = (labels >= 5).float().view(-1, 1, 1)
    colour = torch.stack([warm, green, 1 - warm], 1)
    noise = torch.randn(count, 3, 32, 32, generator=generator)
    return 0.5 * waves.unsqueeze(1) * colour + 0.2 * noise, labels


def make_model():
    """torchvision's, with the stem that small images need: no stride and no pooling."""
    model = resnet18(num_classes=CLASSES)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model.to(memory_format=torch.channels_last)


@torch.no_grad()
def accuracy(model, images, labels):
    model.eval()
    found = [model(part).argmax(1) for part in images.split(256)]
    model.train()
    return (torch.cat(found) == labels).float().mean().item()


def train(args, console):
    torch.manual_seed(0)
    images, labels = (t.to(args.device) for t in gratings(args.images, seed=1))
    held_out = [t.to(args.device) for t in gratings(args.images // 2, seed=2)]
    images = images.contiguous(memory_format=torch.channels_last)
    steps = len(images) // args.batch  # the last, smaller batch is left out: its shape is another

    model = make_model().to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.epochs * steps)
    model, optimizer = tr.accelerate(model, optimizer, ema_decay=args.ema)

    def loss_fn(x, y):
        return nn.functional.cross_entropy(model(x), y)

    step = tr.TrainStep(loss_fn, optimizer, precision=args.precision, compile=args.compile)
    ema = tr.Ema(model, optimizer)

    losses, begin = [], time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        batches = torch.randperm(len(images)).to(args.device).split(args.batch)[:steps]
        for batch in track(batches, f"epoch {epoch}/{args.epochs}", console=console):
            losses.append(step(images[batch], labels[batch]))  # no wait for the device
            scheduler.step()
    losses = torch.stack(losses).tolist()
    speed = len(losses) * args.batch / (time.perf_counter() - begin)
    last = accuracy(model, *held_out)
    with ema.swapped():
        return losses, speed, last, accuracy(model, *held_out), step.captured


def main():
    parser = argparse.ArgumentParser(description="Trains a ResNet-18 on coloured gratings.")
    for name, cpu in DEFAULTS["cpu"].items():
        default = f"default: {cpu} on a CPU, {DEFAULTS['cuda'][name]} on a GPU"
        parser.add_argument(f"--{name}", type=type(cpu), help=default)
    parser.add_argument("--precision", choices=("fp16", "bf16"), help="default: fp32 throughout")
    parser.add_argument("--compile", action="store_true", help="Inductor's kernels in the step")
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=here, choices=("cpu", "cuda"), help=f"here: {here}")
    parser.set_defaults(**DEFAULTS[parser.parse_known_args()[0].device])
    args = parser.parse_args()
    if args.device == "cuda" and here == "cpu":
        parser.error("--device cuda: PyTorch finds no GPU here.")
    given = ", ".join(f"--{name} {getattr(args, name)}" for name in DEFAULTS["cpu"])
    wanted = "epochs >= 1, 2 <= batch <= images, 0 < lr < 1 and 0 < ema < 1"
    sizes_fit = args.epochs >= 1 and 2 <= args.batch <= args.images
    if not (sizes_fit and 0 < args.lr < 1 and 0 < args.ema < 1):
        parser.error(f"{given}: expected {wanted}.")
    losses, speed, last, averaged, captured = train(args, console := Console())
    table = Table("of the training", "value", title=f"ResNet-18 on {args.device}")
    table.add_row("loss of the first and the last step", f"{losses[0]:.4f} → {losses[-1]:.4f}")
    table.add_row("images a second, start-up included", f"{speed:,.0f}")
    table.add_row("accuracy of the last weights", f"{last:.2%}")
    table.add_row("accuracy of the averaged weights", f"{averaged:.2%}")
    table.add_row("steps replayed as one CUDA graph", "yes" if captured else "no")
    console.print(table)


if __name__ == "__main__":
    main()
