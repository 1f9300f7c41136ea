# SPDX-License-Identifier: BSD-3-Clause
# What the forward passes of modules read besides numbers of their own, changed after a capture.

import types

import pytest
import replaying
import torch
from stepping import (
    by_hand,
    no_fallback,
    noise,
    noises,
)
from testing import DEVICES, close, pair, same
from torch import nn

import torch_renaissance as tr

pytestmark = [pytest.mark.parametrize("device", DEVICES), no_fallback]


FACTOR = 1.0
CONFIG = {"factor": 1.0}


def factor_of_config():
    return CONFIG["factor"]


@pytest.fixture
def globals_restored(monkeypatch):
    monkeypatch.setitem(globals(), "FACTOR", 1.0)
    monkeypatch.setitem(CONFIG, "factor", 1.0)


class Keeping(nn.Module):
    """Its forward finds a number in one of many ways."""

    def __init__(self, kept=None):
        super().__init__()
        self.linear, self.kept = nn.Linear(4, 3), kept

    def forward(self, x):
        return self.linear(x) * self.factor()


class KeepsAConfig(Keeping):
    def __init__(self):
        super().__init__(types.SimpleNamespace(inner=types.SimpleNamespace(factor=1.0)))

    def factor(self):
        return self.kept.inner.factor

    def change(self, value):
        self.kept.inner.factor = value


class KeepsADict(Keeping):
    def __init__(self):
        super().__init__({"inner": {"factor": 1.0}})

    def factor(self):
        return self.kept["inner"]["factor"]

    def change(self, value):
        self.kept["inner"]["factor"] = value


class KeepsAList(Keeping):
    def __init__(self):
        super().__init__([[1.0], [2.0]])

    def factor(self):
        return self.kept[0][0]

    def change(self, value):
        self.kept[0][0] = value


class ReadsAGlobal(Keeping):
    def factor(self):
        return FACTOR

    def change(self, value):
        globals()["FACTOR"] = value


class ReadsAGlobalOfAHelper(ReadsAGlobal):
    def factor(self):
        return factor_of_config()

    def change(self, value):
        CONFIG["factor"] = value


class HasAChild(Keeping):
    def __init__(self):
        super().__init__()
        self.child = KeepsAConfig()

    def factor(self):
        return self.child.kept.inner.factor

    def change(self, value):
        self.child.change(value)


def calls_it(model):
    return lambda x: model(x).pow(2).mean()


def calls_a_method(model):
    return lambda x: (model.linear(x) * model.factor()).pow(2).mean()


@pytest.mark.usefixtures("globals_restored")
@pytest.mark.parametrize("loss_of", [calls_it, calls_a_method])
@pytest.mark.parametrize(
    "make", [KeepsAConfig, KeepsADict, KeepsAList, ReadsAGlobal, ReadsAGlobalOfAHelper, HasAChild]
)
def test_what_modules_read_besides_their_own_numbers(make, loss_of, device, monkeypatch):
    if device == "cpu":
        replaying.capture_steps(monkeypatch)
    a, oa, b, ob = pair(make, lambda m: torch.optim.SGD(m.parameters(), 0.05), device)
    native, step = by_hand(loss_of(a), oa), tr.TrainStep(loss_of(b), ob)
    replays = []
    for i, (x,) in enumerate(noises(18, 6, 4, device=device)):
        if i % 6 == 5:
            for model in (a, b):
                model.change(1.0 + i)
        close(step(x), native(x), f"call {i}")
        replays.append(step.captured)
    assert replays[4] and replays[10] and replays[16]
    same(a, b)


def test_an_object_that_leads_back_to_itself(device, monkeypatch):
    if device == "cpu":
        replaying.capture_steps(monkeypatch)
    trainer = types.SimpleNamespace(factor=2.0)
    trainer.me, trainer.list = trainer, [trainer]
    model = nn.Linear(4, 3).to(device)
    model, optimizer = tr.accelerate(model, torch.optim.SGD(model.parameters(), 0.1))
    step = tr.TrainStep(lambda x: (model(x) * trainer.me.list[0].factor).mean(), optimizer)
    for i in range(6):
        x = noise(i, 6, 4, device=device, dtype=torch.float32)
        expected = 2 * model(x).mean()
        close(step(x), expected.detach())
    assert step.captured
