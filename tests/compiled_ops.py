# SPDX-License-Identifier: BSD-3-Clause
# The ops of compiled steps on a CPU, written with torch's own and as strict as the kernels, and
# `on_cpu`, within which they exist and the rewriting takes a CPU's tensors.

import importlib
import pkgutil
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from functools import wraps
from unittest.mock import patch

import torch
import torch.nn.functional as F

from torch_renaissance import _compiled
from torch_renaissance._compiled import _graph


def to_rows(t):
    """[rows, channels]: what the kernels see of a tensor with channels last in memory."""
    return t.movedim(1, -1).flatten(0, -2)


def from_rows(rows, like):
    t = torch.empty_like(like)
    t.movedim(1, -1).copy_(rows.view_as(t.movedim(1, -1)))
    return t


def _alike(t, like):
    return t.dtype == like.dtype and t.shape == like.shape and _graph.is_rows(t)


def _check(op, input, *others):
    assert input.dtype in _graph.HALVES and _graph.is_rows(input), f"{op}: input"
    assert input.shape[1] % 4 == 0 and input.numel() > input.shape[1], f"{op}: shape"
    for other in others:
        assert other is None or _alike(other, input), f"{op}: not like input"


def _normalised(input, weight, bias, mean, invstd):
    rows = (to_rows(input).float() - mean) * (weight * invstd) + bias
    return rows.to(input.dtype)


def batch_norm_forward(
    input, weight, bias, residual, absent_bias, running_mean, running_var, momentum, eps, relu
):
    _check("batch_norm_forward", input, residual)
    var, mean = torch.var_mean(to_rows(input).float(), 0, correction=0)
    if running_mean is not None:
        rows = input.numel() // input.shape[1]
        running_mean.lerp_(mean if absent_bias is None else mean + absent_bias, momentum)
        running_var.lerp_(var * (rows / (rows - 1)), momentum)
    invstd = (var + eps).rsqrt()
    y = _normalised(input, weight, bias, mean, invstd)
    if residual is not None:
        y = y + to_rows(residual)
    return from_rows(y.relu() if relu else y, like=input), mean, invstd


def batch_norm_backward(
    grad, more_grad, input, weight, bias, mean, invstd, result, relu, has_absent_bias
):
    _check("batch_norm_backward", input, result)
    assert more_grad is None or result is not None, "batch_norm_backward: more_grad needs a result"
    passed = to_rows(grad).to(input.dtype)
    if more_grad is not None:
        passed = passed + to_rows(more_grad).to(input.dtype)
    if result is not None:
        passed = passed.masked_fill(to_rows(result) <= 0, 0)
    elif relu:
        passed = passed.masked_fill(_normalised(input, weight, bias, mean, invstd) <= 0, 0)
    of_output, normal = passed.float(), (to_rows(input).float() - mean) * invstd
    of_bias, of_weight = of_output.sum(0), (of_output * normal).sum(0)
    of_input = of_output - (of_bias + normal * of_weight) / len(passed)
    of_input = (of_input * (weight * invstd)).to(input.dtype)
    return (
        from_rows(of_input, like=input),
        of_weight,
        of_bias,
        input.new_empty(0) if result is None else from_rows(passed, like=input),
        of_input.float().sum(0).to(input.dtype) if has_absent_bias else input.new_empty(0),
    )


def _check_columns(op, input, *others):
    assert input.dtype in _graph.HALVES and input.is_contiguous(), f"{op}: input"
    assert input.numel() > 0 and input.shape[-1] % 4 == 0, f"{op}: shape"
    assert all(other.dtype == input.dtype for other in others), f"{op}: dtypes"


def column_sums(matrix, *, dtype=None):
    _check_columns("column_sums", matrix)
    assert matrix.dim() == 2, "column_sums: not a matrix"
    assert dtype in (None, torch.float32, matrix.dtype), "column_sums: dtype"
    return matrix.float().sum(0).to(dtype or matrix.dtype)


def _form(tanh):
    return "tanh" if tanh else "none"


def bias_gelu(input, bias, tanh):
    _check_columns("bias_gelu", input, bias)
    return F.gelu((input + bias).float(), approximate=_form(tanh)).to(input.dtype)


def bias_gelu_backward(grad, input, bias, tanh):
    _check_columns("bias_gelu_backward", input, grad, bias)
    x = (input + bias).float()
    of_x = torch.ops.aten.gelu_backward(grad.float(), x, approximate=_form(tanh)).to(input.dtype)
    return of_x, of_x.float().view(-1, len(bias)).sum(0).to(input.dtype)


def pack_heads(q, k, v):
    assert q.dtype in _graph.HALVES and q.shape == k.shape == v.shape, "pack_heads: shapes"
    packed = torch.stack([q, k, v]).permute(1, 3, 0, 2, 4).flatten(2).contiguous()
    return packed, packed.float().sum((0, 1)).to(q.dtype)


