# SPDX-License-Identifier: BSD-3-Clause
# tr.lr's schedules at work on optimizers, torch's and ours: groups and their ratios, when the lr is
# written, and checkpoints.

import io
import json
import warnings

import pytest
import torch
from testing import DEVICES, USUAL, mlp, square
from torch import nn
from torch.optim import lr_scheduler as S

import torch_renaissance as tr

lr = tr.lr
each_device = pytest.mark.parametrize("device", DEVICES)
HOW = ["torch", "accelerated before", "accelerated after", "ours"]
each_way = pytest.mark.parametrize("how", HOW)
each_lr = pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])


def new_group(value=None):
    group = {"params": [nn.Parameter(torch.zeros(1, dtype=torch.float64))]}
    return group if value is None else {**group, "lr": value}


def sgd(*values, **options):
    """An SGD with a group for each lr among `values`."""
    return torch.optim.SGD([new_group(value) for value in values], **options)


def rate(tensor, value=0.1):
    """Options for an lr that is a tensor, which torch's foreach forms don't take, or a float."""
    return {"lr": torch.tensor(value), "foreach": False} if tensor else {"lr": value}


def train(how, usual, device, schedule, steps, **changes):
    """The lr that each of `steps` updates was done with, by group, and the handle."""
    torch.manual_seed(0)
    model = mlp().to(device, torch.float64)
    options = {**usual.options, **changes}
    groups = [
        {"params": list(model[0].parameters())},
        {"params": list(model[2].parameters()), "lr": options["lr"] * 0.1},
    ]
    optimizer = (usual.ours if how == "ours" else usual.native)(groups, **options)
    if how == "accelerated before":
        tr.accelerate(model, optimizer)
    handle = schedule.attach(optimizer)
    if how == "accelerated after":
        tr.accelerate(model, optimizer)
    values = []
    for _ in range(steps):
        optimizer.zero_grad()
        square(model).backward()
        values.append([float(group["lr"]) for group in optimizer.param_groups])
        assert handle.get_last_lr() == pytest.approx(values[-1], rel=1e-6)
        optimizer.step()
        handle.step()
    return values, handle


@each_device
@each_way
@pytest.mark.parametrize("usual", USUAL, ids=str)
@each_lr
@pytest.mark.filterwarnings("error")
def test_groups_follow_the_schedule_and_keep_their_ratios(usual, how, tensor, device):
    schedule = lr.Cosine(0.1, 8, eta_min=0.01, warmup=3, warmup_factor=0.5)
    values, handle = train(how, usual, device, schedule, 10, **rate(tensor))
    wanted = [[schedule(step), schedule(step) * 0.1] for step in range(10)]
    torch.testing.assert_close(values, wanted, rtol=1e-6, atol=0)
    assert handle.last_step == 10 and handle.get_last_lr() == [0.01, pytest.approx(0.001)]
    assert "step" not in vars(handle.optimizer)
    assert not handle.optimizer._optimizer_step_pre_hooks
    for group in handle.optimizer.param_groups:
        assert isinstance(group["lr"], torch.Tensor) == tensor
        assert "initial_lr" not in group


@each_device
@each_way
def test_an_update_is_done_with_the_lr_of_its_step(how, device):
    p = nn.Parameter(torch.zeros(3, dtype=torch.float64, device=device))
    kind = tr.optim.SGD if how == "ours" else torch.optim.SGD
    optimizer = kind([p], lr=1.0)
    schedule = lr.Exponential(1.0, 0.5, warmup=3, warmup_lr=0.25)
    accelerated = [how == "accelerated before", how == "accelerated after"]
    if accelerated[0]:
        tr.accelerate(nn.ParameterList([p]), optimizer)
    handle = schedule.attach(optimizer)
    if accelerated[1]:
        tr.accelerate(nn.ParameterList([p]), optimizer)
    for step in range(8):
        before = p.detach().clone()
        p.grad = torch.ones_like(p)
        optimizer.step()
        handle.step()
        wanted = torch.full_like(p, schedule(step)).detach()
        torch.testing.assert_close(before - p.detach(), wanted, rtol=1e-12, atol=0)


