# SPDX-License-Identifier: BSD-3-Clause
"""Layer norm in a transformer's residual stream.

Under autocast the stream is float32; a branch's 16-bit output is added to it, the sum normalised,
and the result cast to 16 bits by the layer that reads it. One kernel does all of that, and the one
of backward also makes the branch's 16-bit gradient and that of its last bias.
"""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from .._ops import ops
from ._graph import HALVES, arguments_of, example, is_ours, is_quiet, only_user, writes
from .attention import self_attention
from .gelu import linear_gelu

_CHANNELS, _MOST_CHANNELS = 4, 1024
# Functions that read 16 bits of a tensor under autocast, and which argument that is.
_READERS = {F.linear: 0, torch.addmm: 1, linear_gelu: 0, self_attention: 0}
_SHAPES = ("transpose", "permute", "reshape", "view", "flatten", operator.getitem)
_ADDS = (operator.add, torch.add)


class _LayerNorm(torch.autograd.Function):
    """Returns the output, and with a branch the sum as well."""

    @staticmethod
    def forward(ctx, input, branch, branch_bias, weight, bias, eps, dtype):
        ctx.set_materialize_grads(False)
        cast = None if branch_bias is None else branch_bias.to(dtype)
        output, sum, mean, rstd = ops.layer_norm_forward.default(
            input, branch, cast, weight, bias, eps, dtype
        )
        ctx.save_for_backward(input if branch is None else sum, weight, mean, rstd)
        ctx.branch, ctx.dtype = branch is not None, dtype
        ctx.bias_dtype = None if branch_bias is None else branch_bias.dtype
        return output if branch is None else (output, sum)

    @staticmethod
    def backward(ctx, grad, grad_sum=None):
        sum, weight, mean, rstd = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros_like(sum, dtype=ctx.dtype)
        if grad_sum is not None:
            grad_sum = grad_sum.contiguous()
        has_bias = ctx.bias_dtype is not None
        found = ops.layer_norm_backward.default(
            grad.contiguous(), grad_sum, sum, weight, mean, rstd, ctx.branch, has_bias
        )
        of_input, of_branch, of_weight, of_bias, of_branch_bias = found
        return (
            of_input,
            of_branch if ctx.branch else None,
            of_branch_bias.to(ctx.bias_dtype) if has_bias else None,
            of_weight,
            of_bias,
            None,
            None,
        )


def layer_norm(input: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype):
    """`F.layer_norm(input, weight.shape, weight, bias, eps).to(dtype)`, differentiable."""
    return _LayerNorm.apply(input.contiguous(), None, None, weight, bias, eps, dtype)