def _check_stream(op, stream, half, *others):
    assert stream.dtype == torch.float32 and half in _graph.HALVES, f"{op}: dtypes"
    assert stream.shape[-1] % 4 == 0 and stream.shape[-1] <= 1024, f"{op}: shape"
    for t in (stream, *others):
        assert t is None or (t.shape == stream.shape and t.is_contiguous()), f"{op}: not like input"


def layer_norm_forward(input, branch, branch_bias, weight, bias, eps, dtype):
    _check_stream("layer_norm_forward", input, dtype, branch)
    assert branch is None or branch.dtype == dtype, "layer_norm_forward: branch's dtype"
    total = input
    if branch is not None:
        total = input + (branch if branch_bias is None else branch + branch_bias)
    rows = total.flatten(0, -2)
    var, mean = torch.var_mean(rows, 1, correction=0)
    rstd = (var + eps).rsqrt()
    y = (rows - mean[:, None]) * rstd[:, None] * weight + bias
    total = input.new_empty(0) if branch is None else total
    return y.to(dtype).view(input.shape), total, mean, rstd


def layer_norm_backward(grad, grad_sum, sum, weight, mean, rstd, has_branch, has_branch_bias):
    _check_stream("layer_norm_backward", sum, grad.dtype, grad, grad_sum)
    of_output = grad.float().flatten(0, -2)
    normal = (sum.flatten(0, -2) - mean[:, None]) * rstd[:, None]
    weighted = of_output * weight
    along = (weighted * normal).mean(1, keepdim=True)
    total = (weighted - weighted.mean(1, keepdim=True) - normal * along) * rstd[:, None]
    if grad_sum is not None:
        total = total + grad_sum.flatten(0, -2)
    half = total.to(grad.dtype)
    return (
        total.view(sum.shape),
        half.view(sum.shape) if has_branch else grad.new_empty(0),
        (of_output * normal).sum(0),
        of_output.sum(0),
        half.float().sum(0).to(grad.dtype) if has_branch_bias else grad.new_empty(0),
    )


def _corners(pooled, stride, padding):
    """The first row and column of each window, (rows, 1) and (columns,)."""
    first = [torch.arange(n) * s - p for n, s, p in zip(pooled, stride, padding, strict=True)]
    return first[0][:, None], first[1]


def max_pool2d_forward(input, kernel_size, stride, padding, ceil_mode):
    assert input.dtype in _graph.HALVES and _graph.is_rows(input), "max_pool2d_forward: input"
    assert input.shape[1] % 8 == 0, "max_pool2d_forward: channels"
    y, places = F.max_pool2d(
        input.float(), kernel_size, stride, padding, 1, ceil_mode, return_indices=True
    )
    rows, columns = _corners(y.shape[2:], stride, padding)
    width = input.shape[3]
    within = (places // width - rows) * kernel_size[1] + places % width - columns
    form = {"memory_format": torch.channels_last}
    return y.to(input.dtype).contiguous(**form), within.to(torch.uint8).contiguous(**form)


def max_pool2d_backward(grad, positions, size, kernel_size, stride, padding):
    assert grad.shape == positions.shape, "max_pool2d_backward: shapes"
    rows, columns = _corners(grad.shape[2:], stride, padding)
    within = positions.long()
    places = (within // kernel_size[1] + rows) * size[1] + within % kernel_size[1] + columns
    found = torch.zeros(*grad.shape[:2], size[0] * size[1])
    found.scatter_add_(2, places.flatten(2), grad.float().flatten(2))
    found = found.view(*grad.shape[:2], *size).to(grad.dtype)
    return found.contiguous(memory_format=torch.channels_last)


OPS = [batch_norm_forward, batch_norm_backward, column_sums, bias_gelu, bias_gelu_backward]
OPS += [pack_heads, layer_norm_forward, layer_norm_backward]
OPS += [max_pool2d_forward, max_pool2d_backward]


def takes(value):
    """`is_ours` for a CPU."""
    plain = isinstance(value, torch.Tensor) and value.layout == torch.strided
    return plain and value.dtype in _graph.HALVES and 0 not in value.shape


@contextmanager
def on_cpu():
    """Gives the arguments of all calls, by the names of ops."""
    calls = defaultdict(list)
    library = torch.library.Library("torch_renaissance", "IMPL", "CPU")

    def noted(function):
        @wraps(function)
        def call(*args, **options):
            calls[function.__name__].append(args)
            return function(*args, **options)

        return call

    names = [info.name for info in pkgutil.iter_modules(_compiled.__path__)]
    modules = [importlib.import_module(f"{_compiled.__name__}.{name}") for name in names]
    with ExitStack() as stack:
        stack.callback(library._destroy)
        for function in OPS:
            library.impl(function.__name__, noted(function))
        for module in modules:
            if hasattr(module, "is_ours"):
                stack.enter_context(patch.object(module, "is_ours", takes))
        yield calls
