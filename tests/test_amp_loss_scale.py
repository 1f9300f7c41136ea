# SPDX-License-Identifier: BSD-3-Clause
# tr.amp.LossScale beside torch.amp.GradScaler, with clipping, skipped steps and state_dict; and
# TrainStep with the program's own scaler=.

import copy
import io
import math
import pickle

import pytest
import torch
from autocasting import (
    ROWS,
    SCALE,
    VECTOR,
    Trainings,
    batches,
    each_precision,
    each_row,
    eager_on_a_cpu,
    squares,
)
from testing import DEVICES, GRADIENTS, equal
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torch_renaissance as tr

pytestmark = [pytest.mark.parametrize("device", DEVICES), eager_on_a_cpu]
BAD = (0, 2, 6, 10)  # of the twelve steps of some tests
each_gradients = pytest.mark.parametrize("gradients", GRADIENTS)


# -- clipping and the loss scale -------------------------------------------------------------------


@each_row
@each_precision
@each_gradients
def test_clipping_is_of_the_unscaled_gradients(row, precision, gradients, device):
    t = Trainings("mlp", row, precision, device, max_norm=0.05, gradients=gradients)
    for i, batch in enumerate(batches(VECTOR, 12)):
        if i == 6:
            t.max_norm = t.optimizer.max_grad_norm = 0.02
        t.run(batch)
        t.check_untouched()
        torch.testing.assert_close(t.optimizer.grad_norm, t.norm, rtol=2e-2, atol=0)
        assert t.norm > t.max_norm
    t.check()


