# SPDX-License-Identifier: BSD-3-Clause
# ema_decay and tr.Ema against torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn, which
# sees every step of a native training.

import copy
import io
import math
import pickle
import re
from contextlib import nullcontext

import pytest
import torch
from test_refusals import refused, trained
from testing import (
    DEVICES,
    FP64,
    GRADIENTS,
    LM,
    LOW_PRECISION,
    USUAL,
    Optimizer,
    Two,
    close,
    equal,
    mlp,
    pair,
    parameters,
    same,
    same_state,
    set_gradients,
    square,
    values_of,
    worst,
    x_of,
)
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torch_renaissance as tr

ROWS = [
    Optimizer(torch.optim.SGD, tr.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    Optimizer(torch.optim.SGD, tr.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    *USUAL,
]
pytestmark = pytest.mark.parametrize("device", DEVICES)
each_row = pytest.mark.parametrize("row", ROWS, ids=str)
each_usual = pytest.mark.parametrize("row", USUAL, ids=str)
each_gradients = pytest.mark.parametrize("gradients", GRADIENTS)


def fading(step):
    """A decay that a pickle can name."""
    return 0.9 - 0.1 * step


class Averaged:
    """A native and an accelerated training side by side, each with averages."""

    def __init__(self, make, row, device, decay, dtype=torch.float64, **options):
        def make_optimizer(model):
            return row.native(model.parameters(), **row.options)

        self.decay, self.device = decay, device
        self.a, self.oa, self.b, self.ob = pair(
            make, make_optimizer, device, dtype=dtype, ema_decay=decay, **options
        )
        self.native, self.ours = AveragedModel(self.a), tr.Ema(self.b, self.ob)
        self.steps = 0

    def average(self):
        """After a native step."""
        decay = self.decay(self.steps) if callable(self.decay) else self.decay
        self.native.multi_avg_fn = get_ema_multi_avg_fn(decay)
        self.native.update_parameters(self.a)

    def step(self, loss=square, steps=1, zero=True):
        for _ in range(steps):
            for model, optimizer in ((self.a, self.oa), (self.b, self.ob)):
                if zero:
                    optimizer.zero_grad()
                if loss is not None:
                    loss(model).backward()
                optimizer.step()
            self.average()
            self.steps += 1

    def check(self):
        """Equal weights, averages and number of updates."""
        same(self.a, self.b)
        native, ours = self.native.module.state_dict(), self.ours.state_dict()
        assert list(ours) == list(native)
        for name, want in native.items():
            assert (ours[name].dtype, ours[name].shape) == (want.dtype, want.shape)
            close(ours[name], want, name)
        assert self.ours.updates == int(self.native.n_averaged)


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


def everything(model, optimizer):
    """All that a step may change, as copies."""
    state = optimizer.state_dict()["state"]
    moments = [v for entries in state.values() for v in entries.values() if v is not None]
    averages = tr.Ema(model, optimizer).state_dict().values()
    return [*values_of([*model.parameters(), *model.buffers(), *moments]), *averages]


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


# -- state_dict ------------------------------------------------------------------------------------


@each_usual
def test_state_dict_loads_strictly_into_a_plain_model_and_stands_still(row, device):
    t = Averaged(LM, row, device, 0.9)
    t.step(lambda m: m(torch.arange(7, device=device)), steps=3)
    found = t.ours.state_dict()
    plain = LM().to(device, torch.float64)
    plain.load_state_dict(found, strict=True)
    same(t.native.module, plain)
    kept = {name: value.clone() for name, value in found.items()}
    live = {p.data_ptr() for p in t.b.parameters()}
    for value in found.values():
        assert not value.requires_grad and type(value) is torch.Tensor
        assert value.data_ptr() not in live
        assert value.untyped_storage().nbytes() == value.nbytes
    t.step(lambda m: m(torch.arange(7, device=device)), steps=2)
    assert equal(found.values(), kept.values())
    for value in found.values():
        value.zero_()
    t.check()
    file = io.BytesIO()
    torch.save(t.ours.state_dict(), file)
    file.seek(0)
    plain.load_state_dict(torch.load(file, weights_only=True))
    same(t.native.module, plain)


@each_usual
@each_gradients
def test_load_state_dict_goes_on_from_what_was_saved(row, gradients, device):
    t = Averaged(Two, row, device, 0.7, gradients=gradients)
    t.step(lambda m: m(x_of(device), "a"), steps=2)
    saved = t.ours.state_dict(), copy.deepcopy((t.b.state_dict(), t.ob.state_dict()))
    t.step(lambda m: m(x_of(device), "ab"), steps=3)
    want = t.ours.state_dict()
    for when in ("fresh", "stepped"):
        u = Averaged(Two, row, device, 0.7, gradients=gradients)
        if when == "stepped":
            u.step(lambda m: 3 * m(x_of(device), "ab"), steps=4)
        u.b.load_state_dict(saved[1][0])
        u.ob.load_state_dict(copy.deepcopy(saved[1][1]))
        weights = values_of(u.b.parameters())
        u.ours.load_state_dict(saved[0])
        assert equal(u.b.parameters(), weights)
        assert equal(u.ours.state_dict().values(), saved[0].values())
        for _ in range(3):
            u.ob.zero_grad()
            u.b(x_of(device), "ab").backward()
            u.ob.step()
        found = u.ours.state_dict()
        for name in want:
            close(found[name], want[name], f"{when} {name}")
    assert not equal(want.values(), saved[0].values())


@each_usual
def test_a_state_dict_that_does_not_fit_is_refused(row, device):
    t = Averaged(mlp, row, device, 0.7)
    t.step(steps=3)
    good = t.ours.state_dict()
    missing = {k: v for k, v in good.items() if k != "2.bias"}
    for bad, words in (
        (missing, r"2\.bias needs shape \[1\], got nothing; load what Ema\.state_dict\(\)"),
        (good | {"2.weight": torch.zeros(8, 1)}, r"2\.weight needs shape \[1, 8\], got \[8, 1\]"),
        (good | {"0.bias": torch.zeros(())}, r"0\.bias needs shape \[8\], got \[\]"),
        ({}, r"0\.weight needs shape \[8, 4\], got nothing"),
    ):
        bad = {k: v + 7 for k, v in bad.items()}
        before = everything(t.b, t.ob)
        with pytest.raises(RuntimeError, match=words):
            t.ours.load_state_dict(bad)
        assert equal(everything(t.b, t.ob), before) and t.ours.updates == 3
    t.step()
    t.check()


# -- swapped ---------------------------------------------------------------------------------------


@each_usual
@each_gradients
def test_swapped_exchanges_the_values_and_puts_them_back(row, gradients, device):
    t = Averaged(LM, row, device, 0.9, gradients=gradients)
    tokens = torch.arange(7, device=device)
    t.step(lambda m: m(tokens), steps=3)
    weights, averages = values_of(t.b.parameters()), t.ours.state_dict()
    places = [p.data_ptr() for p in t.b.parameters()]
    with t.ours.swapped() as model:
        assert model is t.b
        assert equal(t.b.state_dict().values(), averages.values())
        assert equal(t.ours.state_dict().values(), averages.values())
        assert [p.data_ptr() for p in t.b.parameters()] == places
        with torch.no_grad():  # evaluation sees the averages
            close(t.b(tokens), t.native.module(tokens))
            assert not torch.allclose(t.b(tokens), t.a(tokens), rtol=1e-6)
        assert t.b.head.weight is t.b.emb.weight
    assert equal(t.b.parameters(), weights)
    assert equal(t.ours.state_dict().values(), averages.values())
    assert [p.data_ptr() for p in t.b.parameters()] == places
    t.step(lambda m: m(tokens), steps=2)
    t.check()
    same_state(t.oa, t.ob)


@each_usual
def test_swapped_puts_everything_back_after_an_error(row, device):
    t = Averaged(mlp, row, device, 0.9)
    t.step(steps=3)
    before = everything(t.b, t.ob)
    with pytest.raises(KeyError, match="by the program"):
        with t.ours.swapped():
            raise KeyError("by the program")
    assert equal(everything(t.b, t.ob), before)
    t.step()
    t.check()


@each_usual
def test_swapped_twice_is_refused(row, device):
    t = Averaged(mlp, row, device, 0.9)
    t.step(steps=3)
    before = everything(t.b, t.ob)
    for again in (t.ours, tr.Ema(t.b, t.ob)):
        with t.ours.swapped():
            averages = values_of(t.b.parameters())
            with pytest.raises(RuntimeError, match="averages are in the model already"):
                with again.swapped():
                    raise AssertionError("entered")
            assert equal(t.b.parameters(), averages)
        assert equal(everything(t.b, t.ob), before)


@each_usual
@each_gradients
def test_a_step_while_swapped_is_refused(row, gradients, device):
    t = Averaged(mlp, row, device, 0.9, gradients=gradients)
    t.step(steps=3)
    before = everything(t.b, t.ob)

    def closure():
        t.ob.zero_grad()
        loss = square(t.b)
        loss.backward()
        return loss

    with t.ours.swapped():
        inside = everything(t.b, t.ob)
        for arguments in ((), (closure,)):
            closure()
            with pytest.raises(RuntimeError, match=r"hold their averages now; step outside of"):
                t.ob.step(*arguments)
            assert equal(everything(t.b, t.ob), inside)
        step = tr.TrainStep(lambda: square(t.b), t.ob)
        t.ob.zero_grad()
        with pytest.warns(UserWarning) if device == "cpu" else nullcontext():
            with pytest.raises(RuntimeError, match=r"hold their averages now; step outside of"):
                step()
        assert equal(everything(t.b, t.ob), inside)
    assert equal(everything(t.b, t.ob), before) and t.ours.updates == 3
    t.step()
    t.check()


@each_usual
def test_loading_averages_while_swapped_leaves_the_weights_alone(row, device):
    """They are in the averages' place then; either it is refused or done right."""
    t = Averaged(mlp, row, device, 0.9)
    t.step(steps=3)
    weights, averages = values_of(t.b.parameters()), t.ours.state_dict()
    other = {name: value + 1 for name, value in averages.items()}
    try:
        with t.ours.swapped():
            t.ours.load_state_dict(other)
        expected = other
    except RuntimeError as error:
        assert "swapped" in str(error)
        expected = averages
    assert equal(t.b.parameters(), weights)
    assert equal(t.ours.state_dict().values(), expected.values())


@each_usual
def test_copies_made_while_swapped_keep_weights_and_averages_apart(row, device):
    """Either refused, or the copy has them as its original."""
    t = Averaged(mlp, row, device, 0.9)
    t.step(steps=3)
    averages = t.ours.state_dict()
    try:
        with t.ours.swapped():
            c, oc = copy.deepcopy((t.b, t.ob))
    except RuntimeError as error:
        assert "swapped" in str(error)
        return
    assert equal(c.parameters(), averages.values())  # the model is as it was copied
    ema = tr.Ema(c, oc)
    assert equal(ema.state_dict().values(), averages.values())
    with pytest.raises(RuntimeError, match="averages"):
        oc.step()


@each_usual
def test_accelerating_while_swapped_is_refused(row, device):
    t = Averaged(mlp, row, device, 0.9)
    t.step(steps=3)
    before = everything(t.b, t.ob)
    with t.ours.swapped():
        with pytest.raises(RuntimeError, match="swapped"):
            tr.accelerate(t.b, t.ob, ema_decay=0.9)
    assert equal(everything(t.b, t.ob), before)
    t.step()
    t.check()


@each_usual
def test_before_the_first_step_the_averages_are_the_weights(row, device):
    t = Averaged(mlp, row, device, 0.9)
    weights = values_of(t.b.parameters())
    assert t.ours.updates == 0
    assert equal(t.ours.state_dict().values(), weights)
    with t.ours.swapped():
        assert equal(t.b.parameters(), weights)
    assert equal(t.b.parameters(), weights)
    t.step()
    t.check()


# -- copies, and accelerating again ----------------------------------------------------------------


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
