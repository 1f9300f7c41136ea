# SPDX-License-Identifier: BSD-3-Clause
"""Pictures of what transforms make of a dataset, for a person to look at.

    python -m torch_renaissance data show --mnist DIR --test \\
        --transforms "Pad(2), RandomCrop(28), RandomRotation(20)" --out grid.png
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import data
from ..lr._checks import check_count
from ._files import check_target, replace
from ._program import Transforms, listed
from .dataset import DeviceDataset

_PICTURE = 96  # pixels that a small image is magnified to, about
_GAP = 4
_PAPER = 64  # grey: neither the black nor the white that images often end in


def show(
    dataset: DeviceDataset,
    transforms: Transforms,
    path: str | os.PathLike,
    *,
    rows: int = 4,
    columns: int = 8,
    seed: int = 0,
    epoch: int = 0,
) -> None:
    """Writes a PNG with a sample in each row: as it is, then as `tr.data.augment` gives it to the
    training in `columns` - 1 epochs from `epoch` on. `Normalize` is undone for the picture.

    Args:
        dataset: with one channel or three; the samples are spread evenly over it.
        transforms: as `tr.data.augment` takes them.
        path: of the file, complete or not there at all.
        rows: at most the length of the dataset.
        columns: at least 2.
        seed, epoch: as `tr.data.augment`'s.

    Raises:
        TypeError, ValueError: for other numbers, and images of other channels.
        OSError: where the file can't be written.
        ImportError: without torchvision.
        Whatever `tr.data.augment` raises.
    """
    check_count("show", "rows", rows)
    check_count("show", "columns", columns, least=2)
    check_count("show", "epoch", epoch, least=0)
    path, transforms = check_target("show", path), listed(transforms)
    if dataset.images.shape[1] not in (1, 3):
        raise ValueError(
            f"show: images have {dataset.images.shape[1]} channels; only one or three are drawn"
        )
    if rows > len(dataset):
        raise ValueError(f"show: rows must be at most {len(dataset)}, got {rows}")
    chosen = torch.linspace(0, len(dataset) - 1, rows, device="cpu").long().to(dataset.device)
    pictures = [dataset.images[chosen].float() / 255]
    for drawn in range(epoch, epoch + columns - 1):
        images = data.augment(dataset.images, transforms, seed=seed, epoch=drawn, indices=chosen)
        if images.dtype == torch.uint8:
            images = images.float() / 255
        pictures.append(_without_normalize(images.float(), transforms))
    grid = _image(_grid([p.cpu() for p in pictures]))
    replace(path, lambda file: grid.save(file, format="PNG"))


def _image(pixels: Tensor):
    """`pixels` (3, H, W) as Pillow has them."""
    try:
        from torchvision.transforms.v2.functional import to_pil_image
    except ImportError as error:
        raise ImportError(
            "show: a PNG is written by torchvision: `pip install torchvision`, or the `data` extra "
            f"({error})"
        ) from error
    return to_pil_image(pixels)


def _without_normalize(images: Tensor, transforms: Sequence[object]) -> Tensor:
    for transform in reversed(transforms):
        if type(transform).__name__ == "Normalize":
            mean, std = (
                torch.tensor(values, device=images.device).view(-1, 1, 1)
                for values in (transform.mean, transform.std)
            )
            images = images * std + mean
    return images


def _grid(columns: list[Tensor]) -> Tensor:
    """Columns of images (rows, C, h, w) in [0, 1], of various h and w, as uint8 (3, H, W)."""
    height, width = (max(images.shape[at] for images in columns) for at in (2, 3))
    times = max(1, round(_PICTURE / max(height, width)))
    cells = []
    for images in columns:
        images = (images.clamp(0, 1) * 255).round().to(torch.uint8).expand(-1, 3, -1, -1)
        images = images.repeat_interleave(times, 2).repeat_interleave(times, 3)
        # In the middle of its cell, as transforms may change the size.
        high, wide = height * times - images.shape[2], width * times - images.shape[3]
        around = (wide // 2, wide - wide // 2 + _GAP, high // 2, high - high // 2 + _GAP)
        cells.append(F.pad(images, around, value=_PAPER))
    cells[0] = F.pad(cells[0], (0, 2 * _GAP), value=_PAPER)  # the originals stand apart
    grid = torch.cat([row for row in torch.cat(cells, 3)], 1)
    return F.pad(grid, (_GAP, 0, _GAP, 0), value=_PAPER)


# -- the command ----------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `data show`."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--mnist", type=Path, metavar="DIR", help="IDX files, .gz or not")
    source.add_argument("--cifar", type=Path, metavar="DIR", help="python version, or its .tar.gz")
    source.add_argument("--folder", type=Path, metavar="DIR", help="a sub-folder for each class")
    parser.add_argument("--test", action="store_true", help="MNIST's or CIFAR's test images")
    parser.add_argument(
        "--size", type=int, nargs=2, metavar=("H", "W"), help="resize a folder's images to this"
    )
    parser.add_argument(
        "--transforms", default="", metavar="LIST", help="such as 'Pad(2), RandomCrop(28)'"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the PNG to write")
    parser.add_argument("--rows", type=int, default=4, help="samples, default: 4")
    parser.add_argument("--columns", type=int, default=8, help="pictures of each, default: 8")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--epoch", type=int, default=0, help="the first of them, default: 0")
    parser.add_argument("--device", default="cpu", help="default: cpu")


def main(args: argparse.Namespace) -> None:
    """Writes the picture that the options of `add_arguments` ask for; leaves with a sentence
    (`SystemExit`) where that can't be done."""
    try:
        transforms = parse_transforms(args.transforms)
        check_target("--out", args.out)
        dataset = _load(args).to(args.device)
        numbers = {name: getattr(args, name) for name in ("rows", "columns", "seed", "epoch")}
        show(dataset, transforms, args.out, **numbers)
    except (OSError, ValueError, TypeError, RuntimeError, ImportError) as error:
        sys.exit(f"data show: {error}")
    print(f"{args.out}: {dataset!r}, {args.rows} samples, the originals in the first column")


