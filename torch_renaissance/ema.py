# SPDX-License-Identifier: BSD-3-Clause
"""Averaged weights, kept up by the optimizer's own pass over the weights."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_COUNTS = "torch_renaissance.Ema"  # the name in `_metadata`, where modules stand by theirs


class Ema:
    """The averaged weights of a model whose optimizer has an `ema_decay`.

    After every step that isn't skipped, `average = lerp(average, weight, 1 - decay)`, as
    `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)` has it: the first step
    copies the weights. Parameters without a gradient are averaged too; those that never had one are
    taken as they are. Buffers, float and integer ones, are the model's own as they are now (like
    AveragedModel's with `use_buffers=False`): recompute BatchNorm statistics with
    `torch.optim.swa_utils.update_bn` inside `swapped()` if the average needs its own.

    Args:
        model: whose parameters `optimizer` updates.
        optimizer: from `tr.accelerate(model, optimizer, ema_decay=...)`.

    Raises:
        TypeError: for an optimizer that isn't one of ours.
        ValueError: for one without `ema_decay`, or with none of the model's parameters.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        if not hasattr(optimizer, "_current_plan"):
            raise TypeError(
                f"Ema: {type(optimizer).__name__} keeps no averages; pass the optimizer through "
                "tr.accelerate(model, optimizer, ema_decay=...)"
            )
        if not optimizer._current_plan().options.averages:
            raise ValueError(
                "Ema: this optimizer has no ema_decay; pass one to tr.accelerate(model, optimizer, "
                "ema_decay=...)"
            )
        known = {p for group in optimizer.param_groups for p in group["params"]}
        if not any(p in known for p in model.parameters()):
            raise ValueError("Ema: the optimizer updates none of this model's parameters")
        self._model, self._optimizer = model, optimizer

    @property
    def updates(self) -> int:
        """How many steps the averages have seen. Waits for the device."""
        return self._plan.averaged()

    def state_dict(self) -> dict[str, Tensor]:
        """The model's `state_dict` with averages in place of weights, as tensors of their own; any
        model of the same class loads it. How many steps they have seen stands in its `_metadata`,
        as versions of modules do. Waits for the device."""
        plan = self._plan
        averages = {} if plan.swapped else plan.averages()
        tensors = self._model.state_dict(keep_vars=True)
        found = OrderedDict(
            (name, averages.get(t, t).detach().clone() if isinstance(t, Tensor) else t)
            for name, t in tensors.items()
        )
        counts = {"updates": self.updates, "calls": plan.host.ema_calls}
        found._metadata = {**getattr(tensors, "_metadata", {}), _COUNTS: counts}
        return found

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Goes on from averages that `state_dict` saved, and with an `ema_decay` of the step from
        where it was. The model's weights and buffers stay. A dict without `_metadata` has no such
        counts: this optimizer's own stay then.

        Raises:
            RuntimeError: for missing names or other shapes, and inside of `swapped()`; nothing has
            been changed then.
        """
        if self._plan.swapped:
            raise RuntimeError(
                "Ema.load_state_dict: the averages are swapped in; load them outside"
            )
        found: dict[Tensor, Tensor] = {}
        for name, p in self._model.named_parameters(remove_duplicate=False):
            if name not in state_dict or state_dict[name].shape != p.shape:
                got = list(state_dict[name].shape) if name in state_dict else "nothing"
                raise RuntimeError(
                    f"Ema.load_state_dict: {name} needs shape {list(p.shape)}, got {got}; load "
                    "what Ema.state_dict() of the same model saved"
                )
            found[p] = state_dict[name].detach().to(p.device, p.dtype, copy=True)
        plan = self._plan
        counts = getattr(state_dict, "_metadata", {}).get(_COUNTS, {})
        plan.start_averages(found, max(1, counts.get("updates", self.updates)))
        plan.host.ema_calls = counts.get("calls", plan.host.ema_calls)

    @contextmanager
    def swapped(self) -> Iterator[nn.Module]:
        """Gives the model its averages, in place, and its own weights back at the end, whatever
        happens in between. A step of the optimizer inside raises a RuntimeError."""
        plan = self._plan
        if plan.swapped:
            raise RuntimeError("Ema.swapped: the averages are in the model already")
        averages = plan.averages()
        self._exchange(averages)
        plan.swapped = True
        try:
            yield self._model
        finally:
            plan.swapped = False
            self._exchange(averages)

    @property
    def _plan(self):
        plan = self._optimizer._current_plan()
        if not plan.slots:  # after deepcopy or unpickling
            plan.sync(self._optimizer)
        return plan

    @staticmethod
    @torch.no_grad()
    def _exchange(averages: dict[Tensor, Tensor]) -> None:
        for p, average in averages.items():
            weight = p.clone()
            p.copy_(average)
            average.copy_(weight)
