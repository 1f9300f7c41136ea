# SPDX-License-Identifier: BSD-3-Clause
# What cannot be done as natively is refused in a sentence that names the value and the remedy, and
# a refused call has changed nothing.

import re
import types

import pytest
import torch
from testing import DEVICES, GRADIENTS, USUAL, equal, mlp, same, same_state, square, values_of
from torch import nn
from torch.optim import lr_scheduler as S

import torch_renaissance as tr

pytestmark = pytest.mark.parametrize("device", DEVICES)
each_usual = pytest.mark.parametrize("usual", USUAL, ids=str)


class Mine(torch.optim.AdamW):
    """Somebody's own optimizer: its step may be anything."""

    def step(self, closure=None):
        self.param_groups[0]["lr"] *= 0.5
        return super().step(closure)


class Renamed(torch.optim.SGD):
    """A subclass that changes nothing we can see is still not what we know."""


def picture(model, optimizer):
    """All that a refused call must leave as it was."""
    entries = [
        (id(p), k, id(v), getattr(v, "data_ptr", int)())
        for p, s in optimizer.state.items()
        for k, v in s.items()
    ]
    return {
        "class": type(optimizer),
        "optimizer": {k: id(v) for k, v in vars(optimizer).items()},
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        "lists": [
            (id(g), id(g["params"]), [id(p) for p in g["params"]]) for g in optimizer.param_groups
        ],
        "parameters": [(id(p), p.data_ptr(), p.stride(), p._version) for p in model.parameters()],
        "gradients": [(id(p.grad), p.grad.data_ptr()) for p in model.parameters()],
        "state": entries,
        "modules": [list(vars(m)) for m in model.modules()],
        "hooks": [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()],
    }


def trained(make, device):
    torch.manual_seed(0)
    model = mlp().to(device, torch.float64)
    optimizer = make(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = square(model)
        loss.backward()
        return loss

    optimizer.step(closure)
    return model, optimizer


def refused(model, optimizer, error, words, **options):
    """The call raises, says each of `words`, and both objects are as they were, to the bit."""
    before, values = picture(model, optimizer), values_of(model.parameters())
    with pytest.raises(error) as raised:
        tr.accelerate(model, optimizer, **options)
    for word in words:
        assert re.search(word, str(raised.value)), (word, str(raised.value))
    assert picture(model, optimizer) == before
    assert equal(model.parameters(), values)


@pytest.mark.parametrize("gradients", GRADIENTS)
@pytest.mark.parametrize(
    "make",
    [
        torch.optim.RMSprop,
        torch.optim.LBFGS,
        torch.optim.Adagrad,
        torch.optim.NAdam,
        Mine,
        lambda params: Renamed(params, lr=0.1),
    ],
    ids=["RMSprop", "LBFGS", "Adagrad", "NAdam", "Mine", "Renamed"],
)
def test_other_optimizers_are_refused(make, gradients, device):
    model, optimizer = trained(make, device)
    words = ["SGD", "Adam", "AdamW", type(optimizer).__name__]
    refused(model, optimizer, TypeError, words, gradients=gradients)
    optimizer.zero_grad()
    optimizer.step(lambda: square(model))  # and works on, as its class does


@each_usual
@pytest.mark.parametrize("how", ["method", "function", "under a scheduler"])
def test_a_replaced_step_is_refused(usual, how, device):
    model, optimizer = trained(lambda params: usual.native(params, **usual.options), device)
    original, calls = optimizer.step, []

    def step(self=None, closure=None):
        calls.append(1)
        return original(closure)

    optimizer.step = step if how == "function" else types.MethodType(step, optimizer)
    if how == "under a scheduler":
        S.StepLR(optimizer, 1)
    refused(model, optimizer, TypeError, ["step"])
    optimizer.step()
    assert calls == [1]


@each_usual
def test_a_step_wrapped_by_a_scheduler_is_not_replaced(usual, device):
    model, optimizer = trained(lambda params: usual.native(params, **usual.options), device)
    S.StepLR(optimizer, 1)
    S.ExponentialLR(optimizer, 0.9)
    tr.accelerate(model, optimizer)
    assert type(optimizer) is usual.ours


@each_usual
@pytest.mark.parametrize("value", ["nope", None, True, "FLAT", 1])
def test_other_values_for_gradients_are_refused(usual, value, device):
    model, optimizer = trained(lambda params: usual.native(params, **usual.options), device)
    words = ["gather", "flat", re.escape(str(value))]
    refused(model, optimizer, ValueError, words, gradients=value)


@each_usual
def test_something_else_than_a_model_or_an_optimizer_is_refused(usual, device):
    model, optimizer = trained(lambda params: usual.native(params, **usual.options), device)
    before = picture(model, optimizer)
    for other in (list(model.parameters()), None, model.state_dict(), lambda x: x, nn.Linear):
        with pytest.raises(TypeError, match=r"Module"):
            tr.accelerate(other, optimizer)
    for other in (None, model, [optimizer], usual.native, optimizer.state_dict()):
        with pytest.raises(TypeError, match=r"SGD.*Adam.*AdamW"):
            tr.accelerate(model, other)
    with pytest.raises(TypeError):
        tr.accelerate(optimizer, model)
    with pytest.raises(TypeError):
        tr.accelerate(model, optimizer, no_such_option=1)
    assert picture(model, optimizer) == before


@each_usual
def test_after_a_refusal_the_same_objects_can_be_accelerated(usual, device):
    runs = []
    for accelerated in (False, True):
        model, optimizer = trained(lambda params: usual.native(params, **usual.options), device)
        if accelerated:
            refused(model, optimizer, ValueError, ["gather"], gradients="nope")
            tr.accelerate(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            square(model).backward()
            optimizer.step()
        runs.append((model, optimizer))
    same(runs[0][0], runs[1][0])
    same_state(runs[0][1], runs[1][1])


@each_usual
def test_questions_about_a_plain_optimizer_are_refused(usual, device):
    model, optimizer = trained(lambda params: usual.native(params, **usual.options), device)
    before = picture(model, optimizer)
    for other in (optimizer, model, None):
        with pytest.raises(TypeError, match="accelerate"):
            tr.regions(other)
    assert picture(model, optimizer) == before


@pytest.mark.parametrize("name", ["grad_scale", "found_inf"])
@pytest.mark.parametrize("value", [4.0, torch.ones(2)], ids=["number", "two elements"])
def test_a_scale_or_flag_that_is_no_scalar_tensor(name, value, device):
    p = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = tr.optim.AdamW([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    before = p.detach().clone()
    setattr(optimizer, name, value)
    with pytest.raises(TypeError, match=f"optimizer.{name} must be a tensor of one element, got"):
        optimizer.step()
    assert torch.equal(p, before)
