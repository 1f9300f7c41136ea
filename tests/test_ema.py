# SPDX-License-Identifier: BSD-3-Clause
# ema_decay against torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn, which sees every
# step of a native training; and what is refused.

import copy
import math
import re

import pytest
import torch
from averaging import Averaged, each_gradients, each_row, each_usual, everything
from test_refusals import refused, trained
from testing import (
    DEVICES,
    FP64,
    LM,
    LOW_PRECISION,
    USUAL,
    Two,
    close,
    equal,
    mlp,
    parameters,
    same_state,
    set_gradients,
    square,
    worst,
    x_of,
)
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torch_renaissance as tr

pytestmark = pytest.mark.parametrize("device", DEVICES)


# -- averages of steps -----------------------------------------------------------------------------


@each_row
@each_gradients
@pytest.mark.parametrize("decay", [0, 0.9, 0.999, 1])
def test_fp64_equals_torchs_averages(row, gradients, decay, device):
    """All shapes and layouts, with gradients of other strides and missing ones among them."""
    native, ours = (nn.ParameterList(parameters(device, torch.float64, plain=True)) for _ in "ab")
    torchs, optimizer = (row.native(m.parameters(), **row.options) for m in (native, ours))
    tr.accelerate(ours, optimizer, ema_decay=decay, gradients=gradients)
    average = AveragedModel(native, multi_avg_fn=get_ema_multi_avg_fn(decay))
    ema = tr.Ema(ours, optimizer)
    for step in range(20):
        for params, each in ((native, torchs), (ours, optimizer)):
            set_gradients(params, step)
            each.step()
        average.update_parameters(native)
        if step in (0, 1, 19):
            found = ema.state_dict()
            assert worst(found.values(), average.module.parameters()) <= FP64
            assert ema.updates == step + 1
    assert worst(ours, native) <= FP64
    if decay == 0:
        assert equal(found.values(), ours)
    apart = worst(found.values(), ours)
    assert apart == 0 if decay == 0 else apart > 1e-3


@each_row
@each_gradients
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *LOW_PRECISION], ids=str)
def test_every_dtype_rounds_as_torchs_lerp(row, gradients, dtype, device):
    """From the same average and the same weight, the next average is torch's but for the last
    place; so errors can't hide in the training."""
    options = row.options
    if row.native is not torch.optim.SGD:
        options = options | {"eps": 1e-3}  # the usual 1e-8 is zero in fp16
    params = nn.ParameterList(parameters(device, dtype, plain=True))
    optimizer = row.native(params.parameters(), **options)
    tr.accelerate(params, optimizer, ema_decay=0.7, gradients=gradients)
    ema, eps = tr.Ema(params, optimizer), torch.finfo(dtype).eps
    for step in range(5):
        before = list(ema.state_dict().values())
        set_gradients(params, step)
        optimizer.step()
        for old, p, new in zip(before, params, ema.state_dict().values(), strict=True):
            want = p.detach() if step == 0 else torch.lerp(old, p.detach(), 1 - 0.7)
            assert new.dtype == dtype
            if step == 0:
                assert torch.equal(new, want)
            torch.testing.assert_close(new, want, rtol=2 * eps, atol=2 * eps)


@each_usual
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_trainings_with_ties_and_layouts(row, dtype, device):
    t = Averaged(LM, row, device, 0.9, dtype)
    t.step(lambda m: m(torch.arange(7, device=device)), steps=6)
    t.check()
    found = t.ours.state_dict()
    assert torch.equal(found["head.weight"], found["emb.weight"])

    def make():
        layers = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 2, 1)
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)

    t = Averaged(make, row, device, 0.9, dtype)
    x = torch.linspace(-1, 1, 2 * 2 * 5 * 5, device=device, dtype=dtype).view(2, 2, 5, 5)
    t.step(lambda m: m(x).pow(2).mean(), steps=4)
    t.check()
    assert t.ours.state_dict()["0.weight"].stride() == (18, 1, 6, 2)


@each_usual
@each_gradients
def test_a_function_of_the_step_is_asked_for_every_step(row, gradients, device):
    calls = []

    def decay(step):
        calls.append(step)
        return min(0.95, (1 + step) / (10 + step))

    t = Averaged(mlp, row, device, decay, gradients=gradients)
    t.decay = lambda step: min(0.95, (1 + step) / (10 + step))
    for _ in range(5):
        t.step()
        t.check()
    assert sorted(set(calls)) == list(range(5)) and calls == sorted(calls)
    for model, optimizer in ((t.a, t.oa), (t.b, t.ob)):  # what makes the step prepare anew
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for p in model.parameters():
            p.data = p.data.clone()
    t.step(steps=2)
    t.check()
    assert sorted(set(calls)) == list(range(7)) and calls == sorted(calls)


