# SPDX-License-Identifier: BSD-3-Clause
"""How many updates an optimizer has really done, asking the device as seldom as possible."""

from __future__ import annotations

from functools import partial
from weakref import ref

import torch


class Updates:
    """Counts the steps of `optimizer`, of which a `GradScaler` may have skipped some.

    `count_skipped` is as in `Handle.step`. `start`: updates done already.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, count_skipped: bool | None, start: int):
        self._optimizer = optimizer
        self._count_skipped = count_skipped
        self._scaled = None if count_skipped is None else not count_skipped
        self.restart(start)
        # Whether a GradScaler is at work shows only while the optimizer steps. One look is enough,
        # and a hook that stayed would cost time at each step.
        look = partial(_look_for_scaler, ref(self))
        self._hook = optimizer.register_step_pre_hook(look) if count_skipped is None else None

    def restart(self, start: int) -> None:
        self._known = start
        self._pending = 0  # steps since then, of which some may have been skipped
        self._skipped = self._optimizer.skipped_steps if self._can_ask() else 0

    def add(self) -> None:
        """The optimizer has stepped once more, or skipped a step."""
        self._pending += 1
        if self._hook is not None and self._scaled is not None:
            self._hook.remove()
            self._hook = None

    @property
    def most(self) -> int:
        """The number if nothing was skipped since it was last exact."""
        return self._known + self._pending

    def exact(self, certainly: bool = False) -> int:
        """The number. Waits for the device if a scaler was seen or announced, or `certainly`."""
        # TrainStep's loss scale never shows in a hook.
        scaled = self._scaled or getattr(self._optimizer, "_loss_scaled", False)
        if self._pending and (scaled or certainly) and self._can_ask():
            skipped = self._optimizer.skipped_steps
            since, self._skipped = skipped - self._skipped, skipped
            if since > 0:
                self._scaled = True  # it came after the first step
            self._known += max(0, self._pending - since)
            self._pending = 0
        return self.most

    def _can_ask(self) -> bool:
        # Of the class: asking the optimizer itself would wait already.
        return not self._count_skipped and hasattr(type(self._optimizer), "skipped_steps")


def _look_for_scaler(updates_ref, optimizer, args, kwargs) -> None:
    updates = updates_ref()
    if updates is not None and not updates._scaled:
        updates._scaled = getattr(optimizer, "found_inf", None) is not None
