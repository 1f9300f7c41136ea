# SPDX-License-Identifier: BSD-3-Clause
# tr.init's initializers: bounds, deviations, defaults and distributions beside torch.nn.init's, and
# their values by hand.

import hashlib
import math

import pytest
import torch
from initializing import each_device, each_draw, each_dtype, filled
from torch import nn

from torch_renaissance import init
from torch_renaissance.init import _recipe

SHAPES = [(6, 4), (5, 7, 3), (8, 3, 3, 5), (2, 9, 1, 2, 3)]
NONLINEARITIES = ("linear", "conv2d", "sigmoid", "tanh", "relu", "leaky_relu", "selu")
KAIMING = [
    {"mode": mode, "nonlinearity": nonlinearity, "a": a}
    for mode in ("fan_in", "fan_out")
    for nonlinearity in NONLINEARITIES
    for a in (0, 0.3)
]
# Ours, torch's, the arguments of both.
TORCHS = [
    *((init.kaiming_uniform, nn.init.kaiming_uniform_, options) for options in KAIMING),
    *((init.kaiming_normal, nn.init.kaiming_normal_, options) for options in KAIMING),
    *(
        (ours, theirs, options)
        for ours, theirs in (
            (init.xavier_uniform, nn.init.xavier_uniform_),
            (init.xavier_normal, nn.init.xavier_normal_),
        )
        for options in ({}, {"gain": 2.5})
    ),
    (init.uniform, nn.init.uniform_, {}),
    (init.uniform, nn.init.uniform_, {"a": -2.0, "b": 0.5}),
    (init.normal, nn.init.normal_, {}),
    (init.normal, nn.init.normal_, {"mean": 0.5, "std": 0.02}),
]


@pytest.mark.parametrize(("ours", "theirs", "options"), TORCHS)
def test_bounds_and_deviations_are_torchs(ours, theirs, options, monkeypatch):
    """What torch.nn.init hands to the tensor's own uniform_ or normal_."""
    asked = []
    for name in ("uniform_", "normal_"):
        record = lambda t, a, b, generator=None, name=name[:-1]: asked.append((name, a, b))  # noqa: E731
        monkeypatch.setattr(torch.Tensor, name, record)
    for shape in SHAPES:
        asked.clear()
        theirs(torch.empty(shape), **options)
        initializer = ours(**options)
        a, b = initializer.parameters(torch.Size(shape))
        assert [(initializer.distribution, pytest.approx(a), pytest.approx(b))] == asked


def test_defaults_are_torchs():
    """Arguments have torch.nn.init's names, order and defaults."""
    assert init.kaiming_normal() == init.kaiming_normal(0, "fan_in", "leaky_relu")
    assert init.kaiming_uniform() == init.kaiming_uniform(0, "fan_in", "leaky_relu")
    assert init.xavier_normal() == init.xavier_normal(1)
    assert init.normal() == init.normal(0, 1) == init.normal(mean=0, std=1)
    assert init.uniform() == init.uniform(0, 1) == init.uniform(a=0, b=1)


def test_fan_avg_and_variance_scaling():
    """fan_in 4 · 6, fan_out 8 · 6, by hand."""
    shape = torch.Size((8, 4, 2, 3))
    for mode, fan in (("fan_in", 24), ("fan_out", 48), ("fan_avg", 36)):
        std = math.sqrt(2 / fan)
        relu = {"mode": mode, "nonlinearity": "relu"}
        assert init.kaiming_normal(**relu).parameters(shape) == (0, pytest.approx(std))
        bound = std * math.sqrt(3)
        assert init.kaiming_uniform(**relu).parameters(shape) == pytest.approx((-bound, bound))
        for distribution, same in (
            ("normal", init.kaiming_normal),
            ("uniform", init.kaiming_uniform),
        ):
            scaled = init.variance_scaling(2.0, mode, distribution)
            assert scaled.distribution == distribution
            assert scaled.parameters(shape) == pytest.approx(same(**relu).parameters(shape))
        # Keras's and JAX's constant for the loss of variance.
        truncated = init.variance_scaling(2.0, mode)
        assert truncated.distribution == "trunc_normal"
        assert truncated.parameters(shape) == (0, pytest.approx(std / 0.87962566103423978))
    glorot = init.variance_scaling(1.0, "fan_avg", "normal")
    assert glorot.parameters(shape) == pytest.approx(init.xavier_normal().parameters(shape))


def distance(xs, ys):
    """The two-sample Kolmogorov-Smirnov statistic, in units of sqrt(1/n + 1/m)."""
    xs, ys = xs.flatten().double().sort().values, ys.flatten().double().sort().values
    both = torch.cat([xs, ys])
    shares = [torch.searchsorted(s, both, right=True) / len(s) for s in (xs, ys)]
    return (shares[0] - shares[1]).abs().max().item() / math.sqrt(1 / len(xs) + 1 / len(ys))


