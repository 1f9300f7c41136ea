# SPDX-License-Identifier: BSD-3-Clause
# A small GPT that reads this project's own sources letter by letter, trained by tr.TrainStep
# with clipped gradients, warm-up and cosine; in the end it writes some lines itself.
import argparse
import sys
import time
from pathlib import Path

import torch
from torch import nn

import torch_renaissance as tr

try:
    from rich import print as show
    from rich import progress, table
except ImportError:
    sys.exit("The example draws with rich: `pip install rich`, or the project's `demo` extra.")

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("benchmarks", "csrc", "examples", "tests", "torch_renaissance")
DEFAULTS = {
    "cpu": dict(steps=300, batch=16, context=32, width=128, layers=2, lr=6e-3),
    "cuda": dict(steps=2000, batch=64, context=256, width=384, layers=6, lr=1e-3),
}


def read_sources():
    files = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*.*")]
    return "".join(p.read_text() for p in sorted(files) if p.suffix in (".py", ".h", ".cpp"))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, 32)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, letters, context, width, layers):
        super().__init__()
        self.place = nn.Parameter(0.02 * torch.randn(context, width))
        self.token = nn.Embedding(letters, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)), nn.LayerNorm(width))
        nn.init.normal_(self.token.weight, std=0.02)  # it is the output layer too

    def forward(self, tokens):
        """Logits [batch, time, letters] of the letter that follows each of `tokens`."""
        x = self.token(tokens) + self.place[: tokens.shape[1]]
        return nn.functional.linear(self.blocks(x), self.token.weight)


@torch.no_grad()
def write(model, tokens, letters, context):
    for _ in range(300):
        chances = (model(tokens[:, -context:])[:, -1] / 0.8).softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1)], 1)
    return "".join(letters[code] for code in tokens[0].tolist())


def train(args, text):
    torch.manual_seed(0)
    letters = sorted(set(text))
    codes = torch.tensor([letters.index(letter) for letter in text], device=args.device)
    model = GPT(len(letters), args.context, args.width, args.layers).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.steps, pct_start=0.1)
    model, optimizer = tr.accelerate(model, optimizer, max_grad_norm=1.0)

    def loss_fn(x, y):
        return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())

    step = tr.TrainStep(loss_fn, optimizer, precision=args.precision, compile=args.compile)
    window = torch.arange(args.context + 1, device=args.device)
    losses, begin = [], time.perf_counter()
    for _ in progress.track(range(args.steps), "training"):
        starts = torch.randint(len(codes) - args.context, (args.batch, 1), device=args.device)
        batch = codes[starts + window]
        losses.append(step(batch[:, :-1], batch[:, 1:]))  # no wait for the device
        scheduler.step()
    losses = torch.stack(losses).tolist()
    speed = args.steps * args.batch * args.context / (time.perf_counter() - begin)
    return losses, speed, step.captured, write(model.eval(), codes[None, :1], letters, args.context)


def main():
    parser = argparse.ArgumentParser(description="Trains a small GPT on this project's sources.")
    for name, cpu in DEFAULTS["cpu"].items():
        parser.add_argument(f"--{name}", type=type(cpu), help=f"default on a CPU: {cpu}")
    parser.add_argument("--precision", choices=("fp16", "bf16"), help="default: fp32 throughout")
    parser.add_argument("--compile", action="store_true", help="Inductor's kernels in the step")
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=here, choices=("cpu", "cuda"), help=f"here: {here}")
    parser.set_defaults(**DEFAULTS[parser.parse_known_args()[0].device])
    args, text = parser.parse_args(), read_sources()
    if args.device == "cuda" and here == "cpu":
        parser.error("--device cuda: PyTorch finds no GPU here.")
    given = ", ".join(f"--{name} {getattr(args, name)}" for name in DEFAULTS["cpu"])
    sizes = (args.steps, args.batch, args.context, args.width, args.layers)
    if min(sizes) < 1 or args.width % 32 or args.context >= len(text) or not 0 < args.lr < 1:
        parser.error(f"{given}: expected sizes > 0, width % 32 = 0, context < {len(text)}, lr < 1.")
    losses, speed, captured, written = train(args, text)
    print(written)
    rows = table.Table("of the training", "value", title=f"{len(text):,} letters, {args.device}")
    rows.add_row("loss of the first and the last step", f"{losses[0]:.4f} → {losses[-1]:.4f}")
    rows.add_row("letters a second, start-up included", f"{speed:,.0f}")
    rows.add_row("steps replayed as one CUDA graph", "yes" if captured else "no")
    show(rows)


if __name__ == "__main__":
    main()
