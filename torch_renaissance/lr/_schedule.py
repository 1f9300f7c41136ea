# SPDX-License-Identifier: BSD-3-Clause
"""What all schedules share: the clock (steps or epochs, by batch or by epoch) and the warm-up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property

import torch

from . import _plot, _warmup
from ._checks import check_count, check_number
from ._handle import Handle

BY = ("batch", "epoch")


def between(a: float, b: float, share: float) -> float:
    """From a (share 0) to b (share 1), exact at both ends."""
    return a * (1 - share) + b * share


@dataclass(frozen=True)
class Schedule(ABC):
    """A learning rate as a pure function: `schedule(step)`, with `step` updates done so far, is the
    lr of the next update.

    Lengths (`total`, `step_size`, `milestones`, `warmup`, ...) are ints, in epochs where
    `steps_per_epoch` is given and in steps, that is updates, where it is not. The main schedule
    starts at the end of the warm-up, at its own step 0, as in torch's
    `SequentialLR([LinearLR(...), main], [warmup])`: `step_size`, `milestones` and `T_0` count from
    there. `total` is the whole, warm-up included.

    Args:
        lr: the learning rate that the warm-up leads to and the main schedule starts from, above 0.
        warmup: length of a linear warm-up: the first update after it is the first with `lr`.
        warmup_steps: the same in steps, whatever the other lengths are in.
        warmup_lr: the lr of the very first update, at most `lr`. Default: 0.
        warmup_factor: the same as a fraction of `lr`, from 0 to 1.
        steps_per_epoch: updates in an epoch.
        by: "batch": the lr changes with every update, within epochs too. "epoch": it stays the same
            within an epoch. A schedule with an end then gets there in its last epoch, one before
            `total`, so that this epoch trains with the end value; by batch it gets there at
            `total`, when the last update is done.

    Past the end the end value stays, where torch's cosine rises again. `Constant`, `Step`,
    `MultiStep`, `Exponential` and, without `cycles`, `CosineWarmRestarts` have no end.

    Raises:
        TypeError, ValueError: for a setting of the wrong type or size, or two that contradict each
            other; at construction.
    """

    lr: float
    _: KW_ONLY
    warmup: int = 0
    warmup_steps: int = 0
    warmup_lr: float | None = None
    warmup_factor: float | None = None
    steps_per_epoch: int | None = None
    by: str = "batch"

    def __post_init__(self) -> None:
        check_number(self._who, "lr", self.lr, above=True)
        if self.by not in BY:
            raise ValueError(f"{self._who}: by must be one of {BY}, got {self.by!r}")
        if self.steps_per_epoch is not None:
            check_count(self._who, "steps_per_epoch", self.steps_per_epoch)
        elif self.by == "epoch":
            raise ValueError(
                f"{self._who}: by='epoch' needs to know how long an epoch is; pass steps_per_epoch="
            )
        _warmup.check(self)
        self._check()

    def __call__(self, step: int) -> float:
        """The lr of the update that follows `step` updates.

        Raises:
            TypeError: if `step` is no int.
            ValueError: if it is negative.
        """
        check_count(self._who, "step", step, least=0)
        tick = step // self.steps_per_epoch if self.by == "epoch" else step
        warmup = self._warmup
        if tick < warmup:
            return float(between(self._start, self.lr, tick / warmup))
        return float(self._main(tick - warmup))

    @property
    def total_steps(self) -> int | None:
        """For how many updates the schedule is laid out, warm-up included; None without an end."""
        return None

    def attach(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        ratios: Sequence[float] | None = None,
        last_step: int = 0,
        count_skipped: bool | None = None,
    ) -> Handle:
        """Sets the lr of `optimizer` for its next update and returns what sets the later ones.

        Each param group follows the schedule times a ratio of its own, `eta_min` and warm-up
        included: its lr at this moment over the schedule's `lr`. At least one group must have the
        schedule's `lr`; otherwise it is unclear which of the two was meant.

        Args:
            optimizer: any of torch's or ours, accelerated or not, now or later. Its lr may be
                floats, which are replaced, or tensors of one element, which are filled in place.
            ratios: one number of at least 0 for each group, instead of those found.
            last_step: updates done already.
            count_skipped: what `Handle.step` does after a step that a `GradScaler` skipped. With
                the default, None, a step hook looks for a scaler in the next step, and is removed.

        Raises:
            TypeError: for what is no optimizer, or an argument of the wrong type.
            ValueError: for ratios or learning rates that don't fit. Nothing is changed then.
        """
        return Handle(self, optimizer, ratios, last_step, count_skipped)

    def plot(self, steps: int | None = None, ax=None):
        """Draws the lr of updates 0 to `steps` with matplotlib; returns the axes.

        Args:
            steps: default: `total_steps`.
            ax: `matplotlib.axes.Axes` to draw into; default: those of a new figure.

        Raises:
            ImportError: if there is no matplotlib and no `ax`.
            ValueError: without `steps` for a schedule that has no end.
        """
        return _plot.draw(self, steps, ax)

    @abstractmethod
    def _main(self, tick: int) -> float:
        """The lr `tick` ticks after the warm-up. A tick is what the lr changes with: an epoch for
        by="epoch", else an update."""

    @abstractmethod
    def _check(self) -> None:
        """Checks the fields that a subclass adds."""

    @property
    def _who(self) -> str:
        return type(self).__name__

    @property
    def _unit(self) -> str:
        return "epochs" if self.steps_per_epoch else "steps"

    @property
    def _unit_steps(self) -> int:
        """Updates in a unit of length."""
        return self.steps_per_epoch or 1

    @property
    def _unit_ticks(self) -> int:
        """Ticks in a unit of length."""
        return 1 if self.by == "epoch" else self._unit_steps

    @cached_property
    def _warmup(self) -> int:
        """Ticks of warm-up."""
        return self.warmup * self._unit_ticks + self.warmup_steps

    @property
    def _warmup_length(self) -> str:
        return f"{self.warmup_steps} steps" if self.warmup_steps else f"{self.warmup} {self._unit}"

    @property
    def _start(self) -> float:
        if self.warmup_lr is not None:
            return self.warmup_lr
        return self.lr * (self.warmup_factor or 0.0)
