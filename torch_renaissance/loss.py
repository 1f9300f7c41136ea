# SPDX-License-Identifier: BSD-3-Clause
"""Cross entropy in two passes over the logits: one kernel forward, one backward."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import _reduction

from ._ops import ops

_PLAIN = (Tensor, nn.Parameter)  # what our ops see as a user sees it


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` with one kernel forward and one backward.

    The logits are read once in each, and nothing of their size is written but the gradient.
    Arithmetic is fp32 (fp64 for fp64). Under autocast the loss is fp32, as torch's is, and the
    gradient has the logits' dtype; no fp32 copy is made. A row that is ignored has a gradient of
    zero, whatever its logits are.

    Args:
        input: logits (C), (N, C) or (N, C, d1, ...), with any strides, of dtype float32, float64,
            float16 or bfloat16, on a CPU or, in a build for CUDA, on a GPU.
        target: int64 labels in [0, C) or `ignore_index`, of shape (), (N) or (N, d1, ...).
        weight: (C), a factor for each class.
        size_average, reduce: deprecated, as in torch.
        ignore_index: the label of rows that are left out.
        reduction: "none", "mean" (divides by the sum of the rows' weights) or "sum".
        label_smoothing: from 0 to 1, the share of the loss that all classes have equally.

    All else that torch's function takes is left to it: soft targets, other dtypes, devices and
    layouts, subclasses of `Tensor`, no elements, `torch.func`'s transforms, forward-mode AD, and
    the second derivative.

    Returns:
        The loss: a scalar, or for "none" of target's shape. Of input's dtype, or under autocast
        at least float32.

    Raises:
        IndexError: for a label out of bounds on a CPU. On a GPU the loss and the row's gradient
            are NaN instead; `tr.debug(True)` turns that into an IndexError too.
        Whatever torch's function raises, for what it refuses.
    """
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    plain = type(input) in _PLAIN and type(target) in _PLAIN
    if not plain or not (weight is None or type(weight) in _PLAIN):
        return F.cross_entropy(
            input,
            target,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    return ops.cross_entropy.default(
        input, target, weight, _reduction.get_enum(reduction), ignore_index, label_smoothing
    )


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss`, whose arguments it takes, by way of `cross_entropy`."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )
