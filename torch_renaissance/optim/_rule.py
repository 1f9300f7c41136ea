# SPDX-License-Identifier: BSD-3-Clause
"""What a plan is made for: the optimizer's formula, and what `accelerate` was told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import ref

from torch import Tensor, nn

from ..regions import Kind, Plane, classify, kind_by_shape


@dataclass
class Options:
    """What `accelerate` was told, and what it learned from the module; travels with pickles, but
    for the module itself."""

    decay_bias_like: bool = True
    gradients: str = "gather"
    known: dict[Tensor, tuple[str, Kind]] = field(default_factory=dict)
    averages: bool = False
    model: ref[nn.Module] | None = None

    def __reduce__(self):
        return Options, (self.decay_bias_like, self.gradients, self.known, self.averages)

    def learn(self, params: set[Tensor]) -> None:
        """Knows of `params`, the optimizer's own, and of no others, which it would keep alive and
        take along into files."""
        self.known = {p: found for p, found in self.known.items() if p in params}
        model = self.model and self.model()
        if model is not None and self.known.keys() != params:
            found = classify(model)
            self.known |= {p: found[p] for p in params if p in found}

    def describe(self, p: Tensor, name: str = "") -> tuple[str, Kind]:
        """Name and kind of a parameter; one of no module has the given name, its kind by `ndim`."""
        return self.known.get(p) or (name, kind_by_shape(p))


@dataclass(frozen=True)
class Rule:
    """An optimizer's formula: its name in C++, the planes of its state by torch's names in torch's
    order, those that a group needs, whether `step` is among its state, and whether it adapts to the
    norms of each weight, which bias-like parameters are exempt from, and from decay."""

    name: str
    planes: dict[str, Plane]
    needed: Callable[[dict], tuple[str, ...]]
    shows_step: bool
    adapts: bool = False
