# SPDX-License-Identifier: BSD-3-Clause
"""One comparison: start and check every variant within the budget, then time them in turns."""

from __future__ import annotations

import gc
import time
from dataclasses import asdict, replace

import torch

from .check import DIFFERS, NOISE_RUNS, OK, Judge, Verdict
from .first_steps import Trace, first_steps, release
from .measure import LEAST_ROUNDS, Plan, Runner, Samples, Times, in_blocks, interleave
from .progress import Silent
from .report import AbResult, Row
from .setting import Setting
from .variants import AUTOTUNED, COMPILED, REFERENCE, VARIANTS, WARMUP, Maker, Variant

MOST_STEPS = 8  # that are compared
LEAST_STEPS = {"cpu": 2, "cuda": WARMUP + 3}  # a graph must have been replayed
SHARE_OF_CHECK = 0.08  # of the budget, for the first steps of native eager
SHARE_OF_TIMING = 0.35  # what compiling leaves of the budget
ROUNDS = {"cpu": 100, "cuda": 60}  # many and short: then neighbours share the machine's moods
MOST_SECONDS = {"cpu": 10.0, "cuda": 4.0}  # of timing one variant
# Expected until one has been compiled: the first kernel, and more for each module. On two busy CPU
# cores it took 31 s for the 8 modules of `mlp` (15 s when they were idle), 100 s for resnet18's 68.
COMPILE_SECONDS = {"cpu": (25.0, 1.5), "cuda": (40.0, 0.0)}
AUTOTUNING = 4  # times as long as compiling


