# SPDX-License-Identifier: BSD-3-Clause
"""Checks of the transforms' arguments: each returns it in one form, or raises a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real


def check_number(what: str, name: str, value: float) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{what}: {name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{what}: {name} must be finite, got {value}")
    return float(value)


def check_flag(what: str, name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{what}: {name} must be a bool, got {value!r}")


def check_choice(what: str, name: str, value, choices: Sequence) -> None:
    if value not in choices:
        listed = ", ".join(map(str, choices))
        raise ValueError(f"{what}: {name} must be one of {listed}, got {value!r}")


def check_probability(what: str, p: float) -> float:
    if not 0 <= check_number(what, "p", p) <= 1:
        raise ValueError(f"{what}: p must be from 0 to 1, got {p}")
    return float(p)


def check_range(
    what: str, name: str, value: Sequence[float], low: float, high: float
) -> tuple[float, float]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise TypeError(f"{what}: {name} must be two numbers, least and most, got {value!r}")
    first, last = (check_number(what, name, number) for number in value)
    if not low <= first <= last <= high:
        raise ValueError(
            f"{what}: {name} must be in order and from {low:g} to {high:g}, got {value}"
        )
    return first, last


def check_values(what: str, name: str, value: float | Sequence[float]) -> tuple[float, ...]:
    several = isinstance(value, Sequence) and not isinstance(value, str)
    if several and not value:
        raise ValueError(f"{what}: {name} must be a number or one a channel, got {value!r}")
    return tuple(check_number(what, name, number) for number in (value if several else (value,)))


def check_fill(what: str, value: float | Sequence[float], name: str = "fill") -> tuple[float, ...]:
    if value is None or isinstance(value, dict):
        raise TypeError(f"{what}: {name} must be a number or one a channel, got {value!r}")
    return check_values(what, name, value)


def check_interpolation(what: str, value) -> str:
    """A name, or a member of torchvision's InterpolationMode."""
    name = getattr(value, "value", value)
    check_choice(what, "interpolation", name, ("nearest", "bilinear"))
    return name


def _whole_numbers(
    what: str, name: str, value: int | Sequence[int], lengths: tuple[int, ...], least: int
) -> tuple[int, ...]:
    numbers = (value,) if isinstance(value, Integral) else value
    right = isinstance(numbers, Sequence) and len(numbers) in lengths
    if not right or not all(isinstance(n, Integral) and not isinstance(n, bool) for n in numbers):
        counts = " or ".join(map(str, lengths))
        raise TypeError(f"{what}: {name} must be {counts} whole numbers, got {value!r}")
    if min(numbers) < least:
        raise ValueError(f"{what}: {name} must be at least {least}, got {value!r}")
    return tuple(int(n) for n in numbers)


def check_size(what: str, size: int | Sequence[int]) -> tuple[int, int]:
    """(height, width); one number stands for both."""
    numbers = _whole_numbers(what, "size", size, (1, 2), 1)
    return numbers * 2 if len(numbers) == 1 else numbers


def check_padding(what: str, padding: int | Sequence[int]) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of one, two or four numbers."""
    numbers = _whole_numbers(what, "padding", padding, (1, 2, 4), 0)
    return numbers if len(numbers) == 4 else (numbers * 4)[:4]