@each_usual
def test_a_function_is_told_of_skipped_steps_too(row, device):
    calls = []
    t = Averaged(mlp, row, device, lambda step: calls.append(step) or 0.5)
    t.decay = 0.5
    t.step()
    t.ob.found_inf = torch.ones((), device=device)
    square(t.b).backward()
    t.ob.step()
    t.ob.found_inf = None
    t.step()
    t.check()
    assert sorted(set(calls)) == [0, 1, 2] and calls == sorted(calls)


@each_usual
def test_what_a_function_raises_leaves_the_step_undone(row, device):
    def decay(step):
        if step == 2:
            raise ZeroDivisionError("a bad schedule")
        return 0.5

    t = Averaged(mlp, row, device, decay)
    t.step(steps=2)
    before = everything(t.b, t.ob)
    square(t.b).backward()
    with pytest.raises(ZeroDivisionError, match="bad schedule"):
        t.ob.step()
    assert equal(everything(t.b, t.ob), before) and t.ours.updates == 2


@each_usual
@each_gradients
def test_edits_between_steps_count_at_once(row, gradients, device):
    t = Averaged(mlp, row, device, 0.9, gradients=gradients)
    for decay in (0.9, 0.5, 1, 0.999, 0, 0.3, lambda step: step / 20, 0.75):
        t.decay = t.ob.ema_decay = decay
        t.step(steps=2)
        t.check()


@each_usual
@each_gradients
def test_skipped_steps_move_no_average(row, gradients, device):
    t = Averaged(mlp, row, device, 0.6, gradients=gradients)
    scalers = [torch.amp.GradScaler(device, init_scale=8.0, growth_interval=2) for _ in "ab"]
    for bad in (math.inf, None, None, math.nan, -math.inf, None):
        before, updates = everything(t.b, t.ob), t.ours.updates
        for scaler, model, optimizer in zip(scalers, (t.a, t.b), (t.oa, t.ob), strict=True):
            optimizer.zero_grad()
            scaler.scale(square(model)).backward()
            if bad is not None:
                model[2].weight.grad[0, 1] = bad
            scaler.step(optimizer)
            scaler.update()
        if bad is None:
            t.average()
        else:
            assert equal(everything(t.b, t.ob), before)
        assert t.ours.updates == updates + (bad is None)
        t.check()
    assert int(t.ob.skipped_steps) == 3
    same_state(t.oa, t.ob)


@each_usual
@each_gradients
def test_parameters_without_a_gradient_are_averaged_on(row, gradients, device):
    t = Averaged(Two, row, device, 0.5, gradients=gradients)
    for keys in ("ab", "ab", "ab", "a", "a", "b"):
        t.step(lambda m, keys=keys: m(x_of(device), keys))
        t.check()


@each_usual
@each_gradients
def test_a_step_without_any_gradient_averages_too(row, gradients, device):
    t = Averaged(mlp, row, device, 0.5, gradients=gradients)
    t.step(steps=3)
    t.step(loss=None)
    t.check()
    t.step()
    t.check()


@each_usual
@each_gradients
def test_parameters_of_another_launch_are_averaged_on(row, gradients, device):
    """Each dtype has launches of its own; here one of them has no gradient in some steps."""

    class Mixed(Two):
        def __init__(self):
            super().__init__()
            self.b.double()

        def forward(self, keys):
            outs = [getattr(self, k)(x_of(device, getattr(self, k).weight.dtype)) for k in keys]
            return sum(out.double().pow(2).sum() for out in outs)

    t = Averaged(Mixed, row, device, 0.5, dtype=None, gradients=gradients)
    for keys in ("ab", "ab", "a", "a", "b", "b", "ab"):
        t.step(lambda m, keys=keys: m(keys))
        t.check()


