# SPDX-License-Identifier: BSD-3-Clause
# What a captured step must notice: whatever the program changes after the capture acts from the
# next step on, as in the native loop; and what may change without a new graph.

import copy
import functools
import re
import types
import warnings
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from stepping import ADAMW, BOTH, NESTEROV, WARMUP, Twins, mean_square, no_fallback, noise, noises
from testing import DEVICES, Optimizer, close, conv_bn, mlp
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from torch.optim.optimizer import register_optimizer_step_post_hook

import torch_renaissance as tr

pytestmark = [pytest.mark.parametrize("device", DEVICES), no_fallback]
each_row = pytest.mark.parametrize("row", BOTH, ids=lambda row: row.native.__name__)
PLAIN_SGD = Optimizer(torch.optim.SGD, tr.optim.SGD, {"lr": 0.05})


def captured_twins(make, row, loss_of, device, batches, **options):
    """Twins with a graph that has been replayed."""
    twins = Twins(make, row, loss_of, device, **options)
    twins.run(batches[: WARMUP + 3])
    twins.check_replays(*[False] * WARMUP, True, True, True)
    return twins


def graphs(twins):
    return len(twins.step.explain().graphs)


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


# -- inputs ----------------------------------------------------------------------------------------

INPUTS = {
    "smaller": lambda x: x[:3],
    "larger": lambda x: x.repeat(2, 1),
    "one row": lambda x: x[:1],
    "float32": lambda x: x.float(),
    "float16": lambda x: x.half(),
    "transposed": lambda x: x.t().contiguous().t(),
    "with gaps": lambda x: x.repeat(1, 2)[:, ::2],
    "one more dimension": lambda x: x[None],
    "no rows": lambda x: x[:0],
}


@each_row
@pytest.mark.parametrize("other", INPUTS.values(), ids=INPUTS)
def test_other_inputs_get_a_graph_of_their_own(other, row, device):
    def loss_of(model):
        return lambda x: (model(x.double()).pow(2).sum(), x.sum())

    batches = noises(24, 6, 4, device=device)
    twins = captured_twins(mlp, row, loss_of, device, batches)
    others = [(other(x),) for (x,) in batches]
    twins.run(others[6:11])
    twins.check_replays(False, True, True, True, True)
    twins.run(batches[11:13] + others[13:15] + batches[15:17])  # both graphs are kept
    twins.check_replays(*[True] * 6)
    assert graphs(twins) == 2 * (device == "cuda")
    twins.check()


def test_the_last_batch_of_an_epoch(device):
    """Seen once an epoch, it runs eagerly once and is captured the next time."""
    twins = Twins(mlp, ADAMW, mean_square, device)
    for epoch in range(4):
        twins.run(
            [
                *noises(5, 6, 4, device=device, first=10 * epoch),
                (noise(epoch, 2, 4, device=device),),
            ]
        )
    twins.check_replays(*[False] * 3, *[True] * 2, False, *[True] * 18)
    twins.check()


# -- many graphs -----------------------------------------------------------------------------------


