# SPDX-License-Identifier: BSD-3-Clause
# Within a step with precision= on a GPU, max pooling of 16-bit channels_last tensors is our kernel:
# torch's values and gradients to the bit, and torch's own function for everything else.

import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from autocasting import DTYPES, each_precision
from testing import DEVICES
from torch import nn

import torch_renaissance as tr
from torch_renaissance._precision import own_kernels

pytestmark = pytest.mark.parametrize("device", DEVICES[1:])

OURS, TORCHS = "torch_renaissance::MaxPoolBackward", "MaxPool2DWithIndicesBackward0"

WINDOWS = {
    "2x2 by 2": {"kernel_size": 2},
    "2x2 by 3, ceil": {"kernel_size": 2, "stride": 3, "padding": 1, "ceil_mode": True},
    "3x3 by 2": {"kernel_size": 3, "stride": 2, "padding": 1},
    "3x3 by 2, ceil": {"kernel_size": 3, "stride": 2, "padding": (0, 1), "ceil_mode": True},
    "3x3 by 1": {"kernel_size": 3, "stride": 1, "padding": 1},
    "5x3": {"kernel_size": (5, 3), "stride": (2, 1), "padding": (2, 0)},
    "15x17": {"kernel_size": (15, 17), "stride": 4, "padding": (7, 8)},
}
SHAPES = [(3, 16, 20, 22), (1, 8, 17, 17), (2, 24, 5, 3), (2, 520, 9, 40)]
VALUES = {
    "random": lambda x: x,
    "ties": torch.round,
    "zeros of either sign": lambda x: x * 0.0,
    "NaN and -inf": lambda x: x.masked_fill(x > 0.5, torch.nan).masked_fill(x < 0.0, -torch.inf),
    "-inf": lambda x: torch.full_like(x, -torch.inf),
}


def images(device, dtype, shape, values=torch.clone):
    torch.manual_seed(0)
    x = values(torch.randn(shape)).to(device, dtype)
    return x.contiguous(memory_format=torch.channels_last).requires_grad_()


def torchs(x, **window):
    with torch.autocast(x.device.type, torch.bfloat16):
        return F.max_pool2d(x, **window)


def pool(x, **window):
    with own_kernels():
        return torchs(x, **window)


def equal(a, b):
    """To the bit, but for what a NaN carries."""
    bits = [t.detach().masked_fill(t.isnan(), torch.nan).view(torch.int16) for t in (a, b)]
    return a.dtype == b.dtype and torch.equal(*bits)


# -- In the place of torch's -----------------------------------------------------------------------


@each_precision
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", WINDOWS)
def test_as_torchs(name, shape, values, precision, device):
    window, x = WINDOWS[name], images(device, DTYPES[precision], shape, VALUES[values])
    # As torch does NCHW: for NHWC it forgets the gradient of a window of -inf.
    native, exact = (x.detach().contiguous().requires_grad_() for _ in range(2))
    found, expected = pool(x, **window), F.max_pool2d(native, **window)
    assert found.grad_fn.name() == OURS and equal(found, expected)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert equal(torch.no_grad()(pool)(x, **window), expected)
    grad = torch.randn_like(expected)
    found.backward(grad)  # NCHW
    assert x.grad.is_contiguous(memory_format=torch.channels_last)
    again = torch.autograd.grad(pool(x, **window), x, grad.to(memory_format=torch.channels_last))
    assert torch.equal(x.grad, again[0])
    if name.startswith("2x2"):  # one window has a pixel
        expected.backward(grad)
        assert torch.equal(x.grad, native.grad)
    F.max_pool2d(exact.double(), **window).backward(grad.double())
    torch.testing.assert_close(x.grad, exact.grad, rtol=torch.finfo(x.dtype).eps, atol=1e-5)


def test_gradients_of_any_layout(device):
    x = images(device, torch.half, (2, 8, 6, 6))
    expected, found = (torch.autograd.grad(f(x, kernel_size=2).sum(), x) for f in (torchs, pool))
    assert torch.equal(*expected, *found)  # from an expanded one
    shifted = torch.ones(2 * 8 * 9 + 1, dtype=x.dtype, device=device)[1:].view(2, 3, 3, 8)
    (found,) = torch.autograd.grad(pool(x, kernel_size=2), x, shifted.permute(0, 3, 1, 2))
    assert torch.equal(found, *expected)
    batched = torch.randn(3, 2, 8, 3, 3, dtype=x.dtype, device=device)
    (found,) = torch.autograd.grad(pool(x, kernel_size=2), x, batched, is_grads_batched=True)
    each = [torch.autograd.grad(torchs(x, kernel_size=2), x, grad)[0] for grad in batched]
    assert torch.equal(found, torch.stack(each))
    with pytest.raises((RuntimeError, IndexError)):
        pool(x, kernel_size=2).grad_fn(torch.ones(1, dtype=x.dtype, device=device))


