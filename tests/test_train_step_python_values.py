# SPDX-License-Identifier: BSD-3-Clause
# Python values that the loss function names: what the program makes of them
# after the capture acts from the next step on.

import types

import pytest
from stepping import (
    NESTEROV,
    WARMUP,
    Twins,
    captured_twins,
    no_fallback,
    noises,
)
from testing import DEVICES, mlp
from torch import nn

pytestmark = [pytest.mark.parametrize("device", DEVICES), no_fallback]


def weighted(model, x, value):
    """Takes numbers, True and None for different things."""
    loss = model(x).pow(2).mean()
    if value is None:
        return loss
    return loss + model(x).abs().mean() if value is True else loss * value


FACTOR = 1.0
CONFIG = {"factor": 1.0}
SETTINGS = types.SimpleNamespace(factor=1.0)
LIBRARY = types.ModuleType("a_library")
LIBRARY.factor = 1.0


class Defaults:
    factor = 1.0


class Slotted:
    __slots__ = ("factor",)


def factor_of_config():
    return CONFIG["factor"]


def in_closure(model):
    factor = 1.0

    def loss_fn(x):
        return weighted(model, x, factor)

    def change(value):
        nonlocal factor
        factor = value

    return loss_fn, change


def in_closure_of_a_helper(model):
    factor = 1.0

    def helper(x):
        return weighted(model, x, factor)

    def change(value):
        nonlocal factor
        factor = value

    return lambda x: helper(x) * 1.0, change


def in_an_inner_function(model):
    factor = 1.0

    def loss_fn(x):
        def inner():
            return weighted(model, x, factor)

        return inner()

    def change(value):
        nonlocal factor
        factor = value

    return loss_fn, change


def in_globals(model):
    def change(value):
        globals()["FACTOR"] = value

    return lambda x: weighted(model, x, FACTOR), change


def in_a_dict(model):
    config = {"factor": 1.0}
    return lambda x: weighted(model, x, config["factor"]), lambda v: config.update(factor=v)


def in_a_nested_dict(model):
    config = {"loss": {"factor": 1.0}}
    return (
        lambda x: weighted(model, x, config["loss"]["factor"]),
        lambda v: config["loss"].update(factor=v),
    )


def in_a_list(model):
    factors = [1.0, 2.0]
    return lambda x: weighted(model, x, factors[0]), lambda v: factors.__setitem__(0, v)


def in_a_global_dict(model):
    return lambda x: weighted(model, x, CONFIG["factor"]), lambda v: CONFIG.update(factor=v)


def in_a_global_dict_of_a_helper(model):
    return lambda x: weighted(model, x, factor_of_config()), lambda v: CONFIG.update(factor=v)


def in_an_attribute(model):
    config = types.SimpleNamespace(factor=1.0)
    return lambda x: weighted(model, x, config.factor), lambda v: setattr(config, "factor", v)


def in_a_global_attribute(model):
    return lambda x: weighted(model, x, SETTINGS.factor), lambda v: setattr(SETTINGS, "factor", v)


def in_an_attribute_of_an_attribute(model):
    run = types.SimpleNamespace(config=types.SimpleNamespace(factor=1.0))
    return (
        lambda x: weighted(model, x, run.config.factor),
        lambda v: setattr(run.config, "factor", v),
    )


def in_a_dict_of_an_attribute(model):
    run = types.SimpleNamespace(config={"factor": 1.0})
    return lambda x: weighted(model, x, run.config["factor"]), lambda v: run.config.update(factor=v)


def in_a_python_module(model):
    return lambda x: weighted(model, x, LIBRARY.factor), lambda v: setattr(LIBRARY, "factor", v)


class Trainer:
    """Its own attributes, and those of what it holds."""

    def __init__(self, model):
        self.net, self.factor = model, 1.0
        self.config = types.SimpleNamespace(factor=1.0)
        self.table = {"factor": 1.0}

    def loss(self, x):
        return weighted(self.net, x, self.factor)

    def by_config(self, x):
        return weighted(self.net, x, self.config.factor)

    def by_table(self, x):
        return weighted(self.net, x, self.table["factor"])

    def by_method(self, x):
        return self.loss(x)

    def __call__(self, x):
        return self.loss(x)