@contextmanager
def fallbacks(device):
    """Collects the warnings of falling back; of the CPU's there may be one."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        messages = []
        yield messages
    messages += [str(w.message) for w in found if "runs eagerly" in str(w.message)]
    if device != "cuda":
        assert all("are on the CPU" in m for m in messages) and len(messages) <= 1
        messages.clear()


def test_more_shapes_than_graphs(device):
    twins = Twins(mlp, ADAMW, mean_square, device, max_graphs=2)
    with fallbacks(device) as messages:
        for i in range(8):
            twins.run([(noise(i, n, 4, device=device),) for n in (3, 4, 5, 6)])
    if device == "cuda":
        assert messages == ["TrainStep runs eagerly: all 2 graphs (max_graphs) are in use"]
        twins.check_replays(*[True, True, False, False] * 4)
        found = twins.step.explain()
        assert len(found.graphs) == 2
        assert found.fallbacks["all 2 graphs (max_graphs) are in use"] >= 8
    twins.check()


def test_a_graph_that_idles_makes_room(device):
    """The one used longest ago, and only after 100 calls without it."""
    twins = Twins(mlp, NESTEROV, mean_square, device, max_graphs=2)
    x, y, z = ((noise(i, 3 + i, 4, device=device),) for i in range(3))
    with fallbacks(device) as messages:
        twins.run([x] * 5 + [y] * 3)
        twins.check_replays(False, False, False, True, True, False, True, True)
        twins.run([z] * 60 + [y] * 10)
        assert not any(twins.replayed[-70:-10])
        twins.check_replays(*[True] * 10)
        twins.run([z] * 40)  # x has been idle for more than 100 calls, y has not
        assert twins.replayed[-1] == (device == "cuda")
        twins.run([y, z])
        twins.check_replays(True, True)
        twins.run([x, x])  # again one too many
        twins.check_replays(False, False)
    assert len(messages) == (device == "cuda")
    assert graphs(twins) == 2 * (device == "cuda")
    twins.check()


# -- Python values ---------------------------------------------------------------------------------


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


# -- tensors that loss_fn names --------------------------------------------------------------------


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


# -- torch's switches ------------------------------------------------------------------------------


def with_out(model):
    def loss_fn(x):
        out = model(x)
        return out.float().pow(2).mean(), (out, torch.is_grad_enabled())

    return loss_fn


@each_row
def test_autocast_of_the_program(row, device):
    """A model in float32; the dtype of what it returns tells whether autocast was on."""
    twins = Twins(mlp, row, with_out, device, torch.float32)
    batches = iter(noises(40, 6, 4, device=device, dtype=torch.float32))

    def run(n, dtype):
        for _ in range(n):  # entered for each step: torch's cast weights are kept until it is left
            with torch.autocast(device, dtype, enabled=dtype is not torch.float32):
                # Rounding to 16 bits may fall to the other side.
                ((_, (out, _)),) = twins.run([next(batches)], rtol=3e-2, atol=3e-2)
            assert out.dtype == dtype

    run(6, torch.float32)
    twins.check_replays(True, True, True)
    for dtype in (torch.bfloat16, torch.float16):
        run(5, dtype)
        twins.check_replays(False, True, True, True, True)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        run(2, dtype)
        twins.check_replays(True, True)


def test_weights_are_cast_anew_under_autocast(device):
    """Autocast keeps its casts of weights until it is left; an update makes them stale."""
    twins = Twins(
        mlp,
        Optimizer(torch.optim.SGD, tr.optim.SGD, {"lr": 0.5}),
        mean_square,
        device,
        torch.float32,
    )
    x = noise(0, 6, 4, device=device, dtype=torch.float32)
    with torch.autocast(device, torch.bfloat16):
        losses = [twins.step(x).item() for _ in range(8)]
    assert len(set(losses)) == len(losses)
    assert twins.step.captured == (device == "cuda")


@each_row
def test_grad_mode(row, device):
    """Under no_grad the step trains all the same, and leaves the mode as it was."""
    batches = noises(30, 6, 4, device=device)
    twins = captured_twins(mlp, row, mean_square, device, batches)
    with torch.no_grad():
        for batch in batches[6:11]:
            with torch.enable_grad():
                expected = twins.native(*batch)
            close(twins.step(*batch), expected)
            assert not torch.is_grad_enabled()
            twins.replayed.append(twins.step.captured)
        twins.check_replays(True)
    twins.run(batches[11:13])
    twins.check_replays(True, True)
    twins.check()


def cudnn(**flags):
    names = ("enabled", "benchmark", "deterministic", "allow_tf32")
    now = {name: getattr(torch.backends.cudnn, name) for name in names}
    return torch.backends.cudnn.flags(**(now | flags))


@contextmanager
def matmul_precision(name):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def deterministic():
    """With a warning only, since some kernels ask for a variable of the environment."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SWITCHES = {
    "cudnn.enabled": lambda: cudnn(enabled=False),
    "cudnn.deterministic": lambda: cudnn(deterministic=True),
    "cudnn.benchmark": lambda: cudnn(benchmark=True),
    "float32 precision": lambda: matmul_precision("medium"),
    "deterministic algorithms": deterministic,
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
}


@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)
def test_switches_of_torch_get_graphs_of_their_own(switch, device):
    """Other kernels may be behind them, which a replay would not notice."""
    batches = noises(30, 6, 3, 8, 8, device=device)
    with matmul_precision("highest"):  # to torch, set is not the same as never set
        twins = captured_twins(conv_bn, NESTEROV, mean_square, device, batches)
        with warnings.catch_warnings(), switch():
            warnings.filterwarnings("ignore", ".*(deterministic|Anomaly)")
            twins.run(batches[6:10])
            twins.check_replays(False, True, True, True)
        twins.run(batches[10:12])
        twins.check_replays(True, True)
    assert graphs(twins) == 2 * (device == "cuda")
    twins.check()


# -- hooks -----------------------------------------------------------------------------------------


@dataclass
class Hook:
    """Registers a hook that changes numbers, and notes its calls."""

    register: object
    title: str  # what the warning says of it


def doubling(calls):
    def hook(*args):
        calls.append("called")
        value = args[-1]
        if isinstance(value, tuple):
            return tuple(v * 2 for v in value)
        return value * 2

    return hook


def post_accumulate(model, optimizer, calls):
    def hook(p):
        calls.append("called")
        p.grad.mul_(2)

    return model[0].weight.register_post_accumulate_grad_hook(hook)


def backward_hook(model, optimizer, calls):
    def hook(module, grad_input, grad_output):
        calls.append("called")
        return tuple(None if g is None else g * 2 for g in grad_input)

    return model[2].register_full_backward_hook(hook)


def backward_pre_hook(model, optimizer, calls):
    def hook(module, grad_output):
        calls.append("called")
        return tuple(g * 2 for g in grad_output)

    return model[1].register_full_backward_pre_hook(hook)


def step_pre_hook(model, optimizer, calls):
    def hook(optimizer, args, kwargs):
        calls.append("called")
        for p in model.parameters():
            p.grad.mul_(2)

    return optimizer.register_step_pre_hook(hook)


