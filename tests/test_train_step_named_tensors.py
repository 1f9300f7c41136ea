# SPDX-License-Identifier: BSD-3-Clause
# Tensors that the loss function names: what the program makes of them after the capture acts from
# the next step on.

import functools

import pytest
import torch
from stepping import (
    NESTEROV,
    Twins,
    captured_twins,
    fallbacks,
    no_fallback,
    noises,
)
from testing import DEVICES, close, mlp
from torch import nn

import torch_renaissance as tr

pytestmark = [pytest.mark.parametrize("device", DEVICES), no_fallback]


@pytest.mark.parametrize("shape", [(), (4,)], ids=["scalar", "vector"])
def test_a_tensor_of_the_closure_is_filled_or_replaced(shape, device):
    tensors = []

    def loss_of(model):
        weight = torch.ones(shape, dtype=torch.float64, device=device)

        def loss_fn(x):
            return model(x * weight).pow(2).mean()

        def replace(value):
            nonlocal weight
            weight = torch.full_like(weight, value)

        tensors.append((lambda value: weight.fill_(value), replace))
        return loss_fn

    batches = noises(40, 6, 4, device=device)
    twins = captured_twins(mlp, NESTEROV, loss_of, device, batches)
    for fill, _ in tensors:
        fill(0.5)
    twins.run(batches[6:11])
    twins.check_replays(*[True] * 5)  # the memory is the same
    for _, replace in tensors:
        replace(2.0)
    twins.run(batches[11:16])
    assert not twins.replayed[-5]
    twins.check_replays(True)
    twins.check()


@pytest.mark.parametrize("where", ["closure", "buffer"])
def test_a_scalar_on_the_cpu_is_filled(where, device):
    """Kernels take it by value, so a graph holds its value of the capture."""
    scalars = []

    def loss_of(model):
        scalar = torch.tensor(1.0, dtype=torch.float64)
        scalars.append(scalar)
        if where == "buffer":
            model.scalar = nn.Buffer(scalar)
            return lambda x: model(x).pow(2).mean() * model.scalar
        return lambda x: model(x).pow(2).mean() * scalar

    batches = noises(30, 6, 4, device=device)
    twins = Twins(mlp, NESTEROV, loss_of, device)
    with fallbacks(device):  # whether it is captured at all is left open
        twins.run(batches[:6])
        for value in (0.25, 3.0):
            for scalar in scalars:
                scalar.fill_(value)
            twins.run(batches[6:11])
    twins.check()


def test_modules_that_only_a_container_names(device):
    """A frozen teacher in a dict; it has dropout."""
    teachers = []

    def loss_of(model):
        torch.manual_seed(1)
        teacher = nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.5)).to(device, torch.float64)
        teachers.append(teacher.requires_grad_(False))
        nets = {"student": model, "teacher": teacher}
        return lambda x: (nets["student"](x) - nets["teacher"](x)).pow(2).mean()

    batches = noises(30, 6, 4, device=device)
    twins = captured_twins(mlp, NESTEROV, loss_of, device, batches)
    for change in (nn.Module.eval, nn.Module.train):
        for teacher in teachers:
            change(teacher)
        twins.run(batches[6:11])
        twins.check_replays(True)
    twins.check()


def test_the_model_given_is_watched(device):
    """Where nothing leads from loss_fn to it: by `model=`, and by what accelerate was given."""
    registry = {}
    row = NESTEROV

    def loss_of(model):
        registry[id(model)] = model
        key = id(model)
        return lambda x: registry[key](x).pow(2).mean()

    batches = noises(30, 6, 4, device=device)
    make = functools.partial(nn.Sequential, nn.Linear(4, 4), nn.Dropout(0.5))
    twins = captured_twins(make, row, loss_of, device, batches)
    for model in twins.models:
        model.eval()
    twins.run(batches[6:11])
    assert not twins.replayed[-5]
    twins.check_replays(True)
    twins.check()
    other = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to(device, torch.float64)
    optimizer = tr.optim.SGD(other.parameters(), lr=0.1)  # knows of no module
    step = tr.TrainStep(loss_of(other), optimizer, model=other)
    for (x,) in batches[:6]:
        step(x)
    other.eval()
    with torch.no_grad():
        expected = other(batches[0][0]).pow(2).mean()
    close(step(*batches[0]), expected)
