# SPDX-License-Identifier: BSD-3-Clause
# torch.amp.GradScaler with an accelerated optimizer, as with torch's fused=True: unscaling, skipped
# steps that change no bit, the first step skipped, and one scaler over several optimizers.

import copy
import math
import warnings

import pytest
import torch
from testing import (
    DEVICES,
    GRADIENTS,
    USUAL,
    Two,
    equal,
    mlp,
    pair,
    parameters,
    same,
    same_state,
    set_gradients,
    square,
    usual_pair,
    values_of,
    worst,
    x_of,
)
from torch import nn

import torch_renaissance as tr

pytestmark = [
    pytest.mark.parametrize("device", DEVICES),
    pytest.mark.parametrize("gradients", GRADIENTS),
]
each_usual = pytest.mark.parametrize("usual", USUAL, ids=str)


def fused_pair(make, usual, device, **options):
    """The native one is torch's fused, which handles the scale in its step as ours does."""
    return pair(
        make,
        lambda m: usual.native(m.parameters(), **usual.options, fused=True),
        device,
        **options,
    )


def scaled_step(scaler, model, optimizer, loss=square, bad=None):
    optimizer.zero_grad()
    scaler.scale(loss(model)).backward()
    if bad is not None:
        list(model.parameters())[-1].grad.view(-1)[0] = bad
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def bits(model, optimizer):
    """Everything that a skipped step must leave alone."""
    state = optimizer.state_dict()["state"]
    moments = [value for entries in state.values() for value in entries.values()]
    return values_of([*model.parameters(), *model.buffers(), *moments])


@each_usual
@pytest.mark.parametrize("fused", [None, True])
def test_bad_steps_are_skipped_whole_and_the_scale_recovers(usual, fused, device, gradients):
    a, oa, b, ob = pair(
        mlp,
        lambda m: usual.native(m.parameters(), **usual.options, fused=fused),
        device,
        gradients=gradients,
    )
    scales = {}
    for name, model, optimizer in (("native", a, oa), ("ours", b, ob)):
        scaler = torch.amp.GradScaler(device, init_scale=4.0, growth_interval=2)
        scales[name] = []
        for bad in (None, math.inf, None, math.nan, -math.inf, None, None):
            before = bits(model, optimizer)
            scales[name].append(scaled_step(scaler, model, optimizer, bad=bad))
            assert bad is None or equal(bits(model, optimizer), before)
    assert scales["ours"] == scales["native"] == [4, 2, 2, 1, 0.5, 0.5, 1]
    assert int(ob.skipped_steps) == 3
    same(a, b)
    same_state(oa, ob)


@each_usual
def test_a_bad_value_anywhere_skips_every_group_dtype_and_loose_parameter(usual, device, gradients):
    params = [*parameters(device, torch.float32), *parameters(device, torch.float64)]
    params += parameters(device, torch.float16)[3:6]  # torch 2.11 can't look for inf in bfloat16
    model = nn.ParameterList(params)
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.3}]
    optimizer = usual.native(groups, **usual.options)
    tr.accelerate(model, optimizer, gradients=gradients)
    scaler = torch.amp.GradScaler(device, init_scale=2.0)
    scaler.scale(torch.ones((), device=device))  # makes the scale
    for step in range(4):
        set_gradients(params, step)
        if step >= 2:
            found = [p for p in params if p.grad is not None and p.numel()]
            found[-1 if step == 2 else 0].grad.view(-1)[-1] = math.inf
        before = bits(model, optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert equal(bits(model, optimizer), before) == (step >= 2)
    assert int(optimizer.skipped_steps) == 2


@each_usual
@pytest.mark.parametrize("found", [None, 0.0, 1.0])
@pytest.mark.parametrize("scale", [None, 4.0])
def test_grad_scale_and_found_inf_act_as_in_torchs_fused(usual, found, scale, device, gradients):
    a, oa, b, ob = fused_pair(mlp, usual, device, gradients=gradients)
    for step in range(3):
        for model, optimizer in ((a, oa), (b, ob)):
            optimizer.zero_grad()
            (square(model) * (scale or 1.0)).backward()
            if step == 1:
                if found is not None:
                    optimizer.found_inf = torch.tensor(found, device=device)
                if scale is not None:
                    optimizer.grad_scale = torch.tensor(scale, device=device)
            elif scale is not None:
                for p in model.parameters():
                    p.grad.div_(scale)
            optimizer.step()
            optimizer.found_inf = optimizer.grad_scale = None
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-5, atol=1e-7)
    same(a, b)
    same_state(oa, ob)
    assert int(ob.skipped_steps) == (found == 1.0)


