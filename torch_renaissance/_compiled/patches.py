# SPDX-License-Identifier: BSD-3-Clause
"""A convolution of patches that don't overlap, as the matrix product that it is.

With few input channels, as of images, cuDNN has no quick kernels for it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from ._graph import example, is_ours, pair, replace

_CHANNELS = 8  # of the input: a multiple of these is what convolutions are quick with
_DEFAULTS = (None, 1, 0, 1, 1)  # bias, stride, padding, dilation, groups


def patch_embedding(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.conv2d(input, weight, bias, stride=weight.shape[2:])`, where the patches fill the images.

    Returns:
        (batch, features, rows, columns), contiguous.
    """
    n, channels, height, width = input.shape
    rows, columns = weight.shape[2:]
    down, across = height // rows, width // columns
    patches = input.reshape(n, channels, down, rows, across, columns).permute(0, 2, 4, 1, 3, 5)
    found = F.linear(patches.flatten(3), weight.flatten(1), bias)
    return found.permute(0, 3, 1, 2).contiguous()


def _fits(node: Node) -> bool:
    if len(node.args) < 2 or node.kwargs:
        return False
    options = (*node.args[2:], *_DEFAULTS[len(node.args) - 2 :])
    _, stride, padding, dilation, groups = options
    if isinstance(padding, str):
        return False
    x, weight, result = example(node.args[0]), example(node.args[1]), example(node)
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or not is_ours(result):
        return False
    kernel = tuple(weight.shape[2:])
    return (
        x.dim() == 4
        and weight.is_contiguous()
        and result.is_contiguous()
        and weight.shape[1] % _CHANNELS != 0
        and kernel != (1, 1)
        and pair(stride) == kernel
        and pair(padding) == (0, 0)
        and pair(dilation) == (1, 1)
        and groups == 1
        and all(isinstance(n, int) and n % k == 0 for n, k in zip(x.shape[2:], kernel, strict=True))
    )


def rewrite(graph: Graph) -> None:
    for node in list(graph.nodes):
        if node.target is torch.conv2d and _fits(node):
            replace(graph, node, patch_embedding, (*node.args[:3], None)[:3])