def add_layer_norm(
    input: Tensor,
    branch: Tensor,
    branch_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """`sum = input + (branch + branch_bias)`, and its layer norm in branch's dtype.

    Returns:
        (output, sum), both contiguous.
    """
    rows = (input.contiguous(), branch.contiguous())
    return _LayerNorm.apply(*rows, branch_bias, weight, bias, eps, branch.dtype)


def _reinterprets(node: Node) -> bool:
    return any(isinstance(a, torch.dtype) for a in (*node.args, *node.kwargs.values()))


def _dtype_of_readers(node: Node) -> torch.dtype | None:
    """What all of a node's readers cast it to; None if they don't agree, or one doesn't."""
    found = set()
    for user in node.users:
        place = _READERS.get(user.target)
        if place is not None and user.op == "call_function":
            if user.all_input_nodes.count(node) != 1 or user.args[place : place + 1] != (node,):
                return None
            value = example(user)
            value = value[0] if isinstance(value, tuple) else value
            found.add(value.dtype if is_ours(value) else None)
        elif user.target in _SHAPES and user.args[0] is node and not _reinterprets(user):
            found.add(_dtype_of_readers(user))
        else:
            return None
    return found.pop() if len(found) == 1 else None


def _is_float_row(node: object, channels: int) -> bool:
    value = example(node)
    return (
        isinstance(value, Tensor)
        and node.op in ("placeholder", "get_attr")
        and value.dtype == torch.float32
        and value.shape == (channels,)
        and value.is_contiguous()
    )


def _fits(call: dict[str, object]) -> bool:
    value, shape = example(call["input"]), call["normalized_shape"]
    if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.dim() < 2:
        return False
    channels = value.shape[-1]
    return (
        isinstance(channels, int)
        and tuple(shape) == (channels,)
        and channels % _CHANNELS == 0
        and 0 < channels <= _MOST_CHANNELS
        and isinstance(call["eps"], float)
        and all(_is_float_row(call[name], channels) for name in ("weight", "bias"))
    )


def _only_in_stream(node: Node) -> bool:
    """Whether nothing asks for a tensor's strides: all that reads it are sums and layer norms."""
    return all(
        user.target is F.layer_norm or (user.target in _ADDS and _only_in_stream(user))
        for user in node.users
    )


def _parts(sum: object, norm: Node) -> tuple[Node, Node] | None:
    """The stream and the branch that `sum` adds; None if it isn't such a sum."""
    if not isinstance(sum, Node) or sum.target not in _ADDS or sum.kwargs or len(sum.args) != 2:
        return None
    if not is_quiet(sum, norm):
        return None
    a, b = (example(n) for n in sum.args)
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.shape != b.shape:
        return None
    if any(map(writes, sum.users)) or not (example(sum).is_contiguous() or _only_in_stream(sum)):
        return None
    if a.dtype == torch.float32 and b.dtype in HALVES:
        return sum.args
    if b.dtype == torch.float32 and a.dtype in HALVES:
        return sum.args[::-1]
    return None


def _drops_nothing(node: Node) -> bool:
    call = arguments_of(node, F.dropout) if node.target is F.dropout else {}
    return bool(call) and (call["p"] == 0 or call["training"] is False) and not call["inplace"]


def _take_bias(branch: Node, reader: Node) -> Node | None:
    """The bias of the layer whose output `reader` adds, which the layer adds no longer."""
    node, total = branch, reader
    while only_user(node) is reader and (node.target == "transpose" or _drops_nothing(node)):
        node, reader = node.args[0], node
    if only_user(node) is not reader:
        return None
    layer, place = node, 2
    if node.target is operator.getitem and node.args[1] == 0:
        layer, place = node.args[0], 6
        if layer.target is not self_attention or only_user(layer) is not node:
            return None
    elif node.target is not F.linear or node.kwargs or len(node.args) < 3:
        return None
    if not is_quiet(layer, total):
        return None
    bias = layer.args[place]
    layer.update_arg(place, None)
    return bias


def rewrite(graph: Graph) -> None:
    """To be called after the rewriting of attention and GELU, whose functions are readers."""
    for node in list(graph.nodes):
        if node.target is not F.layer_norm:
            continue
        call = arguments_of(node, F.layer_norm)
        dtype = _dtype_of_readers(node)
        if dtype is None or not _fits(call):
            continue
        total, vectors = call["input"], (call["weight"], call["bias"], call["eps"])
        parts = _parts(total, node)
        if parts is None or example(parts[1]).dtype != dtype:
            with graph.inserting_before(node):
                output = graph.call_function(layer_norm, (total, *vectors, dtype))
        else:
            stream, branch = parts
            with graph.inserting_before(total):
                arguments = (stream, branch, _take_bias(branch, total), *vectors)
                both = graph.call_function(add_layer_norm, arguments)
                output = graph.call_function(operator.getitem, (both, 0))
                new = graph.call_function(operator.getitem, (both, 1))
            new.meta.update(total.meta)
            both.meta["example_value"] = (example(node), example(total))
            total.replace_all_uses_with(new)
        output.meta["example_value"] = example(node).to(dtype)
        node.replace_all_uses_with(output)
        graph.erase_node(node)
        if parts is not None and not total.users:
            graph.erase_node(total)
