# SPDX-License-Identifier: BSD-3-Clause
"""Progress on stderr: rich's bar where rich is installed, otherwise a line for each stage."""

from __future__ import annotations

import sys
import time


class Silent:
    """Shows nothing."""

    def stage(self, text: str, total: int) -> None:
        """Begins something of `total` parts."""

    def advance(self, text: str) -> None:
        """One part begins."""

    def close(self) -> None:
        """The last stage is over."""


class Lines(Silent):
    """A line for each stage, and for each part of the first ones, which take long."""

    def __init__(self) -> None:
        self._start, self._text, self._told = time.perf_counter(), "", set()

    def stage(self, text: str, total: int) -> None:
        self._text, self._told = text, set()

    def advance(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            seconds = time.perf_counter() - self._start
            print(f"[{seconds:6.1f} s] {self._text}: {text}", file=sys.stderr, flush=True)


class Bar(Silent):
    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            TextColumn("{task.description}", markup=False),  # a variant may be called [x]
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            console=Console(stderr=True, width=100),
            redirect_stdout=sys.stdout.isatty(),  # what the user prints into a pipe stays there
        )
        self._bar.start()
        self._task = None

    def stage(self, text: str, total: int) -> None:
        if self._task is not None:
            self._bar.update(self._task, completed=self._total)
        self._text, self._total, self._begun = text, total, 0
        self._task = self._bar.add_task(text, total=total)

    def advance(self, text: str) -> None:
        description = f"{self._text}: {text}"[:60]
        self._bar.update(self._task, completed=self._begun, description=description)
        self._begun += 1

    def close(self) -> None:
        if self._task is not None:
            self._bar.update(self._task, completed=self._begun, description=self._text)
        self._bar.stop()


def make_progress(wanted: bool) -> Silent:
    if not wanted:
        return Silent()
    if sys.stderr.isatty():
        try:
            return Bar()
        except ImportError:
            pass
    return Lines()
