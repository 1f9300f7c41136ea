# SPDX-License-Identifier: BSD-3-Clause
# LARS without us, for bench_optim.py: timm's where it is installed, and stand-ins in torch's own
# operations, tensor by tensor as timm's, or by torch._foreach functions for all tensors together.
from importlib.util import find_spec

import torch

import torch_renaissance as tr

HAS_TIMM = find_spec("timm") is not None
# timm's over groups of its own for bias-like tensors, which does our work, and over the groups as
# they are, as most callers have it: every tensor then has a ratio and decay.
TIMMS = ("timm", "timm plain") if HAS_TIMM else ()
STOCK = ("for-loop", "foreach", *TIMMS)
# Every tensor moves by about a percent of its norm, so that a wrong ratio shows.
OPTIONS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2, "trust_coefficient": 0.1}


class StockLARS(torch.optim.Optimizer):
    """The ratio for tensors with ndim > 1, lr inside of the velocity, no bound on the ratio."""

    def __init__(self, groups: list[dict], **options):
        super().__init__(groups, options)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            active = [p for p in group["params"] if p.grad is not None]
            for p in active:
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            weights = [p for p in active if p.ndim > 1]
            self.update(weights, group, True)
            self.update([p for p in active if p.ndim <= 1], group, False)

    def update(self, params: list, group: dict, adapts: bool) -> None:
        raise NotImplementedError

    def velocities(self, params: list) -> list[torch.Tensor]:
        return [self.state[p]["momentum_buffer"] for p in params]


def trust_ratio(w: torch.Tensor, g: torch.Tensor, group: dict) -> torch.Tensor:
    """Of norms, one or a vector of them."""
    ratio = group["trust_coefficient"] * w / (g + group["weight_decay"] * w)
    return torch.where((w > 0) & (g > 0), ratio, torch.ones_like(ratio))


class ForLoopLARS(StockLARS):
    """About a dozen kernels a tensor."""

    def update(self, params: list, group: dict, adapts: bool) -> None:
        for p, velocity in zip(params, self.velocities(params), strict=True):
            move = p.grad
            if adapts:
                ratio = trust_ratio(p.norm(), p.grad.norm(), group)
                move = p.grad.add(p, alpha=group["weight_decay"]).mul_(ratio)
            velocity.mul_(group["momentum"]).add_(move, alpha=group["lr"])
            p.sub_(velocity)


class ForeachLARS(StockLARS):
    """The fewest kernels that stock operations need."""

    def update(self, params: list, group: dict, adapts: bool) -> None:
        if not params:
            return
        moves = [p.grad for p in params]
        if adapts:
            norms = [torch.stack(torch._foreach_norm(t)) for t in (params, moves)]
            ratios = trust_ratio(*norms, group).unbind()
            moves = torch._foreach_add(moves, params, alpha=group["weight_decay"])
            torch._foreach_mul_(moves, ratios)
        velocities = self.velocities(params)
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, moves, alpha=group["lr"])
        torch._foreach_sub_(params, velocities)


def make(name: str, groups: list[dict]) -> torch.optim.Optimizer:
    """The variant `name` over these groups; any name that isn't stock is ours."""
    if name in TIMMS:
        return timms(groups if name == "timm plain" else split(groups))
    made = {"for-loop": ForLoopLARS, "foreach": ForeachLARS}.get(name, tr.optim.LARS)
    return made(groups, **OPTIONS)


def split(groups: list[dict]) -> list[dict]:
    """timm's exempts groups without decay from the ratio, so bias-like tensors get such groups."""
    found = []
    for group in groups:
        weights = [p for p in group["params"] if p.ndim > 1]
        others = [p for p in group["params"] if p.ndim <= 1]
        found += [{**group, "params": weights}] if weights else []
        found += [{**group, "params": others, "weight_decay": 0.0}] if others else []
    return found


def timms(groups: list[dict]) -> torch.optim.Optimizer:
    """It writes into the gradients."""
    from timm.optim import Lars

    options = {k: v for k, v in OPTIONS.items() if k != "trust_coefficient"}
    return Lars(groups, trust_coeff=OPTIONS["trust_coefficient"], **options)
