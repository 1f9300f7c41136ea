# SPDX-License-Identifier: BSD-3-Clause
# Timers that interleave their variants: back to back, single (with the host's share), graph replay.
# All return medians and spreads in microseconds.
import gc
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from torch_renaissance.ab.measure import no_garbage_collection, wall_time

LEAST_ROUNDS = 3
LONGEST = 6.0  # seconds; a set of variants gets no further round after them


@dataclass(frozen=True)
class Timed:
    """What is timed, and what must happen before each run without being timed."""

    run: Callable[[], object]
    prepare: Callable[[], object] | None = None


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def flush_bytes(device: torch.device) -> int:
    """Twice the L2 cache."""
    return 2 * (getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 << 20)


def l2_flusher(device: torch.device) -> Callable[[], object]:
    """A call that overwrites twice the L2 cache, for steps that shall find their data in memory."""
    return torch.empty(flush_bytes(device), dtype=torch.uint8, device=device).zero_


def summary(seconds: list[float]) -> dict:
    """Median and spread in µs."""
    us = sorted(s * 1e6 for s in seconds)
    q1, median, q3 = statistics.quantiles(us, n=4, method="inclusive") if len(us) > 1 else us * 3
    values = {"median": median, "q1": q1, "q3": q3, "min": us[0], "max": us[-1]}
    return {**{k: round(v, 3) for k, v in values.items()}, "samples": len(us)}


def interleave(
    variants: Iterable[str],
    rounds: int,
    measure: Callable[[str], float],
    longest: float = LONGEST,
) -> dict[str, dict]:
    """A B C A B C …: a slow moment of the machine meets every variant alike. After `longest`
    seconds no further round begins."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    start = time.perf_counter()
    with no_garbage_collection():
        for done in range(rounds):
            if done >= LEAST_ROUNDS and time.perf_counter() - start > longest:
                break
            for name, taken in samples.items():
                taken.append(measure(name))
    return {name: summary(taken) for name, taken in samples.items()}


def event_time(run: Callable[[], object], repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3 / repeats


def time_b2b(
    steps: dict[str, Timed],
    device: torch.device,
    rounds: int,
    budget: float,
    longest: float = LONGEST,
) -> dict[str, dict]:
    """Back to back: many steps, one synchronize; about `budget` seconds a variant and round."""
    runs = {name: step.run for name, step in steps.items() if step.prepare is None}
    least, trial = (10, 3) if device.type == "cuda" else (1, 1)
    repeats = {}
    for name, run in runs.items():
        repeats[name] = max(least, min(1000, int(budget / wall_time(run, trial, device))))
    return interleave(
        runs, rounds, lambda name: wall_time(runs[name], repeats[name], device), longest
    )


def time_single(
    steps: dict[str, Timed],
    device: torch.device,
    repeats: int,
    before: Callable[[], object] | None = None,
) -> dict[str, dict[str, dict]]:
    """One step on an idle device: `single` with the host's latency, `host` the call alone (CUDA).

    `before` (an L2 flush) runs untimed ahead of every step, after what prepares it, whose data it
    shall not leave in the cache.
    """
    host: dict[str, list[float]] = {name: [] for name in steps}

    def measure(name: str) -> float:
        for call in (steps[name].prepare, before):
            if call is not None:
                call()
        if device.type != "cuda":
            return wall_time(steps[name].run, 1, device)

        def run() -> None:
            start = time.perf_counter()
            steps[name].run()
            host[name].append(time.perf_counter() - start)

        return event_time(run, 1)

    single = interleave(steps, repeats, measure)
    if device.type != "cuda":
        return {"single": single}
    return {"single": single, "host": {name: summary(taken) for name, taken in host.items()}}


def capture(step: Timed, warmup: int = 3) -> torch.cuda.CUDAGraph:
    """Warmed up on the current stream: kernels on many others make every graph slower."""
    for _ in range(warmup):
        if step.prepare is not None:
            step.prepare()
        step.run()
    if step.prepare is not None:
        step.prepare()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step.run()
    return graph


def time_replays(
    graphs: dict[str, torch.cuda.CUDAGraph], rounds: int, budget: float
) -> dict[str, dict]:
    """Replays back to back, timed by events."""
    repeats = {}
    for name, graph in graphs.items():
        event_time(graph.replay, 2)
        repeats[name] = max(10, min(2000, int(budget / event_time(graph.replay, 3))))
    return interleave(graphs, rounds, lambda n: event_time(graphs[n].replay, repeats[n]))


def copy_bandwidth(device: torch.device, rounds: int = 7, size: int = 2 << 30) -> float:
    """Bytes read + written per second by a large device-to-device copy."""
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    event_time(lambda: target.copy_(source), 3)
    seconds = [event_time(lambda: target.copy_(source), 10) for _ in range(rounds)]
    return 2 * size / statistics.median(seconds)
