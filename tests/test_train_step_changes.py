# SPDX-License-Identifier: BSD-3-Clause
# Changes of models and optimizers after a capture, by the program or by schedulers, act from the
# next step on, as in the native loop; and which of them need no new graph.

import copy
import functools
import warnings

import pytest
import torch
from stepping import (
    ADAMW,
    BOTH,
    NESTEROV,
    WARMUP,
    Twins,
    captured_twins,
    each_row,
    graphs,
    mean_square,
    no_fallback,
    noise,
    noises,
)
from testing import DEVICES, Optimizer, conv_bn, mlp
from torch import nn
from torch.nn.utils import parametrize

import torch_renaissance as tr

pytestmark = [pytest.mark.parametrize("device", DEVICES), no_fallback]
PLAIN_SGD = Optimizer(torch.optim.SGD, tr.optim.SGD, {"lr": 0.05})


# -- changes of models and optimizers --------------------------------------------------------------


class Scaled(nn.Module):
    """An MLP with a number, a buffer, dropout and a part that is frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.Linear(8, 1).requires_grad_(False)
        self.factor = 1.0
        self.options = {"shift": 0.0}
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("nothing", None)

    def forward(self, x):
        hidden = self.drop(self.middle(self.first(x)))
        out = (self.last(hidden) + self.frozen(hidden)) * self.scale * self.factor
        out = out + self.options["shift"]
        return out if self.nothing is None else out + self.nothing


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


def set_group(**values):
    return lambda model, optimizer: optimizer.param_groups[0].update(values)


def set_module(name, **values):
    def change(model, optimizer):
        for key, value in values.items():
            setattr(model.get_submodule(name), key, value)

    return change


def replace_data(model, optimizer):
    model.first.weight.data = model.first.weight.data * 0.5


@torch.no_grad()
def change_in_place(model, optimizer):
    model.first.weight.mul_(0.5)
    model.first.bias.data.add_(0.1)
    model.scale.fill_(0.7)


def there_and_back(model, optimizer):
    model.half().double()


# name -> the optimizers, the change, and whether the graph stays as it is
CHANGES = {
    "lr": (BOTH, set_group(lr=0.003), True),
    "lr of zero": (BOTH, set_group(lr=0.0), True),
    "weight decay": (BOTH, set_group(weight_decay=0.5), True),
    "no weight decay": (BOTH, set_group(weight_decay=0.0), True),
    "momentum": ([NESTEROV], set_group(momentum=0.5), True),
    "no nesterov": ([NESTEROV], set_group(nesterov=False, dampening=0.3), True),
    "betas": ([ADAMW], set_group(betas=(0.5, 0.7)), True),
    "eps": ([ADAMW], set_group(eps=0.1), True),
    "maximize": (BOTH, set_group(maximize=True), True),
    "no momentum": ([NESTEROV], set_group(momentum=0.0, nesterov=False), None),
    "momentum where there was none": ([PLAIN_SGD], set_group(momentum=0.9), False),
    "a frozen parameter": (BOTH, lambda m, o: m.first.weight.requires_grad_(False), False),
    "a frozen module": (BOTH, lambda m, o: m.first.requires_grad_(False), False),
    "another unfrozen one": (BOTH, lambda m, o: m.frozen.requires_grad_(True), False),
    "eval": (BOTH, lambda m, o: m.eval(), False),
    "eval of a submodule": (BOTH, lambda m, o: m.drop.eval(), False),
    "a module's number": (BOTH, set_module("", factor=0.3), False),
    "a module's number is None": (BOTH, set_module("", factor=True), False),
    "a number in a module's dict": (BOTH, lambda m, o: m.options.update(shift=0.5), False),
    "Dropout.p": (BOTH, set_module("drop", p=0.1), False),
    "another module": (BOTH, set_module("", middle=nn.ReLU()), False),
    "its forward": (BOTH, set_module("middle", forward=torch.relu), False),
    "a parametrization": (
        BOTH,
        lambda m, o: parametrize.register_parametrization(m.first, "weight", Doubled()),
        False,
    ),
    "another buffer": (
        BOTH,
        lambda m, o: setattr(m, "scale", torch.full_like(m.scale, 3.0)),
        False,
    ),
    "a buffer where there was none": (
        BOTH,
        lambda m, o: setattr(m, "nothing", torch.full_like(m.scale, 3.0)),
        False,
    ),
    "p.data": (BOTH, replace_data, False),
    "half and back": (BOTH, there_and_back, False),
    "values in place": (BOTH, change_in_place, True),
    "state cleared": (BOTH, lambda m, o: o.state.clear(), None),
    "state of before the first step loaded": (
        BOTH,
        lambda m, o: o.load_state_dict({**o.state_dict(), "state": {}}),
        None,
    ),
    "lr as a 0-dim tensor": ([NESTEROV], set_group(lr=torch.tensor(0.02), foreach=False), True),
}


@pytest.mark.parametrize(
    ("row", "change", "stays"),
    [
        pytest.param(row, change, stays, id=f"{name}-{row}")
        for name, (rows, change, stays) in CHANGES.items()
        for row in rows
    ],
)
def test_a_change_acts_from_the_next_step_on(row, change, stays, device):
    batches = noises(40, 6, 4, device=device)
    twins = captured_twins(Scaled, row, mean_square, device, batches)
    with warnings.catch_warnings(record=True) as expected:
        warnings.simplefilter("always")
        for model, optimizer in twins:
            change(model, optimizer)
    assert not expected
    twins.run(batches[6:11])
    if stays:
        twins.check_replays(*[True] * 5)
        assert graphs(twins) == (device == "cuda")
    elif stays is not None:
        assert not twins.replayed[-5]
    twins.run(batches[11:16])
    twins.check_replays(True)
    twins.check()


@each_row
def test_changes_that_come_and_go_find_their_graph_again(row, device):
    batches = noises(60, 6, 3, 8, 8, device=device)
    twins = captured_twins(
        lambda: nn.Sequential(*conv_bn(), nn.Dropout(0.3)), row, mean_square, device, batches
    )
    model = [m for m, _ in twins]

    def each(change):
        for m in model:
            change(m)

    frozen = [lambda m: m[0].weight.requires_grad_(False), lambda m: m[0].weight.requires_grad_()]
    changes = {
        "eval": [lambda m: m.eval(), lambda m: m.train()],
        "eval of the batch norm": [lambda m: m[1].eval(), lambda m: m[1].train()],
        "frozen": frozen,
        "momentum of the batch norm": [
            lambda m: setattr(m[1], "momentum", 0.5),
            lambda m: setattr(m[1], "momentum", 0.1),
        ],
    }
    at = 6
    for change, back in changes.values():
        each(change)
        twins.run(batches[at : at + 4])
        twins.check_replays(False, True, True, True)
        each(back)
        twins.run(batches[at + 4 : at + 6])
        twins.check_replays(True, True)
        each(change)
        twins.run(batches[at + 6 : at + 8])
        twins.check_replays(True, True)
        each(back)
        at += 8
    assert graphs(twins) == (1 + len(changes)) * (device == "cuda")
    tracked = [m[1].num_batches_tracked.item() for m in model]
    assert tracked[0] == tracked[1] < at
    twins.check()


@each_row
def test_another_param_group(row, device):
    """Of parameters that didn't train until then."""
    batches = noises(24, 6, 4, device=device)
    twins = Twins(
        Scaled,
        row,
        mean_square,
        device,
        params_of=lambda m: [*m.first.parameters(), *m.last.parameters()],
    )
    twins.run(batches[:6])
    twins.check_replays(True, True, True)
    for model, optimizer in twins:
        params = list(model.frozen.requires_grad_(True).parameters())
        optimizer.add_param_group({"params": params, "lr": 0.03, "weight_decay": 0.2})
    before = [p.clone() for p in twins.models[1].frozen.parameters()]
    twins.run(batches[6:11])
    assert not twins.replayed[-5]
    assert not any(map(torch.equal, before, twins.models[1].frozen.parameters()))
    twins.run(batches[11:16])
    twins.check_replays(True)
    assert graphs(twins) == (device == "cuda")  # the old one wrote to other memory
    twins.check()