class Comparison:
    def __init__(
        self,
        setting: Setting,
        modules: int,
        batches: list[tuple],
        named: dict[str, Maker],
        asked: set[str],
        budget: float,
        begin: float,
        steps: int | None,
        progress: Silent,
    ):
        self.setting, self.batches, self.device = setting, batches, setting.device
        self.named, self.asked, self.steps, self.progress = named, asked, steps, progress
        self.budget, self.begin = budget, begin
        self.rows = {name: Row(name) for name in named}
        self.alive: dict[str, Variant] = {}
        self.together = True  # whether memory holds all variants at once
        self.judge: Judge | None = None
        self.reference = REFERENCE  # what the others are compared with, unless it failed
        self.check_steps = MOST_STEPS
        first, more = COMPILE_SECONDS[self.device.type]
        self.compile_guess = first + more * modules
        self.compile_s: float | None = None  # once there has been one
        self.step_s: dict[str, float] = {}
        self.samples: dict[str, Samples] = {}

    def fill(self, result: AbResult) -> None:
        """Runs all of it; an interrupt leaves what was measured."""
        try:
            self._start_all()
            self._time()
        except KeyboardInterrupt:
            result.interrupted = True
            result.notes.append("Interrupted: the table holds what was measured until then.")
        finally:
            self._close_all()
        self._collect()
        result.rows, result.interleaved = list(self.rows.values()), self.together
        if self.judge is not None:
            result.check_steps = len(self.judge.trace.losses)
            result.least_drift = self.judge.least_drift
        if result.least_drift is not None:
            result.notes.append(
                f"Compared over {result.check_steps} steps, in which a weight decay shows that is "
                f"wrong by {result.least_drift:.1e} / lr or more."
            )
        for row in result.rows:
            if row.status == OK and not row.measured:
                row.status, row.reason = "left out", "not measured before the interruption"
        if result.repeat_percent is not None and len(result.rows) > 1:
            result.notes.append(
                "The ratios of the first and the second half of the turns differ by at most "
                f"{result.repeat_percent:.1f} %."
            )
        if not self.together:
            result.notes.append(
                "Memory doesn't hold all variants at once: each was built again for blocks of "
                "turns of its own, so that slow moments of the machine may favour one."
            )

    # -- the first steps -------------------------------------------------------------------------

    def _start_all(self) -> None:
        # Where the budget ends, what was asked for and what tells most has been measured.
        order = sorted(self.named, key=lambda name: (name not in self.asked, *_urgency(name)))
        order.sort(key=lambda name: name != REFERENCE)
        self.progress.stage("check", len(order))
        for name in order:
            self.progress.advance(name)
            reason = self._why_not(name)
            if reason:
                self.rows[name].status, self.rows[name].reason = "left out", reason
            else:
                self._start(name)

    def _why_not(self, name: str) -> str:
        """Why a variant that wasn't asked for isn't even begun."""
        if name in self.asked:
            return ""
        if name == "hand graph" and self.device.type != "cuda":
            return "a CUDA graph needs a GPU"
        step = self.judge.trace.step_s if self.judge is not None else 0.0
        expected = self.check_steps * step  # seconds
        timing = LEAST_ROUNDS * step * (len(self.alive) + 1)
        if name in COMPILED:
            unit = self.compile_s or self.compile_guess
            expected += unit * (AUTOTUNING if name == AUTOTUNED else 1)
            timing = max(timing, SHARE_OF_TIMING * self.budget)
        left = self.budget - (time.perf_counter() - self.begin)
        if expected + timing <= left:
            return ""
        what = "compiling" if name in COMPILED else "its first steps"
        return (
            f"{what} may take {_about(expected)} and timing {_about(timing)}, which is more than "
            f"the {_about(max(0.0, left))} left of a budget of {_about(self.budget)}; name the "
            "variant or raise the budget to have it"
        )

    def _start(self, name: str) -> None:
        """Builds a variant and judges its first steps."""
        try:
            self.alive[name], trace = self._first_steps(name)
            self._note(name, trace)
            if self.judge is None:
                self.judge = self._made_judge(name, trace)
            found = asdict(self._judged(name, trace))
        except Exception as error:
            self._fail(name, error)
            self._close(name)
            return
        row, sentence = self.rows[name], found.pop("sentence")
        row.reason = "; ".join(s for s in (sentence, *trace.notes) if s)
        for key, value in found.items():
            setattr(row, key, value)
        if row.status == DIFFERS or not self.together:
            self._close(name)

    def _first_steps(self, name: str, jitter: int = 0, stream: int = 0) -> tuple[Variant, Trace]:
        """Where memory doesn't hold the variant beside those that are there, it is tried alone."""
        setting = replace(self.setting, jitter=jitter)
        first = self.judge is None and not jitter
        enough = self._enough if first else lambda trace: False
        arguments = (self.named[name], setting, self.batches, self.check_steps, enough, stream)
        try:
            return first_steps(*arguments)
        except torch.OutOfMemoryError:
            if not self.alive:
                raise
        self._close_all()  # only here, where no traceback holds the failed variant any more
        gc.collect()
        found = first_steps(*arguments)
        self.together = False
        return found

    def _enough(self, trace: Trace) -> bool:
        return len(trace.losses) >= LEAST_STEPS[self.device.type] and self._is_slow(trace)

    def _is_slow(self, trace: Trace) -> bool:
        return sum(trace.seconds) > SHARE_OF_CHECK * self.budget

    def _note(self, name: str, trace: Trace) -> None:
        row = self.rows[name]
        self.step_s[name] = trace.step_s
        row.losses, row.start_s, row.peak_bytes = trace.losses, trace.start_s, trace.peak_bytes
        if name in COMPILED:
            unit = trace.start_s / (AUTOTUNING if name == AUTOTUNED else 1)
            self.compile_s = max(unit, self.compile_s or 0.0)

    def _made_judge(self, name: str, trace: Trace) -> Judge:
        """The first variant that runs is what the others are compared with: native eager, unless
        it failed."""
        self.check_steps, self.reference = len(trace.losses), name
        runs = (1, 2) if not self._is_slow(trace) else (1,)
        noise = [self._again(name, jitter=i) for i in runs]
        statistical = trace.draws and any(map(draws_its_own, self.named))
        others = [self._again(name, stream=i) for i in runs] if statistical else []
        return Judge(trace, noise, others, self.setting.rounding)

    def _judged(self, name: str, trace: Trace) -> Verdict:
        verdict = self.judge.judge(trace, draws_its_own(name))
        while verdict.status == DIFFERS and self.judge.runs < NOISE_RUNS:
            self.judge.add(self._again(self.reference, jitter=self.judge.runs + 1))
            verdict = self.judge.judge(trace, draws_its_own(name))
        if trace is self.judge.trace and name != REFERENCE:
            verdict.sentence = verdict.sentence or "the others are compared with it"
        return verdict

    def _again(self, name: str, jitter: int = 0, stream: int = 0) -> Trace:
        """The first steps once more, with changed weights or other random numbers."""
        variant, trace = self._first_steps(name, jitter, stream)
        variant.close()
        return trace

    # -- timing ----------------------------------------------------------------------------------

    def _time(self) -> None:
        kind = self.device.type
        names = [n for n, r in self.rows.items() if r.status in (OK, "unchecked")]
        if not names:
            return
        rounds, deadline = ROUNDS[kind], self.begin + self.budget
        if self.steps is not None:
            rounds = min(rounds, self.steps)
        # Never less than a tenth of the budget, where starting the variants has taken it all.
        left = max(0.1 * self.budget, 0.9 * (deadline - time.perf_counter()))
        seconds = min(MOST_SECONDS[kind], left / len(names)) / rounds
        steps = None if self.steps is None else max(1, self.steps // rounds)
        late = (lambda: False) if self.steps else (lambda: time.perf_counter() > deadline)
        plan = Plan(rounds, seconds, self.step_s, steps, late)
        self.progress.stage("time", rounds * len(names))
        if self.together:
            runs = self._runs(names)
            interleave(runs, plan, self.device, self.samples, self.progress.advance)
        else:
            in_blocks(names, self._rebuild, plan, self.device, self.samples, self.progress.advance)

    def _runs(self, names: list[str]) -> dict[str, Runner]:
        """Of all that are alive; of those that made room for one that failed, once more."""
        found = {}
        for name in names:
            try:
                if name not in self.alive:
                    self.alive[name] = self._built_again(name)
                found[name] = Runner(self.alive[name].step, self.batches)
            except Exception as error:
                self._fail(name, error)
        return found

    def _built_again(self, name: str) -> Variant:
        variant, _ = first_steps(
            self.named[name], self.setting, self.batches, LEAST_STEPS[self.device.type]
        )
        return variant

    def _rebuild(self, name: str):
        variant = self._built_again(name)
        return Runner(variant.step, self.batches), variant.close

    def _collect(self) -> None:
        for name, samples in self.samples.items():
            row = self.rows[name]
            if samples.failed is not None:
                self._fail(name, samples.failed)
                continue
            row.turns = [1e6 * seconds for seconds in samples.walls]
            row.steps = samples.steps
            row.wall = Times.of(samples.walls, 1e6)
            row.device = Times.of(samples.devices, 1e6)
            row.host = Times.of(samples.hosts, 1e6)
        measured = [row for row in self.rows.values() if row.measured]
        for row in measured:
            row.ratio, row.halves = ratios(measured[0].turns, row.turns)

    # -- the rest --------------------------------------------------------------------------------

    def _fail(self, name: str, error: Exception) -> None:
        row = self.rows[name]
        row.status, row.reason = "failed", reason(error)

    def _close(self, name: str) -> None:
        variant = self.alive.pop(name, None)
        if variant is not None:
            variant.close()

    def _close_all(self) -> None:
        for name in list(self.alive):
            self._close(name)
        release(self.device)


def _urgency(name: str) -> tuple[bool, bool, int]:
    """What compiles longest comes last; first comes what the question is about."""
    first = ("TrainStep", "accelerate", "eager fused")
    rank = first.index(name) if name in first else len(first)
    return name == AUTOTUNED, name in COMPILED, rank


def _about(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def draws_its_own(name: str) -> bool:
    """Whether a variant may draw other random numbers than eager kernels from the same seed."""
    return name in COMPILED or name not in VARIANTS


def ratios(base: list[float], turns: list[float]) -> tuple[Times | None, list[float]]:
    """Of two variants turn by turn, which a slow moment of the machine changes least; then the
    median of each half."""
    found = [b / t for b, t in zip(base, turns, strict=False)]
    half = len(found) // 2
    halves = [Times.of(part).median for part in (found[:half], found[half:])] if half else []
    return Times.of(found), halves


def reason(error: Exception) -> str:
    """The first line of what was raised."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of memory: {lines[0][:300]}" if lines else "out of memory"
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
