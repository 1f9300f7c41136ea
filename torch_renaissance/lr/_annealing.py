# SPDX-License-Identifier: BSD-3-Clause
"""Schedules from `lr` down to `eta_min`, a number from 0 to lr. `Schedule` has what they share.

In the formulas t is the time since the end of the warm-up, and T the one from there to the end: of
`total` by batch, of all but the last epoch of `total` by epoch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from ._checks import check_count, check_number
from ._schedule import Schedule, between


def _cosine(lr: float, eta_min: float, share: float) -> float:
    return between(eta_min, lr, (1 + math.cos(math.pi * share)) / 2)


def _check_eta_min(schedule: Schedule) -> None:
    check_number(schedule._who, "eta_min", schedule.eta_min)
    if schedule.eta_min > schedule.lr:
        raise ValueError(
            f"{schedule._who}: eta_min must be at most lr={schedule.lr!r}, got {schedule.eta_min!r}"
        )


@dataclass(frozen=True)
class _Ending(Schedule):
    """At `eta_min` when `total` is over, and from then on."""

    total: int
    eta_min: float = field(default=0.0, kw_only=True)

    @property
    def total_steps(self) -> int:
        return self.total * self._unit_steps

    @cached_property
    def _T(self) -> int:
        """T in ticks, at least 1."""
        return self.total * self._unit_ticks - (self.by == "epoch") - self._warmup

    def _check(self) -> None:
        check_count(self._who, "total", self.total)
        _check_eta_min(self)
        if self._T < 1:
            needed = "two epochs after it" if self.by == "epoch" else "some time after it"
            raise ValueError(
                f"{self._who}: a warm-up of {self._warmup_length} is too long for a total of "
                f"{self.total} {self._unit}, warm-up included; there must be {needed} to get from "
                "lr to eta_min"
            )


@dataclass(frozen=True)
class Polynomial(_Ending):
    """eta_min + (lr - eta_min) · (1 - t/T)^power: torch's `PolynomialLR`, which knows no eta_min.
    `power` is above 0."""

    power: float = 1.0

    def _check(self) -> None:
        super()._check()
        check_number(self._who, "power", self.power, above=True)

    def _main(self, tick: int) -> float:
        left = 1 - min(tick, self._T) / self._T
        return between(self.eta_min, self.lr, left**self.power)


@dataclass(frozen=True)
class Cosine(_Ending):
    """eta_min + (lr - eta_min) · (1 + cos(π t/T)) / 2: torch's `CosineAnnealingLR`, which rises
    again past its end (https://arxiv.org/abs/1608.03983)."""

    def _main(self, tick: int) -> float:
        return _cosine(self.lr, self.eta_min, min(tick, self._T) / self._T)


@dataclass(frozen=True)
class WSD(_Ending):
    """Warm-up, stable at lr, linear decay to eta_min during the last `decay` of `total`. By epoch,
    at least one is stable (https://arxiv.org/abs/2404.06395, where the decay has other forms)."""

    decay: int

    def _check(self) -> None:
        super()._check()
        check_count(self._who, "decay", self.decay)
        if self.decay * self._unit_ticks > self._T:
            stable = ", one stable epoch" if self.by == "epoch" else ""
            raise ValueError(
                f"{self._who}: a warm-up of {self._warmup_length}{stable} and a decay of "
                f"{self.decay} {self._unit} don't fit into a total of {self.total} {self._unit}"
            )

    def _main(self, tick: int) -> float:
        decay = self.decay * self._unit_ticks
        left = min(max(self._T - tick, 0), decay)
        return between(self.eta_min, self.lr, left / decay)


@dataclass(frozen=True)
class CosineWarmRestarts(Schedule):
    """`Cosine` again and again, in cycles of T_0, T_0 · T_mult, T_0 · T_mult², ...: torch's
    `CosineAnnealingWarmRestarts` (https://arxiv.org/abs/1608.03983).

    `cycles`: after so many it stays at eta_min, by epoch from the last epoch of the last cycle on.
    Default: it restarts for ever.
    """

    T_0: int
    T_mult: int = 1
    cycles: int | None = None
    eta_min: float = field(default=0.0, kw_only=True)

    def _check(self) -> None:
        check_count(self._who, "T_0", self.T_0)
        check_count(self._who, "T_mult", self.T_mult)
        if self.cycles is not None:
            check_count(self._who, "cycles", self.cycles)
        _check_eta_min(self)

    @property
    def total_steps(self) -> int | None:
        if self.cycles is None:
            return None
        warmup = self.warmup * self._unit_steps + self.warmup_steps
        return warmup + self._length * self._unit_steps

    @cached_property
    def _length(self) -> int:
        """Of all cycles."""
        return self.T_0 * sum(self.T_mult**i for i in range(self.cycles))

    def _main(self, tick: int) -> float:
        if self.cycles is not None:
            if tick >= self._length * self._unit_ticks - (self.by == "epoch"):
                return self.eta_min
        cycle = self.T_0 * self._unit_ticks
        if self.T_mult == 1:
            tick %= cycle
        while tick >= cycle:
            tick -= cycle
            cycle *= self.T_mult
        return _cosine(self.lr, self.eta_min, tick / cycle)