def step_post_hook(model, optimizer, calls):
    def hook(optimizer, args, kwargs):
        calls.append("called")
        with torch.no_grad():
            model[0].weight.mul_(0.9)

    return optimizer.register_step_post_hook(hook)


def global_forward_hook(model, optimizer, calls):
    tanh = model[1]

    def hook(module, args, out):
        if module is tanh:
            calls.append("called")
            return out * 2

    return register_module_forward_hook(hook)


def global_step_hook(model, optimizer, calls):
    mine = optimizer

    def hook(optimizer, args, kwargs):
        if optimizer is mine:
            calls.append("called")

    return register_optimizer_step_post_hook(hook)


HOOKS = {
    "forward": Hook(lambda m, o, c: m[1].register_forward_hook(doubling(c)), r"1 \(Tanh\)"),
    "forward pre": Hook(lambda m, o, c: m[1].register_forward_pre_hook(doubling(c)), "Tanh"),
    "full backward": Hook(backward_hook, r"Linear\) has a hook"),
    "full backward pre": Hook(backward_pre_hook, r"Tanh\) has a hook"),
    "tensor": Hook(lambda m, o, c: m[0].weight.register_hook(doubling(c)), "0.weight has a tensor"),
    "post accumulate": Hook(post_accumulate, "0.weight has a tensor hook"),
    "step pre": Hook(step_pre_hook, "the optimizer has a hook"),
    "step post": Hook(step_post_hook, "the optimizer has a hook"),
    "global forward": Hook(global_forward_hook, "_global_forward_hooks has hooks"),
    "global step": Hook(global_step_hook, "torch.optim has global step hooks"),
}


@each_row
@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_a_hook_added_after_the_capture_runs(hook, row, device):
    batches = noises(30, 6, 4, device=device)
    twins = captured_twins(mlp, row, mean_square, device, batches)
    calls = [], []
    handles = []
    with fallbacks(device) as messages:
        try:
            for (model, optimizer), c in zip(twins, calls, strict=True):
                handles.append(hook.register(model, optimizer, c))
            twins.run(batches[6:11])
            assert len(calls[0]) == len(calls[1]) == 5
            twins.check_replays(*[False] * 5)
        finally:
            for handle in handles:
                handle.remove()
    if device == "cuda":
        assert len(messages) == 1
        assert re.search(hook.title, messages[0])
        assert sum(twins.step.explain().fallbacks.values()) == 5
    twins.run(batches[11:16])
    assert len(calls[1]) == 5
    twins.check_replays(True)
    twins.check()


def test_a_hook_added_before_the_first_step_runs(device):
    twins = Twins(mlp, NESTEROV, mean_square, device)
    calls = [], []
    with fallbacks(device) as messages:
        for (model, _), c in zip(twins, calls, strict=True):
            model[1].register_forward_hook(doubling(c))
        twins.run(noises(8, 6, 4, device=device))
    assert len(calls[0]) == len(calls[1]) == 8
    assert not any(twins.replayed)
    if device == "cuda":
        assert len(messages) == 1 and "test_train_step_keys.py" in messages[0]
    twins.check()


def test_a_replaced_step_of_the_optimizer_is_called(device):
    batches = noises(20, 6, 4, device=device)
    twins = captured_twins(mlp, NESTEROV, mean_square, device, batches)
    calls = []
    for _, optimizer in twins:

        def step(closure=None, own=optimizer.step):
            calls.append("called")
            return own(closure)

        optimizer.step = step
    with fallbacks(device) as messages:
        twins.run(batches[6:11])
    assert len(calls) == 10
    twins.check_replays(*[False] * 5)
    assert len(messages) == (device == "cuda")
    twins.check()


def test_a_gradient_left_over_is_added_to(device):
    """As native backward does, in that one step."""
    batches = noises(20, 6, 4, device=device)
    twins = captured_twins(mlp, NESTEROV, mean_square, device, batches)
    with fallbacks(device) as messages:
        for model, _ in twins:
            model(batches[0][0]).abs().sum().backward()
        twins.run(batches[6:7])
        twins.check_replays(False)
        twins.run(batches[7:11])
    twins.check_replays(True)
    assert len(messages) == (device == "cuda")
    twins.check()


def test_a_decay_of_the_averages_counts_steps(device):
    """A function of the number of steps; replays that were refused are no steps."""
    runs = []
    for warmup in (10**9, WARMUP):
        torch.manual_seed(0)
        model = mlp().to(device, torch.float64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        tr.accelerate(model, optimizer, ema_decay=lambda n: n / (n + 2))
        step = tr.TrainStep(mean_square(model), optimizer, warmup=warmup)
        with fallbacks(device):
            for i, (x,) in enumerate(noises(24, 6, 4, device=device)):
                if i in (6, 9):
                    model(x).sum().backward()  # left over
                if i == 12:
                    hook = model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
                if i == 15:
                    hook.remove()
                step(x)
        runs.append(tr.Ema(model, optimizer).state_dict())
    for name, average in runs[0].items():
        close(runs[1][name], average, name)