def test_torchs_schedulers_go_on_beside_it_without_a_warning():
    """Each for an optimizer of its own; and both on one, where the last to step sets the lr."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for first in (True, False):
            optimizer = sgd(1.0)
            torchs = S.StepLR(optimizer, 2) if first else None
            handle = lr.Constant(1.0).attach(optimizer)
            torchs = torchs or S.StepLR(optimizer, 2)
            for step in range(5):
                optimizer.step()
                torchs.step()
                assert optimizer.param_groups[0]["lr"] == (1.0 if step % 2 == 0 else 0.1)
                handle.step()
                assert optimizer.param_groups[0]["lr"] == 1.0


def test_given_ratios():
    optimizer = sgd(0.3, 0.7)
    handle = lr.Step(2.0, 1, 0.5).attach(optimizer, ratios=(0.25, 0))
    assert [g["lr"] for g in optimizer.param_groups] == handle.get_last_lr() == [0.5, 0]
    optimizer.step()
    handle.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.25, 0]


def test_a_float32_lr_follows_the_schedule_itself():
    """0.1 in float32 is 1.5e-8 more: rounding, not a ratio."""
    handle = lr.Constant(0.1).attach(sgd(torch.tensor(0.1)))
    assert handle.get_last_lr() == [0.1]


@each_lr
def test_a_group_added_later_gets_its_ratio_then(tensor):
    optimizer = torch.optim.SGD([new_group()], **rate(tensor, 1.0))
    handle = lr.Step(1.0, 1, 0.5).attach(optimizer)
    optimizer.step()
    handle.step()
    optimizer.add_param_group(new_group())  # a tensor is shared with the first, and filled by now
    optimizer.add_param_group(new_group(0.1))
    optimizer.step()
    handle.step()
    assert [float(g["lr"]) for g in optimizer.param_groups] == [0.25, 0.25, 0.025]
    assert handle.get_last_lr() == [0.25, 0.25, 0.025]


def test_the_lr_is_written_only_where_it_is_another():
    schedule = lr.MultiStep(1.0, [1, 2], steps_per_epoch=4, by="epoch")
    shared = torch.tensor(1.0, dtype=torch.float64)
    optimizer = sgd(1.0, torch.tensor(0.5, dtype=torch.float64), shared, shared, foreach=False)
    groups = optimizer.param_groups
    handle = schedule.attach(optimizer)
    tensors = [g["lr"] for g in groups[1:]]
    for step in range(1, 12):
        written, versions = groups[0]["lr"], [t._version for t in tensors]
        optimizer.step()
        handle.step()
        changed = step % 4 == 0
        assert (groups[0]["lr"] is not written) == changed
        assert [t._version - v for t, v in zip(tensors, versions, strict=True)] == [changed] * 3
        assert all(g["lr"] is t for g, t in zip(groups[1:], tensors, strict=True))
    for group in groups[:3]:  # what others wrote is noticed, and where they put a tensor of theirs
        value = torch.tensor(7.0) if group is groups[0] else group["lr"].fill_(7.0)
        group["lr"] = value
    handle.step()
    assert [float(g["lr"]) for g in groups] == pytest.approx([0.01, 0.005, 0.01, 0.01])


def test_refused_attachments():
    schedule = lr.Constant(0.1)
    optimizer = sgd(0.1, 0.2)
    before = [dict(group) for group in optimizer.param_groups]
    for options, error, words in (
        ({"ratios": [1.0]}, ValueError, "there are 1 ratios for 2 param groups; give each group"),
        ({"ratios": [1.0, -1.0]}, ValueError, "ratios[1] must be a finite number of at least 0"),
        ({"ratios": [True, 1.0]}, TypeError, "ratios[0] must be a number, got True"),
        ({"ratios": 1.0}, TypeError, "ratios must be a list of numbers, got 1.0"),
        ({"ratios": "12"}, TypeError, "ratios must be a list of numbers, got '12'"),
        ({"last_step": -1}, ValueError, "last_step must be at least 0, got -1"),
        ({"last_step": 1.0}, TypeError, "last_step must be an int, got 1.0"),
        ({"count_skipped": 1}, TypeError, "count_skipped must be a bool or None, got 1"),
    ):
        with pytest.raises(error) as caught:
            schedule.attach(optimizer, **options)
        assert str(caught.value).startswith("attach: ") and words in str(caught.value)
    with pytest.raises(ValueError, match=r"lr is 0.5, but the param groups have \[0.1, 0.2\], non"):
        lr.Constant(0.5).attach(optimizer)
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer, got Module"):
        schedule.attach(nn.Module())
    assert [dict(group) for group in optimizer.param_groups] == before
    assert not optimizer._optimizer_step_pre_hooks
    shared = torch.tensor(0.1)
    with pytest.raises(ValueError, match="groups 0 and 2 have the same tensor as lr, but the rati"):
        schedule.attach(sgd(shared, 0.1, shared, foreach=False), ratios=[1, 2, 3])


def test_refused_changes_of_the_number_of_groups():
    optimizer = sgd(1.0)
    handle = lr.Constant(1.0).attach(optimizer, ratios=[1.0])
    optimizer.add_param_group(new_group(0.5))
    with pytest.raises(ValueError, match="has 2 param groups now, but had 1 when the schedule was"):
        handle.step()
    optimizer = sgd(1.0, 2.0)
    handle = lr.Constant(1.0).attach(optimizer)
    del optimizer.param_groups[1]
    with pytest.raises(ValueError, match="has 1 param groups now, but had 2 when the schedule was"):
        handle.step()


# -- checkpoints --------------------------------------------------------------------------------


@each_way
@each_lr
def test_state_goes_through_a_checkpoint(how, tensor):
    schedule = lr.CosineWarmRestarts(0.1, 3, 2, eta_min=0.01, warmup=2)
    values, _ = train(how, USUAL[0], "cpu", schedule, 30, **rate(tensor))
    _, handle = train(how, USUAL[0], "cpu", schedule, 11, **rate(tensor))
    file = io.BytesIO()
    kept = {"optimizer": handle.optimizer.state_dict(), "lr": handle.state_dict()}
    assert json.loads(json.dumps(kept["lr"])) == kept["lr"]
    torch.save(kept, file)
    file.seek(0)
    kept = torch.load(file, weights_only=True)
    _, other = train(how, USUAL[0], "cpu", schedule, 0, **rate(tensor))
    other.optimizer.load_state_dict(kept["optimizer"])
    other.load_state_dict(kept["lr"])
    assert other.last_step == 11 and other.state_dict() == kept["lr"]
    for step in range(11, 30):
        now = [float(group["lr"]) for group in other.optimizer.param_groups]
        assert now == values[step]
        other.optimizer.step()
        other.step()


def test_loading_sets_the_lr_of_that_step():
    schedule = lr.Step(1.0, 2, 0.5)
    optimizer = sgd(1.0, 3.0)
    handle = schedule.attach(optimizer)
    handle.load_state_dict({"last_step": 5, "ratios": [1.0, 2.0]})
    assert [g["lr"] for g in optimizer.param_groups] == [0.25, 0.5] == handle.get_last_lr()
    again = schedule.attach(sgd(1.0, 2.0), last_step=5)
    assert again.get_last_lr() == [0.25, 0.5] and again.last_step == 5
    assert again.state_dict() == handle.state_dict()


@pytest.mark.parametrize(
    "state, error, words",
    [
        ({}, ValueError, "expected a dict with last_step and ratios"),
        (None, ValueError, "expected a dict with last_step and ratios, as Handle.state_dict"),
        ({"last_step": 1, "ratios": [1.0], "more": 0}, ValueError, "expected a dict with last_st"),
        ({"last_step": -1, "ratios": [1.0]}, ValueError, "last_step must be at least 0, got -1"),
        ({"last_step": 1.5, "ratios": [1.0]}, TypeError, "last_step must be an int, got 1.5"),
        ({"last_step": 3, "ratios": [1.0, 1.0]}, ValueError, "2 ratios for 1 param groups"),
        ({"last_step": 3, "ratios": None}, TypeError, "ratios must be a list of numbers"),
    ],
)
def test_refused_states(state, error, words):
    optimizer = sgd(1.0)
    handle = lr.Exponential(1.0, 0.5).attach(optimizer)
    with pytest.raises(error, match=words):
        handle.load_state_dict(state)
    assert handle.last_step == 0 and optimizer.param_groups[0]["lr"] == 1.0
    assert handle.state_dict() == {"last_step": 0, "ratios": [1.0]}
