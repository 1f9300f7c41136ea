# SPDX-License-Identifier: BSD-3-Clause
"""The first steps of a variant: losses, what they left in the model, start-up time and memory."""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .setting import Setting, loss_of
from .variants import Maker, Variant

LAST = 3  # steps that are taken as steady


@dataclass
class Trace:
    """What is left of the first steps of a variant, on the CPU."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of each step
    start: dict[str, Tensor] = field(default_factory=dict)  # parameters and buffers before
    end: dict[str, Tensor] = field(default_factory=dict)  # and after; empty where unknown
    build_s: float = 0.0
    peak_bytes: int | None = None
    notes: list[str] = field(default_factory=list)
    draws: bool = False  # whether a step draws random numbers

    @property
    def step_s(self) -> float:
        """Of a steady step."""
        return statistics.median(self.seconds[-LAST:])

    @property
    def start_s(self) -> float:
        """Building, compiling, autotuning, warm-up and capture: all beyond steady steps."""
        return max(0.0, self.build_s + sum(self.seconds) - len(self.seconds) * self.step_s)


def snapshot(model: nn.Module | None) -> dict[str, Tensor]:
    """Parameters and buffers by name, as copies on the CPU."""
    if model is None:
        return {}
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: t.detach().to("cpu", copy=True) for name, t in named if not t.is_sparse}


def release(device: torch.device) -> None:
    """Gives what is no longer used back to the device; a CPU's memory isn't measured."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def randoms_of(device: torch.device) -> list[Tensor]:
    cuda = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *cuda]


def first_steps(
    make: Maker,
    setting: Setting,
    batches: list[tuple],
    steps: int,
    enough: Callable[[Trace], bool] = lambda trace: False,
    stream: int = 0,
) -> tuple[Variant, Trace]:
    """Builds a variant and takes at most `steps` steps, fewer where they are `enough`.

    Every step begins with the same random numbers in all variants: `stream` stands for others.
    Memory is what the variant adds to what was there.
    """
    device, trace = setting.device, Trace()
    release(device)
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        begin = time.perf_counter()
        variant = make(setting)
        synchronize(device)
        trace.build_s = time.perf_counter() - begin
        try:
            trace.start = snapshot(variant.model)
            for i in range(steps):
                torch.manual_seed(setting.seed + 1 + i + 7919 * stream)
                before = randoms_of(device)
                begin = time.perf_counter()
                loss = loss_of(variant.step(*batches[i % len(batches)]))
                synchronize(device)
                trace.seconds.append(time.perf_counter() - begin)
                trace.losses.append(float(loss))
                now = randoms_of(device)
                trace.draws |= not all(map(torch.equal, before, now))
                if enough(trace):
                    break
            trace.end = snapshot(variant.model)
        except BaseException:
            variant.close()
            raise
    if device.type == "cuda":
        trace.peak_bytes = torch.cuda.max_memory_allocated(device) - allocated
    trace.notes = list(dict.fromkeys(_first_line(w.message) for w in caught if _is_ours(w)))
    for warning in (w for w in caught if not _is_ours(w)):
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return variant, trace


def _is_ours(warning: warnings.WarningMessage) -> bool:
    return str(warning.message).startswith("TrainStep runs eagerly")


def _first_line(message: object) -> str:
    return str(message).strip().splitlines()[0]
