# SPDX-License-Identifier: BSD-3-Clause
# What tr.init refuses: the op's arguments, those of initializers and recipes, parameters that can't
# be filled, after which the model is as it was, seeds, and what is no module.

import copy
import math

import pytest
import torch
from initializing import RECIPE, ZERO_GAMMA, same_values
from testing import DEVICES, mlp
from torch import nn

import torch_renaissance as tr
from torch_renaissance import init
from torch_renaissance._ops import ops

OP_REFUSALS = [
    (torch.int64, "normal", 0.0, 1.0, "dtype Long is not supported; use float32, float64,"),
    (torch.float32, "cauchy", 0.0, 1.0, "must be uniform, normal or trunc_normal, got cauchy"),
    (torch.float32, "uniform", 1.0, 0.5, "in order and within .*, got a = 1 and b = 0.5"),
    (torch.float32, "uniform", math.nan, 0.5, "got a = nan and b = 0.5"),
    (torch.float32, "uniform", -1.0, 1e39, r"got a = -1 and b = 1e\+39"),
    (torch.float16, "uniform", -65505.0, 0.0, "got a = -65505 and b = 0"),
    (torch.float64, "uniform", -1e308, 1e308, r"got a = -1e\+308 and b = 1e\+308"),
    (torch.float32, "normal", 0.0, -1.0, "deviation of at least 0, got a = 0 and b = -1"),
    (torch.float32, "normal", math.inf, 1.0, "finite mean .*, got a = inf and b = 1"),
    (torch.float32, "trunc_normal", 0.0, math.nan, "got a = 0 and b = nan"),
]


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
@pytest.mark.parametrize(("dtype", "distribution", "a", "b", "message"), OP_REFUSALS)
def test_op_refuses(dtype, distribution, a, b, message, device):
    out = torch.ones(3, dtype=dtype, device=device)
    version = out._version
    with pytest.raises(RuntimeError, match=f"^fill_random_: .*{message}"):
        ops.fill_random_(out, 0, 0, distribution, a, b)
    assert out._version == version
    assert device == "meta" or (out == 1).all()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: init.constant("1"), TypeError, "constant: val must be a number, got '1'"),
        (lambda: init.constant(True), TypeError, "constant: val must be a number, got True"),
        (lambda: init.constant(math.nan), ValueError, "constant: val must be finite, got nan"),
        (lambda: init.normal(std=-1), ValueError, "normal: std must be at least 0, got -1"),
        (lambda: init.normal(mean=math.inf), ValueError, "normal: mean must be finite, got inf"),
        (lambda: init.normal(std=None), TypeError, "normal: std must be a number, got None"),
        (lambda: init.trunc_normal(0, -2), ValueError, "trunc_normal: std must be at least 0"),
        (lambda: init.trunc_normal([0]), TypeError, "trunc_normal: mean must be a number"),
        (lambda: init.uniform(1, 0), ValueError, "uniform: a must not be above b, got a = 1.0"),
        (lambda: init.uniform("0"), TypeError, "uniform: a must be a number, got '0'"),
        (lambda: init.uniform(0, math.inf), ValueError, "uniform: b must be finite, got inf"),
        (lambda: init.xavier_normal(-1), ValueError, "xavier_normal: gain must be at least 0"),
        (lambda: init.xavier_uniform("x"), TypeError, "xavier_uniform: gain must be a number"),
        (
            lambda: init.kaiming_normal(mode="fan"),
            ValueError,
            r"kaiming_normal: mode must be one of \('fan_in', 'fan_out', 'fan_avg'\), got 'fan'",
        ),
        (lambda: init.kaiming_uniform(mode=None), ValueError, "kaiming_uniform: mode .* got None"),
        (
            lambda: init.kaiming_uniform(nonlinearity="gelu"),
            ValueError,
            "kaiming_uniform: nonlinearity must be one that torch.nn.init.calculate_gain knows",
        ),
        (lambda: init.kaiming_normal("relu"), TypeError, "kaiming_normal: a must be a number"),
        (
            lambda: init.variance_scaling(-1),
            ValueError,
            "variance_scaling: scale must be at least 0, got -1",
        ),
        (
            lambda: init.variance_scaling(1, "fan_in", "cauchy"),
            ValueError,
            "variance_scaling: distribution must be one of .*'truncated_normal'.*, got 'cauchy'",
        ),
        (
            lambda: init.Recipe(nn.init.zeros_),
            TypeError,
            "Recipe: weights must be one of tr.init's",
        ),
        (lambda: init.Recipe(None, biases=0), TypeError, "Recipe: biases must be .* got 0"),
        (lambda: init.Recipe(None, norm_weights=1.0), TypeError, "norm_weights must be .* got 1.0"),
        (lambda: init.Recipe(None, zero_gamma=1), TypeError, "zero_gamma must be a bool, got 1"),
        (lambda: RECIPE.on(3, None), TypeError, "Recipe.on: where must be .*, got 3"),
        (lambda: RECIPE.on([tr.Kind.BIAS, 3], None), TypeError, "Recipe.on: where .*, got 3"),
        (lambda: RECIPE.on("x", 1.0), TypeError, "Recipe: initializer must be one of .* got 1.0"),
    ],
)
def test_bad_arguments(make, error, message):
    with pytest.raises(error, match=f"{message}"):
        make()