@pytest.mark.cuda
@each_usual
@each_gradients
def test_parameters_on_two_devices(row, gradients, device):
    a, b = models = [Two().double() for _ in "ab"]
    b.load_state_dict(a.state_dict())
    for model in models:
        model.a.to(device)
        model.b.to("cuda" if device == "cpu" else "cpu")
    oa, ob = (row.native(m.parameters(), **row.options) for m in models)
    tr.accelerate(b, ob, ema_decay=0.5, gradients=gradients)
    average = AveragedModel(a, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for step, keys in enumerate(("ab", "ab", "a", "b", "b", "ab")):
        for model, optimizer in ((a, oa), (b, ob)):
            optimizer.zero_grad()
            parts = [getattr(model, key) for key in keys]
            losses = [part(x_of(part.weight.device)).pow(2).sum().cpu() for part in parts]
            sum(losses).backward()
            optimizer.step()
        average.update_parameters(a)
        found = tr.Ema(b, ob).state_dict()
        for name, want in average.module.state_dict().items():
            close(found[name], want, f"{name} after step {step}")
        assert tr.Ema(b, ob).updates == step + 1


@each_usual
@each_gradients
def test_frozen_thawed_and_added_parameters(row, gradients, device):
    """One frozen from the start and thawed later, one frozen on the way, one added to the optimizer
    later, one in no optimizer."""

    class Four(nn.Module):
        def __init__(self):
            super().__init__()
            for name in "abcd":
                self.add_module(name, nn.Linear(4, 4))

        def forward(self, x):
            return sum(getattr(self, name)(x).pow(2).sum() for name in "abcd")

    torch.manual_seed(0)
    a = Four().to(device, torch.float64)
    a.a.requires_grad_(False)
    b = copy.deepcopy(a)
    oa, ob = (row.native([*m.a.parameters(), *m.b.parameters()], **row.options) for m in (a, b))
    tr.accelerate(b, ob, ema_decay=0.8, gradients=gradients)
    average = AveragedModel(a, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    for step in range(8):
        for model, optimizer in ((a, oa), (b, ob)):
            if step == 2:
                model.a.requires_grad_(True)
            if step == 4:
                model.b.requires_grad_(False)
            if step == 5:
                optimizer.add_param_group({"params": list(model.c.parameters()), "lr": 0.01})
            model.zero_grad()
            model(x_of(device)).backward()
            optimizer.step()
        average.update_parameters(a)
        found = tr.Ema(b, ob).state_dict()
        for name, want in average.module.state_dict().items():
            close(found[name], want, f"{name} after step {step}")
    assert tr.Ema(b, ob).updates == 8


@each_usual
def test_buffers_are_the_models_own_as_in_averaged_model(row, device):
    def make():
        return nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 1))

    t = Averaged(make, row, device, 0.9)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        x = torch.randn(8, 4, generator=generator, dtype=torch.float64).to(device)
        t.step(lambda m, x=x: m(x).pow(2).mean())
        t.check()
    found = t.ours.state_dict()
    assert torch.equal(found["1.running_mean"], t.b[1].running_mean)
    assert found["1.num_batches_tracked"].dtype == torch.int64
    assert int(found["1.num_batches_tracked"]) == 5
    kept = {name: value.clone() for name, value in found.items()}
    t.b[1].running_mean.zero_()
    t.b[1].num_batches_tracked.zero_()
    assert equal(found.values(), kept.values())


def test_more_tensors_than_one_launch_takes_and_large_ones(device):
    sizes = [2] * 1400 + [70_001, 4096]

    def make():
        return nn.ParameterList(nn.Parameter(torch.linspace(-1, 1, n)) for n in sizes)

    t = Averaged(make, USUAL[0], device, 0.9)
    for step in range(3):
        for model in (t.a, t.b):
            for i, p in enumerate(model):
                p.grad = None if (i + step) % 7 == 0 else p.detach() * (step + 1)
        t.step(loss=None, zero=False)
    native = torch.cat([p.detach() for p in t.native.module])
    ours = torch.cat(list(t.ours.state_dict().values()))
    assert worst([ours], [native]) <= FP64
    assert t.ours.updates == 3


# -- refusals --------------------------------------------------------------------------------------


@each_usual
@pytest.mark.parametrize("value", [-0.1, 1.0001, 2, True, False, "0.9", math.nan, [0.9]], ids=str)
def test_other_decays_are_refused(row, value, device):
    model, optimizer = trained(lambda params: row.native(params, **row.options), device)
    words = [r"ema_decay must be a number in \[0, 1\], a function", re.escape(repr(value))]
    refused(model, optimizer, ValueError, words, ema_decay=value)
    assert type(optimizer) is row.native


@each_usual
def test_an_ema_of_an_optimizer_without_one_is_refused(row, device):
    model, optimizer = trained(lambda params: row.native(params, **row.options), device)
    for other in (optimizer, None, model):
        with pytest.raises(TypeError, match=r"keeps no averages; pass .*ema_decay"):
            tr.Ema(model, other)
    tr.accelerate(model, optimizer)
    ours = row.ours(mlp().parameters(), **row.options)
    for other in (optimizer, ours):
        with pytest.raises(ValueError, match=r"no ema_decay; pass one to tr\.accelerate"):
            tr.Ema(model, other)


@each_gradients
def test_a_parameter_left_to_torch_is_refused_by_name(gradients, device):
    model = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    tr.accelerate(model, optimizer, ema_decay=0.5, gradients=gradients)
    before = everything(model, optimizer)
    for _ in range(2):
        model.zero_grad()
        model(torch.tensor([1, 1, 4], device=device)).pow(2).sum().backward()
        with pytest.raises(RuntimeError, match=r"ema_decay can't be had with 0\.weight.*sparse"):
            optimizer.step()
        assert equal(everything(model, optimizer), before)
    assert tr.Ema(model, optimizer).updates == 0
