# SPDX-License-Identifier: BSD-3-Clause
"""Mixed precision: the loss scale on the device, and 16-bit weights for the time of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ._ops import _C

PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16}


class LossScale:
    """torch.amp.GradScaler's scale as a part of the step: it is read, checked, and moved by the
    kernels that read the gradients, so the host never waits.

    Args:
        device: of the parameters.
        init_scale, growth_factor, backoff_factor, growth_interval: as GradScaler's.

    Attributes:
        scale: 0-dim float32 tensor on the device.
        growth_tracker: 0-dim int32 tensor, good steps since the scale last changed.

    Raises:
        ValueError: for a factor or an interval that GradScaler refuses too.
    """

    def __init__(
        self,
        device: torch.device | str,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ):
        if not init_scale > 0:
            raise ValueError(f"LossScale: init_scale must be positive, got {init_scale}")
        if not growth_factor > 1:
            raise ValueError(f"LossScale: growth_factor must be above 1, got {growth_factor}")
        if not 0 < backoff_factor < 1:
            raise ValueError(f"LossScale: backoff_factor must be in (0, 1), got {backoff_factor}")
        if not growth_interval >= 1:
            raise ValueError(f"LossScale: growth_interval must be >= 1, got {growth_interval}")
        self.scale = torch.full((), init_scale, dtype=torch.float32, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval = growth_interval

    @property
    def parts(self) -> tuple[Tensor, Tensor, float, float, float]:
        """What a step needs to know."""
        factors = self.growth_factor, self.backoff_factor, float(self.growth_interval)
        return self.scale, self.growth_tracker, *factors

    def get_scale(self) -> float:
        """The scale as a number. Waits for the device."""
        return self.scale.item()

    def state_dict(self) -> dict:
        """With GradScaler's keys, so that either can load the other's. Waits for the device."""
        return {
            "scale": self.get_scale(),
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": int(self.growth_tracker),
        }

    def load_state_dict(self, state_dict: dict) -> None:
        """In place, so that captured steps go on with it.

        Raises:
            RuntimeError: for an empty `state_dict`, which a disabled GradScaler saves.
        """
        if not state_dict:
            raise RuntimeError(
                "LossScale: the state_dict is empty; it was saved by a GradScaler with "
                "enabled=False, which has no scale"
            )
        self.scale.fill_(state_dict["scale"])
        self.growth_tracker.fill_(state_dict["_growth_tracker"])
        self.growth_factor = state_dict["growth_factor"]
        self.backoff_factor = state_dict["backoff_factor"]
        self.growth_interval = state_dict["growth_interval"]


def parts_of_scaler(scaler: torch.amp.GradScaler, device: torch.device) -> tuple | None:
    """The same of a GradScaler: its own tensors, which the step moves in its stead."""
    if not scaler.is_enabled():
        return None
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(device)
    return (
        scaler._scale,
        scaler._growth_tracker,
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
        float(scaler.get_growth_interval()),
    )


_LINEAR = (nn.Linear, nn.modules.conv._ConvNd, nn.MultiheadAttention)


def places_of_low(modules: list[nn.Module], dropped: set[nn.Module]) -> list[tuple]:
    """(module, name, parameter) of the float32 parameters that Linear, Conv and attention use
    directly, so that autocast would cast each of them at every step. Those that another kind of
    module uses as well (tied embeddings) keep autocast's way: their gradients come in both dtypes.
    """
    found: list[tuple] = []
    elsewhere: set[Tensor] = set()
    for module in dict.fromkeys(m for root in modules for m in root.modules()):
        for name, p in module._parameters.items():
            if p is None:
                continue
            if isinstance(module, _LINEAR) and module not in dropped:
                found.append((module, name, p))
            else:
                elsewhere.add(p)
    return [
        (module, name, p)
        for module, name, p in found
        if p not in elsewhere and p.dtype == torch.float32 and type(p) is nn.Parameter
    ]


@contextmanager
def low_weights(places: list[tuple], copies: dict[Tensor, Tensor]) -> Iterator[None]:
    """For forward and backward, modules see the 16-bit copies in place of their parameters."""
    changed: list[tuple] = []
    dtypes: dict[Tensor, torch.dtype | None] = {}
    stand_ins: dict[Tensor, Tensor] = {}
    try:
        for module, name, p in places:
            if p not in copies or not p.requires_grad or module._parameters.get(name) is not p:
                continue
            if p not in stand_ins:
                if hasattr(p, "grad_dtype"):  # torch >= 2.10; before, the gradient is cast
                    dtypes[p] = p.grad_dtype
                    p.grad_dtype = None
                stand_ins[p] = _C.low_weight(p, copies[p])
            module._parameters[name] = stand_ins[p]
            changed.append((module, name, p))
        yield
    finally:
        for module, name, p in changed:
            module._parameters[name] = p


def restore_grad_dtypes(params) -> None:
    """After the step, with `.grad` gone: gradients are the parameter's dtype again."""
    for p in params:
        if hasattr(p, "grad_dtype") and p.grad_dtype is None:
            p.grad_dtype = p.dtype
