# SPDX-License-Identifier: BSD-3-Clause
# Extras that hold tensors where no copy reaches them; and batches that look otherwise than the
# inputs of a graph, for which a compiled loss_fn was compiled first.

import copy
from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import replaying
import torch
from stepping import (
    WARMUP,
    by_hand,
    no_fallback,
    noise,
)
from testing import DEVICES
from torch import nn

import torch_renaissance as tr

pytestmark = [pytest.mark.parametrize("device", DEVICES), no_fallback]


@dataclass
class Output:
    out: torch.Tensor


class Slotted:
    __slots__ = ("out",)

    def __init__(self, out):
        self.out = out


class Ordered(OrderedDict):
    """As the outputs of language models are, where pytrees know nothing of them."""


HOLDERS = {
    "dataclass": Output,
    "slots": Slotted,
    "dict": lambda out: Ordered(out=out),
    "set": lambda out: {out},
    "deep": lambda out: SimpleNamespace(inner=[SimpleNamespace(out=out)]),
    # Checked arguments would be waited for.
    "distribution": lambda out: torch.distributions.Normal(out, out.exp(), validate_args=False),
    "function": lambda out: lambda: out,
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_tensors_in_extras_that_no_pytree_reaches_are_not_captured(holder, device, monkeypatch):
    """The next replay would write over them."""
    if device == "cpu":
        replaying.capture_steps(monkeypatch)
    model = nn.Linear(4, 3).to(device)
    model, optimizer = tr.accelerate(model, torch.optim.SGD(model.parameters(), 0.1))
    made = []

    def loss_fn(x):
        out = model(x)
        extras = holder(out)
        return out.pow(2).mean(), {"held": extras, "out": out}

    step = tr.TrainStep(loss_fn, optimizer)
    kind = type(holder(torch.ones(1))).__name__
    with pytest.warns(UserWarning, match=f"eagerly: its extras have a {kind}, in which") as found:
        for i in range(WARMUP + 3):
            x = noise(i, 5, 4, device=device, dtype=torch.float32)
            expected = model(x).detach()
            made.append((step(x)[1], expected))
            assert not step.captured
    assert len(found) == 1
    for extras, expected in made:
        torch.testing.assert_close(extras["out"], expected)
        if isinstance(extras["held"], Output):
            torch.testing.assert_close(extras["held"].out, expected)
    with pytest.raises(tr.CaptureError, match="return them in a dict, list or"):
        strict = tr.TrainStep(loss_fn, optimizer, strict=True)
        for _ in range(WARMUP + 1):
            strict(x)


def test_objects_without_tensors_are_extras_like_others(device, monkeypatch):
    if device == "cpu":
        replaying.capture_steps(monkeypatch)
    model = nn.Linear(4, 3).to(device)
    model, optimizer = tr.accelerate(model, torch.optim.SGD(model.parameters(), 0.1))
    things = SimpleNamespace(a=1, b=[2.0, "text"]), Output, model, len, {1, 2}, range(3)
    step = tr.TrainStep(lambda x: (model(x).pow(2).mean(), [*things]), optimizer)
    for i in range(WARMUP + 2):
        _, found = step(noise(i, 5, 4, device=device, dtype=torch.float32))
        assert all(a is b for a, b in zip(found, things, strict=True))
    assert step.captured


ODD = {
    "strided": lambda x: (x.repeat(1, 2)[:, ::2],),
    "expanded": lambda x: (x[:1].expand(5, 4),),
    "the same twice": lambda x: (x, x),
    "on the CPU": lambda x: (x.cpu(),),
}


@pytest.mark.parametrize("kind", ODD)
def test_nothing_is_compiled_in_a_capture(kind, device, monkeypatch):
    """The graph's inputs look otherwise than such batches, for which it was compiled first."""
    if device == "cpu":
        replaying.capture_steps(monkeypatch)
    torch._dynamo.reset()
    counts = torch._dynamo.utils.counters
    model = nn.Linear(4, 3).to(device)
    native = copy.deepcopy(model)
    model, optimizer = tr.accelerate(model, torch.optim.SGD(model.parameters(), 0.1))
    stock = torch.optim.SGD(native.parameters(), 0.1)

    def loss_of(model):
        return lambda *xs: sum(model(x.to(device)) for x in xs).pow(2).mean()

    step = tr.TrainStep(loss_of(model), optimizer, compile={"backend": "eager", "dynamic": False})
    reference = by_hand(loss_of(native), stock)
    for i in range(WARMUP + 2):
        batch = ODD[kind](noise(i, 5, 4, device=device, dtype=torch.float32))
        before = counts["stats"]["unique_graphs"]
        torch.testing.assert_close(step(*batch), reference(*batch))
        if i >= WARMUP:
            assert counts["stats"]["unique_graphs"] == before
            assert step.captured
