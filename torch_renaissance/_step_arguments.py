# SPDX-License-Identifier: BSD-3-Clause
"""What a TrainStep is given and what its `loss_fn` returns: refused here where it doesn't fit."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import amp
from .data.loader import DeviceLoader


def check(loss_fn, optimizer, model, precision, scaler) -> None:
    if not callable(loss_fn):
        raise TypeError(f"TrainStep: loss_fn must be callable, got {type(loss_fn).__name__}")
    if not hasattr(optimizer, "_train_step"):
        raise TypeError(
            f"TrainStep: {type(optimizer).__name__} is not one of ours; pass it through "
            "tr.accelerate(model, optimizer) first"
        )
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"TrainStep: model must be an nn.Module, got {type(model).__name__}")
    if precision is not None and precision not in amp.PRECISIONS:
        raise ValueError(
            f"TrainStep: precision must be one of {list(amp.PRECISIONS)} or None, got {precision!r}"
        )
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(
            f"TrainStep: scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}"
        )
    if precision is not None and scaler is not None:
        raise ValueError(
            "TrainStep: precision has a loss scale of its own; pass either precision or scaler"
        )


def check_data(data: DeviceLoader | None, device: torch.device) -> None:
    if data is None:
        return
    if not isinstance(data, DeviceLoader):
        raise TypeError(
            f"TrainStep: data must be a tr.data.DeviceLoader, got {type(data).__name__}; of any "
            "other loader, pass the batches: step(*batch)"
        )
    if data.device != device:
        raise ValueError(
            f"TrainStep: data is on {data.device}, the parameters are on {device}; "
            "loader.dataset.to(device) moves a dataset"
        )


def compile_arguments(compile: bool | str | dict) -> dict | None:
    """torch.compile's, without graphs of its own inside of ours; None: don't compile."""
    if compile is False or compile is True:
        return {} if compile else None
    if not isinstance(compile, str | dict):
        raise TypeError(
            "TrainStep: compile must be a bool, a mode of torch.compile or a dict of its "
            f"arguments, got {compile!r}"
        )
    arguments = {"mode": compile} if isinstance(compile, str) else dict(compile)
    if arguments.get("mode") == "max-autotune":
        arguments["mode"] = "max-autotune-no-cudagraphs"
    captures = (
        arguments.get("mode") == "reduce-overhead"
        or arguments.get("backend") == "cudagraphs"
        or (arguments.get("options") or {}).get("triton.cudagraphs")
    )
    if captures:
        raise ValueError(
            "TrainStep: compile asks for CUDA graphs of torch.compile's, but the whole step is one "
            "already; pass compile=True"
        )
    return arguments


def loss_and_extras(returned: object) -> tuple[Tensor, object]:
    loss, extras = (
        returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, ())
    )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(
            "TrainStep: loss_fn must return a tensor of one element, or (loss, extras), got "
            f"{got}; reduce the loss with .mean() or .sum()"
        )
    if not loss.requires_grad:
        raise RuntimeError(
            "TrainStep: the loss doesn't require a gradient; nothing in it depends on a parameter "
            "that does"
        )
    return loss, extras
