# SPDX-License-Identifier: BSD-3-Clause
# What happens between and inside of steps with precision=: changed weights, averages, other ways to
# step, frozen weights, exceptions and gradients from before.

import warnings

import pytest
import torch
from autocasting import (
    ROWS,
    SCALE,
    VECTOR,
    Trainings,
    batches,
    each_precision,
    eager_on_a_cpu,
    has_grad_dtype,
    mlp,
    squares,
)
from testing import DEVICES, equal, values_of
from torch import nn

import torch_renaissance as tr

pytestmark = [pytest.mark.parametrize("device", DEVICES), eager_on_a_cpu]


def load(model):
    model.load_state_dict({name: value + 0.3 for name, value in model.state_dict().items()})


def multiply(model):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(-1.5)


def initialize(model):
    for i, p in enumerate(model.parameters()):
        nn.init.constant_(p, 0.05 * (i + 1))


def replace_data(model):
    for p in model.parameters():
        p.data = p.data.clone() * 2


def through_data(model):
    for p in model.parameters():
        p.data.mul_(2.0)


@each_precision
@pytest.mark.parametrize("change", [load, multiply, initialize, replace_data, through_data])
def test_changes_of_weights_are_seen_by_the_next_step(change, precision, device):
    t = Trainings("mlp", ROWS[0], precision, device)
    (batch,) = batches(VECTOR, 1)
    for _ in range(5):
        t.run(batch)
    before = t.losses["native"][-1]
    for model in (t.exact, t.native, t.ours):
        change(model)
    if change is through_data:  # which nothing in torch can see
        t.step.refresh()
    for _ in range(6):
        t.run(batch)
        t.check_untouched()
    assert not 0.8 < t.losses["native"][5] / before < 1.25  # a stale weight would show
    t.check()


@each_precision
def test_averages_in_the_model_and_out_of_it_again(precision, device):
    t = Trainings("mlp", ROWS[0], precision, device, ema_decay=0.9)
    (batch,) = batches(VECTOR, 1)
    ema = tr.Ema(t.ours, t.optimizer)
    for _ in range(5):
        t.run(batch)
    before = t.everything()
    with ema.swapped():
        averages = values_of(t.ours.parameters())
        with pytest.raises(RuntimeError, match="hold their averages now"):
            t.step(batch.to(device))
        t.check_untouched()
        assert equal(t.ours.parameters(), averages)
    assert equal(t.everything(), before)
    for _ in range(5):
        t.run(batch)
    t.check()
    assert ema.updates == 10


@each_precision
def test_other_ways_to_step_in_between(precision, device):
    """A hand-written loop and a second TrainStep without precision share the optimizer."""
    t = Trainings("mlp", ROWS[0], precision, device)
    t.scaler = None  # gradients are small enough without

    def plain(model, optimizer, batch):
        optimizer.zero_grad()
        t.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    other = tr.TrainStep(lambda x: t.loss(t.ours, x), t.optimizer)
    for i, batch in enumerate(batches(VECTOR, 18)):
        batch = batch.to(device)
        if i % 3 == 0:
            t.run_exact(batch)
            t.run_native(batch)
            t.run_ours(batch)
        else:
            plain(t.exact, t.optimizers["exact"], batch.double())
            plain(t.native, t.optimizers["native"], batch)
            if i % 3 == 1:
                plain(t.ours, t.optimizer, batch)
            else:
                other(batch)
        t.check_untouched()
    t.check(replayed=False)
    if precision == "fp16":  # which the others have left alone: it grew after each three of six
        assert t.optimizer.amp.get_scale() == 4 * SCALE["init_scale"]


@each_precision
def test_frozen_and_thawed_weights(precision, device):
    t = Trainings("mlp", ROWS[0], precision, device)
    models = (t.exact, t.native, t.ours)
    for model in models:
        model[0].requires_grad_(False)
    for phase in range(3):
        for model in models:
            model[0].requires_grad_(phase == 1)
        frozen = values_of(t.ours[0].parameters())
        for batch in batches(VECTOR, 6):
            t.run(batch)
            t.check_untouched()
        assert equal(t.ours[0].parameters(), frozen) == (phase != 1)
    t.check()


class Boom(Exception):
    """The program's own."""


