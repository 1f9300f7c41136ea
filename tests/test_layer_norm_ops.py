# SPDX-License-Identifier: BSD-3-Clause
# The ops of layer norm in a residual stream, and that which packs heads, on a GPU: as exact as
# torch's. What all ops of compiled steps have in common is in test_compiled_ops.py.

import pytest
import torch
import torch.nn.functional as F
from testing import DEVICES, LOW_PRECISION

from torch_renaissance._ops import ops

pytestmark = pytest.mark.parametrize("device", DEVICES[1:])
each_dtype = pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)

# One row, fewer than blocks and many; widths of every number of vectors a lane may have.
SHAPES = [(1, 4), (3, 132), (2, 5, 256), (131, 388), (40, 640), (12608, 768), (1, 900), (999, 1024)]


def random(shape, dtype, device, seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def inputs(shape, dtype, device, mean=0.0):
    """Stream, branch, the branch's bias, weight, bias; gradients of the output and of the sum."""
    vectors = [random(shape[-1:], torch.float32, device, seed) for seed in (1, 2, 3)]
    stream, grad_sum = (random(shape, torch.float32, device, seed) for seed in (4, 5))
    branch, grad = (random(shape, dtype, device, seed) for seed in (6, 7))
    return stream + mean, branch, vectors[0].to(dtype), vectors[1] + 2, vectors[2], grad, grad_sum


def exactly(total, weight, bias, grad, grad_sum):
    """Output and the gradients of the sum, weight and bias, in float64."""
    leaves = [t.double().requires_grad_() for t in (total, weight, bias)]
    y = F.layer_norm(leaves[0], weight.shape, *leaves[1:], 1e-5)
    of_total, *of_vectors = torch.autograd.grad(y, leaves, grad.double())
    return y.detach(), of_total + (0 if grad_sum is None else grad_sum.double()), *of_vectors


def assert_near(found, exact, bound):
    assert found.shape == exact.shape
    assert (found.double() - exact).norm() <= bound * exact.norm() + 1e-6


def rounding(exact, dtype):
    return float((exact.to(dtype).double() - exact).norm() / exact.norm())


@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mean", [0.0, 100.0])
def test_with_a_branch(mean, shape, dtype, device):
    stream, branch, branch_bias, weight, bias, grad, grad_sum = inputs(shape, dtype, device, mean)
    y, total, *moments = ops.layer_norm_forward(
        stream, branch, branch_bias, weight, bias, 1e-5, dtype
    )
    assert torch.equal(total, stream + (branch + branch_bias))
    exact = exactly(total, weight, bias, grad, grad_sum)
    assert y.dtype == dtype
    assert_near(y, exact[0], 1.01 * rounding(exact[0], dtype) + 1e-6 * (1 + mean))
    of_total, of_branch, of_weight, of_bias, of_branch_bias = ops.layer_norm_backward(
        grad, grad_sum, total, weight, *moments, True, True
    )
    for found, wanted in zip((of_total, of_weight, of_bias), exact[1:], strict=True):
        assert_near(found, wanted, 2e-6 * (1 + mean))
    assert torch.equal(of_branch, of_total.to(dtype))
    wanted = of_branch.double().flatten(0, -2).sum(0)
    assert_near(of_branch_bias, wanted, 1.01 * rounding(wanted, dtype) + 1e-5)


@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_without_one(shape, dtype, device):
    """And without a gradient of the sum: nobody else has read it."""
    stream, _, _, weight, bias, grad, _ = inputs(shape, dtype, device)
    y, total, *moments = ops.layer_norm_forward(stream, None, None, weight, bias, 1e-5, dtype)
    exact = exactly(stream, weight, bias, grad, None)
    assert total.numel() == 0
    assert_near(y, exact[0], 1.01 * rounding(exact[0], dtype) + 1e-6)
    found = ops.layer_norm_backward(grad, None, stream, weight, *moments, False, False)
    assert found[1].numel() == found[4].numel() == 0
    for ours, wanted in zip((found[0], *found[2:4]), exact[1:], strict=True):
        assert_near(ours, wanted, 2e-6)


def test_a_branch_without_a_bias(device):
    stream, branch, _, weight, bias, *_ = inputs((7, 64), torch.float16, device)
    zeros = torch.zeros(64, device=device).half()
    found, expected = (
        ops.layer_norm_forward(stream, branch, b, weight, bias, 1e-5, torch.float16)
        for b in (None, zeros)
    )
    assert all(map(torch.equal, found, expected))


def test_what_is_not_finite_stays_in_its_row(device):
    stream, _, _, weight, bias, *_ = inputs((64, 256), torch.float16, device)
    stream[13, 5] = float("nan")
    y, *_ = ops.layer_norm_forward(stream, None, None, weight, bias, 1e-5, torch.float16)
    assert y.isnan().any(1).nonzero().flatten().tolist() == [13]


# -- What is refused -------------------------------------------------------------------------------

BAD = {
    "float16 stream": ({0: torch.Tensor.half}, "input must be a contiguous Float tensor"),
    "a stream with gaps": ({0: lambda t: t.repeat(1, 2)[:, ::2]}, "input must be a contiguous"),
    "float32 branch": ({1: torch.Tensor.float}, "branch must be a contiguous Half tensor"),
    "short branch": ({1: lambda t: t[:3]}, "branch must be a contiguous Half tensor of shape"),
    "float32 branch_bias": ({2: torch.Tensor.float}, "branch_bias must be a contiguous Half"),
    "no branch": ({1: lambda t: None}, "branch_bias needs a branch"),
    "float16 weight": ({3: torch.Tensor.half}, "weight must be a contiguous Float tensor"),
    "long bias": ({4: lambda t: t.repeat(2)}, "bias must be a contiguous Float tensor"),
    "on a CPU": ({4: torch.Tensor.cpu}, "bias must be a contiguous Float tensor"),
    "float32 output": ({6: lambda t: torch.float32}, "the output is float16 or bfloat16"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_inputs(name, device):
    changes, message = BAD[name]
    given = [*inputs((8, 16), torch.float16, device)[:5], 1e-5, torch.float16]
    given = [changes[i](t) if i in changes else t for i, t in enumerate(given)]
    with pytest.raises(RuntimeError, match=message):
        ops.layer_norm_forward(*given)


BAD_BACKWARD = {
    "float32 gradient": ({0: torch.Tensor.float}, "the output is float16 or bfloat16"),
    "short gradient": ({0: lambda t: t[:3]}, "grad must be a contiguous Half tensor of shape"),
    "float16 grad_sum": ({1: torch.Tensor.half}, "grad_sum must be a contiguous Float tensor"),
    "long weight": ({3: lambda t: t.repeat(2)}, "weight must be a contiguous Float tensor"),
    "a mean too few": ({4: lambda t: t[1:]}, "mean must be a contiguous Float tensor"),
    "float16 rstd": ({5: torch.Tensor.half}, "rstd must be a contiguous Float tensor"),
    "no branch": ({6: lambda _: False}, "layer_norm_backward: branch_bias needs a branch"),
}


@pytest.mark.parametrize("name", BAD_BACKWARD)
def test_bad_inputs_of_backward(name, device):
    changes, message = BAD_BACKWARD[name]
    stream, _, _, weight, _, grad, grad_sum = inputs((8, 16), torch.float16, device)
    per_row = stream[:, 0].contiguous()
    given = [grad, grad_sum, stream, weight, per_row, per_row, True, True]
    given = [changes[i](t) if i in changes else t for i, t in enumerate(given)]
    with pytest.raises(RuntimeError, match=message):
        ops.layer_norm_backward(*given)


@pytest.mark.parametrize("shape", [(2, 6), (2, 1028), (0, 8), ()], ids=str)
def test_bad_shapes(shape, device):
    x = torch.zeros(shape, device=device)
    vector = torch.zeros(shape[-1:] or 1, device=device)
    with pytest.raises(RuntimeError, match="takes rows of a multiple of 4 numbers, at most 1024"):
        ops.layer_norm_forward(x, None, None, vector, vector, 1e-5, torch.float16)


# -- Heads -----------------------------------------------------------------------------------------


def heads(shape, dtype, device):
    return [random(shape, dtype, device, seed) for seed in range(3)]


@each_dtype
@pytest.mark.parametrize("shape", [(1, 1, 1, 4), (2, 3, 5, 12), (64, 12, 197, 64)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "packed", "others"])
def test_pack_heads(layout, shape, dtype, device):
    parts = heads(shape, dtype, device)
    packed = torch.stack(parts).permute(1, 3, 0, 2, 4).contiguous()
    if layout == "packed":
        parts = packed.permute(2, 0, 3, 1, 4).unbind(0)
    elif layout == "others":
        parts = [p.transpose(1, 2).contiguous().transpose(1, 2) for p in parts[:2]]
        parts.append(packed[:, :, 2].permute(0, 3, 2, 1).contiguous().permute(0, 2, 3, 1))
    found, sums = ops.pack_heads(*parts)
    assert torch.equal(found, packed.flatten(2))
    exact = packed.double().sum((0, 1)).flatten()
    assert_near(sums, exact, 1.01 * rounding(exact, dtype) + 1e-5)


@pytest.mark.parametrize("shape", [(2, 3, 5, 6), (2, 3, 5), (1, 30, 1, 64), (0, 3, 5, 8)], ids=str)
def test_bad_heads(shape, device):
    with pytest.raises(RuntimeError, match="pack_heads: takes float16 or bfloat16 of shape"):
        ops.pack_heads(*heads(shape, torch.float16, device))


def test_heads_that_differ(device):
    q, k, v = heads((2, 3, 5, 8), torch.float16, device)
    for other in (k[:1], k.bfloat16(), k.cpu()):
        with pytest.raises(RuntimeError, match="queries, keys and values must be alike"):
            ops.pack_heads(q, other, v)
