# SPDX-License-Identifier: BSD-3-Clause
# With precision=, what a loss_fn itself does with weights: it has the parameters, not the 16-bit
# copies that Linear, Conv and attention read; or an error.

import copy
import warnings

import pytest
import torch
from autocasting import (
    ROWS,
    VECTOR,
    Trainings,
    batches,
    each_precision,
    eager_on_a_cpu,
    mlp,
    squares,
    wide,
)
from testing import DEVICES, equal
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torch_renaissance as tr
from torch_renaissance import _low

pytestmark = [pytest.mark.parametrize("device", DEVICES), eager_on_a_cpu]


def clamp(p):
    with torch.no_grad():
        p.clamp_(-0.01, 0.01)


def clamp_data(p):
    p.data.clamp_(-0.01, 0.01)


def copy_into(p):
    with torch.no_grad():
        p.copy_(torch.zeros_like(p))


class Taught(nn.Module):
    """A teacher's weights follow the student's, within forward."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = mlp(), mlp().requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for t, p in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                t.mul_(0.5).add_(p, alpha=0.5)
        return self.student(x) - 0.5 * self.teacher(x)


def penalized(model, x):
    return squares(model, x) + 0.1 * sum(p.square().sum() for p in model.parameters())


def written(write):
    def loss(model, x):
        write(model[0].weight)
        return squares(model, x)

    return loss


def multiplied(model, x):
    return wide(x @ model[0].weight.t().to(x.dtype)).pow(2).mean() + squares(model, x)


def cast(model, x):
    return squares(model, x) + model[0].weight.type(torch.float64).pow(2).sum()


# Each with how many modules then read their own weights.
READERS = {
    "penalty": (mlp, penalized, 2),
    "penalty of one": (mlp, lambda m, x: squares(m, x) + m[0].weight.abs().sum(), 1),
    "clamp": (mlp, written(clamp), 2),
    "copy": (mlp, written(copy_into), 2),
    "data": (mlp, written(clamp_data), 2),
    "cast": (mlp, cast, 1),
    "product": (mlp, multiplied, 1),
    "teacher": (Taught, squares, 4),
}


@each_precision
@pytest.mark.parametrize("name", READERS)
def test_a_loss_function_that_reads_or_writes_weights_has_the_parameters(name, precision, device):
    """Not their 16-bit copies, which are for Linear, Conv and attention alone."""
    make, loss, count = READERS[name]
    t = Trainings((make, VECTOR, loss), ROWS[0], precision, device)
    t.run_all(8)
    t.check()
    left = t.step.explain().autocast
    assert len(left) == count and all("reads its weight" in why for why in left.values()), left


@each_precision
def test_what_fails_with_a_copy_is_tried_with_the_parameter(precision, device):
    """Only leaves can be copied, which the 16-bit copies aren't."""
    model = mlp().to(device)
    model, optimizer = tr.accelerate(model, torch.optim.SGD(model.parameters(), 0.1))
    step = tr.TrainStep(
        lambda x: squares(model, x) + squares(copy.deepcopy(model), x).detach(),
        optimizer,
        precision=precision,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whether a copy can be captured isn't asked here
        losses = [step(batch.to(device)) for batch in batches(VECTOR, 6)]
    assert torch.stack(losses).isfinite().all()
    assert step.explain().autocast.keys() == {"model.0", "model.2"}


@each_precision
def test_what_loss_fn_keeps_is_changed_once_a_step(precision, device):
    """Though the first step begins again when it comes to the weight."""
    model, kept = mlp().to(device), torch.zeros(4, device=device)
    model, optimizer = tr.accelerate(model, torch.optim.SGD(model.parameters(), 0.1))

    def loss_fn(x):
        with torch.no_grad():
            kept.mul_(0.5).add_(1.0)
            size = model[0].weight.abs().mean()
        return squares(model, x) * kept.mean() * size

    step, expected = tr.TrainStep(loss_fn, optimizer, precision=precision), 0.0
    for batch in batches(VECTOR, 7):
        step(batch.to(device))
        expected = 0.5 * expected + 1.0
        assert kept.tolist() == [expected] * 4
    assert step.explain().autocast.keys() == {"model.0", "model.2"}


@each_precision
def test_frozen_weights_are_not_copied(precision, device):
    """They may be most of a model: the first step takes no memory for what it doesn't change."""
    model = nn.Sequential(nn.Linear(6, 6).requires_grad_(False), mlp()).to(device)
    model, optimizer = tr.accelerate(model, torch.optim.SGD(model.parameters(), 0.1))
    frozen, copies = model[0].weight.data_ptr(), []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.clone.default:
                copies.append(args[0].data_ptr())
            return function(*args, **(kwargs or {}))

    step = tr.TrainStep(lambda x: squares(model, x), optimizer, precision=precision)
    with Copies():
        step(batches(VECTOR, 1)[0].to(device))
    assert copies and frozen not in copies


@each_precision
def test_one_more_forward_for_any_number_of_readers(precision, device):
    """And only they keep autocast's way. Hooks of backward run once."""
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(6)]).to(device)
    model, optimizer = tr.accelerate(model, torch.optim.SGD(model.parameters(), 0.1))
    calls, gradients = [], []

    def loss_fn(x):
        calls.append(len(x))
        y = model(x)
        y.register_hook(lambda g: gradients.append(g.shape))
        return y.float().pow(2).mean() + sum((model[i].bias + 1).sum() for i in (0, 2, 5))

    step = tr.TrainStep(loss_fn, optimizer, precision=precision)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the hook keeps it from capture
        for batch in batches(VECTOR, 3):
            step(batch.to(device))
    assert len(calls) == 4 and len(gradients) == 3
    left = step.explain().autocast
    assert left.keys() == {"model.0", "model.2", "model.5"}
    assert all(why.endswith("reads its weight") for why in left.values()), left


