# SPDX-License-Identifier: BSD-3-Clause
"""What every variant of a training step starts from: the same weights, optimizer and precision."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .._seed import seed

DTYPES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}  # of autocast
INIT_SCALE = 1024.0  # at GradScaler's 65536 the first steps may be skipped, and there is no loss
_IMPLEMENTATIONS = ("foreach", "fused", "param_names")  # says nothing of what a step computes


@dataclass(frozen=True)
class Setting:
    """The user's three functions, and where and how a step of them is taken.

    Args:
        make_model: builds a module anew at each call, from torch's random numbers alone.
        make_optimizer: `make_optimizer(model)`, one of `torch.optim`'s.
        loss_fn: `loss_fn(model, *batch)` returns the loss, or `(loss, extras)`.
        jitter: 0, or the seed of a relative change of all weights by at most `rounding`: what the
            precision itself leaves open.
        rounding: the relative spacing of numbers in which the step computes.
    """

    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    loss_fn: Callable
    device: torch.device
    precision: str = "fp32"
    seed: int = 0
    jitter: int = 0
    rounding: float = 0.0

    def model(self) -> nn.Module:
        seed(self.seed)
        model = self.make_model()
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"ab_test: make_model must return an nn.Module, got {type(model).__name__}"
            )
        model = model.to(self.device)
        if self.jitter:
            shake(model, self.rounding, self.jitter)
        return model

    def optimizer(self, model: nn.Module, **kind: bool) -> torch.optim.Optimizer:
        """The user's optimizer; with `fused=True` and the like, the same in another form."""
        seed(self.seed)
        optimizer = self.make_optimizer(model)
        _check_optimizer(optimizer)
        return another_form(optimizer, **kind) if kind else optimizer

    def strongest(self, model: nn.Module) -> torch.optim.Optimizer:
        """torch's fused form where there is one."""
        try:
            return self.optimizer(model, fused=True)
        except (TypeError, RuntimeError):
            return self.optimizer(model)

    def autocast(self) -> torch.autocast:
        dtype = DTYPES[self.precision]
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)

    def scaler(self) -> torch.amp.GradScaler:
        enabled = self.precision == "fp16"
        return torch.amp.GradScaler(self.device.type, INIT_SCALE, enabled=enabled)


def another_form(optimizer: torch.optim.Optimizer, **kind: bool) -> torch.optim.Optimizer:
    """The same optimizer with the same groups and numbers, built with `fused=True` and the like.

    Raises:
        TypeError: where its class has no such argument, as few of torch's have `fused`.
    """
    known = inspect.signature(type(optimizer)).parameters
    for name in kind:
        if name not in known:
            raise TypeError(f"{type(optimizer).__name__} has no argument {name}")
    options = {k: v for k, v in optimizer.defaults.items() if k in known}
    left_out = {*_IMPLEMENTATIONS, *kind}
    groups = [
        {k: v for k, v in group.items() if k not in left_out} for group in optimizer.param_groups
    ]
    options = {k: v for k, v in options.items() if k not in _IMPLEMENTATIONS}
    return type(optimizer)(groups, **options | kind)


def shake(model: nn.Module, rounding: float, number: int) -> None:
    """Multiplies each weight by 1 + u, with u uniform in ±`rounding`."""
    random = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for p in (p for p in model.parameters() if p.is_floating_point()):
            shift = torch.rand(p.shape, generator=random, dtype=torch.float64) * 2 - 1
            p.copy_((p.double().cpu() * (1 + rounding * shift)).to(p.dtype))


def loss_of(returned: object) -> Tensor:
    """Of what a `loss_fn` returned: the loss, or a tuple that begins with it."""
    loss = returned[0] if isinstance(returned, tuple) and returned else returned
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(
            "ab_test: loss_fn must return a tensor of one element, or (loss, extras), got "
            f"{got}; reduce the loss with .mean() or .sum()"
        )
    return loss


def check_builds_alike(setting: Setting) -> nn.Module:
    """Builds twice before anything is compared; returns a model of its own.

    Raises:
        TypeError, ValueError: where `make_model` or `make_optimizer` return something else than
            they should, or `make_model` gives the same module, or other weights, a second time.
    """
    first, second = setting.model(), setting.model()
    shared = {id(p) for p in first.parameters()} & {id(p) for p in second.parameters()}
    if first is second or shared:
        raise ValueError(
            "ab_test: make_model returned the same parameters twice; it must build anew, for "
            "example `lambda: copy.deepcopy(model)`"
        )
    theirs = second.state_dict()
    for name, value in first.state_dict().items():
        other = theirs.get(name)
        if isinstance(value, Tensor) and not (
            isinstance(other, Tensor)
            and value.shape == other.shape
            and torch.equal(value.nan_to_num(), other.nan_to_num())
        ):
            raise ValueError(
                f"ab_test: make_model gave another {name} the second time, from the same seed; it "
                "must draw from torch's random numbers alone, or copy one model"
            )
    setting.optimizer(second)
    return first


def _check_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            "ab_test: make_optimizer must return a torch.optim.Optimizer, got "
            f"{type(optimizer).__name__}"
        )
    if hasattr(optimizer, "_train_step"):
        raise TypeError(
            "ab_test: make_optimizer must return one of torch.optim's, which is what is compared "
            "with; the variants that need ours make it from that"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise TypeError(
            f"ab_test: make_optimizer returned {type(optimizer).__name__}, whose step needs a "
            "closure; the steps compared here compute the loss once and call optimizer.step()"
        )
    if optimizer.state:
        raise ValueError(
            "ab_test: make_optimizer returned an optimizer that has taken steps; each variant "
            "starts from a new one"
        )