@each_row
@each_gradients
def test_bad_steps_are_skipped_whole_and_the_scale_moves_as_gradscalers(row, gradients, device):
    t = Trainings("mlp", row, "fp16", device, ema_decay=0.8, max_norm=10.0, gradients=gradients)
    ema, scales = tr.Ema(t.ours, t.optimizer), []
    average = AveragedModel(t.native, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    for i, batch in enumerate(batches(VECTOR, 12)):
        bad = i in BAD
        if bad:
            batch[3, 2] = math.nan if i == 2 else math.inf
        before, updates = t.everything(), ema.updates
        batch = batch.to(device)
        if not bad:
            t.run_exact(batch)
        t.run_native(batch)
        if not bad:
            average.update_parameters(t.native)
        t.run_ours(batch)
        t.check_untouched()
        assert equal(t.everything(), before) == bad
        assert ema.updates == updates + (not bad)
        assert t.optimizer.amp.get_scale() == t.scaler.get_scale()
        scales.append(t.scaler.get_scale())
        tracker = t.scaler.state_dict()["_growth_tracker"]
        assert t.optimizer.amp.state_dict()["_growth_tracker"] == tracker
    assert scales == [512, 512, 256, 256, 256, 512, 256, 256, 256, 512, 256, 256]
    assert int(t.optimizer.skipped_steps) == 4
    for p, mine in zip(average.module.parameters(), ema.state_dict().values(), strict=True):
        assert (mine - p).norm() <= 1e-3 * p.norm()
    for name in ("native", "ours"):  # of the good steps, as in "exact"
        t.losses[name] = [x for i, x in enumerate(t.losses[name]) if i not in BAD]
    t.check()


def test_a_scale_that_overflows_finds_its_way_down(device):
    t = Trainings("mlp", ROWS[0], "fp16", device)
    big = {"init_scale": 2.0**40, "backoff_factor": 2.0**-8, "growth_interval": 2}
    t.scaler, t.optimizer.amp = torch.amp.GradScaler(device, **big), tr.amp.LossScale(device, **big)
    for batch in batches(VECTOR, 14):
        before = t.everything()
        t.run_native(batch.to(device))
        t.run_ours(batch.to(device))
        assert t.optimizer.amp.get_scale() == t.scaler.get_scale()
        skipped = t.scaler.get_scale() < 2.0**40 and equal(t.everything(), before)
    assert not skipped and 3 <= int(t.optimizer.skipped_steps) < 12


def test_growth_stops_before_infinity(device):
    scale = {"init_scale": 2.0**126, "growth_interval": 1, "growth_factor": 4.0}
    p = nn.Parameter(torch.zeros(3, device=device))
    optimizer = tr.optim.SGD([p], lr=0.1)
    optimizer.amp = tr.amp.LossScale(device, **scale)
    step = tr.TrainStep(lambda: (p * 0).sum(), optimizer, precision="fp16")
    for _ in range(6):
        step()
        assert optimizer.amp.get_scale() == 2.0**126
    assert int(optimizer.skipped_steps) == 0


def test_another_loss_scale_counts_at_once(device):
    t = Trainings("mlp", ROWS[0], "fp16", device)
    t.run_all(6)
    for scale in ({"init_scale": 64.0, "growth_interval": 2}, {"init_scale": 8.0}):
        t.optimizer.amp = tr.amp.LossScale(device, **scale)
        t.scaler = torch.amp.GradScaler(device, **scale)
        t.run_all(5)
        t.optimizer.amp.growth_interval = 1
        t.scaler.set_growth_interval(1)
        t.optimizer.amp.growth_factor = 3.0
        t.scaler.set_growth_factor(3.0)
        t.run_all(3)
    t.check()


def test_bf16_has_no_loss_scale_and_fp16_keeps_the_one_that_is_there(device):
    for precision in ("bf16", "fp16"):
        p = nn.Parameter(torch.ones(3, device=device))
        optimizer = tr.optim.SGD([p], lr=0.1)
        tr.TrainStep(lambda p=p: p.sum(), optimizer, precision=precision)
        if precision == "bf16":
            assert optimizer.amp is None
            continue
        assert optimizer.amp.get_scale() == 65536 == torch.amp.GradScaler(device).get_scale()
        kept = optimizer.amp
        tr.TrainStep(lambda p=p: p.sum(), optimizer, precision=precision)
        assert optimizer.amp is kept


def test_state_dict_goes_both_ways_between_loss_scale_and_gradscaler(device):
    t = Trainings("mlp", ROWS[0], "fp16", device)
    t.run_all(5)
    ours, native = t.optimizer.amp.state_dict(), t.scaler.state_dict()
    assert ours == native
    assert {k: type(v) for k, v in ours.items()} == {k: type(v) for k, v in native.items()}
    scaler = torch.amp.GradScaler(device, init_scale=2.0, growth_interval=9)
    scaler.load_state_dict(ours)
    amp = t.optimizer.amp
    scale, tracker = amp.scale, amp.growth_tracker
    other = {"scale": 1.0, "growth_factor": 3.0, "backoff_factor": 0.1, "growth_interval": 5}
    for state in (other | {"_growth_tracker": 4}, native):
        amp.load_state_dict(state)
        assert amp.state_dict() == state
        assert amp.scale is scale and amp.growth_tracker is tracker  # for the sake of graphs
    t.scaler = scaler
    t.run_all(5)
    assert t.optimizer.amp.state_dict() == scaler.state_dict()
    t.check()
    with pytest.raises(RuntimeError, match="state_dict is empty; it was saved by a GradSc"):
        t.optimizer.amp.load_state_dict(torch.amp.GradScaler(device, enabled=False).state_dict())
    assert t.optimizer.amp.state_dict() == scaler.state_dict()


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_carry_the_loss_scale(how, device):
    t = Trainings("mlp", ROWS[1], "fp16", device)
    t.run_all(5)
    original = t.optimizer.amp
    if how == "deepcopy":
        copied = copy.deepcopy((t.ours, t.optimizer))
        alone = copy.deepcopy(original)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps((t.ours, t.optimizer)))
        alone = pickle.loads(pickle.dumps(original))
    else:
        file = io.BytesIO()
        torch.save((t.ours, t.optimizer, original), file)
        file.seek(0)
        *copied, alone = torch.load(file, weights_only=False)
    before = original.state_dict()
    t.ours, t.optimizer = copied
    t.optimizers["ours"], t.places = t.optimizer, []
    assert t.optimizer.amp is not original
    assert t.optimizer.amp.state_dict() == alone.state_dict() == before
    t.step = t.make_step()
    t.run_all(6)
    t.check()
    assert original.state_dict() == before != t.optimizer.amp.state_dict()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"init_scale": 0.0}, "init_scale must be positive, got 0.0"),
        ({"init_scale": -1.0}, "init_scale must be positive, got -1.0"),
        ({"init_scale": math.nan}, "init_scale must be positive, got nan"),
        ({"growth_factor": 1.0}, "growth_factor must be above 1, got 1.0"),
        ({"growth_factor": math.nan}, "growth_factor must be above 1, got nan"),
        ({"backoff_factor": 1.0}, r"backoff_factor must be in \(0, 1\), got 1.0"),
        ({"backoff_factor": 0.0}, r"backoff_factor must be in \(0, 1\), got 0.0"),
        ({"growth_interval": 0}, "growth_interval must be >= 1, got 0"),
    ],
    ids=str,
)
def test_impossible_loss_scales_are_refused(options, words, device):
    with pytest.raises(ValueError, match="LossScale: " + words):
        tr.amp.LossScale(device, **options)