@each_usual
def test_unscaled_gradients_are_written_back_exactly(usual, device, gradients):
    params = parameters(device, torch.float32)
    optimizer = usual.native(params, **usual.options)
    tr.accelerate(nn.ParameterList(params), optimizer, gradients=gradients)
    for step in range(3):  # with gradients of other layouts among them
        set_gradients(params, step)
        wanted = [None if p.grad is None else p.grad / 1024 for p in params]
        held = [p.grad for p in params]
        optimizer.grad_scale = torch.tensor(1024.0, device=device)
        optimizer.found_inf = torch.tensor(0.0, device=device)
        optimizer.step()
        for p, gradient, want in zip(params, held, wanted, strict=True):
            assert p.grad is gradient
            assert want is None or torch.equal(gradient, want)


@each_usual
def test_unscaling_by_the_user_and_clipping(usual, device, gradients):
    a, oa, b, ob = usual_pair(mlp, usual, device, gradients=gradients)
    for model, optimizer in ((a, oa), (b, ob)):
        scaler = torch.amp.GradScaler(device, init_scale=256.0, growth_interval=2)
        for step in range(5):
            optimizer.zero_grad()
            scaler.scale(square(model)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if step == 2:  # found before or after: only the former is looked for
                model[0].weight.grad[0, 0] = 3.0
            scaler.step(optimizer)
            scaler.update()
    same(a, b)
    same_state(oa, ob)
    assert int(ob.skipped_steps) == 0


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_sgds_first_step_is_still_to_come_after_a_skipped_one(dampening, device, gradients):
    def make_optimizer(model):
        options = {"lr": 0.1, "momentum": 0.9, "dampening": dampening}
        return torch.optim.SGD(model.parameters(), **options)

    a, oa, b, ob = pair(mlp, make_optimizer, device, gradients=gradients)
    scalers = [torch.amp.GradScaler(device, init_scale=4.0) for _ in "ab"]
    for scaler, model, optimizer in zip(scalers, (a, b), (oa, ob), strict=True):
        scaled_step(scaler, model, optimizer, bad=math.inf)
    assert int(ob.skipped_steps) == 1
    states = copy.deepcopy((oa.state_dict(), ob.state_dict()))
    for state in states[1]["state"].values():
        assert state.get("momentum_buffer") is None
    fresh = make_optimizer(copy.deepcopy(b)), *(copy.deepcopy(m) for m in (a, b))
    torchs, ours = make_optimizer(fresh[1]), make_optimizer(fresh[2])
    tr.accelerate(fresh[2], ours, gradients=gradients)
    torchs.load_state_dict(states[1])  # ours into torch's, and back
    ours.load_state_dict(copy.deepcopy(torchs.state_dict()))
    runs = [(a, oa), (b, ob), (fresh[1], torchs), (fresh[2], ours)]
    for model, optimizer in runs:
        for _ in range(3):
            scaled_step(torch.amp.GradScaler(device, init_scale=2.0), model, optimizer)
    for model, optimizer in runs[1:]:
        same(a, model)
        same_state(oa, optimizer)


@each_usual
def test_the_first_step_skipped_for_some_parameters_only(usual, device, gradients):
    a, oa, b, ob = usual_pair(Two, usual, device, gradients=gradients)
    for model, optimizer in ((a, oa), (b, ob)):
        scaler = torch.amp.GradScaler(device, init_scale=4.0)
        for keys, bad in (
            ("a", None),
            ("ab", math.nan),
            ("b", math.inf),
            ("ab", None),
            ("a", None),
        ):
            scaled_step(scaler, model, optimizer, lambda m, k=keys: m(x_of(device), k), bad)
    same(a, b)
    same_state(oa, ob)


@each_usual
def test_one_scaler_over_two_optimizers(usual, device, gradients):
    runs = []
    for accelerated in (False, True):
        torch.manual_seed(0)
        model = Two().to(device, torch.float64)
        optimizers = [usual.native(m.parameters(), **usual.options) for m in (model.a, model.b)]
        if accelerated:
            for optimizer in optimizers:
                tr.accelerate(model, optimizer, gradients=gradients)
        scaler, scales = torch.amp.GradScaler(device, init_scale=4.0, growth_interval=2), []
        for step in range(5):
            model.zero_grad()
            scaler.scale(model(x_of(device), "ab")).backward()
            if step in (1, 2):
                (model.a if step == 1 else model.b).bias.grad[2] = math.inf
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        runs.append((model, scales, optimizers))
    assert runs[0][1] == runs[1][1] == [4, 2, 1, 1, 2]
    same(runs[0][0], runs[1][0])
    assert [int(o.skipped_steps) for o in runs[1][2]] == [1, 1]


@each_usual
def test_autocast_with_a_scaler_and_hooks(usual, device, gradients):
    a, oa, b, ob = fused_pair(mlp, usual, device, dtype=torch.float32, gradients=gradients)
    calls = []
    for name, optimizer in (("native", oa), ("ours", ob)):
        optimizer.register_step_pre_hook(lambda *_, name=name: calls.append((name, "pre")))
        optimizer.register_step_post_hook(lambda *_, name=name: calls.append((name, "post")))

    def loss(model):
        with torch.autocast(device, dtype=torch.bfloat16):
            return square(model)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model, optimizer in ((a, oa), (b, ob)):
            scaler = torch.amp.GradScaler(device, init_scale=8.0)
            for bad in (None, None, math.inf, None):  # hooks fire on the skipped step as well
                scaled_step(scaler, model, optimizer, loss, bad)
    assert [c[1] for c in calls] == ["pre", "post"] * 8
    assert worst(b.parameters(), a.parameters()) <= 1e-3  # the same roundings to bf16, but for ties


def test_scale_stays_finite_and_a_disabled_scaler_does_nothing(device, gradients):
    a, oa, b, ob = usual_pair(mlp, USUAL[0], device, gradients=gradients)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**127, growth_interval=1)
    w = nn.Parameter(torch.zeros(1, device=device))
    optimizer = torch.optim.SGD([w], 0.1)
    tr.accelerate(nn.ParameterList([w]), optimizer, gradients=gradients)
    w.grad = torch.zeros(1, device=device)
    scaler.scale(torch.zeros(1, device=device))
    scaler.step(optimizer)
    scaler.update()
    assert math.isfinite(scaler.get_scale())
    for model, each in ((a, oa), (b, ob)):
        for _ in range(3):
            scaled_step(torch.amp.GradScaler(device, enabled=False), model, each)
    same(a, b)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sparse_gradients_with_a_scaler(momentum, device, gradients):
    def make():
        return nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 2))

    def make_optimizer(model):
        return torch.optim.SGD(model.parameters(), 0.05, momentum=momentum)

    a, oa, b, ob = pair(make, make_optimizer, device, gradients=gradients)
    tokens = torch.tensor([1, 1, 4], device=device)
    for model, optimizer in ((a, oa), (b, ob)):
        scaler = torch.amp.GradScaler(device, init_scale=4.0)
        for bad in (None, math.inf, None, None):
            scaled_step(scaler, model, optimizer, lambda m: m(tokens).pow(2).sum(), bad)
    same(a, b)
    assert int(ob.skipped_steps) == 1


