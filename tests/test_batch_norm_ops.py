# SPDX-License-Identifier: BSD-3-Clause
# The ops of batch norm on a GPU: as exact as torch's batch norm, sum and ReLU, with all that they
# take besides. What all ops of compiled steps have in common is in test_compiled_ops.py.

import pytest
import torch
from batch_norms import (
    BEFORE_RELU,
    FOLLOWS,
    HALVES,
    exactly,
    make_inputs,
    run,
    running_stats,
)
from testing import DEVICES

from torch_renaissance._ops import ops

pytestmark = pytest.mark.parametrize("device", DEVICES[1:])
each_half = pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)

# Of few rows and many, in clusters and in two launches, with channels that don't fill a tile.
SHAPES = [(2, 4), (2, 4, 1, 1), (3, 12, 5, 7), (128, 512, 1, 1), (16, 100, 31, 17)]
SHAPES += [(32, 64, 112, 112), (7, 4096, 3, 3), (2, 24, 3, 4, 5), (12608, 768)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
JOINS = {
    f.__name__: (f, {"residual": "add" in f.__name__, "relu": "relu" in f.__name__})
    for f in FOLLOWS
}


def by_ops(inputs, grad, residual, relu, absent_bias=None, more_grad=None, stats=None):
    """Output, running statistics and gradients as of `run`; then the absent bias' gradient."""
    x, weight, bias, other = [t.detach() for t in inputs]
    stats = stats or running_stats(weight.numel())
    y, mean, invstd = ops.batch_norm_forward(
        x, weight, bias, other if residual else None, absent_bias, *stats, 0.1, 1e-5, relu
    )
    result = y if residual and relu else None
    *found, passed, of_absent = ops.batch_norm_backward(
        grad, more_grad, x, weight, bias, mean, invstd, result, relu, absent_bias is not None
    )
    assert passed.numel() == (x.numel() if result is not None else 0)
    assert of_absent.numel() == (0 if absent_bias is None else x.shape[1])
    of_residual = [passed if relu else grad] if residual else []
    return [y, *stats, *found, *of_residual], of_absent


def error(found, exact):
    return (found.double() - exact).norm()


@each_half
@each_shape
@pytest.mark.parametrize("name", JOINS)
def test_as_exact_as_torchs(name, shape, dtype, device):
    function, joins = JOINS[name]
    inputs, grad = make_inputs(shape, dtype)
    if function in BEFORE_RELU:  # at its kink, rounding decides whether a gradient passes
        grad[exactly(BEFORE_RELU[function], inputs, grad)[0].abs() < 0.05] = 0
    exact, natively = exactly(function, inputs, grad), run(function, inputs, grad, own=False)
    found, _ = by_ops(inputs, grad, **joins)
    for ours, native, wanted in zip(found, natively, exact, strict=True):
        assert ours.dtype == native.dtype and ours.stride() == native.stride()
        # The statistics are sums in float32 in either, in another order.
        assert error(ours, wanted) <= 1.1 * error(native, wanted) + 1e-6 * wanted.norm() + 1e-6


@each_half
@each_shape
def test_an_absent_bias(shape, dtype, device):
    """Only the running mean shows it; its gradient is the sum of the input's."""
    inputs, grad = make_inputs(shape, dtype)
    bias = torch.linspace(-3, 3, shape[1], device=device).to(dtype)
    expected, _ = by_ops(inputs, grad, residual=True, relu=True)
    found, of_bias = by_ops(inputs, grad, residual=True, relu=True, absent_bias=bias)
    torch.testing.assert_close(found[1], expected[1] + 0.1 * bias.float(), rtol=1e-5, atol=1e-6)
    assert all(torch.equal(found[i], expected[i]) for i in range(len(found)) if i != 1)
    of_input = found[3].double().movedim(1, -1).flatten(0, -2)
    exact, size = of_input.sum(0), of_input.abs().sum(0)
    assert of_bias.dtype == dtype and of_bias.shape == bias.shape
    # Numbers that cancel each other, added up in float32 and rounded once.
    room = 2e-6 * size + torch.finfo(dtype).eps * exact.abs() + 1e-7
    assert ((of_bias.double() - exact).abs() <= room).all()


@each_half
@each_shape
def test_one_more_gradient(shape, dtype, device):
    """The bits of a sum by a kernel of its own, whatever the layout."""
    inputs, grad = make_inputs(shape, dtype)
    _, more = make_inputs(shape, dtype, seed=1)
    expected, _ = by_ops(inputs, grad + more, residual=True, relu=True)
    for other in (more, more.contiguous(), more.float()):
        found, _ = by_ops(inputs, grad, residual=True, relu=True, more_grad=other)
        assert all(map(torch.equal, found, expected))


def test_gradients_of_another_layout(device):
    inputs, grad = make_inputs((8, 16, 4, 4), torch.float16)
    expected, _ = by_ops(inputs, grad, residual=True, relu=True)
    for other in (grad.contiguous(), grad.float()):
        found, _ = by_ops(inputs, other, residual=True, relu=True)
        assert all(map(torch.equal, found, expected))


def test_without_running_statistics(device):
    inputs, grad = make_inputs((8, 16, 4, 4), torch.float16)
    expected, _ = by_ops(inputs, grad, residual=True, relu=True)
    found, _ = by_ops(inputs, grad, residual=True, relu=True, stats=(None, None))
    assert found[1:3] == [None, None]
    assert all(torch.equal(found[i], expected[i]) for i in (0, *range(3, len(found))))


@pytest.mark.parametrize("momentum, eps", [(0.0, 1e-5), (1.0, 0.1), (0.3, 1e-3)])
def test_momentum_and_eps(momentum, eps, device):
    (x, weight, bias, _), _ = make_inputs((8, 16, 4, 4), torch.float16)
    found, exact = running_stats(16), running_stats(16, torch.float64)
    y, _, _ = ops.batch_norm_forward(x, weight, bias, None, None, *found, momentum, eps, False)
    expected = torch.nn.functional.batch_norm(
        x.double(), *exact, weight.double(), bias.double(), True, momentum, eps
    )
    torch.testing.assert_close(y.double(), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close([t.double() for t in found], list(exact), rtol=1e-5, atol=1e-6)


# -- What is refused -------------------------------------------------------------------------------


def arguments(**changes):
    """Of forward, by name, and of backward."""
    (x, weight, bias, residual), grad = make_inputs((8, 16, 4, 4), torch.float16)
    inputs = [t.detach() for t in (x, weight, bias)]
    forward = dict(zip(("input", "weight", "bias"), inputs, strict=True))
    forward |= {"residual": residual.detach(), "absent_bias": bias.detach().half()}
    forward |= dict(zip(("running_mean", "running_var"), running_stats(16), strict=True))
    forward |= {"momentum": 0.1, "eps": 1e-5, "relu": True}
    result, mean, invstd = ops.batch_norm_forward(*forward.values())
    backward = {"grad": grad, "more_grad": grad} | dict(list(forward.items())[:3])
    backward |= {"mean": mean, "invstd": invstd, "result": result}
    backward |= {"relu": True, "has_absent_bias": True}
    return forward, backward


NCHW = torch.Tensor.contiguous
TAKES = "takes float16 or bfloat16 with channels last in memory, a multiple of 4"
LIKE_INPUT = "residual must be like input, got"
LIKE_BIAS = "absent_bias must be of weight's shape and input's dtype"
BAD_FORWARD = {
    "float32": ("input", torch.Tensor.float, TAKES),
    "NCHW": ("input", NCHW, TAKES),
    "6 channels": ("input", lambda t: t[:, :6], TAKES),
    "3 dimensions": ("input", lambda t: t[:, :, 0], TAKES),
    "nothing": ("input", lambda t: t[:0], TAKES),
    "one value of a channel": ("input", lambda t: t[:1, :, :1, :1], TAKES),
    "a 16-bit weight": ("weight", torch.Tensor.half, TAKES),
    "a short bias": ("bias", lambda t: t[:8], TAKES),
    "one running statistic": ("running_var", lambda t: None, TAKES),
    "a double running mean": ("running_mean", torch.Tensor.double, TAKES),
    "another layout of the residual": ("residual", NCHW, LIKE_INPUT),
    "a float32 residual": ("residual", torch.Tensor.float, LIKE_INPUT),
    "a small residual": ("residual", lambda t: t[:1], LIKE_INPUT),
    "a float32 absent bias": ("absent_bias", torch.Tensor.float, LIKE_BIAS),
    "a short absent bias": ("absent_bias", lambda t: t[:8], LIKE_BIAS),
}


@pytest.mark.parametrize("name", BAD_FORWARD)
def test_bad_forward(name, device):
    key, change, message = BAD_FORWARD[name]
    forward, _ = arguments()
    forward[key] = change(forward[key])
    with pytest.raises(RuntimeError, match=f"batch_norm(_forward)?: .*{message}"):
        ops.batch_norm_forward(*forward.values())


LIKE_FORWARD = "input must be what batch_norm_forward takes"
BAD_BACKWARD = {
    "float32": ("input", torch.Tensor.float, LIKE_FORWARD),
    "NCHW": ("input", NCHW, LIKE_FORWARD),
    "a short mean": ("mean", lambda t: t[:8], LIKE_FORWARD),
    "a double deviation": ("invstd", torch.Tensor.double, LIKE_FORWARD),
    "a small gradient": ("grad", lambda t: t[:1], "grad must have input's shape"),
    "a small other gradient": ("more_grad", lambda t: t[:1], "grad must have input's shape"),
    "no result to add for": ("result", lambda t: None, "more_grad needs a result"),
    "another layout of the result": ("result", NCHW, "result must be like input"),
}


@pytest.mark.parametrize("name", BAD_BACKWARD)
def test_bad_backward(name, device):
    key, change, message = BAD_BACKWARD[name]
    _, backward = arguments()
    backward[key] = change(backward[key])
    with pytest.raises(RuntimeError, match=f"batch_norm(_backward)?: .*{message}"):
        ops.batch_norm_backward(*backward.values())