class With(nn.Module):
    """A linear layer, so that something could be changed, and then the parameter in question."""

    def __init__(self, p):
        super().__init__()
        self.linear, self.p = nn.Linear(3, 3), p


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("recipe", "p", "message"),
    [
        (
            RECIPE,
            lambda: nn.parameter.UninitializedParameter(),
            "p has no shape yet; pass a batch through the model first",
        ),
        (
            RECIPE,
            lambda: nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64)),
            "p: fill_random_: dtype ComplexFloat is not supported; use float32, float64,",
        ),
        (
            RECIPE,
            lambda: nn.Parameter(torch.zeros(2, 2).as_subclass(Subclass)),
            "p is a Subclass of layout torch.strided; initialise the model before it is sharded",
        ),
        (
            RECIPE,
            lambda: nn.Parameter(torch.zeros(2, 2).to_sparse()),
            "p is a Tensor of layout torch.sparse_coo; initialise the model before",
        ),
        (
            RECIPE,
            lambda: nn.Parameter(torch.zeros(1, 2).expand(4, 2)),
            r"p has strides \(0, 1\), so its elements share memory",
        ),
        (
            init.Recipe(None, biases=init.xavier_normal()),
            lambda: nn.Parameter(torch.zeros(4)),
            r"p: a fan needs at least 2 dimensions, got shape \[4\]",
        ),
        (
            init.Recipe(None).on("p", init.constant(1e6)),
            lambda: nn.Parameter(torch.zeros(4, dtype=torch.float16)),
            "p is torch.float16, which cannot hold 1000000.0",
        ),
        (
            init.Recipe(init.uniform(0, 1e6)),
            lambda: nn.Parameter(torch.zeros(4, 4, dtype=torch.float16)),
            "p: fill_random_: the bounds .* within the dtype's range, got a = 0",
        ),
        (RECIPE.on("q.*", None), lambda: None, r"no parameter's name matches 'q\.\*'"),
        (
            ZERO_GAMMA,
            lambda: None,
            "zero_gamma=True, but no residual branch was found: .* downsample or",
        ),
    ],
)
def test_refused_models_stay_as_they_are(recipe, p, message):
    model = With(p())
    before = copy.deepcopy(model.linear.state_dict())
    versions = [q._version for q in model.linear.parameters()]
    with pytest.raises(ValueError, match=f"^initialize: {message}"):
        recipe.initialize(model)
    assert same_values(dict(model.linear.state_dict()), dict(before))
    assert [q._version for q in model.linear.parameters()] == versions


@pytest.mark.parametrize(
    ("seed", "error", "message"),
    [
        (1.0, TypeError, "initialize: seed must be an int, got 1.0"),
        ("1", TypeError, "initialize: seed must be an int, got '1'"),
        (True, TypeError, "initialize: seed must be an int, got True"),
        (-1, ValueError, r"initialize: seed must be from 0 to 2\*\*64 - 1, got -1"),
        (2**64, ValueError, "initialize: seed must be .* got 18446744073709551616"),
    ],
)
def test_bad_seeds(seed, error, message):
    with pytest.raises(error, match=message):
        RECIPE.initialize(mlp(), seed=seed)


@pytest.mark.parametrize("model", [None, [], nn.Linear, torch.zeros(3)])
def test_no_module(model):
    with pytest.raises(TypeError, match=r"^initialize: model must be an nn\.Module, got "):
        RECIPE.initialize(model)
