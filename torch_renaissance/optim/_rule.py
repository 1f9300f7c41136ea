# SPDX-License-Identifier: BSD-3-Clause
"""What a plan is made for: the optimizer's formula, and what `accelerate` was told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from ..regions import Kind, Plane, kind_by_shape


@dataclass
class Options:
    """What `accelerate` was told, and what it learned from the module; travels with pickles."""

    decay_bias_like: bool = True
    gradients: str = "gather"
    known: dict[Tensor, tuple[str, Kind]] = field(default_factory=dict)
    averages: bool = False

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
