# SPDX-License-Identifier: BSD-3-Clause
"""A folder of images in one sub-folder for each class, decoded once."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

import torch
from torch import Tensor

from ..lr._checks import check_count
from . import _cache
from ._files import check_target, counted
from ._limits import check_fits_when_read
from .map_style import from_pil

_WHO = "from_folder"
_ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


def from_folder(cls, root, size=None, *, workers=8, cache=None, progress=True, device=None):
    """Reads root/class/…/image.png as `torchvision.datasets.ImageFolder` does: classes are the
    sub-folders in alphabetical order, images all files in and below them whose names end with
    .jpg, .jpeg, .png, .ppm, .bmp, .pgm, .tif, .tiff or .webp, as RGB.

    Args:
        root: the folder.
        size: (H, W): each image is resized until it just covers that (bilinear, antialiased) and
            its centre is kept. Default: all must have the same size.
        workers: threads that decode.
        cache: a file for the decoded images, written after they have been read, and read instead
            of them as long as the images' names, sizes and times and `size` stay what they were;
            otherwise it is written anew.
        progress: shows a bar on a terminal, where rich is installed.
        device: as `DeviceDataset`'s.

    Raises:
        ImportError: without torchvision, unless everything is in the cache.
        OSError: where a folder is missing or can't be read, or there is no place for the cache.
        ValueError: for a class without images, naming the image that can't be decoded or the
            first two that differ in size, and for a `cache` that is some other file or damaged.
            No cache has been written then.
        RuntimeError: where the images don't fit on the device or the host, before they are read.
        Whatever DeviceDataset raises.
    """
    check_count(_WHO, "workers", workers)
    size = _checked_size(size)
    root = Path(root)
    classes, paths, labels = _scan(root)
    key = None
    if cache is not None:
        cache = check_target(_WHO, cache)
        key = _cache.key(root, paths, size)
        images = _cache.load(_WHO, cache, key)
    if key is None or images is None:
        images = _decode_all(paths, size, workers, progress, device)
        if key is not None:
            _cache.save(cache, key, images)
    return cls(images, labels, device=device, layout="NHWC", classes=classes)


def _checked_size(size) -> tuple[int, int] | None:
    if size is None:
        return None
    if not isinstance(size, tuple | list) or len(size) != 2:
        raise TypeError(f"{_WHO}: size must be a pair (H, W), got {size!r}")
    for name, length in zip("HW", size, strict=True):
        check_count(_WHO, f"{name} of size", length)
    return tuple(size)


def _scan(root: Path) -> tuple[list[str], list[Path], Tensor]:
    """Names of classes; paths of images and their labels."""
    if not root.is_dir():
        raise FileNotFoundError(f"{_WHO}: {root} is no folder")
    classes = sorted(entry.name for entry in root.iterdir() if entry.is_dir())
    if not classes:
        raise ValueError(
            f"{_WHO}: {root} has no sub-folders; each class must have its own, with its images"
        )
    paths, labels = [], []
    for label, name in enumerate(classes):
        before = len(paths)
        for folder, _, names in sorted(os.walk(root / name, followlinks=True)):
            found = (file for file in sorted(names) if file.lower().endswith(_ENDINGS))
            paths.extend(Path(folder, file) for file in found)
        if len(paths) == before:
            raise ValueError(
                f"{_WHO}: {root / name} has no images (files ending with {', '.join(_ENDINGS)})"
            )
        labels.extend(repeat(label, len(paths) - before))
    return classes, paths, torch.tensor(labels, device="cpu")


def _decode_all(
    paths: list[Path], size: tuple[int, int] | None, workers: int, progress: bool, device
) -> Tensor:
    decode = _decoder(size)
    first = decode(paths[0])
    check_fits_when_read(_WHO, len(paths) * first.nbytes, device)
    images = torch.empty((len(paths), *first.shape), dtype=torch.uint8, device="cpu")

    def read(i: int) -> None:
        image = decode(paths[i])
        if image.shape != first.shape:
            raise ValueError(
                f"{_WHO}: {paths[0]} has {_size(first)} pixels, but {paths[i]} has "
                f"{_size(image)}; pass size=(H, W), to which all are resized and cropped"
            )
        images[i] = image

    with ThreadPoolExecutor(workers, thread_name_prefix="decode") as pool:
        try:
            for _ in counted(pool.map(read, range(len(paths))), len(paths), "decoding", progress):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return images


def _size(image: Tensor) -> str:
    return f"{image.shape[0]} × {image.shape[1]}"


def _decoder(size: tuple[int, int] | None) -> Callable[[Path], Tensor]:
    """A function from an image's path to its pixels (H, W, 3)."""
    try:
        from torchvision.datasets.folder import pil_loader
        from torchvision.transforms.v2.functional import center_crop, resize
    except ImportError as error:
        raise ImportError(
            f"{_WHO} decodes with torchvision: `pip install torchvision`, or install "
            "torch_renaissance with its extra `data`"
        ) from error

    def decode(path: Path) -> Tensor:
        try:
            image = from_pil(str(path), pil_loader(str(path)))
        except Exception as error:  # decoders raise what they like
            raise ValueError(f"{_WHO}: {path} can't be decoded: {error}") from error
        if size is None or image.shape[:2] == size:
            return image
        height, width = image.shape[:2]
        scale = max(size[0] / height, size[1] / width)
        cover = [max(size[0], round(height * scale)), max(size[1], round(width * scale))]
        image = resize(image.permute(2, 0, 1), cover, antialias=True)
        return center_crop(image, list(size)).permute(1, 2, 0)

    return decode
