# SPDX-License-Identifier: BSD-3-Clause
"""GELU after a Linear layer: the bias is added by GELU's kernel, and its gradient comes with
GELU's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from .._ops import ops
from ._graph import example, is_ours, is_quiet, only_user, replace, takes_channels


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, bias, tanh):
        cast = bias.to(input.dtype)
        ctx.save_for_backward(input, cast)
        ctx.tanh, ctx.dtype = tanh, bias.dtype
        return ops.bias_gelu.default(input, cast, tanh)

    @staticmethod
    def backward(ctx, grad):
        input, bias = ctx.saved_tensors
        of_input, of_bias = ops.bias_gelu_backward.default(grad, input, bias, ctx.tanh)
        return of_input, of_bias.to(ctx.dtype), None


def linear_gelu(input: Tensor, weight: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """`F.gelu(F.linear(input, weight, bias), approximate=approximate)`, differentiable."""
    hidden = F.linear(input, weight).contiguous()
    return _BiasGelu.apply(hidden, bias, approximate == "tanh")


def _fits(gelu: Node) -> Node | None:
    """The Linear layer that `gelu` alone reads, if the kernels take it."""
    linear = gelu.args[0] if len(gelu.args) == 1 else None
    if not isinstance(linear, Node) or linear.target is not F.linear or linear.kwargs:
        return None
    if only_user(linear) is not gelu or len(linear.args) != 3 or linear.args[2] is None:
        return None
    if not is_quiet(linear, gelu):
        return None
    value, bias = example(linear), example(linear.args[2])
    channels = value.shape[-1] if is_ours(value) else None
    fits = (
        takes_channels(channels)
        and isinstance(bias, Tensor)
        and bias.shape == (channels,)
        and bias.is_contiguous()
        and value.is_contiguous()
        and gelu.kwargs.get("approximate", "none") in ("none", "tanh")
    )
    return linear if fits else None


def rewrite(graph: Graph) -> None:
    for node in list(graph.nodes):
        if node.target is not F.gelu:
            continue
        linear = _fits(node)
        if linear is None:
            continue
        approximate = node.kwargs.get("approximate", "none")
        replace(graph, node, linear_gelu, (*linear.args, approximate))
        graph.erase_node(linear)