@each_precision
def test_questions_that_are_no_values_leave_the_copies(precision, device):
    def loss(model, x):
        weight = model[0].weight
        assert weight.dim() == 2 and weight.requires_grad and weight.device.type == device
        return squares(model, x) * weight.shape[0] / weight.numel()

    t = Trainings((mlp, VECTOR, loss), ROWS[0], precision, device)
    t.run_all(8)
    t.check()
    assert t.step.explain().autocast == {}


@each_precision
@pytest.mark.parametrize("how", ["model", "loss_fn", "TrainStep"])
def test_looking_at_what_is_compiled(how, precision, device):
    """The first step runs it as it was written; it isn't compiled with what looks at it."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    given = {"backend": "eager", "fullgraph": True, "dynamic": False}

    def loss(model, x):
        if model is t.ours and how == "model":
            return penalized(compiled, x)
        return penalized(model, x)

    t = Trainings((mlp, VECTOR, loss), ROWS[0], precision, device)
    compiled = torch.compile(t.ours, **given)
    if how == "loss_fn":
        t.step = tr.TrainStep(
            torch.compile(lambda x: penalized(t.ours, x), **given),
            t.optimizer,
            precision=precision,
        )
    elif how == "TrainStep":
        t.step = tr.TrainStep(
            lambda x: penalized(t.ours, x), t.optimizer, precision=precision, compile=given
        )
    t.run_all(6)
    t.check()
    assert len(t.step.explain().autocast) == 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_memory_that_only_the_uncompiled_step_lacks(device, monkeypatch):
    """Then the first step runs again, and without a look."""
    t = Trainings("mlp", ROWS[0], "bf16", device)
    looks = []
    forward = nn.Linear.forward

    def short_of_memory(self, x):
        looks.append(torch.overrides._get_current_function_mode_stack() != [])
        if looks[-1]:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(self, x)

    step = t.make_step()
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", short_of_memory)
        patch.setattr(_low, "_FORWARDS", {short_of_memory})
        t.step = step
        t.run(batches(VECTOR, 1)[0])
    assert looks.count(True) == 1 and looks[-1] is False
    for batch in batches(VECTOR, 7)[1:]:
        t.run(batch)
    t.check()


class Unseen:
    """What lies in slots isn't watched: else another value would be looked at anew."""

    __slots__ = ("now",)

    def __init__(self):
        self.now = False


@each_precision
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("write", [clamp, copy_into])
@pytest.mark.parametrize("directly", [False, True], ids=["by module", "the parameter"])
def test_a_loss_function_that_begins_to_write_to_weights_is_refused(
    directly, write, when, precision, device
):
    """It finds 16-bit copies, which the update makes anew. Those are the weights' again after."""
    parameters, armed = [], Unseen()

    def loss(model, x):
        def change():
            if armed.now:
                write(parameters[0] if directly else model[0].weight)

        if when == "before":
            change()
        value = squares(model, x)
        if when == "after":
            change()
        return value

    t = Trainings((mlp, VECTOR, loss), ROWS[0], precision, device)
    parameters.append(t.ours[0].weight)
    given = batches(VECTOR, 8)
    for i, batch in enumerate(given):
        if i == 1 or (i == 0 and directly):
            before = t.everything()
            armed.now = True
            with pytest.raises(RuntimeError, match="writes to the weight of a Linear of shape"):
                t.step(batch.to(device))
            armed.now = False
            t.check_untouched()
            if directly:  # what the program has done to it itself is its own
                for model in (t.exact, t.native):
                    write(model[0].weight)
            else:
                assert equal(t.everything(), before)
        t.run(batch)
    t.check()
