# SPDX-License-Identifier: BSD-3-Clause
"""Batch norm, with the residual and the ReLU that follow it, as an op of ours."""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from .._ops import ops
from ._graph import (
    arguments_of,
    example,
    is_ours,
    is_quiet,
    is_rows,
    only_user,
    same_form,
    takes_channels,
)

_ADDS = (operator.iadd, operator.add, torch.add, "add_", "add")
_RELUS = (F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_")


class _BatchNorm(torch.autograd.Function):
    """`relu(norm(input) + residual)`, as `torch_renaissance::batch_norm_forward` has it."""

    @staticmethod
    def forward(ctx, input, weight, bias, residual, absent_bias, stats, momentum, eps, relu):
        absent = None if absent_bias is None else absent_bias.to(input.dtype)
        output, mean, invstd = ops.batch_norm_forward.default(
            input, weight, bias, residual, absent, *stats, momentum, eps, relu
        )
        result = output if relu and residual is not None else None
        ctx.save_for_backward(input, weight, bias, mean, invstd, result)
        ctx.relu, ctx.residual = relu, residual is not None
        ctx.absent = None if absent_bias is None else absent_bias.dtype
        return output

    @staticmethod
    def backward(ctx, grad):
        input, weight, bias, mean, invstd, result = ctx.saved_tensors
        of_input, of_weight, of_bias, passed, of_absent = ops.batch_norm_backward.default(
            grad, None, input, weight, bias, mean, invstd, result, ctx.relu, ctx.absent is not None
        )
        of_residual = None
        if ctx.residual:
            of_residual = grad if result is None else passed
        of_absent = None if ctx.absent is None else of_absent.to(ctx.absent)
        return of_input, of_weight, of_bias, of_residual, of_absent, None, None, None, None


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    momentum: float,
    eps: float,
    residual: Tensor | None,
    absent_bias: Tensor | None,
    relu: bool,
) -> Tensor:
    """`relu(F.batch_norm(input + absent_bias, training=True) + residual)`, differentiable.

    Args:
        input: 16-bit, channels (dimension 1) last in memory.
        weight, bias, running_mean, running_var: (channels,), float32.
        residual: like input.
        absent_bias: (channels,), floating point.
    """
    F._verify_batch_size(input.size())
    stats = (running_mean, running_var)
    return _BatchNorm.apply(input, weight, bias, residual, absent_bias, stats, momentum, eps, relu)


def _is_vector(node: object, of: Tensor) -> bool:
    value = example(node)
    return (
        isinstance(value, Tensor)
        and value.dtype == torch.float32
        and value.device == of.device
        and value.shape == of.shape[1:2]
        and value.is_contiguous()
    )


def _fits(call: dict[str, object]) -> bool:
    """Whether the kernels take this call; whatever torch would refuse is left to it."""
    x = example(call["input"])
    if call["training"] is not True or not is_ours(x) or not is_rows(x):
        return False
    momentum, eps = call["momentum"], call["eps"]
    vectors = [call["weight"], call["bias"]]
    stats = [call["running_mean"], call["running_var"]]
    return (
        takes_channels(x.shape[1])
        and isinstance(momentum, float)
        and isinstance(eps, float)
        and all(_is_vector(v, x) for v in vectors)
        and (stats == [None, None] or all(_is_vector(v, x) for v in stats))
    )


def _memory(node: object) -> int | None:
    value = example(node)
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _reads_between(first: Node, last: Node, stats: list[object]) -> bool:
    """Whether something between two nodes reads the running statistics that `first` writes to."""
    written, node = {_memory(value) for value in stats if value is not None}, first.next
    while node is not last:
        if not written.isdisjoint(map(_memory, node.all_input_nodes)):
            return True
        node = node.next
    return False


def _residual(adds: Node | None, norm: Node) -> Node | None:
    """What a node adds to `norm`, if that is all it does."""
    if adds is None or adds.target not in _ADDS or adds.kwargs or len(adds.args) != 2:
        return None
    a, b = adds.args
    writes = adds.target in (operator.iadd, "add_")
    other = b if a is norm else None if writes else a
    if other is norm or not same_form(example(other), example(norm)):
        return None
    return other


def _is_relu(node: Node | None, of: Node) -> bool:
    return node is not None and node.target in _RELUS and node.all_input_nodes == [of]


def _bias_of(conv: object, norm: Node) -> Node | None:
    """The bias of the convolution that `norm` alone reads, which it needn't add then."""
    convolutions = (torch.conv1d, torch.conv2d, torch.conv3d)
    if not isinstance(conv, Node) or conv.target not in convolutions:
        return None
    if only_user(conv) is not norm or len(conv.args) < 3 or not is_quiet(conv, norm):
        return None
    return conv.args[2]


def rewrite(graph: Graph) -> None:
    """Puts `batch_norm` in the place of the calls that the kernels take."""
    for node in list(graph.nodes):
        if node.target is not F.batch_norm:
            continue
        call = arguments_of(node, F.batch_norm)
        if not _fits(call):
            continue
        reads = [call[k] for k in ("input", "running_mean", "running_var", "weight", "bias")]
        last, residual = node, None
        adds = only_user(node)
        added = _residual(adds, node)
        stats = [call["running_mean"], call["running_var"]]
        if added is not None and is_quiet(node, adds) and not _reads_between(node, adds, stats):
            last, residual = adds, added
        relu = _is_relu(only_user(last), last) and is_quiet(last, only_user(last))
        conv = call["input"]
        absent_bias = _bias_of(conv, node)
        if absent_bias is not None:
            conv.update_arg(2, None)
        with graph.inserting_before(last):
            joint = graph.call_function(
                batch_norm, (*reads, call["momentum"], call["eps"], residual, absent_bias, relu)
            )
        replaced = only_user(last) if relu else last
        joint.meta.update(replaced.meta)
        replaced.replace_all_uses_with(joint)
        for dead in {replaced: None, last: None, node: None}:
            graph.erase_node(dead)
