# SPDX-License-Identifier: BSD-3-Clause
"""Checks of DeviceLoader's arguments: each returns it in one form, or raises a sentence."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

_WHO = "DeviceLoader"


def whole(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{_WHO}: {name} must be an int, got {value!r}") from None


def count(name: str, value: int) -> int:
    value = whole(name, value)
    if value < 1:
        raise ValueError(f"{_WHO}: {name} must be at least 1, got {value}")
    if value >= 2**31:
        raise ValueError(f"{_WHO}: {name} must be less than 2**31, got {value}")
    return value


def word(name: str, value: int) -> int:
    value = whole(name, value)
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{_WHO}: {name} must fit in 64 bits with a sign, got {value}")
    return value


def epoch(name: str, value: int) -> int:
    value = whole(name, value)
    if not 0 <= value < 2**24:  # what the stream of a random number has room for
        raise ValueError(f"{_WHO}: {name} must be from 0 to 2**24 - 1, got {value}")
    return value


def subset(indices: Tensor | Sequence[int], n: int, device: torch.device) -> Tensor:
    try:
        found = torch.as_tensor(indices)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{_WHO}: indices must be ints of shape (n,): {error}") from error
    found = found if found.numel() else found.long()  # an empty list has no dtype
    ints = not (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool)
    if found.dim() != 1 or not ints:
        raise ValueError(
            f"{_WHO}: indices must be ints of shape (n,), got {str(found.dtype)[6:]} of shape "
            f"{list(found.shape)}"
        )
    found = found.to("cpu", torch.int64)
    outside = found[(found < 0) | (found >= n)]
    if len(outside):
        raise ValueError(
            f"{_WHO}: index {int(outside[0])} is not in the dataset, which has {n} samples"
        )
    return found.to(device)
