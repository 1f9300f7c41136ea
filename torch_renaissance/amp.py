# SPDX-License-Identifier: BSD-3-Clause
"""Mixed precision: the precisions of a step, and the loss scale on the device."""

from __future__ import annotations

import torch
from torch import Tensor

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
