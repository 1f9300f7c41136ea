# SPDX-License-Identifier: BSD-3-Clause
# What stands between backward and the next forward in a mixed-precision loop, alone: unscale,
# finite check, clip, fused AdamW, update of the scale, EMA of the weights; torch's against ours.
from collections.abc import Callable

import shapes
import torch
from common import reason
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from train_step_measure import time_rounds

import torch_renaissance as tr

CASES = ("resnet50", "gpt2_124m", "gpt2_774m")
VARIANTS = ("stock", "ours", "stock + EMA", "ours + EMA")
MAX_NORM, EMA_DECAY = 1.0, 0.999
LR = 1e-3
TOLERANCE = (
    1e-3  # of the first move; two norms of 1e9 numbers, summed in other orders, part by less
)


def make_start(case: str, device: torch.device) -> tuple[list, list]:
    """Weights and gradients, fp32. The gradients' norm exceeds any loss scale, so that clipping
    makes it 1 whatever scale they are taken to have, and the first steps of all chains agree."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    found = shapes.CASES[case]()
    return [0.02 * draw(s) for s in found], [1e4 * draw(s) for s in found]


def stock_chain(
    model: nn.Module, optimizer: torch.optim.Optimizer, with_ema: bool
) -> Callable[[], object]:
    """A scale of 1 that never grows: unscale_ works in place, and gradients stay as they are."""
    parameters = list(model.parameters())
    device = parameters[0].device
    scaler = torch.amp.GradScaler(device.type, init_scale=1.0, growth_interval=2**31 - 1)
    scaler.scale(torch.zeros((), device=device))  # as backward's would: it makes the scale
    average = get_ema_multi_avg_fn(EMA_DECAY)
    averaged = AveragedModel(model, multi_avg_fn=average) if with_ema else None

    def chain() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        if averaged is not None:
            averaged.update_parameters(model)

    return chain


def ours_chain(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """All of it in `optimizer`'s own pass; clip and EMA are what `tr.accelerate` was given."""
    from torch_renaissance.amp import LossScale

    scale = LossScale(optimizer.param_groups[0]["params"][0].device)
    return lambda: optimizer._update(loss_scale=scale.parts)


def build(name: str, start: list, gradients: list) -> tuple[list[nn.Parameter], Callable]:
    """The weights that a variant updates, and one call that does its whole chain."""
    model = nn.ParameterList([nn.Parameter(t.clone()) for t in start])
    own, with_ema = list(model.parameters()), name.endswith("EMA")
    optimizer = torch.optim.AdamW(own, lr=LR, fused=True)
    for p, g in zip(own, gradients, strict=True):
        p.grad = g.clone()
    if name.startswith("stock"):
        return own, stock_chain(model, optimizer, with_ema)
    options = {"ema_decay": EMA_DECAY} if with_ema else {}
    model, optimizer = tr.accelerate(model, optimizer, max_grad_norm=MAX_NORM, **options)
    return own, ours_chain(optimizer)


@torch.no_grad()
def largest_difference(own: list, other: list) -> float:
    """Of two variants' weights, as a share of AdamW's first move, which is the learning rate."""
    return max(float((p - q).abs().max()) for p, q in zip(own, other, strict=True)) / LR


def measure(case: str, device: torch.device, rounds: int, budget: float) -> dict:
    """One step of each, compared with stock's; then rounds in which all take turns."""
    start, gradients = make_start(case, device)
    found: dict[str, dict] = {}
    weights, runs = {}, {}
    for name in VARIANTS:
        try:
            weights[name], run = build(name, start, gradients)
            run()
            runs[name] = run
            found[name] = {}
        except Exception as error:  # the others are still worth having
            found[name] = {"failed": reason(error)}
    for name in (n for n in runs if "stock" in runs):
        apart = largest_difference(weights[name], weights["stock"])
        found[name] |= {"difference": apart, "agrees": apart <= TOLERANCE}
    for name, times in time_rounds(runs, device, rounds, budget).items():
        found[name] |= times
    size = sum(t.numel() for t in start)
    return {"tensors": len(start), "parameters": size, "variants": found}
