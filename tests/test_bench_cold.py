# SPDX-License-Identifier: BSD-3-Clause
# `bench_optim.py --cold`: L2 is flushed right before each single step, and the flush overwrites as
# many bytes as it says.
import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from testing import DEVICES
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import bench_optim
import optim_variants
import shapes
import timers

CPU = torch.device("cpu")
TINY = [(8, 4), (8,), (3, 8), (3,)]


class Written(TorchDispatchMode):
    """Counts the bytes of tensors that operations change."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for value, argument in zip(args, function._schema.arguments, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.bytes += value.numel() * value.element_size()
        return function(*args, **kwargs or {})


@pytest.fixture
def flushes(monkeypatch):
    """A list that each flush adds "flush" to, besides what it does."""
    calls, make = [], timers.l2_flusher

    def counting(device):
        flush = make(device) if device.type == "cuda" else lambda: None
        return lambda: (calls.append("flush"), flush())

    monkeypatch.setattr(timers, "l2_flusher", counting)
    return calls


# --- before each single step ----------------------------------------------------------------------


def test_a_flush_is_the_last_thing_before_each_step():
    """What prepares a step would leave its data in the cache."""
    calls = []
    steps = {
        "plain": timers.Timed(lambda: calls.append("plain")),
        "prepared": timers.Timed(lambda: calls.append("run"), lambda: calls.append("prepare")),
    }
    timers.time_single(steps, CPU, repeats=3, before=lambda: calls.append("flush"))
    assert calls == ["flush", "plain", "prepare", "flush", "run"] * 3


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_measuring_cold_flushes_once_for_each_single_step(device, cold, flushes, monkeypatch):
    monkeypatch.setitem(shapes.CASES, "tiny", lambda: TINY)
    device = torch.device(device)
    problem = optim_variants.make_problem("tiny", "adamw", torch.float32, device)
    args = argparse.Namespace(quick=True, cold=cold)
    found = bench_optim.measure(problem, args, device)["us"]["single"]
    steps = sum(times["samples"] for times in found.values())
    assert steps >= 3 * len(found) > 0
    assert len(flushes) == (steps if cold else 0)


@pytest.mark.cuda
def test_cold_run_on_a_gpu(flushes, monkeypatch, tmp_path):
    monkeypatch.setitem(shapes.CASES, "tiny", lambda: TINY)
    path = tmp_path / "record.json"
    words = ["--device", "cuda", "--quick", "--cases", "tiny", "--json", str(path)]
    assert bench_optim.OptimizerSteps().main([*words, "--cold"]) == 0
    record = json.loads(path.read_text())
    single = record["cases"]["tiny"]["us"]["single"]
    assert record["settings"]["cold"]
    assert len(flushes) == sum(times["samples"] for times in single.values())


def test_cold_needs_a_gpu(capsys):
    with pytest.raises(SystemExit) as leaving:
        bench_optim.OptimizerSteps().parse(["--device", "cpu", "--cold"])
    assert leaving.value.code == 2
    assert "--cold flushes a GPU's L2 cache; leave it out with --device cpu" in (
        capsys.readouterr().err
    )


# --- what a flush writes --------------------------------------------------------------------------


@pytest.mark.parametrize("properties, size", [({"L2_cache_size": 5000}, 10_000), ({}, 128 << 20)])
def test_a_flush_writes_twice_the_cache(properties, size, monkeypatch):
    """Of a GPU that doesn't tell its cache, twice 64 MiB."""
    pretended = SimpleNamespace(**properties)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: pretended)
    assert timers.flush_bytes(CPU) == size
    flush = timers.l2_flusher(CPU)
    for _ in range(2):
        with Written() as written:
            flush()
        assert written.bytes == size


@pytest.mark.cuda
def test_a_flush_writes_twice_the_cache_of_this_gpu():
    device = torch.device("cuda", torch.cuda.current_device())
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    assert cache > 0 and timers.flush_bytes(device) == 2 * cache
    flush, before = timers.l2_flusher(device), torch.cuda.memory_allocated(device)
    with Written() as written:
        flush()
    assert written.bytes == 2 * cache
    assert torch.cuda.memory_allocated(device) == before, "it writes what it holds"
