# SPDX-License-Identifier: BSD-3-Clause
"""What a number must be, refused in a sentence that names who wanted it."""

import math
from numbers import Integral, Real


def check_number(who: str, name: str, value, least: float = 0.0, above: bool = False) -> None:
    """A finite int or float of at least `least`, or `above` it.

    Raises:
        TypeError: if it is no such number; a bool is none.
        ValueError: if it is infinite, NaN or too small.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{who}: {name} must be a number, got {value!r}")
    if not math.isfinite(value) or value < least or (above and value == least):
        bound = "above" if above else "of at least"
        raise ValueError(f"{who}: {name} must be a finite number {bound} {least:g}, got {value!r}")


def check_count(who: str, name: str, value, least: int = 1) -> None:
    """An int of at least `least`.

    Raises:
        TypeError: if it is no int; a bool is none.
        ValueError: if it is too small.
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{who}: {name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{who}: {name} must be at least {least}, got {value!r}")
