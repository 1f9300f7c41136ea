# SPDX-License-Identifier: BSD-3-Clause
"""Schedules without an end: the lr times powers of `gamma`. `Schedule` has what they share.

In the formulas t is the time since the end of the warm-up, in the unit of lengths; it has fractions
where lengths are in epochs and the lr changes by batch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ._checks import check_count, check_number
from ._schedule import Schedule


def _decayed(lr: float, gamma: float, times: float) -> float:
    try:
        return lr * float(gamma) ** times
    except OverflowError:  # a gamma above 1; torch's products become inf
        return math.inf


@dataclass(frozen=True)
class Constant(Schedule):
    """lr, for ever. With a warm-up it is torch's `LinearLR`."""

    def _check(self) -> None:
        """Nothing is added."""

    def _main(self, tick: int) -> float:
        return self.lr


@dataclass(frozen=True)
class Step(Schedule):
    """lr · gamma^⌊t / step_size⌋, for ever: torch's `StepLR`. `gamma` is at least 0."""

    step_size: int
    gamma: float = 0.1

    def _check(self) -> None:
        check_count(self._who, "step_size", self.step_size)
        check_number(self._who, "gamma", self.gamma)

    def _main(self, tick: int) -> float:
        return _decayed(self.lr, self.gamma, tick // (self.step_size * self._unit_ticks))


@dataclass(frozen=True)
class MultiStep(Schedule):
    """lr · gamma^(number of `milestones` ≤ t): torch's `MultiStepLR`. Milestones increase, begin
    with 1 at least, and count from the end of the warm-up. `gamma` is at least 0."""

    milestones: Sequence[int]
    gamma: float = 0.1

    def _check(self) -> None:
        if isinstance(self.milestones, str) or not isinstance(self.milestones, Sequence):
            raise TypeError(
                f"{self._who}: milestones must be a list of ints, got {self.milestones!r}"
            )
        object.__setattr__(self, "milestones", tuple(self.milestones))  # the caller's may change
        for i, milestone in enumerate(self.milestones):
            check_count(self._who, f"milestones[{i}]", milestone)
            if i and milestone <= self.milestones[i - 1]:
                raise ValueError(
                    f"{self._who}: milestones must increase, got {list(self.milestones)}; sort "
                    "them and give each once"
                )
        check_number(self._who, "gamma", self.gamma)

    def _main(self, tick: int) -> float:
        passed = bisect_right(self.milestones, tick // self._unit_ticks)
        return _decayed(self.lr, self.gamma, passed)


@dataclass(frozen=True)
class Exponential(Schedule):
    """lr · gamma^t, for ever: torch's `ExponentialLR`. `gamma` is at least 0."""

    gamma: float

    def _check(self) -> None:
        check_number(self._who, "gamma", self.gamma)

    def _main(self, tick: int) -> float:
        return _decayed(self.lr, self.gamma, tick / self._unit_ticks)
