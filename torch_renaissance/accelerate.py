# SPDX-License-Identifier: BSD-3-Clause
"""`accelerate`: one line that moves a model and its optimizer into regions."""

from collections.abc import Callable
from functools import wraps
from weakref import ref

import torch
from torch import nn

from . import optim
from .optim._plan import Plan
from .optim._rule import Options

_OURS = {
    torch.optim.SGD: optim.SGD,
    torch.optim.Adam: optim.Adam,
    torch.optim.AdamW: optim.AdamW,
}
_SUPPORTED = (*_OURS, *_OURS.values(), optim.LARS)
GRADIENTS = ("gather", "flat")


def accelerate(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    max_grad_norm: float | None = None,
    ema_decay: float | Callable[[int], float] | None = None,
    decay_bias_like: bool = True,
    gradients: str = "gather",
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Makes `optimizer.step()` one launch; the training loop stays as it is.

    Parameters and state move into contiguous regions, and the optimizer's class is swapped for
    ours, a subclass of it. Numbers, hooks, schedulers, param groups and `state_dict`s keep torch's
    meaning. What can't move without changing meaning stays where it is (see `tr.regions`).

    Args:
        model: gives parameters their names and kinds. It may have parameters that the optimizer
            doesn't, and the other way round.
        optimizer: `torch.optim.SGD`, `Adam` or `AdamW` (any of foreach, fused, capturable), or one
            of `tr.optim`'s. May have taken steps already.
        max_grad_norm: `step()` clips the norm of all gradients to this, in its own pass: what
            `torch.nn.utils.clip_grad_norm_` before it does. `optimizer.grad_norm` is the norm.
        ema_decay: `step()` keeps averaged weights, in its own pass: see `tr.Ema`. A number in
            [0, 1], or a function of the number of steps so far.
        decay_bias_like: False exempts biases and norm layers' parameters from weight decay.
        gradients: "gather" reads `.grad` tensors where autograd left them. "flat" copies them into
            a contiguous plane first: see `optimizer.pack_gradients()`.

    Returns:
        The same model and the same optimizer.

    Raises:
        TypeError: for another kind of optimizer, one whose `step` was replaced, or a model that is
            not an `nn.Module`.
        RuntimeError: inside of `Ema.swapped()`.
        ValueError: for an unknown `gradients`, a negative `max_grad_norm`, or an `ema_decay`
            outside of [0, 1].
        Whatever it raises, nothing has been changed.
    """
    _check(model, optimizer, decay_bias_like, gradients)
    _check_extras(max_grad_norm, ema_decay)
    ours = _OURS.get(type(optimizer), type(optimizer))
    before = vars(optimizer).get("_plan")
    averages = ema_decay is not None
    if before is not None and before.swapped:
        raise RuntimeError(
            "accelerate: the parameters hold their averages now; call it outside of `Ema.swapped()`"
        )
    plan = Plan(ours._rule, Options(decay_bias_like, gradients, {}, averages, ref(model)))
    if before is not None and before.options.averages and averages:
        plan.start_averages(before.averages(), before.averaged())
        plan.host.ema_calls = before.host.ema_calls
    plan.sync(optimizer)
    if before is not None:
        optimizer._skipped_before = optimizer.skipped_steps
    optimizer.__class__ = ours
    optimizer._plan = plan
    optimizer._model = ref(model)
    optimizer.max_grad_norm, optimizer.ema_decay = max_grad_norm, ema_decay
    if "step" in vars(optimizer):
        optimizer.step = _tell_scheduler(optimizer)
    return model, optimizer


def _check(model, optimizer, decay_bias_like, gradients) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"accelerate: model must be an nn.Module, got {type(model).__name__}")
    if type(optimizer) not in _SUPPORTED:
        raise TypeError(
            f"accelerate: {type(optimizer).__name__} is not supported; pass torch.optim.SGD, Adam "
            "or AdamW (not a subclass), or one of tr.optim's"
        )
    step = vars(optimizer).get("step")
    if step is not None and not _is_schedulers(step, type(optimizer)):
        raise TypeError(
            f"accelerate: the step of this {type(optimizer).__name__} was replaced, which a new "
            "one would undo; call accelerate before whatever replaces it"
        )
    if not isinstance(decay_bias_like, bool):
        raise TypeError(f"accelerate: decay_bias_like must be a bool, got {decay_bias_like!r}")
    if gradients not in GRADIENTS:
        raise ValueError(f"accelerate: gradients must be one of {GRADIENTS}, got {gradients!r}")


def _check_extras(max_grad_norm, ema_decay) -> None:
    def is_number(value) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool)

    if max_grad_norm is not None and not (is_number(max_grad_norm) and max_grad_norm >= 0):
        raise ValueError(
            f"accelerate: max_grad_norm must be a number >= 0 or None, got {max_grad_norm!r}"
        )
    good = is_number(ema_decay) and 0 <= ema_decay <= 1
    if not (ema_decay is None or callable(ema_decay) or good):
        raise ValueError(
            "accelerate: ema_decay must be a number in [0, 1], a function of the step, or None, "
            f"got {ema_decay!r}"
        )


def _is_schedulers(step, kind: type) -> bool:
    """Whether `step` is the wrapper that an LR scheduler puts around a class's own step."""
    return (
        getattr(step, "_wrapped_by_lr_sched", False)
        and getattr(step, "__wrapped__", None) is kind.step
    )


def _tell_scheduler(optimizer):
    """Our step in the wrapper that schedulers look for to see that `step` has been called."""
    step = type(optimizer).step
    optimizer_ref = ref(optimizer)

    @wraps(step)
    def wrapper(*args, **kwargs):
        optimizer = optimizer_ref()
        optimizer._opt_called = True
        return step(optimizer, *args, **kwargs)

    wrapper._wrapped_by_lr_sched = True
    return wrapper
