# SPDX-License-Identifier: BSD-3-Clause
"""Where residual branches end: found by a block's structure, whatever library it is from."""

import re

from torch import nn

from ..regions import _NORMS

_SHORTCUTS = ("downsample", "shortcut")


def last_norm_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weight of the norm that ends each residual branch of `model`.

    A residual block has an attribute `downsample` or `shortcut` (which may be None) and children
    `conv1`, `conv2`, …; its branch ends with `bn<n>` or `norm<n>` for the last of these, or within
    `conv<n>` itself where that is a `Sequential`. So it is in the ResNets of torchvision, timm and
    most others. Where a norm comes before its convolution, the branch doesn't end with it.
    """
    weights = []
    for block in model.modules():
        if any(hasattr(block, name) for name in _SHORTCUTS):
            norm = _last_norm(block)
            if norm is not None and norm.weight is not None:
                weights.append(norm.weight)
    return weights


def _last_norm(block: nn.Module) -> nn.Module | None:
    children = dict(block.named_children())
    numbers = [int(match[1]) for name in children if (match := re.fullmatch(r"conv(\d+)", name))]
    if not numbers:
        return None
    names = list(children)
    after = names[names.index(f"conv{max(numbers)}") :]
    tail = (after[0], f"bn{max(numbers)}", f"norm{max(numbers)}")
    ends = [m for name in after if name in tail for m in children[name].modules() if m._parameters]
    return ends[-1] if ends and isinstance(ends[-1], _NORMS) else None
