# SPDX-License-Identifier: BSD-3-Clause
"""A schedule at work on an optimizer's param groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import _ratios
from ._checks import check_count
from ._updates import Updates

if TYPE_CHECKING:
    from ._schedule import Schedule


class Handle:
    """What `Schedule.attach` returns; used like one of torch's schedulers:

        optimizer.step()      # or scaler.step(optimizer); scaler.update()
        scheduler.step()

    Call `step` after every step of the optimizer, those included that a `GradScaler` skipped.
    """

    def __init__(
        self,
        schedule: Schedule,
        optimizer: torch.optim.Optimizer,
        ratios: Sequence[float] | None,
        last_step: int,
        count_skipped: bool | None,
    ):
        who = "attach"
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"{who}: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
            )
        if count_skipped is not None and not isinstance(count_skipped, bool):
            raise TypeError(f"{who}: count_skipped must be a bool or None, got {count_skipped!r}")
        check_count(who, "last_step", last_step, least=0)
        groups = optimizer.param_groups
        self._finds_ratios = ratios is None
        if ratios is None:
            self._ratios = _ratios.found(who, groups, schedule.lr)
        else:
            self._ratios = _ratios.given(who, ratios, groups)
        self.schedule = schedule
        self.optimizer = optimizer
        self._filled: dict[int, tuple[Tensor, int, float]] = {}  # by id: which, its version, lr
        self._write(schedule(last_step))
        self._updates = Updates(optimizer, count_skipped, last_step)

    def step(self) -> None:
        """Sets the lr of the next update. Call it after each step of the optimizer.

        Only real updates count. Our optimizers skip a step on the device when a `GradScaler` has
        found an infinity, and know how many in `skipped_steps`, but reading that waits for the
        device. So it is read only where the lr would change if nothing had been skipped (by epoch
        that is once an epoch), and only if `count_skipped` is

        * None, and the first step after `attach` had a `GradScaler` (a `found_inf`): the default;
        * False: in any case; for a scaler that comes later.

        With `count_skipped=True` nothing is ever read, and skipped steps count as updates. So they
        do in any case with optimizers that have no `skipped_steps`, torch's own.

        The lr in `param_groups` is written where it is not yet the schedule's: a float is replaced,
        a tensor filled in place. A group that was added since gets a ratio as in `attach`.

        Raises:
            ValueError: if the number of param groups is not that of `ratios`.
        """
        self._updates.add()
        most = self._updates.most
        lr = self.schedule(most)
        # Up to here the lr was the same with or without those skipped since the last look.
        if lr != self._lr and (done := self._updates.exact()) != most:
            lr = self.schedule(done)
        self._write(lr)

    @property
    def last_step(self) -> int:
        """Updates done. Waits for the device if `step` may."""
        return self._updates.exact()

    def get_last_lr(self) -> list[float]:
        """The lr of each param group for the next update, as floats; read from no tensor."""
        return [self._lr * ratio for ratio in self._ratios]

    def state_dict(self) -> dict:
        """`last_step` and `ratios`, as plain numbers. Waits for the device unless
        `count_skipped=True`, so that a scaler that came late isn't missed."""
        return {"last_step": self._updates.exact(certainly=True), "ratios": list(self._ratios)}

    def load_state_dict(self, state_dict: dict) -> None:
        """Goes on from `state_dict` and sets the lr of the next update. Load the optimizer's own
        before it, since that brings another lr. Waits for the device unless `count_skipped=True`.

        Raises:
            TypeError, ValueError: if it is no state of a `Handle`, or of another number of groups.
                Nothing is changed then.
        """
        who = "load_state_dict"
        if not isinstance(state_dict, dict) or state_dict.keys() != {"last_step", "ratios"}:
            raise ValueError(
                f"{who}: expected a dict with last_step and ratios, as Handle.state_dict returns, "
                f"got {state_dict!r}"
            )
        check_count(who, "last_step", state_dict["last_step"], least=0)
        self._ratios = _ratios.given(who, state_dict["ratios"], self.optimizer.param_groups)
        self._updates.restart(state_dict["last_step"])
        self._write(self.schedule(state_dict["last_step"]))

    def _write(self, lr: float) -> None:
        groups = self.optimizer.param_groups
        if len(groups) != len(self._ratios):
            self._fit(groups)
        self._lr = lr
        for group, ratio in zip(groups, self._ratios, strict=True):
            wanted, present = lr * ratio, group["lr"]
            if not isinstance(present, Tensor):
                if present != wanted:
                    group["lr"] = wanted
                continue
            # A tensor's value is on the device; whether others wrote to it shows in its version.
            held, version, value = self._filled.get(id(present), (None, 0, 0.0))
            if held is not present or version != present._version or value != wanted:
                present.fill_(wanted)
                self._filled[id(present)] = present, present._version, wanted

    def _fit(self, groups: list[dict]) -> None:
        n = len(self._ratios)
        if not self._finds_ratios or len(groups) < n:
            raise ValueError(
                f"step: the optimizer has {len(groups)} param groups now, but had {n} when the "
                "schedule was attached; attach it again"
            )
        self._ratios = _ratios.continued(self._ratios, groups, self.schedule.lr)