@pytest.mark.parametrize("name", ["2x2 by 2", "3x3 by 2", "5x3"])
def test_double_backward(name, device):
    def second(pool):
        x = images(device, torch.half, (2, 8, 9, 9))
        (first,) = torch.autograd.grad(pool(x, **WINDOWS[name]).pow(2).sum(), x, create_graph=True)
        first.pow(2).sum().backward()
        return first.detach(), x.grad

    torch.testing.assert_close(second(pool), second(torchs))


def test_backward_twice(device):
    x = images(device, torch.half, (2, 8, 6, 6))
    y = pool(x, kernel_size=2).sum()
    y.backward(retain_graph=True)
    y.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


# -- What is left to torch -------------------------------------------------------------------------

LEFT = {
    "NCHW": (torch.Tensor.contiguous, {}),
    "float32": (torch.Tensor.float, {}),
    "dilation": (torch.clone, {"dilation": 2}),
    "4 channels": (lambda x: x[:, :4].contiguous(memory_format=torch.channels_last), {}),
    "a part of the channels": (lambda x: x[:, :8], {}),
    "a large window": (lambda x: F.interpolate(x, (40, 40)), {"kernel_size": 16}),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_to_torch(name, device):
    change, options = LEFT[name]
    x = change(images(device, torch.half, (2, 16, 9, 9)))
    window = {"kernel_size": 3, "stride": 2} | options
    found = pool(x, **window)
    assert found.grad_fn.name() == TORCHS and torch.equal(found, torchs(x, **window))


def test_outside_of_a_step(device):
    x = images(device, torch.half, (2, 8, 6, 6))
    assert torchs(x, kernel_size=2).grad_fn.name() == TORCHS
    with own_kernels():
        assert F.max_pool2d(x, 2).grad_fn.name() == TORCHS  # without autocast


def test_transforms(device):
    x = images(device, torch.half, (2, 8, 6, 6)).detach()

    def both(pool):
        halve = partial(pool, kernel_size=2)
        gradient = torch.func.grad(lambda x: halve(x).sum())(x)
        return torch.func.vmap(halve)(x[None]), gradient, *torch.func.jvp(halve, (x,), (x,))

    assert all(map(torch.equal, both(pool), both(torchs)))


BAD = [("kernel_size", 0), ("kernel_size", 9), ("kernel_size", (2, 2, 2)), ("stride", 0)]
BAD += [("padding", 2), ("padding", -1), ("dilation", 0)]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_bad_arguments(bad, device):
    x, window = images(device, torch.half, (2, 8, 6, 6)), {"kernel_size": 2} | dict([bad])
    with pytest.raises(RuntimeError) as expected:
        torchs(x, **window)
    with pytest.raises(RuntimeError, match=re.escape(str(expected.value).splitlines()[0])):
        pool(x, **window)


# -- In a step -------------------------------------------------------------------------------------


def train(device, warmup):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 16, 3), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 9, 5)).to(device)
    model.to(memory_format=torch.channels_last)
    _, optimizer = tr.accelerate(model, torch.optim.SGD(model.parameters(), lr=0.05))
    options = {"precision": "fp16", "strict": True, "warmup": warmup}
    step = tr.TrainStep(lambda x, y: F.cross_entropy(model(x), y), optimizer, **options)
    x = torch.randn(6, 3, 18, 18, device=device).to(memory_format=torch.channels_last)
    labels = torch.arange(6, device=device) % 5
    return torch.stack([step(x, labels).clone() for _ in range(12)]), step


def test_captured(device):
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        (captured, step), (again, _), (eager, _) = (train(device, n) for n in (3, 3, 100))
    assert step.captured and torch.equal(captured, again) and torch.equal(captured, eager)
    (graph,) = step.explain().graphs
    kernels = {name: n for name, n in graph["kernels"].items() if "max_pool" in name}
    assert sum(kernels.values()) == 4 and not any("nhwc" in name for name in kernels)
