# SPDX-License-Identifier: BSD-3-Clause
"""What a parameter's elements are drawn from: distributions, most of them scaled by a fan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import torch
from torch import nn

MODES = ("fan_in", "fan_out", "fan_avg")
# Standard deviation of a standard normal cut off at ±2: its square is 1 - 4 pdf(2) / P(-2 < Z < 2).
TRUNCATED_STD = math.sqrt(1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / math.erf(math.sqrt(2)))


@dataclass(frozen=True)
class Initializer:
    """What the elements of a tensor are drawn from; `tr.init`'s functions make them.

    Args:
        distribution: "constant" (every element is `a`), "uniform" (from `a` to `b`), "normal" or
            "trunc_normal" (mean `a` and standard deviation `b`).
        fan: "fan_in", "fan_out" or "fan_avg", by whose square root `a` and `b` are divided.
    """

    distribution: str
    a: float
    b: float = 0.0
    fan: str | None = None

    def parameters(self, shape: torch.Size) -> tuple[float, float]:
        """`a` and `b` for a tensor of this shape.

        Raises:
            ValueError: where a fan is asked for and the tensor has fewer than two dimensions.
        """
        if self.fan is None:
            return self.a, self.b
        root = math.sqrt(fan_of(shape, self.fan))
        return self.a / root, self.b / root


def fan_of(shape: torch.Size, mode: str) -> float:
    """The fan of a weight [out, in, *kernel], as `torch.nn.init` counts it; "fan_avg" is the mean
    of "fan_in" and "fan_out"."""
    if len(shape) < 2:
        raise ValueError(f"a fan needs at least 2 dimensions, got shape {list(shape)}")
    field = math.prod(shape[2:])
    fan_in, fan_out = shape[1] * field, shape[0] * field
    return {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[mode]


def constant(val: float) -> Initializer:
    """Every element is `val`."""
    return Initializer("constant", _number("constant", "val", val))


def zeros() -> Initializer:
    """Every element is 0."""
    return constant(0.0)


def ones() -> Initializer:
    """Every element is 1."""
    return constant(1.0)


def uniform(a: float = 0.0, b: float = 1.0) -> Initializer:
    """Uniform from `a` to `b`."""
    a, b = _number("uniform", "a", a), _number("uniform", "b", b)
    if not a <= b:
        raise ValueError(f"uniform: a must not be above b, got a = {a} and b = {b}")
    return Initializer("uniform", a, b)


def normal(mean: float = 0.0, std: float = 1.0) -> Initializer:
    """Normal with this mean and standard deviation."""
    return Initializer("normal", _number("normal", "mean", mean), _positive("normal", "std", std))


def trunc_normal(mean: float = 0.0, std: float = 1.0) -> Initializer:
    """Normal, cut off at `mean ± 2 std`.

    With the default arguments that is `torch.nn.init.trunc_normal_`'s distribution too; with
    others torch's bounds stay at -2 and 2. Cut off, the standard deviation is 0.8796 `std`.
    """
    a, b = _number("trunc_normal", "mean", mean), _positive("trunc_normal", "std", std)
    return Initializer("trunc_normal", a, b)


def kaiming_uniform(
    a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu"
) -> Initializer:
    """Uniform within ±gain · sqrt(3 / fan), as `torch.nn.init.kaiming_uniform_`
    (https://arxiv.org/abs/1502.01852).

    Args:
        a: the negative slope of "leaky_relu".
        mode: "fan_in", "fan_out", or their mean "fan_avg".
        nonlinearity: gives the gain, by `torch.nn.init.calculate_gain`.
    """
    return _scaled("kaiming_uniform", _gain("kaiming_uniform", nonlinearity, a), mode, "uniform")


def kaiming_normal(
    a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu"
) -> Initializer:
    """Normal with mean 0 and standard deviation gain / sqrt(fan), as
    `torch.nn.init.kaiming_normal_`; arguments as for `kaiming_uniform`."""
    return _scaled("kaiming_normal", _gain("kaiming_normal", nonlinearity, a), mode, "normal")


def xavier_uniform(gain: float = 1.0) -> Initializer:
    """Uniform within ±gain · sqrt(6 / (fan_in + fan_out)), as `torch.nn.init.xavier_uniform_`
    (https://proceedings.mlr.press/v9/glorot10a.html)."""
    gain = _positive("xavier_uniform", "gain", gain)
    return _scaled("xavier_uniform", gain, "fan_avg", "uniform")


def xavier_normal(gain: float = 1.0) -> Initializer:
    """Normal with mean 0 and standard deviation gain · sqrt(2 / (fan_in + fan_out)), as
    `torch.nn.init.xavier_normal_`."""
    return _scaled("xavier_normal", _positive("xavier_normal", "gain", gain), "fan_avg", "normal")


def variance_scaling(
    scale: float = 1.0, mode: str = "fan_in", distribution: str = "truncated_normal"
) -> Initializer:
    """Mean 0 and variance scale / fan: the general form, as Keras's `VarianceScaling` and JAX's
    `variance_scaling` have it.

    Args:
        scale: 1 is LeCun's and, with "fan_avg", Xavier's; 2 is Kaiming's for ReLU.
        mode: "fan_in", "fan_out" or "fan_avg".
        distribution: "uniform", "normal", or "truncated_normal", which is cut off at two standard
            deviations of a normal so much wider that the variance is right.
    """
    gain = math.sqrt(_positive("variance_scaling", "scale", scale))
    return _scaled("variance_scaling", gain, mode, distribution)


def _scaled(what: str, gain: float, mode: str, distribution: str) -> Initializer:
    of = {
        "uniform": ("uniform", -gain * math.sqrt(3), gain * math.sqrt(3)),
        "normal": ("normal", 0.0, gain),
        "truncated_normal": ("trunc_normal", 0.0, gain / TRUNCATED_STD),
    }
    if mode not in MODES:
        raise ValueError(f"{what}: mode must be one of {MODES}, got {mode!r}")
    if distribution not in of:
        raise ValueError(f"{what}: distribution must be one of {tuple(of)}, got {distribution!r}")
    return Initializer(*of[distribution], mode)


def _gain(what: str, nonlinearity: str, a: float) -> float:
    a = _number(what, "a", a)
    try:
        return nn.init.calculate_gain(nonlinearity, a)
    except ValueError:
        raise ValueError(
            f"{what}: nonlinearity must be one that torch.nn.init.calculate_gain knows, such as "
            f"'relu', 'leaky_relu', 'tanh' or 'linear', got {nonlinearity!r}"
        ) from None


def _number(what: str, name: str, value: float) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{what}: {name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{what}: {name} must be finite, got {value}")
    return float(value)


def _positive(what: str, name: str, value: float) -> float:
    value = _number(what, name, value)
    if value < 0:
        raise ValueError(f"{what}: {name} must be at least 0, got {value}")
    return value
