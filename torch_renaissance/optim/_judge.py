# SPDX-License-Identifier: BSD-3-Clause
"""What can be said of one parameter: whether the kernels take it, whether it may move, and why."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .._ops import _C, build_info

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def step_is_hosted(group: dict) -> bool:
    """Whether torch keeps this group's step counters on the CPU."""
    return not (group.get("capturable") or group.get("fused"))


def is_fresh(entry: dict, keys: Iterable[str], step: Tensor) -> bool:
    """Whether no step has counted yet, every one having been skipped: torch has no entry then."""
    tensors = [entry[k] for k in keys if entry.get(k) is not None]
    return int(step) == 0 and not any(t.any() for t in tensors)


def why_native(p: Tensor, group: dict) -> str:
    """Why the kernels can't update `p`, or an empty string."""
    if group.get("differentiable"):
        return "differentiable=True"
    if type(p) not in (nn.Parameter, Tensor):
        return f"is a {type(p).__name__}"
    if p.layout != torch.strided or p.dtype not in _DTYPES:
        return f"{p.layout} {p.dtype}"
    if p.device.type != "cpu" and not (p.device.type == "cuda" and build_info()["cuda"]):
        return f"no kernels for {p.device.type}"
    if not _C.is_dense(p):
        return f"strides {p.stride()} leave gaps"
    return "is an inference tensor" if p.is_inference() else ""


def why_unsupported(p: Tensor, mixed: bool) -> str:
    """Why the kernels can't take the gradient that `p` has, or an empty string. `mixed`: whether
    `p` has a 16-bit copy, whose gradients are 16-bit as well."""
    grad = p.grad
    if grad is None:
        return ""
    narrow = mixed and grad.dtype in (torch.float16, torch.bfloat16)
    fits = (
        grad.layout == torch.strided
        and (grad.dtype == p.dtype or narrow)
        and grad.device == p.device
        and grad.shape == p.shape
    )
    plain = type(grad) in (nn.Parameter, Tensor)
    return "" if fits and plain else f"its gradient is {grad.layout} {grad.dtype} {type(grad)}"


def why_loose(p: Tensor) -> str:
    """Why the weight can't be moved into a region without changing its meaning, or ''."""
    if _C.storage_holders(p) > 1:
        return "its storage is shared"
    storage = p.untyped_storage()
    if p.storage_offset() or storage.nbytes() != p.nbytes:
        return "it is a view of a larger buffer"
    if p.device.type == "cpu" and (storage.is_shared() or p.is_pinned()):
        return "it lies in shared or pinned memory"
    if not storage.resizable():  # numpy's, a bytearray's, another process's
        return "its memory is not torch's own"
    return ""


def kind_of(t: Tensor) -> tuple:
    return t.dtype, t.device


def made_for(p: Tensor) -> tuple:
    return p.dtype, p.device, p.shape, p.stride()


def overlapping(params: list[Tensor]) -> list[Tensor]:
    """Those whose memory another one of them uses too."""
    spans = sorted(
        (str(p.device), p.data_ptr(), p.data_ptr() + p.nbytes, i)
        for i, p in enumerate(params)
        if p.numel()
    )
    found: set[int] = set()
    last = ("", 0, 0, -1)  # of those before, the one that reaches farthest
    for span in spans:
        if span[0] == last[0] and span[1] < last[2]:
            found |= {span[3], last[3]}
        if span[0] != last[0] or span[2] > last[2]:
            last = span
    return [params[i] for i in sorted(found)]
