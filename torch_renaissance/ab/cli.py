# SPDX-License-Identifier: BSD-3-Clause
"""`python -m torch_renaissance ab`: `ab_test` for a model by name."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from .draw import check_format
from .models import OPTIMIZERS, Options, title_of, workload
from .own_model import whose
from .run import BUDGETS, ab_test
from .setting import DTYPES
from .variants import VARIANTS

DESCRIPTION = """\
Times a training step natively and accelerated, after checking that all variants compute the same.
It ends with advice. Exit status: 0; 1 where a variant computes something else or none could be
measured; 2 for arguments that don't fit or a module:function that raises; 130 after Ctrl-C, with
what was measured until then."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument(
        "--model",
        required=True,
        help="mlp, gpt2, a model of torchvision or timm, or module:function, which returns "
        "(make_model, make_optimizer, loss_fn, batch)",
    )
    parser.add_argument(
        "--optimizer",
        default="adamw",
        help=f"{', '.join(OPTIMIZERS)}, or another of torch.optim (default: adamw)",
    )
    parser.add_argument("--batch", type=int, default=64, help="samples (default: 64)")
    parser.add_argument("--precision", default="fp32", choices=DTYPES, help="(default: fp32)")
    parser.add_argument("--device", help="cpu, cuda or cuda:1 (default: cuda where there is one)")
    parser.add_argument(
        "--variants",
        help=f"names between commas, or all (default: what fits into the budget of "
        f"{', '.join(VARIANTS)})",
    )
    parser.add_argument("--steps", type=int, help="timed steps of each variant")
    parser.add_argument(
        "--budget",
        type=float,
        help="seconds for all of it "
        f"(default: {BUDGETS['cpu']:.0f} on a CPU, {BUDGETS['cuda']:.0f} on a GPU)",
    )
    parser.add_argument("--image", type=int, help="pixels a side (default: the model's own)")
    parser.add_argument("--tokens", type=int, default=256, help="of gpt2 (default: 256)")
    parser.add_argument("--channels-last", action="store_true", help="memory format of images")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios (matplotlib)")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def main(args: argparse.Namespace) -> int:
    try:
        result = _run(args)
    except Exception as error:
        theirs = whose(error)
        if not theirs and not isinstance(error, (ImportError, TypeError, ValueError)):
            raise
        print(f"ab: {theirs or error}", file=sys.stderr)
        return 2
    print(result, flush=True)
    status = 0 if any(row.measured for row in result.rows) else 1
    if any(row.status == "differs" for row in result.rows):
        status = 1
    try:
        _write(args, result)
    except (ImportError, OSError, ValueError) as error:
        print(f"ab: {error}", file=sys.stderr)
        status = 2
    return 130 if result.interrupted else status


def _run(args: argparse.Namespace):
    for name in ("threads", "seed"):
        value, least = getattr(args, name), int(name == "threads")
        if value is not None and value < least:
            raise ValueError(f"--{name} must be at least {least}, got {value}")
    for path in (args.json, args.html, args.plot):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"there is no directory {path.parent} to write {path.name} into")
        if path is not None and path.is_dir():
            raise ValueError(f"{path} is a directory; name a file")
    if args.plot is not None:
        check_format(args.plot)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    variants = args.variants and [name.strip() for name in args.variants.split(",")]
    if variants == ["all"]:
        variants = list(VARIANTS)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options = Options(args.batch, args.image, args.tokens, args.channels_last, args.seed)
    chosen = workload(args.model, args.optimizer, options)
    return ab_test(
        *chosen,
        variants=variants,
        steps=args.steps,
        precision=args.precision,
        device=device,
        budget=args.budget,
        seed=args.seed,
        title=title_of(args.model, args.optimizer, options),
        progress=not args.quiet,
    )


def _write(args: argparse.Namespace, result) -> None:
    if args.json is not None:
        args.json.write_text(result.to_json() + "\n", encoding="utf-8")
    if args.html is not None:
        result.to_html(args.html)
    if args.plot is not None:
        result.plot(args.plot)
