# SPDX-License-Identifier: BSD-3-Clause
"""In a capture: BatchNorms' counters of batches, together instead of one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

# Code that names one of these may look at counters while a module's forward runs.
READERS = {"num_batches_tracked", "buffers", "named_buffers", "_buffers", "state_dict"}


class BatchCounts:
    """For a captured forward: each BatchNorm would add 1 to its counter by a kernel of one number.
    Within the block that waits for the end of the outermost of `roots` that is called, and is then
    one kernel for all.

    Args:
        roots: modules that the program calls.
        modules: those below them, themselves included.
    """

    def __init__(self, roots: Iterable[nn.Module], modules: Iterable[nn.Module]):
        self._norms = [m for m in modules if _counts(m)]
        self._roots = [m for m in roots if "forward" not in vars(m) and m not in self._norms]
        self._before: list[tuple[nn.Module, Callable | None]] = []
        self._calls: Counter[Tensor] = Counter()
        self._depth = 0

    def __enter__(self) -> None:
        if not self._norms:
            return
        for module in self._norms:
            self._put(module, partial(self._norm, module))
        for module in self._roots:
            self._put(module, partial(self._root, module.forward))

    def _put(self, module: nn.Module, forward: Callable) -> None:
        self._before.append((module, vars(module).get("forward")))
        vars(module)["forward"] = forward

    def __exit__(self, *_) -> None:
        for module, forward in reversed(self._before):  # others may have put theirs there
            if forward is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = forward
        self._before.clear()

    def _root(self, forward: Callable, *args, **kwargs):
        self._depth += 1
        try:
            return forward(*args, **kwargs)
        finally:
            self._depth -= 1
            self._move_on()

    def _norm(self, module: nn.Module, input: Tensor) -> Tensor:
        count = module._buffers.get("num_batches_tracked")
        moves = module.training and module.track_running_stats and module.momentum is not None
        if not moves or type(count) is not Tensor:
            return type(module).forward(module, input)
        module._buffers["num_batches_tracked"] = None
        try:
            result = type(module).forward(module, input)
        finally:
            module._buffers["num_batches_tracked"] = count
        self._calls[count] += 1
        self._move_on()
        return result

    def _move_on(self) -> None:
        if self._depth:
            return
        for times in set(self._calls.values()):
            torch._foreach_add_([t for t, n in self._calls.items() if n == times], times)
        self._calls.clear()


def _counts(module: nn.Module) -> bool:
    torchs = getattr(type(module), "forward", None) is _BatchNorm.forward
    return torchs and "forward" not in vars(module)
