# SPDX-License-Identifier: BSD-3-Clause
"""Timing in turns: A B C A B C …, so that a slow moment of the machine meets every variant alike.

A turn is a number of steps back to back with one wait at the end: its wall time, and on CUDA the
time between two events around it. On CUDA single steps on an idle device follow, of which the
host's share is taken: the time until the call returns."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from .first_steps import release, synchronize

LEAST_ROUNDS = 2  # one for each half
MOST_STEPS = 2000  # of a variant in one turn
HOST_SAMPLES = 3  # in each turn

Step = Callable[..., object]


@dataclass
class Samples:
    """Of one variant, a number for each turn; in seconds per step."""

    walls: list[float] = field(default_factory=list)
    devices: list[float] = field(default_factory=list)  # by CUDA events
    hosts: list[float] = field(default_factory=list)  # HOST_SAMPLES for each turn
    steps: int = 0  # in a turn
    failed: Exception | None = None


@dataclass(frozen=True)
class Times:
    """Median, quartiles and number of some times."""

    median: float
    q1: float
    q3: float
    samples: int

    @classmethod
    def of(cls, values: list[float], scale: float = 1.0) -> Times | None:
        """None where there are no values."""
        if not values:
            return None
        v = sorted(x * scale for x in values)
        q1, median, q3 = statistics.quantiles(v, n=4, method="inclusive") if len(v) > 1 else v * 3
        return cls(median, q1, q3, len(v))

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles."""
        return (self.q3 - self.q1) / 2


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def wall_time(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def host_time(run: Callable[[], object], device: torch.device) -> float:
    """The call alone, with nothing queued on the device and without waiting for it."""
    synchronize(device)
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    synchronize(device)
    return seconds


class Runner:
    """Calls a step on one batch after the other."""

    def __init__(self, step: Step, batches: list[tuple]):
        self._step, self._batches, self._next = step, batches, 0

    def __call__(self) -> object:
        batch = self._batches[self._next]
        self._next = (self._next + 1) % len(self._batches)
        return self._step(*batch)


def take_turn(run: Runner, samples: Samples, device: torch.device) -> None:
    """`samples.steps` steps back to back, then some single ones."""
    if device.type != "cuda":
        samples.walls.append(wall_time(run, samples.steps, device))
        return
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    start.record()
    for _ in range(samples.steps):
        run()
    end.record()
    torch.cuda.synchronize(device)
    samples.walls.append((time.perf_counter() - begin) / samples.steps)
    samples.devices.append(start.elapsed_time(end) * 1e-3 / samples.steps)
    samples.hosts += [host_time(run, device) for _ in range(HOST_SAMPLES)]


@dataclass
class Plan:
    """How long to measure: `rounds` of turns of about `seconds`, or of `steps` steps where those
    are given, ending early when `late()` and there have been LEAST_ROUNDS. `step_s` is what a step
    takes in each variant, roughly."""

    rounds: int
    seconds: float
    step_s: dict[str, float]
    steps: int | None = None
    late: Callable[[], bool] = lambda: False

    def samples(self, name: str) -> Samples:
        steps = self.steps or int(self.seconds / max(self.step_s[name], 1e-9))
        return Samples(steps=max(1, min(MOST_STEPS, steps)))


def interleave(
    runs: dict[str, Runner],
    plan: Plan,
    device: torch.device,
    found: dict[str, Samples],
    tick: Callable[[str], object] = lambda name: None,
) -> None:
    """Fills `found` as it goes, so that an interrupt leaves what was measured. A variant that
    raises gets no further turn."""
    found |= {name: plan.samples(name) for name in runs}
    with no_garbage_collection():
        for done in range(plan.rounds):
            if done >= LEAST_ROUNDS and plan.late():
                break
            for name, run in runs.items():
                tick(name)
                _try_turn(run, found[name], device)


def in_blocks(
    names: list[str],
    rebuild: Callable[[str], tuple[Runner, Callable[[], object]]],
    plan: Plan,
    device: torch.device,
    found: dict[str, Samples],
    tick: Callable[[str], object] = lambda name: None,
    blocks: int = 2,
) -> None:
    """The same where only one variant fits into memory: in each of the blocks every variant is
    built again, warmed up, timed in some turns, and given up. `rebuild` returns what to run and
    what to call in the end."""
    found |= {name: plan.samples(name) for name in names}
    turns = max(2, plan.rounds // blocks)
    for block in range(blocks):
        if block and plan.late():
            break
        for name in names:
            samples = found[name]
            if samples.failed is not None:
                continue
            try:
                run, close = rebuild(name)
            except Exception as error:
                samples.failed = error
                continue
            try:
                with no_garbage_collection():
                    for done in range(turns):
                        if done >= 2 and plan.late():
                            break
                        tick(name)
                        _try_turn(run, samples, device)
            finally:
                close()
                del run, close  # which hold the variant, and the next one needs the room
                release(device)


def _try_turn(run: Runner, samples: Samples, device: torch.device) -> None:
    if samples.failed is not None:
        return
    try:
        take_turn(run, samples, device)
    except Exception as error:
        samples.failed = error