def bounded_normal(t, mean=0.0, std=1.0):
    return nn.init.trunc_normal_(t, mean, std, mean - 2 * std, mean + 2 * std)


DISTRIBUTIONS = [
    (
        init.kaiming_uniform(nonlinearity="relu"),
        lambda t: nn.init.kaiming_uniform_(t, nonlinearity="relu"),
    ),
    (init.kaiming_normal(0.2, "fan_out"), lambda t: nn.init.kaiming_normal_(t, 0.2, "fan_out")),
    (init.xavier_uniform(2.0), lambda t: nn.init.xavier_uniform_(t, 2.0)),
    (init.xavier_normal(), nn.init.xavier_normal_),
    (init.uniform(-3.0, 5.0), lambda t: nn.init.uniform_(t, -3.0, 5.0)),
    (init.normal(2.0, 0.1), lambda t: nn.init.normal_(t, 2.0, 0.1)),
    (init.trunc_normal(), nn.init.trunc_normal_),
    (init.trunc_normal(0.5, 0.02), lambda t: bounded_normal(t, 0.5, 0.02)),
]


@each_device
@each_dtype
@pytest.mark.parametrize(("ours", "theirs"), DISTRIBUTIONS)
def test_distribution_is_torchs(ours, theirs, dtype, device):
    """Equal distributions differ by more than 2.63 of these units once in a million times,
    wrong ones by many. Both sides are rounded alike, since rounding makes ties."""
    model = nn.Linear(250, 200, bias=False, device=device, dtype=dtype)
    init.Recipe(ours).initialize(model, seed=0)
    torch.manual_seed(0)
    native = theirs(torch.empty(200, 250, dtype=torch.float64, device=device)).to(dtype)
    assert distance(model.weight.detach(), native) < 2.63
    assert distance(model.weight.detach() * 1.2, native) > 2.63, "the test sees a difference"


def moments(distribution, a, b):
    """Mean, variance, and the variance of squares about the mean, of the exact distribution."""
    if distribution == "uniform":
        v = (b - a) ** 2 / 12
        return (a + b) / 2, v, v * v * 0.8
    if distribution == "normal":
        return a, b * b, 2 * b**4
    inside, edge = math.erf(math.sqrt(2)), 2 * math.exp(-2) / math.sqrt(2 * math.pi)
    second = 1 - 2 * edge / inside
    fourth = 3 * second - 8 * edge / inside
    return a, b * b * second, b**4 * (fourth - second**2)


@each_device
@each_draw
def test_moments_and_bounds(draw, device):
    """Mean and variance of 10^6 values, to five standard errors of their own."""
    n = 1_000_000
    values = filled((n,), draw, device=device)
    distribution, a, b = draw
    mean, variance, spread = moments(*draw)
    assert abs(values.mean() - mean) < 5 * math.sqrt(variance / n)
    assert abs((values - mean).square().mean() - variance) < 5 * math.sqrt(spread / n)
    low, high = {"uniform": (a, b), "trunc_normal": (a - 2 * b, a + 2 * b)}.get(
        distribution, (-math.inf, math.inf)
    )
    assert low <= values.min() and values.max() <= high
    if distribution != "normal":  # and they come near their bounds: 5 standard deviations off none
        assert values.min() < low + 1e-4 * (high - low)
        assert values.max() > high - 1e-4 * (high - low)
    else:
        assert values.max() > a + 4 * b and values.min() < a - 4 * b


def test_variance_scaling_has_its_variance():
    model = nn.Linear(400, 500, bias=False)
    for distribution in ("uniform", "normal", "truncated_normal"):
        scaled = init.variance_scaling(3.0, "fan_in", distribution)
        init.Recipe(scaled).initialize(model, seed=1)
        # 200,000 values: the variance is off by at most 5 sqrt(2 / n) of itself.
        assert model.weight.var().item() == pytest.approx(3.0 / 400, rel=5 * math.sqrt(2 / 2e5))


def test_reference_by_hand():
    """One value all the way: SHA-256, Philox's published answer, quantile, fan."""
    stream = int.from_bytes(hashlib.sha256(b"0.weight").digest()[:8], "little", signed=True)
    assert _recipe.stream_of("0.weight") == stream
    model = nn.Sequential(nn.Linear(8, 3, dtype=torch.float64))
    init.Recipe(init.kaiming_normal(nonlinearity="relu")).initialize(model, seed=11)
    z = filled((3, 8), ("normal", 0.0, 1.0), 11, stream)
    torch.testing.assert_close(model[0].weight.detach(), z * math.sqrt(2 / 8), rtol=1e-15, atol=0)
    # With seed and stream 0 the first 64 bits are e169c58d 6627e8d5.
    q = (2 * (0xE169C58D6627E8D5 >> 12) + 1 - 2**52) / 2**53
    expected = torch.special.ndtri(torch.tensor(0.5 - q, dtype=torch.float64))
    torch.testing.assert_close(-filled((1,), ("normal", 0.0, 1.0))[0], expected, rtol=1e-14, atol=0)