# -- the program's own scaler ----------------------------------------------------------------------


class Scaled(Trainings):
    """With autocast in the loss function and a GradScaler for each side."""

    def __init__(self, *args, scaler_options=SCALE, **more):
        super().__init__(*args, **more)
        self.scaler, self.mine = (torch.amp.GradScaler(self.device, **scaler_options) for _ in "ab")
        self.step = tr.TrainStep(self.autocast_loss, self.optimizer, scaler=self.mine)

    def autocast_loss(self, *batch):
        with torch.autocast(self.device, torch.float16):
            return self.loss(self.ours, *batch)

    def make_step(self):
        self.optimizer.amp = None


@each_row
@each_gradients
def test_a_gradscaler_behaves_as_in_a_loop(row, gradients, device):
    t = Scaled("mlp", row, "fp16", device, gradients=gradients, max_norm=0.3)
    scales = []
    for i, batch in enumerate(batches(VECTOR, 12)):
        bad = i in BAD
        if bad:
            batch[3, 2] = math.inf
        batch, before = batch.to(device), t.everything()
        if not bad:
            t.run_exact(batch)
        t.run_native(batch)
        t.run_ours(batch)
        t.check_untouched()
        assert equal(t.everything(), before) == bad
        assert t.mine.state_dict() == t.scaler.state_dict()
        scales.append(t.mine.get_scale())
    assert scales == [512, 512, 256, 256, 256, 512, 256, 256, 256, 512, 256, 256]
    assert t.optimizer.amp is None and int(t.optimizer.skipped_steps) == 4
    for name in ("native", "ours"):  # of the good steps, as in "exact"
        t.losses[name] = [x for i, x in enumerate(t.losses[name]) if i not in BAD]
    t.check()
    for scaler, model, optimizer in (  # and goes on in a hand-written loop
        (t.scaler, t.native, t.optimizers["native"]),
        (t.mine, t.ours, t.optimizer),
    ):
        optimizer.zero_grad()
        scaler.scale(squares(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert t.mine.state_dict() == t.scaler.state_dict()


def test_a_disabled_gradscaler_does_nothing(device):
    t = Scaled("mlp", ROWS[0], "fp16", device, scaler_options={"enabled": False})
    for batch in batches(VECTOR, 8):
        batch = batch.to(device)
        t.run_exact(batch)
        t.run_native(batch)
        t.run_ours(batch)
    t.check()
    assert t.mine.state_dict() == {} and t.mine.get_scale() == 1.0


@pytest.mark.parametrize("change", ["update", "load_state_dict", "set_growth_interval"])
def test_changes_of_a_gradscaler_count_at_once(change, device):
    t = Scaled("mlp", ROWS[0], "fp16", device)
    for phase in range(2):
        for batch in batches(VECTOR, 6):
            batch = batch.to(device)
            t.run_native(batch)
            t.run_ours(batch)
            assert t.mine.state_dict() == t.scaler.state_dict()
        for scaler in (t.scaler, t.mine):
            if phase == 0 and change == "update":
                scaler.update(16.0)
            elif phase == 0 and change == "load_state_dict":
                scaler.load_state_dict(scaler.state_dict() | {"scale": 8.0, "_growth_tracker": 2})
            else:
                scaler.set_growth_interval(2)
