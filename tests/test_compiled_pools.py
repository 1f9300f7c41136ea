# SPDX-License-Identifier: BSD-3-Clause
# Max pooling in Dynamo's graphs: which calls become ours, with the values and gradients of torch's.
# On a CPU; on a GPU the op against torch's.

import pytest
import torch
import torch.nn.functional as F
from compiled_ops import on_cpu
from compiling import Model, check, ours, random
from testing import DEVICES, LOW_PRECISION
from torch import nn

from torch_renaissance._compiled.pools import max_pool2d
from torch_renaissance._ops import ops

X = random(2, 8, 9, 12, channels_last=True)


def pooled(function, x=X, **options):
    return ours(check(Model(function), x, **options)) == {"max_pool2d": 1}


OURS = {
    "2x2": lambda m, x: F.max_pool2d(x, 2),
    "torch.max_pool2d": lambda m, x: torch.max_pool2d(x, (2, 3), padding=1),
    "by name": lambda m, x: F.max_pool2d(input=x, kernel_size=3, stride=(2, 1), padding=(1, 0)),
    "cut off": lambda m, x: F.max_pool2d(x, 2, ceil_mode=True),
    "module": lambda m, x: nn.MaxPool2d(3, 2, 1)(x),
    "windows apart": lambda m, x: F.max_pool2d(x, 2, 3),
}


@pytest.mark.parametrize("name", OURS)
def test_ours(name):
    assert pooled(OURS[name])


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_both_16_bit_types(half):
    assert pooled(OURS["2x2"], X.to(half), half=half)


LEFT = {
    "dilation": (lambda m, x: F.max_pool2d(x, 2, dilation=2), X),
    "indices": (lambda m, x: F.max_pool2d(x, 2, return_indices=True)[0], X),
    "a large window": (
        lambda m, x: F.max_pool2d(x, (9, 30), padding=(4, 15)),
        X.repeat(1, 1, 1, 3),
    ),
    "float32": (lambda m, x: F.max_pool2d(x, 2), X.float()),
    "another layout": (lambda m, x: F.max_pool2d(x, 2), X.contiguous()),
    "12 channels": (lambda m, x: F.max_pool2d(x, 2), random(2, 12, 4, 4, channels_last=True)),
    "one image": (lambda m, x: F.max_pool2d(x[0], 2), X),
    "1x1": (lambda m, x: F.max_pool2d(x, 1), random(2, 8, 1, 1, channels_last=True)),
    "one dimension": (lambda m, x: F.max_pool1d(x.flatten(2), 2), X),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_to_torch(name):
    function, x = LEFT[name]
    assert not ours(check(Model(function), x))


def test_ties_and_what_is_not_finite():
    x = X.round().masked_fill(X > 1, torch.nan).masked_fill(X < -1, -torch.inf)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    with on_cpu():
        y = max_pool2d(x, (2, 2), (2, 2), (0, 0), False)
        (found,) = torch.autograd.grad(y.sum(), x)
    expected = F.max_pool2d(x, 2)
    torch.testing.assert_close(y, expected, equal_nan=True)
    assert torch.equal(found, torch.autograd.grad(expected.sum(), x)[0])


on_a_gpu = pytest.mark.parametrize("device", DEVICES[1:])


@on_a_gpu
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("size", [(112, 112), (7, 30), (2, 2), (1, 5)], ids=str)
@pytest.mark.parametrize("kernel, stride, padding", [(3, 2, 1), (2, 2, 0), (3, 1, 1), (2, 3, 1)])
def test_on_a_gpu(kernel, stride, padding, size, ceil_mode, dtype, device):
    window = [(n, n) for n in (kernel, stride, padding)]
    if size[0] + 2 * padding < kernel:
        pytest.skip("no window fits, which torch refuses")
    x = random(3, 16, *size, dtype=dtype, channels_last=True).to(device).requires_grad_()
    y = F.max_pool2d(x, *window, ceil_mode=ceil_mode)
    grad = random(*y.shape, dtype=dtype, seed=1).to(device)
    found, positions = ops.max_pool2d_forward(x.detach(), *window, ceil_mode)
    assert torch.equal(found, y) and found.is_contiguous(memory_format=torch.channels_last)
    of_x = ops.max_pool2d_backward(grad, positions, size, *window)
    torch.testing.assert_close(of_x, torch.autograd.grad(y, x, grad)[0])


@on_a_gpu
def test_refusals(device):
    x = X.half().to(device)
    for bad in (x.float(), x.contiguous(), x[:, :4], x[0], x[:0]):
        with pytest.raises(RuntimeError, match="max_pool2d_forward: takes float16 or bfloat16"):
            ops.max_pool2d_forward(bad, (2, 2), (2, 2), (0, 0), False)
    with pytest.raises(RuntimeError, match="max_pool2d_forward: takes"):
        ops.max_pool2d_forward(x, (16, 16), (2, 2), (8, 8), False)
    y, positions = ops.max_pool2d_forward(x, (2, 2), (2, 2), (0, 0), False)
    with pytest.raises(RuntimeError, match="grad must have the shape of positions"):
        ops.max_pool2d_backward(y[:1], positions, (9, 12), (2, 2), (2, 2), (0, 0))
    with pytest.raises(RuntimeError, match="forward takes no"):
        ops.max_pool2d_backward(y.float(), positions, (9, 12), (2, 2), (2, 2), (0, 0))
