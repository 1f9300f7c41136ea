# SPDX-License-Identifier: BSD-3-Clause
# What explain() tells of a TrainStep, and reset(): training goes on, and memory comes back.

import random
import re

import pytest
import torch
from failing import (
    CRUMBS,
    ON_THE_CPU,
    SEGMENT,
    Bystander,
    Net,
    Warned,
    memory,
    net_pair,
    only_cuda,
    seed,
)
from stepping import ADAMW, WARMUP, Twins, mean_square, noise, noises
from testing import DEVICES, close, same, same_state

import torch_renaissance as tr

pytestmark = pytest.mark.parametrize("device", DEVICES)


def expect_captures(found, device):
    assert found.texts == ([] if device == "cuda" else [ON_THE_CPU])


def test_explain_before_anything_has_run(device, capsys):
    _, _, model, optimizer = net_pair(device)
    found = tr.TrainStep(mean_square(model), optimizer).explain()
    assert capsys.readouterr().out == f"{found}\n" == "state: eager; 0 graphs in 0 bytes\n"
    assert (found.state, found.graphs, found.pool_bytes) == ("eager", [], 0)
    assert (found.fallbacks, found.autocast) == ({}, {})
    assert (found.nodes, found.kernels, found.key, found.replays) == (0, {}, "", 0)


def test_explain(device, capsys):
    _, _, model, optimizer = net_pair(device)

    def loss_fn(x, factor):
        if factor == 3.0:
            random.random()
        return model(x).pow(2).mean() * factor

    step = tr.TrainStep(loss_fn, optimizer)
    with Warned():
        for factor, rows in [(0.5, 6)] * 7 + [(0.5, 2)] * 4 + [(3.0, 6)] * 4:
            step(noise(rows, rows, 4, device=device), factor)
    capsys.readouterr()
    found = step.explain()
    text = capsys.readouterr().out
    assert text == f"{found}\n"
    assert found.state == "eager"  # the last call was
    assert found.autocast == {}
    if device != "cuda":
        assert found.graphs == [] and found.pool_bytes == 0
        assert found.fallbacks == {ON_THE_CPU.split(": ")[1]: 15}
        assert "eager 15 times: the parameters are on the CPU" in text
        return
    assert [g["key"] for g in found.graphs] == [
        "(float64[2, 4] on cuda:0, 0.5)",
        "(float64[6, 4] on cuda:0, 0.5)",
    ]
    assert [g["replays"] for g in found.graphs] == [3, 4] and found.replays == 7
    for g in found.graphs:
        assert g["nodes"] >= sum(g["kernels"].values()) > 10
        assert sum(n for name, n in g["kernels"].items() if "update_kernel" in name) == 1
    assert (found.nodes, found.kernels) == (found.graphs[0]["nodes"], found.graphs[0]["kernels"])
    assert found.key == found.graphs[0]["key"]
    assert found.pool_bytes > 0
    ((reason, count),) = found.fallbacks.items()
    assert "Python's random" in reason and count == 3
    assert "state: eager; 2 graphs in" in text and "update_kernel" in text
    assert re.search(
        r"graph 1: \(float64\[6, 4\] on cuda:0, 0\.5\): \d+ nodes, \d+ kernels, 4", text
    )
    assert re.search("eager 3 times: .*Python's random", text)
    with Warned():
        step(noise(6, 6, 4, device=device), 0.5)
    found = step.explain()
    assert found.state == "captured" and found.replays == 8
    assert found.key == "(float64[6, 4] on cuda:0, 0.5)"  # the one used last comes first


def test_reset(device):
    """Training goes on, and warms up and captures anew; results handed out stay."""
    twins = Twins(Net, ADAMW, mean_square, device)
    batches = noises(30, 6, 4, device=device)
    with Warned() as found:
        results = twins.run(batches[:8])
        values = [loss.item() for loss in results]
        for _ in range(2):  # the second one has nothing to do
            twins.step.reset()
        explained = twins.step.explain()
        assert (explained.state, explained.graphs, explained.pool_bytes) == ("eager", [], 0)
        assert not twins.step.captured and twins.step.inputs == ()
        results += twins.run(batches[8:16])
        twins.check_replays(*[False] * WARMUP, *[True] * 5)
        values += [loss.item() for loss in results[8:]]
        twins.step.reset()
        twins.run(batches[16:24])
    twins.check_replays(*[False] * WARMUP, *[True] * 5)
    assert [loss.item() for loss in results] == values
    expect_captures(found, device)
    twins.check()


def test_reset_amid_micro_batches(device):
    _, _, a, oa = net_pair(device)
    _, _, b, ob = net_pair(device)
    runs = []
    with Warned():
        for resets, model, optimizer in ((False, a, oa), (True, b, ob)):
            step = tr.TrainStep(mean_square(model), optimizer, accumulate=3)
            seed()
            losses = []
            for i, batch in enumerate(noises(18, 6, 4, device=device)):
                losses.append(step(*batch))
                if resets and i in (1, 7, 8):
                    step.reset()
            runs.append(torch.stack(losses))
    assert step.captured == (device == "cuda")
    close(runs[1], runs[0])
    same(a, b)
    same_state(oa, ob)


@only_cuda
@pytest.mark.parametrize("how", ["reset", "deleted"])
def test_memory_comes_back(how, device):
    if device != "cuda":
        pytest.skip("a CPU has no graphs")
    bystander = Bystander(device)
    _, _, model, optimizer = net_pair(device)

    def loss_fn(x):
        large = x.repeat(1 << 19, 2).sin()  # 200 MB
        return model(x).pow(2).mean() + large.mean() * 0

    step = tr.TrainStep(loss_fn, optimizer)
    x = noise(0, 6, 4, device=device)
    for _ in range(WARMUP):
        step(x)
    before = memory()
    loss = None
    for rows in (6, 6, 3, 3):
        loss = step(x[:rows])
    assert step.captured
    kept = loss.item()
    assert memory()[1] >= before[1] + (100 << 20)
    assert step.explain().pool_bytes >= 100 << 20
    if how == "reset":
        step.reset()
    else:
        del step
    after = memory()
    assert after[0] <= before[0] + CRUMBS
    assert after[1] <= before[1] + SEGMENT
    assert loss.item() == kept
    if how == "reset":
        for _ in range(WARMUP + 1):
            step(x)
        assert step.captured
    bystander.check()
