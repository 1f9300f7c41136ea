# SPDX-License-Identifier: BSD-3-Clause
# What an optimizer step costs besides time: launches, memory, padding.
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from optim_variants import Problem, build
from timers import release, synchronize

import torch_renaissance as tr


def count_launches(run: Callable[[], object]) -> dict[str, int]:
    """Kernels, copies and memsets of one step, from the profiler's trace; {} if it saw none."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(2):  # the first trace of a process can come back empty
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            run()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        kinds = Counter(e["cat"] for e in events if e.get("ph") == "X" and "cat" in e)
        counts = {k: kinds[k] for k in ("kernel", "gpu_memcpy", "gpu_memset")}
        if counts["kernel"]:
            return counts
    return {}


def step_memory(problem: Problem, name: str, frozen: float) -> dict[str, int]:
    """Bytes above what was allocated before: peak of set-up, of the first and of a later step."""
    device = problem.start[0].device
    release(device)
    before = torch.cuda.memory_allocated(device)

    def peak() -> int:
        synchronize(device)
        found = torch.cuda.max_memory_allocated(device) - before
        torch.cuda.reset_peak_memory_stats(device)
        return found

    peak()
    variant = build(problem, name, frozen=frozen)
    found = {"setup": peak()}
    for when in ("first_step", "later_step"):
        variant.optimizer.step()
        found[when] = peak()
    return {**found, "resident": torch.cuda.memory_allocated(device) - before}


def padding_fraction(problem: Problem) -> float | None:
    regions = getattr(tr, "regions", None)
    plan = regions(build(problem, "gather").optimizer) if regions else None
    found = getattr(plan, "padding_fraction", None)
    return found() if callable(found) else found
