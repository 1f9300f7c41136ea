# SPDX-License-Identifier: BSD-3-Clause
# Batch norm in Dynamo's graphs: which calls become ours, what joins them, and that values,
# gradients and running statistics are torch's. On a CPU; kernels are in test_compiled_ops.py.

import operator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from compiling import check, ours, random
from joining import NCHW, R, X, joined, model
from torch import nn

from torch_renaissance._compiled import norms

# -- Which calls are ours --------------------------------------------------------------------------

OURS = {
    "2-D": (nn.BatchNorm1d(8), random(16, 8)),
    "4-D": (nn.BatchNorm2d(8), X),
    "5-D": (nn.BatchNorm3d(8), random(2, 8, 2, 3, 4, channels_last=True)),
    "float16": (nn.BatchNorm2d(8), X.half()),
    "no running statistics": (nn.BatchNorm2d(8, track_running_stats=False), X),
    "none in evaluation": (nn.BatchNorm2d(8, track_running_stats=False).eval(), X),
    "momentum and eps": (nn.BatchNorm2d(8, momentum=0.3, eps=0.1), X),
    "momentum of zero": (nn.BatchNorm2d(8, momentum=0.0), X),
    "one image": (nn.BatchNorm2d(8), X[:1]),
    "one pixel": (nn.BatchNorm2d(8), X[:, :, :1, :1].contiguous(memory_format=NCHW)),
}


@pytest.mark.parametrize("name", OURS)
def test_ours(name):
    norm, x = OURS[name]
    assert joined(check(model(lambda m, x: m.norm(x), norm), x)) == [""]


TORCHS = {
    "evaluation": (nn.BatchNorm2d(8).eval(), X),
    "float32": (nn.BatchNorm2d(8), X.float()),
    "NCHW": (nn.BatchNorm2d(8), X.contiguous(memory_format=NCHW)),
    "6 channels": (nn.BatchNorm2d(6), random(4, 6, 3, 3, channels_last=True)),
    "4100 channels": (nn.BatchNorm1d(4100), random(3, 4100)),
    "no weight": (nn.BatchNorm2d(8, affine=False), X),
    "a 16-bit weight": (nn.BatchNorm2d(8).bfloat16(), X),
    "3-D": (nn.BatchNorm1d(8), random(4, 8, 5)),
}


@pytest.mark.parametrize("name", TORCHS)
def test_left_to_torch(name):
    norm, x = TORCHS[name]
    assert not joined(check(model(lambda m, x: F.relu(m.norm(x)), norm), x))


def test_channels_with_gaps_between_are_left_to_torch():
    assert not joined(check(model(lambda m, x: m.norm(x[:, ::2])), random(4, 16, 3, 3)))


def test_one_value_of_a_channel_is_refused_as_torch_does():
    whole, one = model(lambda m, x: m.norm(x)), X[:1, :, :1, :1]
    vectors = [torch.ones(8) for _ in range(4)]
    for call in (whole, lambda x: norms.batch_norm(x, *vectors, 0.1, 1e-5, None, None, False)):
        with pytest.raises(ValueError, match="more than 1 value per channel when training"):
            call(one)


# -- ReLU and residuals ----------------------------------------------------------------------------

RELUS = {
    "function": F.relu,
    "function in place": partial(F.relu, inplace=True),
    "F.relu_": F.relu_,
    "torch.relu": torch.relu,
    "torch.relu_": torch.relu_,
    "method": lambda y: y.relu(),
    "method in place": lambda y: y.relu_(),
    "module": nn.ReLU(),
    "module in place": nn.ReLU(inplace=True),
}
ADDS = {
    "+": operator.add,
    "other +": lambda y, r: r + y,
    "+=": operator.iadd,
    "torch.add": torch.add,
    "method": lambda y, r: y.add(r),
    "method in place": lambda y, r: y.add_(r),
}


@pytest.mark.parametrize("relu", RELUS)
def test_relu_joins(relu):
    relu = RELUS[relu]
    assert joined(check(model(lambda m, x: relu(m.norm(x))), X)) == ["relu"]
    graph = check(model(lambda m, x, r: relu(m.norm(x) + r)), X, R)
    assert joined(graph) == ["residual relu"]


@pytest.mark.parametrize("add", ADDS)
def test_a_residual_joins(add):
    add = ADDS[add]
    graph = check(model(lambda m, x, r: add(m.norm(x), r)), X, R)
    assert joined(graph) == ["residual"] and ours(graph)["batch_norm"] == 1


def test_the_input_as_residual():
    assert joined(check(model(lambda m, x: F.relu(m.norm(x) + x)), X)) == ["residual relu"]


def test_a_residual_that_is_a_norm():
    both = model(lambda m, x, r: F.relu(m.norm(x) + m.aside(r)), aside=nn.BatchNorm2d(8))
    assert joined(check(both, X, R)) == ["", "residual relu"]


def test_a_residual_that_changes_before_and_after():
    def function(m, x, r):
        r = r * 1
        y = m.norm(x)
        r.mul_(2)
        z = y + r
        r.add_(1)
        return z + r

    assert joined(check(model(function), X, R)) == [""]


def used_twice(m, x, r):
    y = m.norm(x)
    return F.relu(y) + y


def sum_of_one(m, x, r):
    y = m.norm(x)
    return F.relu(y + y)


def written_to_the_other(m, x, r):
    r = r * 1
    r += m.norm(x)
    return r


def viewed(m, x, r):
    y = m.norm(x)
    view = y.permute(0, 2, 3, 1)
    y += r
    return F.relu(y) + view.sum()


APART = {
    "used twice": used_twice,
    "added to itself": sum_of_one,
    "written to the other": written_to_the_other,
    "a view": viewed,
    "a factor": lambda m, x, r: F.relu(torch.add(m.norm(x), r, alpha=2)),
    "a number": lambda m, x, r: F.relu(m.norm(x) + 1),
    "float32": lambda m, x, r: F.relu(m.norm(x) + r.float()),
    "other 16 bits": lambda m, x, r: F.relu(m.norm(x) + r.half()),
    "one channel": lambda m, x, r: F.relu(m.norm(x) + r[:, :1]),
    "one image": lambda m, x, r: F.relu(m.norm(x) + r[:1]),
    "NCHW": lambda m, x, r: F.relu(m.norm(x) + r.contiguous(memory_format=NCHW)),
    "relu6": lambda m, x, r: F.relu6(m.norm(x)),
    "clamp": lambda m, x, r: m.norm(x).clamp(min=0),
}


@pytest.mark.parametrize("name", APART)
def test_what_does_not_join(name):
    assert joined(check(model(APART[name]), X, R)) == [""]


def test_a_factor_in_place():
    """Which Dynamo has made a product by then, or hasn't."""
    check(model(lambda m, x, r: F.relu(m.norm(x).add_(r, alpha=2))), X, R)
