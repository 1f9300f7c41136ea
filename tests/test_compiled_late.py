# SPDX-License-Identifier: BSD-3-Clause
# What is replaced in Inductor's graphs of forward and backward: sums of columns, and a sum of two
# gradients that batch norm's backward reads. On a CPU, graph by graph, without Inductor.

import pytest
import torch
from compiled_ops import on_cpu
from compiling import ours, random
from torch.fx.experimental.proxy_tensor import make_fx

from torch_renaissance._compiled import late
from torch_renaissance._ops import ops


def replaced(function, *inputs):
    """A rewritten graph, whose results are compared with the function's."""
    with on_cpu():
        module = make_fx(function, tracing_mode="fake")(*inputs)
        late.rewrite(module.graph)
        module.graph.lint()
        module.recompile()
        torch.testing.assert_close(module(*inputs), function(*inputs), rtol=0.01, atol=0.01)
    return module.graph


# -- Sums of columns -------------------------------------------------------------------------------

MATRIX = random(1024, 12)
SUMS = {
    "a vector": (lambda x: x.sum(0), MATRIX),
    "a row": (lambda x: x.sum(0, keepdim=True), MATRIX),
    "of a view": (lambda x: x.view(1024, 12).sum(0), random(8, 128, 12)),
    "of a copy": (lambda x: x.t().contiguous().sum(0), random(12, 1024)),
    "float16": (lambda x: x.sum(0), MATRIX.half()),
    "in float32": (lambda x: x.sum(0, dtype=torch.float32), MATRIX),
    "4096 columns": (lambda x: x.sum(0), random(1024, 4096)),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_columns(name):
    assert ours(replaced(*SUMS[name])) == {"column_sums": 1}


OTHERS = {
    "of rows": (lambda x: x.sum(1), MATRIX),
    "of everything": (lambda x: x.sum([0, 1]), MATRIX),
    "three dimensions": (lambda x: x.sum(0), random(1024, 2, 12)),
    "float32": (lambda x: x.sum(0), MATRIX.float()),
    "another dtype": (lambda x: x.sum(0, dtype=torch.float64), MATRIX),
    "columns side by side": (lambda x: x.t().sum(0), random(12, 1024)),
    "gaps": (lambda x: x[:, :4].sum(0), MATRIX),
    "few rows": (lambda x: x.sum(0), MATRIX[:1023]),
    "6 columns": (lambda x: x.sum(0), random(1024, 6)),
    "4100 columns": (lambda x: x.sum(0), random(1024, 4100)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_sums_are_inductors(name):
    assert not ours(replaced(*OTHERS[name]))


# -- Two gradients of a batch norm's result --------------------------------------------------------

X, RESULT, A, B = (random(4, 8, 3, 3, channels_last=True, seed=i) for i in range(4))


def backward(grad, x, result, more=None):
    mean, invstd, weight, bias = torch.zeros(8), torch.ones(8), torch.ones(8), torch.zeros(8)
    found = ops.batch_norm_backward.default(
        grad, more, x, weight, bias, mean, invstd, result, True, False
    )
    return found[:3]


def sums(function):
    """Whether batch norm's backward gets more than one gradient, and how many sums are left."""
    nodes = replaced(function, A, B, X, RESULT).nodes
    (norm,) = [node for node in nodes if node.target is ops.batch_norm_backward.default]
    left = [node for node in nodes if node.target is torch.ops.aten.add.Tensor]
    return norm.args[1] is not None, len(left)


def test_a_sum_of_gradients_joins():
    assert sums(lambda a, b, x, result: backward(a + b, x, result)) == (True, 0)


def test_one_of_two_sums_joins():
    assert sums(lambda a, b, x, result: backward(a + b + a, x, result)) == (True, 1)


def read_elsewhere(a, b, x, result):
    total = a + b
    return *backward(total, x, result), total


def in_another_layout(a, b, x, result):
    return backward(a + b.contiguous(memory_format=torch.contiguous_format), x, result)


APART = {
    "no result": lambda a, b, x, result: backward(a + b, x, None),
    "read elsewhere": read_elsewhere,
    "a factor": lambda a, b, x, result: backward(torch.add(a, b, alpha=2), x, result),
    "a number": lambda a, b, x, result: backward(a + 1, x, result),
    "one channel": lambda a, b, x, result: backward(a + b[:, :1], x, result),
    "float32": lambda a, b, x, result: backward(a + b.float(), x, result),
    "another layout": in_another_layout,
}


@pytest.mark.parametrize("name", APART)
def test_other_sums_stay(name):
    assert sums(APART[name]) == (False, 1)


def test_a_sum_stays_where_there_is_more_already():
    assert sums(lambda a, b, x, result: backward(a + b, x, result, b)) == (True, 1)
