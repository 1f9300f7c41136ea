# SPDX-License-Identifier: BSD-3-Clause
"""Files that are there as a whole or not at all, and a bar that shows how far reading them is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

T = TypeVar("T")


def check_target(who: str, path: str | os.PathLike) -> Path:
    """A file must be writable at `path`.

    Raises:
        OSError: where its folder is missing or read-only, or where `path` is a folder.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{who}: {path.parent} is no folder; make it, then try again")
    if path.is_dir():
        raise IsADirectoryError(f"{who}: {path} is a folder; name a file")
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"{who}: {path.parent} is read-only; name another place")
    return path


def replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """What `write` puts into the file it is given becomes `path`, once it is complete; if it
    raises, `path` is as before."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(unfinished, "wb") as file:
            write(file)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def counted(items: Iterable[T], total: int, what: str, show: bool) -> Iterator[T]:
    """`items`, with a bar on stderr if `show`, where that is a terminal and rich is installed."""
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return iter(items)
    console = Console(stderr=True)
    hidden = not (show and console.is_terminal)
    return iter(track(items, what, total, console=console, transient=True, disable=hidden))