@each_row
def test_loaded_state_dicts(row, device):
    """Each model's own, then those of the other one, so that ours loads torch's and the other way
    round. Loading writes into memory that the graph knows."""
    batches = noises(40, 6, 3, 8, 8, device=device)
    twins = Twins(conv_bn, row, mean_square, device)
    twins.run(batches[:4])
    saved = [copy.deepcopy((m.state_dict(), o.state_dict())) for m, o in twins]
    twins.run(batches[4:8])
    for (model, _), (weights, _) in zip(twins, saved, strict=True):
        model.load_state_dict(weights)
    twins.run(batches[8:13])
    twins.check_replays(*[True] * 5)
    for (_, optimizer), (_, state) in zip(twins, saved, strict=True):
        optimizer.load_state_dict(copy.deepcopy(state))  # torch's takes the tensors themselves
    twins.run(batches[13:18])
    twins.check_replays(*[True] * 4)
    for (model, optimizer), (weights, state) in zip(twins, reversed(saved), strict=True):
        optimizer.load_state_dict(state)
        model.load_state_dict(weights)
    twins.run(batches[18:23])
    twins.check_replays(*[True] * 4)
    assert graphs(twins) == (device == "cuda")
    twins.check()


# -- schedules -------------------------------------------------------------------------------------

