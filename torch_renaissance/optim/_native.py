# SPDX-License-Identifier: BSD-3-Clause
"""Torch's own form of a step, for the parameters that our kernels leave alone."""

import torch
from torch import Tensor


def step(optimizer: torch.optim.Optimizer, native: type, params: set[Tensor], decays) -> None:
    """One step of `native` (a class of torch.optim) over `params` only, bit for bit. A group with
    fused=True takes the for-loop form: torch's fused one is wrong or refuses on such parameters.

    Works on a stand-in that shares the optimizer's state and options. A gradient scale and a found
    infinity are handled here as GradScaler does for optimizers that know nothing of them.
    `decays(p)`: whether weight decay applies to p; a group of those it doesn't apply to is marked
    `bias_like`, which LARS looks for.
    """
    active = {p for p in params if p.grad is not None}
    options = dict(vars(optimizer))
    grad_scale, found_inf = options.pop("grad_scale", None), options.pop("found_inf", None)
    if not active or (found_inf is not None and found_inf.item()):
        return
    if grad_scale is not None:
        for p in active:
            p.grad.div_(grad_scale.to(p.device))
    stand_in = object.__new__(native)
    vars(stand_in).update(options)
    stand_in.param_groups = []
    for group in optimizer.param_groups:
        for decayed in (True, False):
            chosen = [p for p in group["params"] if p in active and decays(p) == decayed]
            if chosen:
                own = {**group, "params": chosen}
                if own.get("fused"):
                    own |= {"foreach": False, "fused": False}
                exempt = {} if decayed else {"weight_decay": 0, "bias_like": True}
                stand_in.param_groups.append(own | exempt)
    if native is torch.optim.SGD:
        _decay_decoupled(stand_in.param_groups)
    # The class's step may be wrapped with hooks already; they have their turn around ours.
    inner = native.step.__wrapped__ if getattr(native.step, "hooked", False) else native.step
    inner(stand_in)


def _decay_decoupled(groups: list[dict]) -> None:
    """torch's SGD has no decoupled decay: w * (1 - lr * wd), then a step without decay."""
    for group in groups:
        if group.get("decoupled_weight_decay") and group["weight_decay"] != 0:
            with torch.no_grad():
                for p in group["params"]:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
            group["weight_decay"] = 0