@each_precision
@pytest.mark.parametrize("where", ["before", "inside", "after"])
def test_an_exception_in_the_loss_function_leaves_no_trace(where, precision, device):
    armed = []

    def boom(*_):
        if armed:
            raise Boom

    class Trap(nn.Module):
        def forward(self, x):
            boom()
            return x

    def make():
        return nn.Sequential(nn.Linear(6, 16), Trap() if where == "inside" else nn.Tanh(), mlp2())

    def mlp2():
        return nn.Sequential(nn.Tanh(), nn.Linear(16, 4))

    def loss(model, x):
        if where == "before":
            boom()
        value = squares(model, x)
        if where == "after":
            boom()
        return value

    t = Trainings((make, VECTOR, loss), ROWS[1], precision, device, ema_decay=0.9)
    given = batches(VECTOR, 8)
    for i, batch in enumerate(given):
        if i in (0, 1):
            before = t.everything()
            armed.append(True)
            with pytest.raises(Boom):
                t.step(batch.to(device))
            armed.clear()
            t.check_untouched()
            assert equal(t.everything(), before)
        t.run(batch)
    t.check()


@each_precision
def test_gradients_from_before_are_added_to(precision, device):
    """As natively, without zero_grad before backward."""
    t = Trainings("mlp", ROWS[0], precision, device)
    first, second = (b.to(device) for b in batches(VECTOR, 2))
    for name in ("exact", "native", "ours"):
        model = getattr(t, name)
        squares(model, first.double() if name == "exact" else first).backward()
        if precision == "fp16" and name != "exact":
            for p in model.parameters():
                p.grad.mul_(SCALE["init_scale"])
    t.optimizers["exact"].zero_grad = t.optimizers["native"].zero_grad = lambda: None
    with pytest.warns(UserWarning, match="gradient already" if device == "cuda" else "CPU"):
        t.run(second)
    t.check_untouched()
    t.check(replayed=False)


@each_precision
def test_an_exception_before_backward_leaves_gradients_from_before(precision, device):
    def loss(model, x):
        raise Boom

    t = Trainings((mlp, VECTOR, loss), ROWS[0], precision, device)
    for p in t.ours.parameters():
        p.grad = torch.ones_like(p)
    held, before = [p.grad for p in t.ours.parameters()], t.everything()
    (batch,) = batches(VECTOR, 1)
    with pytest.raises(Boom):
        t.step(batch.to(device))
    assert equal(t.everything(), before)
    for p, gradient in zip(t.ours.parameters(), held, strict=True):
        assert p.grad is gradient and (gradient == 1).all()


@each_precision
def test_an_exception_in_a_hook_with_gradients_from_before(precision, device):
    t = Trainings("mlp", ROWS[0], precision, device)
    t.ours[0].weight.grad = torch.zeros_like(t.ours[0].weight)
    before = t.everything()

    def boom(*_):
        raise Boom

    handle = t.optimizer.register_step_pre_hook(boom)
    (batch,) = batches(VECTOR, 1)
    with pytest.raises(Boom):
        t.step(batch.to(device))
    handle.remove()
    assert equal(t.everything(), before)
    for module, name, p in t.places:
        assert module._parameters[name] is p
        assert p.grad is None or p.grad.dtype == torch.float32
        assert getattr(p, "grad_dtype", p.dtype) == torch.float32
    t.optimizer.zero_grad()
    for batch in batches(VECTOR, 6):
        t.run(batch)
    t.check()


@has_grad_dtype
@each_precision
def test_the_programs_own_grad_dtype_comes_back(precision, device):
    t = Trainings("mlp", ROWS[0], precision, device)
    t.ours[0].weight.grad_dtype = None
    t.ours[2].weight.grad_dtype = torch.float64
    for batch in batches(VECTOR, 2):
        t.run(batch)
        assert t.ours[0].weight.grad_dtype is None
        assert t.ours[2].weight.grad_dtype == torch.float64
        assert t.ours[0].bias.grad_dtype == torch.float32


@each_precision
@pytest.mark.parametrize("accumulate", [1, 2])
def test_step_hooks_find_gradients_of_the_weights_dtype(accumulate, precision, device):
    model = mlp().to(device)
    model, optimizer = tr.accelerate(model, torch.optim.SGD(model.parameters(), 0.1))
    found = []

    def hook(*_):
        found.append({p.grad.dtype for p in model.parameters()})

    optimizer.register_step_pre_hook(hook)
    step = tr.TrainStep(
        lambda x: squares(model, x), optimizer, precision=precision, accumulate=accumulate
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a hook keeps it from capture
        for batch in batches(VECTOR, 4):
            step(batch.to(device))
    assert found == [{torch.float32}] * (4 // accumulate)
    assert all(p.grad is None for p in model.parameters())
