# SPDX-License-Identifier: BSD-3-Clause
"""What an Evaluator is given, by its caller, a loader and a model: refused where it doesn't fit."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from . import amp
from ._measures import are_labels


def check(model, loss_fn, precision, topk, max_graphs) -> tuple[int, ...]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"Evaluator: model must be an nn.Module, got {type(model).__name__}")
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"Evaluator: loss_fn must be callable, got {type(loss_fn).__name__}")
    if getattr(loss_fn, "reduction", "mean") == "sum":
        raise ValueError(
            "Evaluator: loss_fn must return the mean over the batch, got one with "
            "reduction='sum'; give it reduction='mean'"
        )
    if precision is not None and precision not in amp.PRECISIONS:
        raise ValueError(
            f"Evaluator: precision must be one of {list(amp.PRECISIONS)} or None, got {precision!r}"
        )
    if not isinstance(topk, Iterable):
        raise TypeError(f"Evaluator: topk must be a tuple of ints, such as (1, 5), got {topk!r}")
    topk = tuple(topk)
    for name, value in [*(("every k of topk", k) for k in topk), ("max_graphs", max_graphs)]:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"Evaluator: {name} must be an int >= 1, got {value!r}")
    if len(set(topk)) < len(topk):
        raise ValueError(f"Evaluator: topk has a number twice: {topk}")
    return topk


def parts(batch: object, index: int) -> tuple:
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        got = type(batch).__name__
        got += f" of length {len(batch)}" if isinstance(batch, (tuple, list)) else ""
        raise TypeError(
            f"Evaluator: batch {index} is a {got}, but must be (input, target) or (*inputs, "
            "target); a generator over the loader can make it so"
        )
    if not isinstance(batch[-1], Tensor) or batch[-1].ndim == 0:
        tensor = isinstance(batch[-1], Tensor)
        got = "a tensor without dimensions" if tensor else type(batch[-1]).__name__
        raise TypeError(f"Evaluator: batch {index} must end with a tensor of targets, got {got}")
    return tuple(batch)


def check_output(output: object, target: Tensor, topk: tuple) -> None:
    if not isinstance(output, Tensor):
        raise TypeError(
            f"Evaluator: the model must return a tensor, got {type(output).__name__}; wrap it in a "
            "module that returns its scores"
        )
    if topk and not are_labels(output, target):
        raise ValueError(
            "Evaluator: accuracy needs scores (N, C, ...) and integer labels (N, ...), got "
            f"{output.dtype} {list(output.shape)} and {target.dtype} {list(target.shape)}; topk=() "
            "measures the loss alone"
        )
