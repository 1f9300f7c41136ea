# SPDX-License-Identifier: BSD-3-Clause
# Averages in copies, pickles and conversions of a training, after accelerating again, in a
# TrainStep, and with clipping.

import copy
import io
import pickle

import pytest
import torch
from averaging import Averaged, each_gradients, each_row, each_usual, everything
from testing import DEVICES, USUAL, Two, equal, mlp, pair, same_state, square, x_of
from torch import nn

import torch_renaissance as tr

pytestmark = pytest.mark.parametrize("device", DEVICES)


def fading(step):
    """A decay that a pickle can name."""
    return 0.9 - 0.1 * step


@each_usual
@each_gradients
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "deepcopy of a deepcopy", "torch.save"])
def test_copies_carry_averages_and_their_number(row, gradients, how, device):
    t = Averaged(Two, row, device, fading, gradients=gradients)
    for keys in ("a", "ab", "ab"):  # so that counters differ
        t.step(lambda m, keys=keys: m(x_of(device), keys))
    original = everything(t.b, t.ob)
    if how == "torch.save":
        file = io.BytesIO()
        torch.save((t.b, t.ob), file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps((t.b, t.ob)))
    else:
        copied = copy.deepcopy((t.b, t.ob))
        if how == "deepcopy of a deepcopy":
            copied = copy.deepcopy(copied)
    kept = t.b, t.ob
    (t.b, t.ob), t.ours = copied, tr.Ema(*copied)
    t.check()
    assert equal(everything(t.b, t.ob), original)
    t.step(lambda m: m(x_of(device), "ab"), steps=2)
    t.check()
    same_state(t.oa, t.ob)
    assert equal(everything(*kept), original)


@each_usual
def test_accelerating_again_keeps_averages_and_their_number(row, device):
    t = Averaged(Two, row, device, fading)
    t.step(lambda m: m(x_of(device), "a"), steps=2)
    tr.accelerate(t.b, t.ob, ema_decay=fading, gradients="flat")
    t.check()
    t.step(lambda m: m(x_of(device), "ab"), steps=2)
    t.check()
    tr.accelerate(t.b, t.ob, ema_decay=fading)
    tr.accelerate(t.b, t.ob, ema_decay=fading)
    t.step(lambda m: m(x_of(device), "b"), steps=2)
    t.check()
    tr.accelerate(t.b, t.ob)
    with pytest.raises(ValueError, match="no ema_decay"):
        tr.Ema(t.b, t.ob)


@each_usual
@pytest.mark.parametrize("first", [{}, {"max_grad_norm": 1e9}, {"ema_decay": None}], ids=str)
def test_averages_begun_later_start_with_a_copy(row, first, device):
    a, oa, b, ob = pair(mlp, lambda m: row.native(m.parameters(), **row.options), device, **first)
    for model, optimizer in ((a, oa), (b, ob)):
        for _ in range(3):
            optimizer.zero_grad()
            square(model).backward()
            optimizer.step()
    tr.accelerate(b, ob, ema_decay=0.9)
    ema = tr.Ema(b, ob)
    assert ema.updates == 0
    square(b).backward()
    ob.step()
    assert equal(ema.state_dict().values(), b.parameters()) and ema.updates == 1


@each_row
def test_averages_survive_a_conversion_or_the_step_says_no(row, device):
    """model.double(): torch's AveragedModel stays as it is, so the average must not start anew."""
    t = Averaged(mlp, row, device, 0.5, torch.float32)
    t.step(steps=3)
    before = t.ours.state_dict()
    t.b.double()
    t.ob.zero_grad()
    square(t.b).backward()
    try:
        t.ob.step()
    except RuntimeError as error:
        assert "ema_decay" in str(error)
        return
    found = t.ours.state_dict()
    for name, p in t.b.named_parameters():
        want = torch.lerp(before[name].double(), p.detach(), 0.5)
        torch.testing.assert_close(found[name].double(), want, rtol=1e-6, atol=1e-7, msg=name)


@each_usual
@each_gradients
@pytest.mark.filterwarnings("ignore:TrainStep runs eagerly. the parameters are on the CPU")
@pytest.mark.parametrize("decay", [0.9, fading], ids=["number", "function"])
def test_a_train_step_averages_too(row, gradients, decay, device):
    """On a GPU from the fourth call on as a replay, with the decay of each step."""
    t = Averaged(mlp, row, device, decay, gradients=gradients)
    step = tr.TrainStep(lambda x: t.b(x).pow(2).sum(), t.ob)
    for i in range(9):
        t.oa.zero_grad()
        square(t.a).backward()
        t.oa.step()
        t.average()
        t.steps += 1
        step(x_of(device))
        assert step.captured == (device == "cuda" and i >= 3)
        t.check()
        if i == 6:
            before = everything(t.b, t.ob)
            with t.ours.swapped():
                with pytest.raises(RuntimeError, match="hold their averages now"):
                    step(x_of(device))
            assert equal(everything(t.b, t.ob), before)
        if i == 7:
            t.ob.ema_decay = t.decay = 0.25
    same_state(t.oa, t.ob)


@each_usual
def test_moved_parameters_and_loaded_weights(row, device):
    t = Averaged(mlp, row, device, 0.8)
    t.step(steps=2)
    other = {name: value + 0.5 for name, value in copy.deepcopy(t.a.state_dict()).items()}
    for model in (t.a, t.b):
        model.load_state_dict(other)
    t.step(steps=2)
    t.check()
    for model in (t.a, t.b):
        for p in model.parameters():
            p.data = p.data.clone() + 0.25
    t.step(steps=2)
    t.check()


@each_usual
def test_two_runs_are_bitwise_equal(row, device):
    runs = []
    for _ in range(2):
        t = Averaged(mlp, row, device, 0.9, torch.float32, max_grad_norm=0.5)
        t.step(steps=4)
        runs.append(everything(t.b, t.ob))
    assert equal(*runs)


def test_with_clipping_and_decay_left_out_of_biases(device):
    row = USUAL[2]
    t = Averaged(mlp, row, device, 0.9, max_grad_norm=0.3, decay_bias_like=False)
    bias_like = [p for p in t.a.parameters() if p.ndim == 1]
    weights = [p for p in t.a.parameters() if p.ndim > 1]
    t.oa = row.native(
        [{"params": weights}, {"params": bias_like, "weight_decay": 0}], **row.options
    )
    for _ in range(4):
        for model, optimizer in ((t.a, t.oa), (t.b, t.ob)):
            optimizer.zero_grad()
            square(model).backward()
            if model is t.a:
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
        t.average()
    t.check()
