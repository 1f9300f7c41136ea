# SPDX-License-Identifier: BSD-3-Clause
"""`ab_test`: builds every variant of a training step, checks that they compute the same, and times
them in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..graphs import RandomState
from .check import rounding_of
from .compare import Comparison
from .machine import busy, environment
from .progress import make_progress
from .report import AbResult
from .setting import DTYPES, Setting, check_builds_alike
from .variants import REFERENCE, VARIANTS, Maker, own

BUDGETS = {"cpu": 100.0, "cuda": 300.0}  # seconds
BATCHES = 4  # of a callable `batch`; the timed steps take them in turn


def ab_test(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    loss_fn: Callable,
    batch: tuple | Callable[[int], tuple],
    *,
    variants: Iterable | dict | None = None,
    steps: int | None = None,
    precision: str = "fp32",
    device: torch.device | str | None = None,
    budget: float | None = None,
    seed: int = 0,
    title: str = "ab_test",
    progress: bool = True,
) -> AbResult:
    """Times a training step of your model in several ways, after checking that all compute the
    same.

    The ways are native PyTorch, eager with its default and its fused optimizer, `torch.compile`
    (default and max-autotune, with the fused optimizer), a hand-made CUDA graph of stock parts,
    `tr.accelerate`, `tr.TrainStep` and `tr.TrainStep(compile=True)`. Each is built from the same
    seed. Losses of the first steps and the parameters after them are compared with native eager's;
    a variant that differs by more than rounding explains (`ab/check.py` says how much that is) is
    reported and not timed. The others take turns in one process, A B C A B C …, and a row gives
    medians and quartiles of a step's wall time, its time by CUDA events, and the host's time until
    the call returns; the time that building, compiling and capturing took is shown apart. A variant
    that fails is a row with its reason. Ctrl-C ends with what was measured so far.

    All variants are alive while they take turns. Where memory doesn't hold them, each is built
    again for blocks of turns of its own, which the result says (`interleaved`).

    Args:
        make_model: builds the module anew at each call, with torch's random numbers alone.
        make_optimizer: `make_optimizer(model)` returns one of `torch.optim`'s optimizers.
        loss_fn: `loss_fn(model, *batch)` returns the loss, a tensor of one element, or
            `(loss, extras)`. Without autocast of its own: see `precision`.
        batch: a tuple of what `loss_fn` takes after the model, or a function of the step's number
            that returns one, which is called for the first 4 steps; the steps take these in turn.
            Tensors are moved to the device before anything is timed.
        variants: names out of `torch_renaissance.ab.VARIANTS`, with native eager added in front;
            None for all that fit into `budget`. A dict adds ways of your own,
            `{name: make_step}`, to those, and may also stand between names, as in
            `["TrainStep", {"mine": make_step}]`: `make_step(make_model, make_optimizer, loss_fn)`
            returns `step(*batch)`, which trains once and returns the loss. Precision is its own
            concern.
        steps: timed steps of each variant. None: as many as the budget allows.
        precision: "fp32" (the model as it is), or autocast with "fp16" (and a loss scale) or
            "bf16".
        device: where; by default the one of the batch's first tensor.
        budget: seconds for all of it, 100 on a CPU and 300 on a GPU. What would exceed it is left
            out, with a row that says so, unless `variants` names it; a compilation that has begun
            is waited for.
        seed: of the weights and of the random numbers of each step.
        title: of the table.
        progress: whether to show it, on stderr.

    Returns:
        The rows, the advice, `to_json()`, `to_html(path)`, `plot(path)`; printed, it is a table.

    Raises:
        TypeError, ValueError: for arguments that don't fit, an unknown variant, or a `make_model`
            that gives the same module or other weights at a second call.
    """
    _check(make_model, make_optimizer, loss_fn, batch, steps, precision, budget)
    named, asked = _named(variants)
    begin, disturbed = time.perf_counter(), [text for text in [busy()] if text]
    batches, device = _batches(batch, device)
    setting = Setting(make_model, make_optimizer, loss_fn, device, precision, seed)
    budget = BUDGETS[device.type] if budget is None else budget
    randoms, shown = RandomState(device), make_progress(progress)
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            model = check_builds_alike(setting)
            setting = replace(setting, rounding=rounding_of(setting, model))
            size = sum(p.numel() for p in model.parameters())
            notes = disturbed + layout_notes(model, device, precision)
            result = AbResult(title, device.type, precision, size, notes=notes)
            modules = sum(1 for _ in model.modules())
            del model
            comparison = Comparison(
                setting, modules, batches, named, asked, budget, begin, steps, shown
            )
            comparison.fill(result)
    finally:
        shown.close()
        randoms.restore()
    result.seconds = time.perf_counter() - begin
    result.environment = environment(device)
    return result


def layout_notes(model: nn.Module, device: torch.device, precision: str) -> list[str]:
    """What another memory format would change, where convolutions are in the slower one."""
    if device.type != "cuda" or precision == "fp32":
        return []
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d)]
    if all(w.is_contiguous(memory_format=torch.channels_last) for w in weights):
        return []
    return [
        "Not in torch.channels_last (--channels-last), in which 16-bit convolutions are faster on "
        "a GPU, and which this package's batch norm and pooling are for."
    ]


def _named(variants: Iterable | dict | None) -> tuple[dict[str, Maker], set[str]]:
    """What to run by name, in order, native eager first; and which of it was asked for."""
    if isinstance(variants, str):
        variants = [variants]
    own_only = isinstance(variants, dict)
    wanted = [*VARIANTS, variants] if own_only else variants
    found: dict[str, Maker] = {REFERENCE: VARIANTS[REFERENCE]}
    asked = {REFERENCE}
    if wanted is None:
        return dict(VARIANTS), asked
    for item in wanted:
        if isinstance(item, dict):
            for name, make_step in item.items():
                _check_own(name, make_step, found)
                found[name] = own(make_step)
                asked.add(name)
        elif item in VARIANTS:
            found[item] = VARIANTS[item]
            if not own_only:
                asked.add(item)
        else:
            raise ValueError(
                f"ab_test: there is no variant {item!r}; there are {', '.join(VARIANTS)}, and a "
                "dict adds others"
            )
    return found, asked


def _check_own(name: object, make_step: object, found: dict) -> None:
    if not isinstance(name, str) or name in found or name in VARIANTS:
        raise ValueError(
            f"ab_test: {name!r} can't name a variant of your own; it must be a string that no "
            "other variant has"
        )
    if not callable(make_step):
        raise TypeError(
            f"ab_test: the variant {name!r} must be a callable (make_model, make_optimizer, "
            f"loss_fn) -> step, got {type(make_step).__name__}"
        )


def _batches(batch, device) -> tuple[list[tuple], torch.device]:
    """On the device. Where a function makes them, four of them."""
    given = [batch(i) for i in range(BATCHES)] if callable(batch) else [batch]
    for one in given:
        if not isinstance(one, tuple):
            raise TypeError(
                "ab_test: batch must be a tuple of what loss_fn takes after the model, or return "
                f"one, got {type(one).__name__}"
            )
    tensors = [t for t in pytree.tree_leaves(given) if isinstance(t, Tensor)]
    if device is None:
        device = tensors[0].device if tensors else torch.device("cpu")
    device = _device(device)

    def move(leaf):
        return leaf.to(device) if isinstance(leaf, Tensor) else leaf

    return [pytree.tree_map(move, one) for one in given], device


def _device(wanted) -> torch.device:
    """With its number, if it is a GPU."""
    try:
        device = torch.device(wanted)
    except RuntimeError:  # it isn't the name of one
        device = None
    if device is None or device.type not in BUDGETS:
        raise ValueError(f"ab_test: device must be a CPU or a CUDA GPU, got {str(wanted)!r}")
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise ValueError(f"ab_test: there is no GPU for device {str(device)!r}")
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.device("cuda", index)


def _check(make_model, make_optimizer, loss_fn, batch, steps, precision, budget) -> None:
    functions = {"make_model": make_model, "make_optimizer": make_optimizer, "loss_fn": loss_fn}
    for name, value in functions.items():
        if isinstance(value, nn.Module) and name == "make_model":
            raise TypeError(
                "ab_test: make_model must be a function that builds a module, got a module; for "
                "example `lambda: copy.deepcopy(model)`"
            )
        if not callable(value):
            raise TypeError(f"ab_test: {name} must be callable, got {type(value).__name__}")
    if not callable(batch) and not isinstance(batch, tuple):
        raise TypeError(
            "ab_test: batch must be a tuple of what loss_fn takes after the model, or a function "
            f"of the step's number, got {type(batch).__name__}"
        )
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
        raise ValueError(f"ab_test: steps must be an int >= 1 or None, got {steps!r}")
    if precision not in DTYPES:
        raise ValueError(f"ab_test: precision must be one of {list(DTYPES)}, got {precision!r}")
    number = isinstance(budget, (int, float)) and not isinstance(budget, bool)
    if budget is not None and not (number and budget > 0):
        raise ValueError(f"ab_test: budget must be a number of seconds > 0, got {budget!r}")
