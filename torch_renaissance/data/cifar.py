# SPDX-License-Identifier: BSD-3-Clause
"""CIFAR-10 and CIFAR-100 in their "python version", https://www.cs.toronto.edu/~kriz/cifar.html:
pickled batches, in a folder or still in the .tar.gz."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ._limits import check_labels
from ._unpickle import Array, text, unpickled


@dataclass(frozen=True)
class _Kind:
    folder: str
    archive: str
    train: tuple[str, ...]
    test: str
    meta: str
    labels: dict[bool, tuple[str, str, int]]  # by coarse: key of labels, key of names, classes


_KINDS = (
    _Kind(
        "cifar-10-batches-py",
        "cifar-10-python.tar.gz",
        tuple(f"data_batch_{i}" for i in range(1, 6)),
        "test_batch",
        "batches.meta",
        {False: ("labels", "label_names", 10)},
    ),
    _Kind(
        "cifar-100-python",
        "cifar-100-python.tar.gz",
        ("train",),
        "test",
        "meta",
        {
            False: ("fine_labels", "fine_label_names", 100),
            True: ("coarse_labels", "coarse_label_names", 20),
        },
    ),
)


def from_cifar(cls, root, train=True, coarse=False, *, device=None):
    """Reads CIFAR-10 or CIFAR-100, "python version", whichever is there. Nothing that the pickles
    could bring along is run: of all they may name, arrays of numbers and bytes are understood.

    Args:
        root: the folder `cifar-10-batches-py` or `cifar-100-python`, the .tar.gz with it, or a
            folder that holds one of these. The archive is read without unpacking it.
        train: the 50,000 images to train on, or the 10,000 to test on.
        coarse: CIFAR-100's 20 superclasses instead of its 100 classes.
        device: as `DeviceDataset`'s.

    Raises:
        FileNotFoundError: where they, or one of their files, are missing.
        ValueError: naming the file that is damaged or holds something else, for a folder with both
            CIFAR-10 and CIFAR-100, and for `coarse` with CIFAR-10.
        Whatever DeviceDataset raises.
    """
    kind, place = _locate(Path(root))
    if coarse not in kind.labels:
        raise ValueError(f"from_cifar: {place} is CIFAR-10, which has no coarse labels")
    key, names_key, num_classes = kind.labels[coarse]
    names = kind.train if train else (kind.test,)
    contents = _contents(place, (*names, kind.meta))
    batches = [_batch(f"{place}/{name}", contents[name], key, num_classes) for name in names]
    classes = _load(f"{place}/{kind.meta}", contents[kind.meta]).get(names_key)
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    if not isinstance(classes, list) or len(classes) != num_classes:
        raise ValueError(f"{place}/{kind.meta} has no {num_classes} {names_key}")
    return cls(images, labels, device=device, layout="NCHW", classes=map(text, classes))


def _locate(root: Path) -> tuple[_Kind, Path]:
    """What is at `root`, and the folder or archive that holds its files."""
    if root.is_file():
        return _archive_kind(root), root
    found = []
    for kind in _KINDS:
        for place in (root, root / kind.folder, root / kind.archive):
            if place.is_file() or any((place / name).is_file() for name in (kind.meta, kind.test)):
                found.append((kind, place))
                break
    if len(found) > 1:
        raise ValueError(
            f"from_cifar: {root} has both CIFAR-10 and CIFAR-100; name {found[0][1]} or "
            f"{found[1][1]}"
        )
    if not found:
        raise FileNotFoundError(
            f"from_cifar: {root} has neither CIFAR-10 nor CIFAR-100: no {_KINDS[0].folder} or "
            f"{_KINDS[1].folder} (folders), no {_KINDS[0].archive} or {_KINDS[1].archive}; "
            "torchvision.datasets.CIFAR10(root, download=True) fetches the first"
        )
    return found[0]


def _archive_kind(path: Path) -> _Kind:
    with _archive(path) as members:
        for member in members:
            for kind in _KINDS:
                if kind.folder in member.name.split("/"):
                    return kind
    raise ValueError(
        f"from_cifar: {path} is an archive of something else: nothing in it is in the folder "
        f"{_KINDS[0].folder} or {_KINDS[1].folder}"
    )


def _contents(place: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    contents = {}
    if place.is_file():
        with _archive(place) as members:
            for member in members:
                name = member.name.rpartition("/")[2]
                if member.isfile() and name in names:
                    contents[name] = members.extractfile(member).read()
            while members.fileobj.read(1 << 24):  # gzip compares its checksum when it sees the end
                pass
    else:
        for name in names:
            if (place / name).is_file():
                contents[name] = (place / name).read_bytes()
    for name in names:
        if name not in contents:
            raise FileNotFoundError(f"from_cifar: {place} has no {name}")
    return contents


@contextmanager
def _archive(path: Path) -> Iterator[tarfile.TarFile]:
    with open(path, "rb") as file:
        try:
            with tarfile.open(fileobj=file) as members:
                yield members
        except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} is no archive, damaged or cut off: {error}") from error


def _load(where: str, content: bytes) -> dict:
    try:
        return {text(key): value for key, value in unpickled(content).items()}
    except Exception as error:  # damaged pickles raise whatever their wrong bytes lead to
        raise ValueError(
            f"{where} is no batch of CIFAR's python version, or damaged: "
            f"{str(error) or type(error).__name__}"
        ) from error


def _batch(where: str, content: bytes, key: str, num_classes: int) -> tuple[Tensor, Tensor]:
    batch = _load(where, content)
    images, labels = _tensor(batch.get("data")), _tensor(batch.get(key))
    if images is None or images.dtype != torch.uint8 or images.shape[1:] != (3072,):
        raise ValueError(f"{where} has no images: data must be uint8 of shape [N, 3072]")
    if labels is None or labels.dtype == torch.uint8 or labels.shape != images.shape[:1]:
        raise ValueError(f"{where} needs {key}, a list of {len(images)} integers")
    check_labels(where, labels, num_classes)
    return images.reshape(-1, 3, 32, 32), labels.long()


def _tensor(value) -> Tensor | None:
    """An array or a list of integers; None for anything else."""
    if isinstance(value, Array):
        return value.tensor
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return torch.tensor(value, dtype=torch.int64, device="cpu")
    return None
