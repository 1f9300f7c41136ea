# SPDX-License-Identifier: BSD-3-Clause
"""How the learning rates of an optimizer's param groups relate to a schedule's."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from ._checks import check_number

_SAME = 1e-6  # a float32 tensor holds an lr to 6e-8


def given(who: str, ratios: Sequence[float], groups: list[dict]) -> list[float]:
    """The user's own, checked: a number for each group, one for those that share a tensor as lr."""
    if isinstance(ratios, str) or not isinstance(ratios, Sequence):
        raise TypeError(f"{who}: ratios must be a list of numbers, got {ratios!r}")
    for i, ratio in enumerate(ratios):
        check_number(who, f"ratios[{i}]", ratio)
    if len(ratios) != len(groups):
        raise ValueError(
            f"{who}: there are {len(ratios)} ratios for {len(groups)} param groups; give each "
            "group one"
        )
    for i, group in enumerate(groups):
        first = _first_with_lr_of(group, groups)
        if ratios[first] != ratios[i]:
            raise ValueError(
                f"{who}: param groups {first} and {i} have the same tensor as lr, but the ratios "
                f"{ratios[first]!r} and {ratios[i]!r}; give each a tensor of its own"
            )
    return [float(ratio) for ratio in ratios]


def found(who: str, groups: list[dict], base: float) -> list[float]:
    """Each group's lr over `base`, the schedule's, which some group must have too."""
    ratios = [_found(group, base) for group in groups]
    if 1.0 not in ratios:
        lrs = [float(group["lr"]) for group in groups]
        raise ValueError(
            f"{who}: the schedule's lr is {base!r}, but the param groups have {lrs}, none of them "
            "the same. Give both the same lr (and attach before load_state_dict, which brings "
            "another), or pass ratios=, one factor of the schedule's lr for each group"
        )
    return ratios


def continued(ratios: list[float], groups: list[dict], base: float) -> list[float]:
    """`ratios`, and those of the groups that have been added since."""
    ratios = list(ratios)
    for group in groups[len(ratios) :]:
        # Without an lr of its own it may have that of the first groups: filled since, if a tensor.
        first = _first_with_lr_of(group, groups)
        ratios.append(ratios[first] if first < len(ratios) else _found(group, base))
    return ratios


def _found(group: dict, base: float) -> float:
    ratio = float(group["lr"]) / base
    return 1.0 if math.isclose(ratio, 1.0, rel_tol=_SAME) else ratio  # but for rounding


def _first_with_lr_of(group: dict, groups: list[dict]) -> int:
    """The first group whose lr is the same tensor; for a float, the group itself."""
    shared = isinstance(group["lr"], Tensor)
    return next(
        i for i, g in enumerate(groups) if g is group or (shared and g["lr"] is group["lr"])
    )
