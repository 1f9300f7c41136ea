# SPDX-License-Identifier: BSD-3-Clause
# tr.lr's schedules beside a GradScaler: a step that it skips doesn't advance them, and the device
# is asked as seldom as that allows.

import math

import pytest
import torch
from testing import DEVICES
from torch import nn

import torch_renaissance as tr

lr = tr.lr
each_device = pytest.mark.parametrize("device", DEVICES)
each_lr = pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])


def scaled_run(optimizer, p, handle, bad, schedule):
    """Steps through a GradScaler, those in `bad` with an infinity; what each took off `p`."""
    scaler = torch.amp.GradScaler(p.device.type, init_scale=4.0)
    moved = []
    for step in range(12):
        before = p.detach().clone()
        optimizer.zero_grad()
        scaler.scale(p.sum()).backward()
        if step in bad:
            p.grad[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        handle.step()
        moved.append(float((before - p.detach()).mean()))
    return moved


def scaled_start(device, kind=None, accelerated=True, **options):
    p = nn.Parameter(torch.zeros(3, dtype=torch.float64, device=device))
    optimizer = (kind or torch.optim.SGD)([p], lr=1.0, **options)
    if accelerated:
        tr.accelerate(nn.ParameterList([p]), optimizer)
    return p, optimizer


SKIPPED = [{0}, {11}, {3, 4, 5}, {0, 2, 7}, set(), set(range(12))]
SCALED = {
    "batch": lr.Exponential(1.0, 0.5, warmup=2, warmup_lr=0.5),
    "epoch": lr.Exponential(1.0, 0.5, steps_per_epoch=3, by="epoch"),
}


@each_device
@pytest.mark.parametrize("bad", SKIPPED, ids=str)
@pytest.mark.parametrize("by", SCALED)
@pytest.mark.parametrize("count_skipped", [None, False, True])
@pytest.mark.filterwarnings("error")
def test_a_skipped_step_does_not_advance_it(bad, by, count_skipped, device):
    p, optimizer = scaled_start(device)
    schedule = SCALED[by]
    handle = schedule.attach(optimizer, count_skipped=count_skipped)
    moved = scaled_run(optimizer, p, handle, bad, schedule)
    wanted, done = [], 0
    for step in range(12):
        wanted.append(0.0 if step in bad else schedule(done))
        done += 1 if count_skipped else step not in bad
    torch.testing.assert_close(moved, wanted, rtol=1e-9, atol=0)
    assert handle.last_step == handle.state_dict()["last_step"] == done
    assert optimizer.param_groups[0]["lr"] == schedule(done)


@each_device
@pytest.mark.parametrize("when", ["attached first", "skipped before", "resumed"])
def test_skipped_steps_of_another_time_do_not_count(when, device):
    schedule = SCALED["batch"]
    p, optimizer = scaled_start(device, accelerated=when != "attached first")
    if when == "attached first":
        handle = schedule.attach(optimizer)
        tr.accelerate(nn.ParameterList([p]), optimizer)
    else:
        scaled_run(optimizer, p, lr.Constant(1.0).attach(optimizer), {0, 5}, schedule)
        handle = schedule.attach(optimizer, last_step=0)
    scaled_run(optimizer, p, handle, {1, 2}, schedule)
    assert handle.last_step == 10
    if when == "resumed":
        handle.load_state_dict({**handle.state_dict(), "last_step": 4})
        assert optimizer.param_groups[0]["lr"] == schedule(4)
        scaled_run(optimizer, p, handle, {2}, schedule)
        assert handle.last_step == 4 + 11


@each_device
@pytest.mark.parametrize("fused", [None, True])
def test_every_step_of_torchs_own_optimizers_advances_it(fused, device):
    p, optimizer = scaled_start(device, accelerated=False, fused=fused)
    schedule = SCALED["batch"]
    handle = schedule.attach(optimizer)
    scaled_run(optimizer, p, handle, {3, 4}, schedule)
    assert handle.last_step == 12 and optimizer.param_groups[0]["lr"] == schedule(12)


class Counted(torch.optim.SGD):
    """Skips on the device as ours do, and counts who asks for it."""

    _step_supports_amp_scaling = True
    asked = skipped = 0

    @property
    def skipped_steps(self):
        self.asked += 1
        return self.skipped

    def step(self, closure=None):
        found = getattr(self, "found_inf", None)
        if found is not None:
            self.found_inf = self.grad_scale = None  # not for torch's step
        if found:
            self.skipped += 1
        else:
            super().step(closure)


@pytest.mark.parametrize(
    "by, count_skipped, scaler, bad, asked",
    [
        ("batch", None, False, set(), 0),
        ("batch", True, True, {3}, 0),
        ("batch", None, True, set(), 12),
        ("batch", False, False, set(), 12),
        ("epoch", None, False, set(), 0),
        ("epoch", True, True, {3}, 0),
        ("epoch", None, True, set(), 4),  # once an epoch
        ("epoch", None, True, {4}, 4),  # again one later, where the epoch really ends
        ("epoch", False, False, set(), 4),
    ],
)
def test_the_device_is_asked_as_seldom_as_possible(by, count_skipped, scaler, bad, asked):
    p, optimizer = scaled_start("cpu", Counted, accelerated=False)
    schedule = lr.Exponential(
        1.0, 0.5, **({"steps_per_epoch": 3, "by": by} if by == "epoch" else {})
    )
    handle = schedule.attach(optimizer, count_skipped=count_skipped)
    assert optimizer.asked == (0 if count_skipped else 1)  # how many there were
    optimizer.asked = 0
    if scaler:
        scaled_run(optimizer, p, handle, bad, schedule)
    else:
        for _ in range(12):
            optimizer.step()
            handle.step()
    handle.get_last_lr()
    assert optimizer.asked == asked
    assert handle.last_step == 12 - (0 if count_skipped else len(bad))


def test_a_scaler_that_comes_late_is_noticed_at_the_checkpoint():
    p, optimizer = scaled_start("cpu")
    schedule = lr.Exponential(1.0, 0.5)
    handle = schedule.attach(optimizer)
    p.grad = torch.ones_like(p)
    optimizer.step()
    handle.step()
    scaled_run(optimizer, p, handle, {1, 2}, schedule)
    assert handle.last_step == 13
    assert handle.state_dict()["last_step"] == handle.last_step == 11
    scaled_run(optimizer, p, handle, {1, 2}, schedule)
    assert handle.last_step == 21 and optimizer.param_groups[0]["lr"] == schedule(21)


@pytest.mark.cuda
@each_lr
def test_no_step_waits_for_the_device_without_a_scaler(tensor):
    p = nn.Parameter(torch.zeros(3, device="cuda"))
    value = torch.tensor(1.0, device="cuda") if tensor else 1.0
    optimizer = torch.optim.SGD([p], lr=value, foreach=False)
    tr.accelerate(nn.ParameterList([p]), optimizer)
    handle = lr.Cosine(1.0, 20, warmup=3).attach(optimizer)
    p.grad = torch.ones_like(p)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            optimizer.step()
            handle.step()
            assert handle.last_step and handle.get_last_lr()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
def test_by_epoch_a_step_waits_once_an_epoch_with_a_scaler():
    p, optimizer = scaled_start("cuda")
    handle = SCALED["epoch"].attach(optimizer)
    scaler = torch.amp.GradScaler("cuda")
    waited = []
    for step in range(1, 13):
        optimizer.zero_grad()
        scaler.scale(p.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        torch.cuda.set_sync_debug_mode("error")
        try:
            handle.step()
        except RuntimeError:
            torch.cuda.set_sync_debug_mode("default")
            waited.append(step)
            handle.load_state_dict({"last_step": step, "ratios": [1.0]})
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert waited == [3, 6, 9, 12]
