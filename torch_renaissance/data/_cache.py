# SPDX-License-Identifier: BSD-3-Clause
"""The file in which `from_folder` keeps decoded images, beside a key of what they were made of."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from ._files import replace

_FORMAT = "torch_renaissance.data images 1"


def key(root: Path, paths: list[Path], size: tuple[int, int] | None) -> str:
    """A digest of the images' names, sizes and times of last change, and of `size`."""
    digest = hashlib.sha256(repr(size).encode())
    for path in paths:
        status = path.stat()
        entry = (str(path.relative_to(root)), status.st_size, status.st_mtime_ns)
        digest.update(repr(entry).encode())
    return digest.hexdigest()


def load(who: str, path: Path, key: str) -> Tensor | None:
    """The images, or None where there is no file or one with another key.

    Raises:
        ValueError: where the file is something else, which must not be overwritten, or damaged.
    """
    if not path.exists():
        return None
    try:
        # mmap: a file with another key isn't read, and what goes to a GPU isn't copied before.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        return content["images"] if content["key"] == key else None
    except Exception as error:  # torch.load raises whatever wrong bytes lead to
        raise ValueError(
            f"{who}: {path} is no cache of images, or damaged; delete it or name another file: "
            f"{error}"
        ) from error


def save(path: Path, key: str, images: Tensor) -> None:
    """Writes the cache; if that fails, `path` is as before."""
    content = {"format": _FORMAT, "key": key, "images": images}
    replace(path, lambda file: torch.save(content, file))
