# SPDX-License-Identifier: BSD-3-Clause
"""What the rewriting of Dynamo's graphs asks of their nodes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .._ops import ops

HALVES = (torch.float16, torch.bfloat16)
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_ours(value: object) -> bool:
    """Whether kernels of ours take such a tensor: of 16 bits, on a GPU, not empty."""
    return (
        isinstance(value, Tensor)
        and value.device.type == "cuda"
        and value.layout == torch.strided
        and value.dtype in HALVES
        and 0 not in value.shape
    )


def example(node: object) -> object:
    """What Dynamo has seen a node to be: a fake tensor, or whatever else it stands for."""
    return node.meta.get("example_value") if isinstance(node, Node) else None


def takes_channels(channels: object) -> bool:
    """Whether batch norm's kernels, and those on columns, take so many numbers in a row."""
    return isinstance(channels, int) and channels % 4 == 0 and 0 < channels <= 4096


def is_counter(value: object) -> bool:
    """Whether this may be a BatchNorm's counter of batches."""
    return isinstance(value, Tensor) and value.dtype == torch.int64 and value.dim() == 0


def only_user(node: Node) -> Node | None:
    """The one node that reads this one, or None."""
    return next(iter(node.users)) if len(node.users) == 1 else None


_IN_PLACE = ("iadd", "isub", "imul", "itruediv", "ipow", "iand", "ior", "ixor", "setitem")


def writes(node: Node) -> bool:
    """Whether a node, by its name or its arguments, writes to something that it reads."""
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
    return in_place or "out" in node.kwargs or bool(node.kwargs.get("inplace"))


def _counts(node: Node) -> bool:
    """Whether a node moves on counters of batches."""
    if node.target is ops.count_batches_.default:
        return True
    return node.target == "add_" and is_counter(example(node.args[0]))


def is_quiet(first: Node, last: Node) -> bool:
    """Whether the nodes between two others compute tensors and do nothing else: none switches
    gradients or autocast on or off, none writes to what `first` may read."""
    node = first.next
    while node is not last:
        computes = isinstance(example(node), Tensor | tuple | list | int) and node.users
        if node.op not in ("placeholder", "get_attr") and not _counts(node):
            if writes(node) or not computes:
                return False
        node = node.next
    return True


@cache
def _signature(function: Callable) -> inspect.Signature:
    return inspect.signature(function)


def arguments_of(node: Node, function: Callable) -> dict[str, object]:
    """What `node` calls `function`, which has a Python signature, with, defaults included."""
    bound = _signature(function).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return bound.arguments


def is_rows(value: Tensor) -> bool:
    """Whether channels, dimension 1, are side by side in memory, row after row."""
    dims = value.dim()
    if dims not in (2, 4, 5):
        return False
    return value.is_contiguous(memory_format=_FORMATS.get(dims, torch.contiguous_format))


def pair(value: object) -> tuple:
    """An argument for rows and columns: one number for both, or each its own."""
    return (value, value) if isinstance(value, int) else tuple(value)


def replace(graph: Graph, node: Node, function: Callable, arguments: tuple) -> None:
    """Puts a call of `function` in the place of a node that others may read."""
    with graph.inserting_before(node):
        ours = graph.call_function(function, arguments)
    ours.meta.update(node.meta)
    node.replace_all_uses_with(ours)
    graph.erase_node(node)


def same_form(a: object, b: object) -> bool:
    """Whether one is of the other's dtype, sizes and strides, on the same device."""
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and (a.dtype, a.device, a.shape, a.stride()) == (b.dtype, b.device, b.shape, b.stride())
    )