SCHEDULERS = {
    "every step": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda i: 1 / (i + 1)),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=40),
    "chained": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, total_iters=5),
            torch.optim.lr_scheduler.CosineAnnealingLR(o, 30),
        ],
        milestones=[5],
    ),
}


@each_row
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_schedules_need_no_new_graph(make, row, device):
    """Momentum and betas included, which OneCycleLR moves as well."""
    twins = Twins(mlp, row, mean_square, device)
    schedulers = [make(optimizer) for optimizer in twins.optimizers]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*lr_scheduler.step")
        for batch in noises(35, 6, 4, device=device):
            twins.run([batch])
            for scheduler in schedulers:
                scheduler.step()
    twins.check_replays(*[False] * WARMUP, *[True] * (35 - WARMUP))
    assert graphs(twins) == (device == "cuda")
    a, b = (o.param_groups[0] for o in twins.optimizers)
    assert a["lr"] == b["lr"] and a.get("betas") == b.get("betas")
    twins.check()


@each_row
def test_the_lr_of_a_step_reaches_that_step(row, device):
    """Though the device lags behind the host, and nothing waits."""
    twins = Twins(mlp, row, mean_square, device)
    batches = noises(100, 6, 4, device=device)
    lrs = [0.0 if i % 3 == 0 else 0.002 * (1 + i % 7) for i in range(100)]
    for step, optimizer in zip((twins.native, twins.step), twins.optimizers, strict=True):
        for i, (batch, lr) in enumerate(zip(batches, lrs, strict=True)):
            if device == "cuda" and i % 20 == 10:
                torch.cuda._sleep(20_000_000)
            optimizer.param_groups[0]["lr"] = lr
            step(*batch)
    assert twins.step.captured == (device == "cuda")
    twins.check()


def test_a_schedule_that_plateaus_reads_the_loss(device):
    """`.item()` between steps is the program's own affair."""
    twins = Twins(mlp, NESTEROV, mean_square, device)
    make = functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5)
    schedulers = [make(optimizer) for optimizer in twins.optimizers]
    for batch in noises(16, 6, 4, device=device):
        loss = twins.run([batch])[0].item()
        for scheduler in schedulers:
            scheduler.step(loss)
    assert twins.optimizers[1].param_groups[0]["lr"] < 0.02
    twins.check_replays(*[True] * 13)
    twins.check()


@each_row
@pytest.mark.cuda
def test_ten_thousand_steps_allocate_nothing(row, device):
    if device != "cuda":
        pytest.skip("the CPU's allocator doesn't count")
    twins = Twins(mlp, row, mean_square, device)
    optimizer, step = twins.optimizers[1], twins.step
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=10_010)
    x = noise(0, 64, 4, device=device)
    lrs = set()
    for _ in range(10):
        step(x)
        scheduler.step()
    torch.cuda.synchronize()
    keys = ("allocation.all.allocated", "segment.all.allocated")
    before = [torch.cuda.memory_stats()[key] for key in keys]
    for _ in range(10_000):
        step(x)
        assert step.captured
        scheduler.step()
        lrs.add(optimizer.param_groups[0]["lr"])
    torch.cuda.synchronize()
    assert [torch.cuda.memory_stats()[key] for key in keys] == before
    assert len(lrs) > 9_000
    found = step.explain()
    assert len(found.graphs) == 1 and found.replays == 10_010 - WARMUP and not found.fallbacks