def _load(args: argparse.Namespace) -> DeviceDataset:
    if args.mnist is not None:
        return DeviceDataset.from_mnist(args.mnist, not args.test)
    if args.cifar is not None:
        return DeviceDataset.from_cifar(args.cifar, not args.test)
    if args.test:
        raise ValueError("--test: a folder has no test images; name the folder that has them")
    return DeviceDataset.from_folder(args.folder, args.size)


def parse_transforms(text: str) -> list[object]:
    """Transforms of `tr.data` as they are written in Python: "Pad(2), RandomCrop(28)", in brackets
    or not. Only their names and literal arguments are understood; nothing is evaluated.

    Raises:
        ValueError: for anything else, and for arguments that a transform refuses.
    """
    known = {
        name: value
        for name, value in vars(data).items()
        if isinstance(value, type) and dataclasses.is_dataclass(value)
    }
    if not text.strip():
        return []
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(
            f"transforms: {text!r} can't be read: {error}; write them as in Python, such as "
            "'Pad(2), RandomCrop(28)'"
        ) from error
    calls = body.elts if isinstance(body, ast.Tuple | ast.List) else [body]
    return [_transform(call, known) for call in calls]


def _transform(call: ast.expr, known: dict[str, type]) -> object:
    written = ast.unparse(call)
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(f"transforms: {written} is no transform with its arguments in parentheses")
    name = call.func.id
    if name not in known:
        raise ValueError(f"transforms: there is no {name}; there are {', '.join(sorted(known))}")
    try:
        positional = [ast.literal_eval(value) for value in call.args]
        named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (ValueError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(
            f"transforms: {written} has an argument that is no literal, such as 2, 0.5, (1, 2) or "
            "'bilinear'"
        ) from error
    if None in named:
        raise ValueError(f"transforms: {written} has ** arguments; write each with its name")
    try:
        return known[name](*positional, **named)
    except (TypeError, ValueError) as error:
        raise ValueError(f"transforms: {written} is refused: {error}") from error