def in_self(model):
    trainer = Trainer(model)
    return trainer.loss, lambda v: setattr(trainer, "factor", v)


def in_self_of_a_method_called_by_a_method(model):
    trainer = Trainer(model)
    return trainer.by_method, lambda v: setattr(trainer, "factor", v)


def in_an_attribute_of_self(model):
    trainer = Trainer(model)
    return trainer.by_config, lambda v: setattr(trainer.config, "factor", v)


def in_a_dict_of_self(model):
    trainer = Trainer(model)
    return trainer.by_table, lambda v: trainer.table.update(factor=v)


def in_a_callable_object(model):
    trainer = Trainer(model)
    return trainer, lambda v: setattr(trainer, "factor", v)


class Criterion(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.factor = model, 1.0

    def forward(self, x):
        return weighted(self.model, x, self.factor)


def in_a_module(model):
    criterion = Criterion(model)
    return criterion, lambda v: setattr(criterion, "factor", v)


PLACES = [
    in_closure,
    in_closure_of_a_helper,
    in_an_inner_function,
    in_globals,
    in_a_dict,
    in_a_nested_dict,
    in_a_list,
    in_a_global_dict,
    in_a_global_dict_of_a_helper,
    in_an_attribute,
    in_a_global_attribute,
    in_an_attribute_of_an_attribute,
    in_a_dict_of_an_attribute,
    in_a_python_module,
    in_self,
    in_self_of_a_method_called_by_a_method,
    in_an_attribute_of_self,
    in_a_dict_of_self,
    in_a_callable_object,
    in_a_module,
]


@pytest.fixture
def globals_restored(monkeypatch):
    monkeypatch.setitem(globals(), "FACTOR", 1.0)
    for name in ("CONFIG",):
        monkeypatch.setitem(globals()[name], "factor", 1.0)
    for owner in (SETTINGS, LIBRARY, Defaults):
        monkeypatch.setattr(owner, "factor", 1.0)


@pytest.mark.usefixtures("globals_restored")
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_new_python_value_acts_from_the_next_step_on(place, device):
    changes = []

    def loss_of(model):
        loss_fn, change = place(model)
        changes.append(change)
        return loss_fn

    batches = iter(noises(60, 6, 4, device=device))
    twins = captured_twins(mlp, NESTEROV, loss_of, device, [next(batches) for _ in range(6)])
    for value in (0.25, None, True, 1, 0.25):
        for change in changes:
            change(value)
        twins.run([next(batches) for _ in range(3)])
        twins.check_replays(True)
    twins.check()


def test_what_loss_fn_does_not_name_may_change(device):
    """Counters and logs beside the loss function are the program's own affair."""

    class Loop:
        def __init__(self, model):
            self.net, self.calls, self.log = model, 0, []

        def loss(self, x):
            return self.net(x).pow(2).mean()

    loops = []

    def loss_of(model):
        loops.append(Loop(model))
        return loops[-1].loss

    twins = Twins(mlp, NESTEROV, loss_of, device)
    for batch in noises(12, 6, 4, device=device):
        twins.run([batch])
        for loop in loops:
            loop.calls += 1
            loop.log.append(loop.calls)
    twins.check_replays(*[True] * (12 - WARMUP))
    twins.check()


def test_a_function_that_loss_fn_calls_is_replaced(device, monkeypatch):
    def other(model, x, value):
        return model(x).abs().mean()

    def loss_of(model):
        return lambda x: weighted(model, x, 1.0)

    batches = noises(20, 6, 4, device=device)
    twins = captured_twins(mlp, NESTEROV, loss_of, device, batches)
    monkeypatch.setitem(globals(), "weighted", other)
    twins.run(batches[6:11])
    assert not twins.replayed[-5]
    twins.check_replays(True)
    twins.check()