@each_usual
def test_the_number_of_skipped_steps_starts_at_zero(usual, device, gradients):
    _, _, b, ob = usual_pair(mlp, usual, device, gradients=gradients)
    assert int(ob.skipped_steps) == 0
    ob.step()  # no gradients at all
    square(b).backward()
    ob.step()
    assert int(ob.skipped_steps) == 0
    ob.found_inf = torch.ones((), device=device)
    ob.step()
    assert int(ob.skipped_steps) == 1


@each_usual
def test_no_parameter_has_a_gradient(usual, device, gradients):
    """torch refuses unless the optimizer is fused, and so do we; nothing is left behind."""
    for fused in (False, True):
        options = {**usual.options, "fused": True} if fused else usual.options
        a, oa, b, ob = pair(
            mlp,
            lambda m, o=options: usual.native(m.parameters(), **o),
            device,
            torch.float32,
            gradients=gradients,
        )
        for model, optimizer in ((a, oa), (b, ob)):
            scaler = torch.amp.GradScaler(device, init_scale=2.0)
            scaler.scale(square(model))
            if fused:
                scaler.step(optimizer)
            else:
                with pytest.raises(AssertionError, match="No inf checks were recorded for this"):
                    scaler.step(optimizer)
            assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()
            scaler = torch.amp.GradScaler(device, init_scale=2.0)
            scaled_step(scaler, model, optimizer)
        same(a, b)
        same_state(oa, ob)
