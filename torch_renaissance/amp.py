# SPDX-License-Identifier: BSD-3-Clause
"""Mixed precision: the loss scale on the device, and 16-bit weights for the time of a step."""

from __future__ import annotations

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


# Who uses its parameters as autocast expects it. A subclass with a forward of its own may not.
_FORWARDS = {
    kind.forward
    for kind in (
        nn.Linear,
        *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
        *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        nn.MultiheadAttention,
    )
}
_NAMES = {"weight", "bias", "in_proj_weight", "in_proj_bias"}
_NAMES |= {"q_proj_weight", "k_proj_weight", "v_proj_weight"}


def _takes_low(module: nn.Module) -> bool:
    conv = getattr(type(module), "_conv_forward", None)
    return (
        getattr(type(module), "forward", None) in _FORWARDS  # a ScriptModule's raises
        and "forward" not in vars(module)
        and (conv is None or conv.__module__ == "torch.nn.modules.conv")
    )


def places_of_low(modules: list[nn.Module], dropped: set[nn.Module]) -> list[tuple]:
    """(module, name, parameter) of the float32 parameters that Linear, Conv and attention use
    directly, so that autocast would cast each of them at every step. Those that another kind of
    module uses as well (tied embeddings) keep autocast's way: their gradients come in both dtypes.
    """
    found: list[tuple] = []
    elsewhere: set[Tensor] = set()
    for module in dict.fromkeys(m for root in modules for m in root.modules()):
        takes = _takes_low(module) and module not in dropped
        for name, p in module._parameters.items():
            if p is None:
                continue
            if takes and name in _NAMES:
                found.append((module, name, p))
            else:
                elsewhere.add(p)
    return [
        (module, name, p)
        for module, name, p in found
        if p not in elsewhere and p.dtype == torch.float32 and type(p) is nn.Parameter
    ]


def same_places(some: list[tuple], others: list[tuple]) -> bool:
    """By identity: two tensors have no truth value to compare."""
    return [tuple(map(id, place)) for place in some] == [tuple(map(id, p)) for p in others]


class LowWeights:
    """For forward and backward, modules see the 16-bit copies in place of their parameters.

    Args:
        places: of `places_of_low`.
        copies: of those parameters.
        thorough: also looks for changes that torch doesn't count, through `.data`. Waits for the
            device.

    Raises:
        RuntimeError: at the end, where the block has written to a weight or to its copy.
    """

    def __init__(self, places: list[tuple], copies: dict[Tensor, Tensor], thorough: bool = False):
        self._places, self._copies, self._thorough = places, copies, thorough
        self._changed: list[tuple] = []
        self._dtypes: dict[Tensor, torch.dtype | None] = {}
        self._versions: dict[Tensor, tuple[int, int]] = {}
        self._values: dict[Tensor, Tensor] = {}

    def __enter__(self) -> None:
        stand_ins: dict[Tensor, Tensor] = {}
        for module, name, p in self._places:
            fits = p in self._copies and p.requires_grad and module._parameters.get(name) is p
            if not fits:
                continue
            if p not in stand_ins:
                # torch >= 2.10; before, autograd casts the gradient to the parameter's dtype
                if hasattr(p, "grad_dtype") and p.grad is None:
                    self._dtypes[p] = p.grad_dtype
                    p.grad_dtype = None
                stand_ins[p] = _C.low_weight(p, self._copies[p])
                self._versions[p] = self._versions_of(p)
                if self._thorough:
                    self._values[p] = self._copies[p].clone()
            module._parameters[name] = stand_ins[p]
            self._changed.append((module, name, p))

    def __exit__(self, kind: type | None, *_) -> None:
        for module, name, p in self._changed:
            module._parameters[name] = p
        if kind is not None and not issubclass(kind, RuntimeError):
            return
        for module, name, p in self._changed:
            if self._is_written(p):
                raise RuntimeError(
                    f"TrainStep: loss_fn writes to the {name} of a {type(module).__name__} of "
                    f"shape {list(p.shape)}, in whose place it finds a 16-bit copy; change weights "
                    "between steps, or leave precision out"
                )

    def _versions_of(self, p: Tensor) -> tuple[int, int]:
        return p._version, self._copies[p]._version

    def _is_written(self, p: Tensor) -> bool:
        if self._versions_of(p) != self._versions[p]:
            return True
        before, now = self._values.get(p), self._copies[p]
        return before is not None and not torch.allclose(before, now, 0, 0, equal_nan=True)

    def restore_grad_dtypes(self) -> None:
        """Once the gradients are used and gone; those that stay are cast, as autograd would have
        done it."""
        for p, dtype in self._dtypes.items():
            grad = p.grad
            p.grad = None
            p.grad_dtype = dtype
            if grad is not None:
                p.grad = grad if dtype is None else grad.to(dtype)
