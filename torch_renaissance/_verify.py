# SPDX-License-Identifier: BSD-3-Clause
"""Compares a replay with an eager step from the same state."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from . import _watch, graphs
from ._eager import Eager

# Kernels may sum in another order from run to run; relative to the size of the tensor.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class Kept:
    """Tensors that `loss_fn` keeps outside of modules: which of them does a step change?"""

    def __init__(self, loss_fn: Callable):
        found = _watch.look_into(loss_fn).tensors
        self._versions = [
            (t.detach(), name, t._version) for t, name in found.items() if not t.is_inference()
        ]

    def changed(self) -> dict[str, Tensor]:
        """Since this was made, by name."""
        return {name: t for t, name, version in self._versions if t._version != version}


class _State:
    """All tensors that a step changes, with their values.

    Args:
        kept: those of `loss_fn`, besides modules and the optimizer.
    """

    def __init__(self, eager: Eager, kept: dict[str, Tensor]):
        self.named: dict[str, Tensor] = dict(kept)
        for module, name in _watch.all_modules(eager.roots()).items():
            for kind in (module._parameters, module._buffers):
                for key, t in kind.items():
                    if t is not None:
                        self.named.setdefault(f"{name}.{key}", t.detach())
        plan = eager._plan
        for i, block in enumerate(plan.blocks):
            tensors = {**{p.name: t for p, t in block.planes.items()}, "steps": block.steps}
            self.named |= {f"plane {k} of block {i}": t for k, t in tensors.items()}
        for device, table in plan._tables.items():
            self.named |= {f"{k} on {device}": table[k] for k in ("counters", "chain")}
        for s in plan.slots.values():
            self.named.setdefault(s.name, s.param.detach())
        parts = eager.scale_parts()
        if parts is not None:
            self.named |= {"the loss scale": parts[0], "its growth tracker": parts[1]}
        self.values = {name: t.clone() for name, t in self.named.items()}
        self.random = graphs.RandomState(eager.device)
        self.ema_calls, self.done = plan.host.ema_calls, eager.cycle.done

    def restore(self, eager: Eager) -> None:
        with torch.no_grad():
            for name, t in self.named.items():
                t.copy_(self.values[name])
        self.random.restore()
        eager._plan.host.ema_calls, eager.cycle.done = self.ema_calls, self.done


class Expected:
    """What an eager step gave and left behind."""

    def __init__(self, eager: Eager, kept: dict[str, Tensor], results, before, after):
        self.results, self._eager, self._kept = results, eager, kept
        self._before, self._after = before, after

    def difference(self, results) -> str:
        """What is different after the replay, or ''."""
        ours, theirs = (pytree.tree_leaves(r) for r in (results, self.results))
        pairs = [
            ("the loss" if i == 0 else f"extra {i - 1}", a, b)
            for i, (a, b) in enumerate(zip(ours, theirs, strict=True))
            if isinstance(a, Tensor)
        ]
        now = _State(self._eager, self._kept).values
        pairs += [(name, now[name], value) for name, value in self._after.values.items()]
        for name, got, expected in pairs:
            apart = _apart(got, expected)
            if apart:
                return f"{name}: {apart}"
        return ""

    def undo(self) -> None:
        """As if there had been no step at all."""
        self._before.restore(self._eager)

    def take_over(self) -> None:
        """Training goes on from the eager step."""
        self._after.restore(self._eager)


def eager_step(eager: Eager, leaves: tuple, spec, kept: dict[str, Tensor]) -> Expected:
    """Runs one and puts everything back as it was before, the batch too."""
    before = _State(eager, kept)
    batch = tuple(leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    results = eager(batch, spec)
    after = _State(eager, kept)
    before.restore(eager)
    return Expected(eager, kept, results, before, after)


def _apart(got: Tensor, expected: Tensor) -> str:
    if not got.is_floating_point():
        return "" if torch.equal(got, expected) else "other values"
    got, expected = got.double(), expected.double()
    if torch.equal(torch.isfinite(got), torch.isfinite(expected)):
        finite = torch.isfinite(expected)
        difference = torch.where(finite, got - expected, 0).norm()
        size = torch.where(finite, expected, 0).norm()
        if difference <= _TOLERANCE.get(got.dtype, 1e-3) * size + 1e-7:
            return ""
        return f"apart by {float(difference / (size + 1e-30)):.1e} of its size"
    return "finite in one and not in the other"
