# SPDX-License-Identifier: BSD-3-Clause
"""Max pooling as an op of ours, which keeps a byte for each window and not the input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from .._ops import ops
from ._graph import arguments_of, example, is_ours, is_rows, pair, replace

_CHANNELS = 8  # the kernels take a multiple of
_MOST_IN_WINDOW = 255


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, ceil_mode, *window):
        output, positions = ops.max_pool2d_forward.default(input, *window, ceil_mode)
        ctx.save_for_backward(positions)
        ctx.size, ctx.window = input.shape[2:], window
        return output

    @staticmethod
    def backward(ctx, grad):
        (positions,) = ctx.saved_tensors
        found = ops.max_pool2d_backward.default(grad, positions, ctx.size, *ctx.window)
        return found, None, None, None, None


def max_pool2d(
    input: Tensor,
    kernel_size: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    ceil_mode: bool,
) -> Tensor:
    """`F.max_pool2d(input, kernel_size, stride, padding, ceil_mode=ceil_mode)`, differentiable."""
    return _MaxPool.apply(input, ceil_mode, kernel_size, stride, padding)


def _window(node: Node) -> tuple | None:
    """`max_pool2d`'s arguments, if the kernels take the call."""
    call = arguments_of(node, F._max_pool2d)
    x = example(call["input"])
    if not is_ours(x) or x.dim() != 4 or not is_rows(x) or x.shape[1] % _CHANNELS != 0:
        return None
    kernel, padding = pair(call["kernel_size"]), pair(call["padding"])
    stride = pair(call["stride"]) if call["stride"] not in (None, (), []) else kernel
    sizes = (*x.shape[1:], *kernel, *stride, *padding)
    fits = (
        all(isinstance(n, int) for n in sizes)
        and x.shape[2] * x.shape[3] > 1  # else it may be in either format
        and kernel[0] * kernel[1] <= _MOST_IN_WINDOW
        and pair(call["dilation"]) == (1, 1)
        and call["return_indices"] is False
        and isinstance(call["ceil_mode"], bool)
    )
    return (call["input"], kernel, stride, padding, call["ceil_mode"]) if fits else None


def rewrite(graph: Graph) -> None:
    for node in list(graph.nodes):
        if node.target not in (F.max_pool2d, torch.max_pool2d):
            continue
        window = _window(node)
        if window is not None:
            replace(graph, node, max_pool2d, window)
