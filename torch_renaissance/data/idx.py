# SPDX-License-Identifier: BSD-3-Clause
"""IDX, the format of MNIST and its relatives: a magic number, the sizes, then the values, all
big-endian, as http://yann.lecun.com/exdb/mnist lays it down."""

from __future__ import annotations

import gzip
import math
import os
import struct
import sys
import zlib
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ..lr._checks import check_count
from ._limits import check_labels

_DTYPES = {
    0x08: torch.uint8,
    0x09: torch.int8,
    0x0B: torch.int16,
    0x0C: torch.int32,
    0x0D: torch.float32,
    0x0E: torch.float64,
}
_CHUNK = 1 << 24


def read_idx(path: str | os.PathLike) -> Tensor:
    """The values of an IDX file, gzipped or not, as a CPU tensor of the file's shape and dtype.

    Raises:
        OSError: where it can't be opened.
        ValueError: where it is no IDX file, has no elements, or more or fewer bytes than its
            header says, or where its gzip is damaged.
    """
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        try:
            return _read(Path(path), gzip.open(file) if packed else file)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is damaged or cut off: {error}") from error


def _read(path: Path, file: BinaryIO) -> Tensor:
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _DTYPES or magic[3] == 0:
        raise ValueError(
            f"{path} is no IDX file: it begins with '{magic.hex()}', expected two zero bytes, a "
            "dtype (08, 09, 0b to 0e) and the number of dimensions"
        )
    dtype, dim = _DTYPES[magic[2]], magic[3]
    sizes = file.read(4 * dim)
    if len(sizes) < 4 * dim:
        raise ValueError(f"{path} is cut off within its header, after {4 + len(sizes)} bytes")
    shape = struct.unpack(f">{dim}I", sizes)
    expected = math.prod(shape) * dtype.itemsize
    if expected == 0:
        raise ValueError(f"{path} has no elements: its shape is {list(shape)}")
    content = bytearray()
    # By chunks, and one byte past the end: a wrong header must not ask for terabytes, and gzip
    # compares its checksum when it sees the end.
    while len(content) <= expected:
        chunk = file.read(min(_CHUNK, expected + 1 - len(content)))
        if not chunk:
            break
        content += chunk
    if len(content) != expected:
        what = "is cut off:" if len(content) < expected else "goes on after its last value:"
        most = f"{len(content)} bytes" if len(content) < expected else "more bytes"
        raise ValueError(
            f"{path} {what} {most} follow its header, expected {expected} for shape "
            f"{list(shape)} of {str(dtype).removeprefix('torch.')}"
        )
    values = torch.frombuffer(content, dtype=torch.uint8)
    if dtype.itemsize > 1 and sys.byteorder == "little":
        values = values.view(-1, dtype.itemsize).flip(1).flatten()
    return values.view(dtype).view(shape)


def read_pair(
    images: str | os.PathLike, labels: str | os.PathLike, num_classes: int | None
) -> tuple[Tensor, Tensor]:
    """Images (N, H, W) or (N, C, H, W) of uint8, and labels (N), int64 if they are integers.

    Raises:
        OSError, ValueError: as `read_idx`, and where the files hold something else.
    """
    pixels, classes = read_idx(images), read_idx(labels)
    if pixels.dtype != torch.uint8 or pixels.dim() not in (3, 4):
        raise ValueError(
            f"{images} holds {str(pixels.dtype).removeprefix('torch.')} of shape "
            f"{list(pixels.shape)}, expected images: uint8 of shape [N, H, W] or [N, C, H, W]"
        )
    if classes.dim() != 1:
        raise ValueError(
            f"{labels} holds values of shape {list(classes.shape)}, expected labels of shape [N]; "
            "is it a file of images?"
        )
    if len(pixels) != len(classes):
        raise ValueError(
            f"{images} has {len(pixels)} images, but {labels} has {len(classes)} labels"
        )
    check_labels(str(labels), classes, num_classes)
    return pixels, classes if classes.dtype.is_floating_point else classes.long()


def from_idx(cls, images, labels, *, device=None, num_classes=None):
    """Reads two IDX files, gzipped or not (what they contain decides, not their names).

    Args:
        images: path of uint8 values of shape [N, H, W] or [N, C, H, W].
        labels: path of N labels; integers become int64.
        device, num_classes: as `DeviceDataset`'s.

    Raises:
        OSError: where a file can't be opened.
        ValueError: naming the file that is damaged or holds something else.
        Whatever DeviceDataset raises.
    """
    if num_classes is not None:
        check_count("from_idx", "num_classes", num_classes)
    pixels, classes = read_pair(images, labels, num_classes)
    return cls(pixels, classes, device=device, layout="NCHW", num_classes=num_classes)


def from_mnist(cls, root, train=True, *, device=None):
    """Reads MNIST or one of its relatives with ten classes (Fashion-MNIST, KMNIST): the four files
    of the standard names, each with or without .gz.

    Args:
        root: the folder that holds them, or `raw` or `MNIST/raw` with them, as torchvision has it.
        train: the 60,000 images to train on, or the 10,000 to test on.
        device: as `DeviceDataset`'s.

    Raises:
        FileNotFoundError: where one is missing.
        OSError, ValueError: as `from_idx`.
    """
    part = "train" if train else "t10k"
    images = _find(Path(root), f"{part}-images-idx3-ubyte")
    labels = _find(Path(root), f"{part}-labels-idx1-ubyte")
    pixels, classes = read_pair(images, labels, 10)
    if classes.dtype != torch.int64:
        raise ValueError(f"{labels} holds {str(classes.dtype)[6:]}, expected classes from 0 to 9")
    return cls(pixels, classes, device=device, layout="NCHW", num_classes=10)


def _find(root: Path, name: str) -> Path:
    for folder in (root, root / "raw", root / "MNIST" / "raw"):
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
    raise FileNotFoundError(
        f"{root} has neither {name} nor {name}.gz, nor has raw or MNIST/raw in it; "
        "torchvision.datasets.MNIST(root, download=True) fetches them"
    )
