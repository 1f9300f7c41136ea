# SPDX-License-Identifier: BSD-3-Clause
# What stands around a step: closures, hooks, profiler records and every kind of LR scheduler, made
# before or after accelerate, without a warning.

import copy
import pickle
import warnings

import pytest
import torch
from testing import (
    DEVICES,
    GRADIENTS,
    USUAL,
    Two,
    both,
    close,
    equal,
    mlp,
    pair,
    same,
    same_state,
    square,
    usual_pair,
    values_of,
    x_of,
)
from torch.optim import lr_scheduler as S
from torch.optim import swa_utils
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import torch_renaissance as tr

pytestmark = [
    pytest.mark.parametrize("device", DEVICES),
    pytest.mark.parametrize("gradients", GRADIENTS),
    pytest.mark.filterwarnings("error"),
]
each_usual = pytest.mark.parametrize("usual", USUAL, ids=str)


@each_usual
@pytest.mark.parametrize("by_keyword", [False, True])
def test_closure_runs_once_with_gradients_before_the_update(usual, by_keyword, device, gradients):
    a, oa, b, ob = usual_pair(mlp, usual, device, gradients=gradients)
    for _ in range(3):
        losses = []
        for model, optimizer in ((a, oa), (b, ob)):
            before, calls = values_of(model.parameters()), []

            def closure(model=model, optimizer=optimizer, before=before, calls=calls):
                assert torch.is_grad_enabled() and equal(model.parameters(), before)
                calls.append(1)
                optimizer.zero_grad()
                loss = square(model)
                loss.backward()
                return loss

            with torch.no_grad():
                out = optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
            assert out.requires_grad and out.ndim == 0 and len(calls) == 1
            assert not equal(model.parameters(), before)
            losses.append(out.detach())
        close(losses[1], losses[0])
    same(a, b)
    assert ob.step() is None
    assert ob.step(lambda: "whatever it returns") == "whatever it returns"


@each_usual
def test_an_error_in_a_closure_or_hook_reaches_the_user(usual, device, gradients):
    a, oa, b, ob = usual_pair(mlp, usual, device, gradients=gradients)
    square(b).backward()
    before = values_of(b.parameters())
    with pytest.raises(ZeroDivisionError):
        ob.step(lambda: 1 / 0)
    handle = ob.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ob.step()
    handle.remove()
    assert equal(b.parameters(), before)
    both(a, oa, b, ob, square)
    same(a, b)


@each_usual
@pytest.mark.parametrize("first", [True, False], ids=["hooks first", "accelerate first"])
def test_hooks_fire_once_in_order_and_may_change_the_step(usual, first, device, gradients):
    runs = []
    for accelerated in (False, True):
        torch.manual_seed(0)
        model = mlp().to(device, torch.float64)
        optimizer = usual.native(model.parameters(), **usual.options)
        if accelerated and not first:
            tr.accelerate(model, optimizer, gradients=gradients)
        calls, weights = [], []

        def halve(opt, args, kwargs, model=model, calls=calls):
            calls.append("pre")
            for p in model.parameters():
                p.grad.mul_(0.5)
            opt.param_groups[0]["lr"] *= 0.9

        def record(opt, args, kwargs, model=model, calls=calls, weights=weights):
            calls.append("post")
            weights.extend(values_of(model.parameters()))

        optimizer.register_step_pre_hook(halve)
        optimizer.register_step_post_hook(record)
        removed = optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("no"))
        everywhere = [
            register_optimizer_step_pre_hook(lambda *_, calls=calls: calls.append("global pre")),
            register_optimizer_step_post_hook(lambda *_, calls=calls: calls.append("global post")),
        ]
        removed.remove()
        if accelerated and first:
            tr.accelerate(model, optimizer, gradients=gradients)
        try:
            for _ in range(3):
                optimizer.zero_grad()
                square(model).backward()
                optimizer.step()
        finally:
            for handle in everywhere:
                handle.remove()
        assert equal(weights[-4:], model.parameters())  # a post hook sees the new weights
        runs.append((model, calls))
    assert runs[0][1] == runs[1][1] == ["global pre", "pre", "post", "global post"] * 3
    same(runs[0][0], runs[1][0])


@each_usual
def test_a_pre_hook_may_replace_the_arguments(usual, device, gradients):
    a, oa, b, ob = usual_pair(mlp, usual, device, gradients=gradients)
    for model, optimizer in ((a, oa), (b, ob)):

        def closure(model=model):
            square(model).backward()
            return "from the hook"

        optimizer.register_step_pre_hook(lambda opt, args, kwargs, c=closure: ((opt, c), {}))
        optimizer.zero_grad()
        assert optimizer.step() == "from the hook"
    same(a, b)


def test_hooks_of_state_dicts(device, gradients):
    _, _, _, ob = usual_pair(mlp, USUAL[2], device, gradients=gradients)
    calls = []
    ob.register_state_dict_pre_hook(lambda opt: calls.append("save"))
    ob.register_state_dict_post_hook(lambda opt, state: calls.append("saved"))
    ob.register_load_state_dict_pre_hook(lambda opt, state: calls.append("load"))
    ob.register_load_state_dict_post_hook(lambda opt: calls.append("loaded"))
    ob.load_state_dict(copy.deepcopy(ob.state_dict()))
    assert calls == ["save", "saved", "load", "loaded"]


