# SPDX-License-Identifier: BSD-3-Clause
# The ops on columns on a GPU, sums of them and GELU of a matrix plus a bias: as exact as torch's.
# What all ops of compiled steps have in common is in test_compiled_ops.py.

import pytest
import torch
import torch.nn.functional as F
from testing import DEVICES, LOW_PRECISION

from torch_renaissance._ops import ops

pytestmark = pytest.mark.parametrize("device", DEVICES[1:])
each_dtype = pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
each_form = pytest.mark.parametrize("form", ["none", "tanh"])

# One row, few and many, with columns that don't fill a tile.
SHAPES = [(1, 4), (1, 100), (3, 12), (7, 100), (33, 256), (12608, 768), (1000, 4096), (70001, 4)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def random(shape, dtype, device, seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def as_exact(found, native, exact):
    assert (found.dtype, found.shape, found.stride()) == (
        native.dtype,
        native.shape,
        native.stride(),
    )
    ours, torchs = ((t.double() - exact).norm() for t in (found, native))
    assert ours <= 1.1 * torchs + 1e-6 * exact.norm() + 1e-6


# -- Sums ------------------------------------------------------------------------------------------


@each_dtype
@each_shape
def test_column_sums(shape, dtype, device):
    matrix = random(shape, dtype, device)
    as_exact(ops.column_sums(matrix), matrix.sum(0), matrix.double().sum(0))


@each_dtype
@each_shape
def test_column_sums_in_float32(shape, dtype, device):
    matrix = random(shape, dtype, device)
    found = ops.column_sums(matrix, dtype=torch.float32)
    as_exact(found, matrix.sum(0, dtype=torch.float32), matrix.double().sum(0))


@each_dtype
def test_column_sums_far_from_zero(dtype, device):
    """Which 16 bits could not hold on the way; what they hold is exact."""
    matrix = torch.ones(32768, 8, dtype=dtype, device=device)
    assert ops.column_sums(matrix).eq(32768).all()


def test_what_is_not_finite_stays_in_its_column(device):
    matrix = random((5000, 12), torch.float16, device)
    matrix[4321, 5], matrix[7, 6] = float("nan"), float("inf")
    assert ops.column_sums(matrix).isfinite().logical_not().nonzero().flatten().tolist() == [5, 6]


# -- GELU ------------------------------------------------------------------------------------------


def gelu(x, bias, grad, form):
    """Output and gradients by torch, in the dtype of what is given."""
    x, bias = x.clone().requires_grad_(), bias.clone().requires_grad_()
    y = F.gelu(x + bias, approximate=form)
    return y.detach(), *torch.autograd.grad(y, (x, bias), grad)


def gelu_by_ops(x, bias, grad, form):
    y = ops.bias_gelu(x, bias, form == "tanh")
    return y, *ops.bias_gelu_backward(grad, x, bias, form == "tanh")


@each_form
@each_dtype
@pytest.mark.parametrize("shape", [*SHAPES, (8,), (2, 3, 64), (2, 2, 5, 12)], ids=str)
def test_bias_gelu(shape, dtype, form, device):
    x, grad = (random(shape, dtype, device, seed) for seed in (0, 1))
    bias = random(shape[-1:], dtype, device, 2)
    exact = gelu(x.double(), bias.double(), grad.double(), form)
    natively, found = gelu(x, bias, grad, form), gelu_by_ops(x, bias, grad, form)
    for ours, native, wanted in zip(found, natively, exact, strict=True):
        as_exact(ours, native, wanted)


def values_to_10(dtype, device):
    """Every number of a dtype up to 10, as a matrix of 64 columns, the last row's filled up."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[every.abs() <= 10]  # NaN isn't
    every = torch.cat([every, every.new_zeros(-len(every) % 64)])
    return every.view(-1, 64).to(device)


def largest(found, exact, floor):
    """The largest error, relative to what is at least `floor`."""
    return ((found.double() - exact).abs() / exact.abs().clamp(min=floor)).max()


@each_form
@each_dtype
def test_gelu_of_every_number(dtype, form, device):
    x = values_to_10(dtype, device)
    bias, ones = torch.zeros(64, dtype=dtype, device=device), torch.ones_like(x)
    exact = gelu(x.double(), bias.double(), ones.double(), form)
    natively, found = gelu(x, bias, ones, form), gelu_by_ops(x, bias, ones, form)
    # Smaller values have fewer bits in float16. Where the derivative passes through zero, it is a
    # difference of numbers near 0.2, which the kernel has to 1e-6 for the third of float16's bits.
    for i, floor in enumerate((torch.finfo(torch.float16).tiny, 0.01)):
        allowed = 2 * largest(natively[i], exact[i], floor)
        assert largest(found[i], exact[i], floor) <= allowed


@each_form
def test_gelu_of_what_is_large_or_not_finite(form, device):
    x = torch.tensor([[60000.0, -60000.0, float("inf"), float("nan")]], device=device).half()
    bias, grad = torch.zeros(4, device=device).half(), torch.ones_like(x)
    y, of_x, of_bias = gelu_by_ops(x, bias, grad, form)
    assert y[0, :3].tolist() == [60000.0, 0.0, float("inf")] and y[0, 3].isnan()
    assert of_x[0, :2].tolist() == [1.0, 0.0] and of_x[0, 3].isnan()
    assert torch.equal(of_bias[:2], of_x[0, :2])


@each_form
def test_gradients_of_another_layout(form, device):
    x, grad = (random((48, 32), torch.float16, device, seed) for seed in (0, 1))
    bias = random((32,), torch.float16, device, 2)
    expected = gelu_by_ops(x, bias, grad, form)
    found = gelu_by_ops(x, bias, grad.t().contiguous().t(), form)
    assert all(map(torch.equal, found, expected))
    ones = torch.ones(1, 1, device=device).half().expand(48, 32)
    assert all(
        map(torch.equal, gelu_by_ops(x, bias, ones, form), gelu_by_ops(x, bias, ones.clone(), form))
    )


# -- What is refused -------------------------------------------------------------------------------

TAKES = "takes contiguous tensors of float16 or bfloat16 whose last dimension is a multiple of 4"
BAD_MATRICES = {
    "float32": torch.Tensor.float,
    "columns side by side": lambda t: t.t().contiguous().t(),
    "gaps": lambda t: t[:, :8],
    "6 columns": lambda t: t[:, :6].contiguous(),
    "4100 columns": lambda t: t.new_zeros(2, 4100),
    "nothing": lambda t: t[:0],
}


@pytest.mark.parametrize("name", BAD_MATRICES)
def test_bad_matrices(name, device):
    matrix = BAD_MATRICES[name](random((48, 32), torch.float16, device))
    bias = matrix.new_zeros(matrix.shape[1])
    with pytest.raises(RuntimeError, match=f"column_sums: {TAKES}"):
        ops.column_sums(matrix)
    with pytest.raises(RuntimeError, match=f"bias_gelu: {TAKES}"):
        ops.bias_gelu(matrix, bias, False)
    with pytest.raises(RuntimeError, match=f"bias_gelu_backward: {TAKES}"):
        ops.bias_gelu_backward(matrix, matrix, bias, False)


@pytest.mark.parametrize("shape", [(), (8,), (2, 3, 8)], ids=str)
def test_column_sums_takes_a_matrix(shape, device):
    with pytest.raises(RuntimeError, match="column_sums: takes a matrix, got shape"):
        ops.column_sums(torch.zeros(shape, dtype=torch.float16, device=device))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_column_sums_of_another_dtype(dtype, device):
    matrix = random((48, 32), torch.float16, device)
    with pytest.raises(RuntimeError, match="sums are of matrix's dtype or float32, got"):
        ops.column_sums(matrix, dtype=dtype)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t[:16],
        lambda t: t[None],
        torch.Tensor.float,
        torch.Tensor.bfloat16,
        torch.Tensor.cpu,
        lambda t: t.repeat(2)[::2],
    ],
    ids=["short", "2-D", "float32", "bfloat16", "on a CPU", "gaps"],
)
def test_bad_biases(change, device):
    x = random((48, 32), torch.float16, device)
    bias = change(random((32,), torch.float16, device))
    message = r"bias must be a contiguous tensor of shape \[32\] and of input's dtype and device"
    with pytest.raises(RuntimeError, match=f"bias_gelu: {message}"):
        ops.bias_gelu(x, bias, False)
    with pytest.raises(RuntimeError, match=f"bias_gelu_backward: {message}"):
        ops.bias_gelu_backward(x, x, bias, False)


@pytest.mark.parametrize("change", [torch.Tensor.float, lambda t: t[:7], torch.Tensor.cpu])
def test_bad_gradients(change, device):
    x, bias = random((48, 32), torch.float16, device), random((32,), torch.float16, device)
    with pytest.raises(RuntimeError, match="bias_gelu_backward: grad must be like input"):
        ops.bias_gelu_backward(change(x), x, bias, False)
