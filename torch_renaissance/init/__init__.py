# SPDX-License-Identifier: BSD-3-Clause
"""Initialisation by kind of parameter: a `Recipe` says which `Initializer` each kind gets."""

from ._initializers import (
    Initializer,
    constant,
    kaiming_normal,
    kaiming_uniform,
    normal,
    ones,
    trunc_normal,
    uniform,
    variance_scaling,
    xavier_normal,
    xavier_uniform,
    zeros,
)
from ._recipe import Recipe

__all__ = [
    "Initializer",
    "Recipe",
    "constant",
    "kaiming_normal",
    "kaiming_uniform",
    "normal",
    "ones",
    "trunc_normal",
    "uniform",
    "variance_scaling",
    "xavier_normal",
    "xavier_uniform",
    "zeros",
]