@each_usual
def test_profiler_records_one_step_under_torchs_name(usual, device, gradients):
    _, _, b, ob = usual_pair(mlp, usual, device, gradients=gradients)
    square(b).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, on how it was built
        with torch.autograd.profiler.profile() as profile:
            ob.step()
            ob.zero_grad()
    names = [event.name for event in profile.function_events]
    name = usual.native.__name__
    assert names.count(f"Optimizer.step#{name}.step") == 1
    assert names.count(f"Optimizer.zero_grad#{name}.zero_grad") == 1


def cosine(optimizer):
    first, second = S.LinearLR(optimizer, 0.2, 1.0, 3), S.CosineAnnealingLR(optimizer, 5)
    return S.SequentialLR(optimizer, [first, second], [3])


SCHEDULERS = {
    "StepLR": lambda o: S.StepLR(o, 2, 0.5),
    "LambdaLR": lambda o: S.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "MultiplicativeLR": lambda o: S.MultiplicativeLR(o, lambda epoch: 0.8),
    "ExponentialLR": lambda o: S.ExponentialLR(o, 0.7),
    "SequentialLR": cosine,
    "ChainedScheduler": lambda o: S.ChainedScheduler([S.ConstantLR(o), S.ExponentialLR(o, 0.9)]),
    "WarmRestarts": lambda o: S.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: S.OneCycleLR(o, [0.05, 0.02], total_steps=10),
    "CyclicLR": lambda o: S.CyclicLR(o, 0.01, 0.1, 3),
    "ReduceLROnPlateau": lambda o: S.ReduceLROnPlateau(o, patience=0, threshold=0.9),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.01, anneal_epochs=3),
}


def two_groups(usual):
    """Groups with numbers of their own."""

    def make(model):
        key, values = ("betas", [(0.9, 0.99), (0.8, 0.999)])
        if usual.native is torch.optim.SGD:
            key, values = ("momentum", [0.9, 0.5])
        pairs = zip((model.a, model.b), values, strict=True)
        groups = [{"params": list(m.parameters()), key: value} for m, value in pairs]
        return usual.native(groups, **usual.options)

    return make


def lrs(optimizer):
    keys = ("lr", "momentum", "betas", "weight_decay")
    return [[group.get(key) for key in keys] for group in optimizer.param_groups]


@each_usual
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_schedulers_act_as_natively(usual, name, first, device, gradients):
    runs = []
    for accelerated in (False, True):
        torch.manual_seed(0)
        model = Two().to(device, torch.float64)
        optimizer = two_groups(usual)(model)
        scheduler = SCHEDULERS[name](optimizer) if first else None
        if accelerated:
            tr.accelerate(model, optimizer, gradients=gradients)
        scheduler = scheduler or SCHEDULERS[name](optimizer)
        seen = []
        for i in range(8):
            optimizer.zero_grad()
            loss = model(x_of(device), "ab")
            loss.backward()
            optimizer.step()
            if name == "ReduceLROnPlateau":
                scheduler.step(loss.detach())
            else:
                scheduler.step()
            seen.append(lrs(optimizer))
            if i == 4:  # resumed from a checkpoint
                kept = pickle.loads(pickle.dumps(optimizer.state_dict()))
                optimizer.load_state_dict(kept)
                if name not in ("LambdaLR", "MultiplicativeLR"):
                    scheduler.load_state_dict(copy.deepcopy(scheduler.state_dict()))
        runs.append((model, optimizer, seen))
    (a, oa, native), (b, ob, ours) = runs
    assert ours == native and native[0] != native[-1]
    same(a, b)
    same_state(oa, ob)


def test_a_schedulers_numbers_take_effect_at_the_very_next_step(device, gradients):
    def make():
        return torch.nn.Linear(4, 1, bias=False)

    a, oa, b, ob = pair(
        make, lambda m: torch.optim.SGD(m.parameters(), 1.0), device, gradients=gradients
    )
    schedulers = [S.StepLR(o, 1, gamma=0.5) for o in (oa, ob)]
    ones, moved = torch.ones(1, 4, device=device, dtype=torch.float64), []
    for _ in range(8):
        before = b.weight.detach().clone()
        both(a, oa, b, ob, lambda m: m(ones).sum())
        moved.append(float((before - b.weight.detach()).mean()))
        for scheduler in schedulers:
            scheduler.step()
    torch.testing.assert_close(torch.tensor(moved), 0.5 ** torch.arange(8.0), rtol=1e-3, atol=1e-6)
    same(a, b)


def test_warnings_are_those_of_native(device, gradients):
    """scheduler.step() before optimizer.step() still warns, once accelerated as before."""
    for accelerated in (False, True):
        model = mlp().to(device, torch.float64)
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = S.StepLR(optimizer, 1)
        if accelerated:
            tr.accelerate(model, optimizer, gradients=gradients)
        with pytest.warns(UserWarning, match="before `optimizer.step"):
            scheduler.step()
