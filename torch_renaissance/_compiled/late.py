# SPDX-License-Identifier: BSD-3-Clause
"""What is replaced once forward and backward are separate graphs, before Inductor fuses them.

* The gradient of a bias is the sum of a matrix' columns; Inductor takes two or three kernels.
* Where a residual block begins, two gradients are added: batch norm's backward adds what it reads.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

from .._ops import ops
from ._graph import is_ours, only_user, same_form, takes_channels

_aten = torch.ops.aten
_LEAST_ROWS = 1024  # fewer are left to be fused with what comes before


def _value(node: object) -> object:
    return node.meta.get("val") if isinstance(node, Node) else None


def _sums_columns(node: Node) -> bool:
    if node.target is not _aten.sum.dim_IntList or node.args[1:2] != ([0],):
        return False
    matrix = _value(node.args[0])
    if not is_ours(matrix) or matrix.dim() != 2 or not matrix.is_contiguous():
        return False
    if node.kwargs.get("dtype") not in (None, torch.float32, matrix.dtype):
        return False
    rows, channels = matrix.shape
    return takes_channels(channels) and isinstance(rows, int) and rows >= _LEAST_ROWS


# Inductor lays out what an op reads by "eager_input_vals", without which it may pad rows.


def _replace_sum(graph: Graph, node: Node) -> None:
    keeps = len(node.args) > 2 and node.args[2]
    with graph.inserting_before(node):
        options = dict(node.kwargs)
        sums = graph.call_function(ops.column_sums.default, node.args[:1], options)
        sums.meta["eager_input_vals"] = ((_value(node.args[0]),), options)
        value = _value(node)
        sums.meta["val"] = value.reshape(-1) if keeps else value
        if keeps:
            sums = graph.call_function(_aten.view.default, (sums, list(value.shape)))
            sums.meta["val"] = value
    node.replace_all_uses_with(sums)
    graph.erase_node(node)


def _join_sum(graph: Graph, norm: Node) -> None:
    """`norm` calls batch_norm_backward(grad, more_grad, input, ..., result, ...)."""
    grad, more, x, result = norm.args[0], norm.args[1], norm.args[2], norm.args[7]
    if more is not None or result is None or not isinstance(grad, Node):
        return
    if grad.target is not _aten.add.Tensor or grad.kwargs or only_user(grad) is not norm:
        return
    a, b = grad.args
    if not all(same_form(_value(n), _value(x)) for n in (a, b)):
        return
    norm.args = (a, b, *norm.args[2:])
    graph.erase_node(grad)
    if before := norm.meta.get("eager_input_vals"):
        arguments, others = before
        norm.meta["eager_input_vals"] = ((_value(a), _value(b), *arguments[2:]), others)


def rewrite(graph: Graph) -> None:
    for node in list(graph.nodes):
        if _sums_columns(node):
            _replace_sum(graph, node)
        elif node.target is ops.batch_norm_backward.default:
            _join_sum(graph, node)


class LatePass(CustomGraphPass):
    """`rewrite` for Inductor, which keeps what it compiles by this pass' `uuid`."""

    def __call__(self, graph: Graph) -> None:
        rewrite(graph)

    def uuid(self) -> bytes:
        return Path(__file__).read_bytes()
