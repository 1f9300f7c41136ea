# SPDX-License-Identifier: BSD-3-Clause
"""`accumulate=`: the micro-batches of an update, and whose sums an optimizer holds."""

from __future__ import annotations

import weakref

from torch.optim import Optimizer

_LAST: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Cycle]]
_LAST = weakref.WeakKeyDictionary()


class Cycle:
    """Counts micro-batches up to an update, whose gradients are the optimizer's sums.

    Attributes:
        size: micro-batches of the update that is under way.
        done: of these, how many have been summed.
    """

    def __init__(self, optimizer, accumulate: int):
        self._optimizer, self.done = optimizer, 0
        self.accumulate = accumulate

    @property
    def accumulate(self) -> int:
        """Micro-batches of the updates to come."""
        return self._accumulate

    @accumulate.setter
    def accumulate(self, value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"TrainStep: accumulate must be an int >= 1, got {value!r}")
        self._accumulate = value
        if not self.done:
            self.size = value

    def begin(self) -> None:
        """Before the gradients of a micro-batch are added."""
        self.refuse_another()
        last = _LAST.get(self._optimizer)
        if last is None or last() is not self:
            self.done = 0
        if self.done == 0 or self._optimizer._sums_dropped:
            self._optimizer._begin_accumulation()
            _LAST[self._optimizer] = weakref.ref(self)

    def end(self, loss_scale: tuple | None) -> None:
        """After the last one: the update. If that raises, the cycle counts for nothing, as the
        gradients of a step that raises."""
        self.done += 1
        if self.done < self.size:
            return
        size, self.done, self.size = self.size, 0, self.accumulate
        if self._optimizer._has_step_hooks():
            self._update_from_gradients(size, loss_scale)
        else:
            self._optimizer._train_step(loss_scale, size)

    def _update_from_gradients(self, size: int, loss_scale: tuple | None) -> None:
        """Hooks may read and change `.grad`, as in a loop."""
        self._optimizer._show_sums(size)
        try:
            self._optimizer._train_step(loss_scale)
        finally:
            for group in self._optimizer.param_groups:
                for p in group["params"]:
                    p.grad = None

    def refuse_another(self) -> None:
        """The sums are the optimizer's: two cycles would take each other's."""
        last = _LAST.get(self._optimizer)
        other = last and last()
        begun = other is not None and other.done and not self._optimizer._sums_dropped
        if begun and other is not self:
            raise RuntimeError(
                f"TrainStep: another TrainStep has summed {other.done} of {other.size} "
                "micro-batches on this optimizer; call it until it has updated, or delete it"
            )
