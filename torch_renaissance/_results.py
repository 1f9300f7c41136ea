# SPDX-License-Identifier: BSD-3-Clause
"""What a `loss_fn` returned, taken apart into tensors and put together around others."""

from __future__ import annotations

import gc
from types import FunctionType, ModuleType

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_PLACE = object()
_WHOLE = (nn.Module, torch.optim.Optimizer, ModuleType, type)  # what they hold is the program's


class Results:
    """A loss and its extras, without them: called with a loss and as many tensors as `rest` has, it
    returns what `loss_fn` did with those in their place.

    Attributes:
        rest: the tensors among the leaves of `extras`, detached.
    """

    def __init__(self, returned: object, extras: object):
        leaves, self._spec = pytree.tree_flatten(extras)
        self._has_extras = isinstance(returned, tuple)
        self.rest = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
        # Tensors stand for themselves only by their place, so that no graph of autograd is kept.
        self._others = [_PLACE if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def __call__(self, loss: Tensor, rest: list[Tensor]) -> object:
        if not self._has_extras:
            return loss
        found = iter(rest)
        leaves = [next(found) if leaf is _PLACE else leaf for leaf in self._others]
        return loss, pytree.tree_unflatten(leaves, self._spec)

    def holder(self) -> str:
        """The type of a leaf in which tensors lie that a copy doesn't reach, or ''."""
        return next((type(o).__name__ for o in self._others if _holds_tensors(o)), "")


def _holds_tensors(value: object) -> bool:
    """Whether a tensor can be reached from `value`. The collector's view of an object knows all
    attributes, slots and entries, and runs none of its code."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, Tensor):
            return True
        if id(found) in seen or isinstance(found, _WHOLE):
            continue
        seen.add(id(found))
        if isinstance(found, FunctionType):  # not its globals
            found = (found.__closure__, found.__defaults__, found.__kwdefaults__)
        waiting += gc.get_referents(found)
    return False
