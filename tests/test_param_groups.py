# SPDX-License-Identifier: BSD-3-Clause
# Hyper-parameters and parameter lists that the user edits while training: each step reads them as
# they are then.

import math

import numpy
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
from torch import nn
from torch.optim import lr_scheduler as S

import torch_renaissance as tr

pytestmark = [
    pytest.mark.parametrize("device", DEVICES),
    pytest.mark.parametrize("gradients", GRADIENTS),
]
each_usual = pytest.mark.parametrize("usual", USUAL, ids=str)

EDITS = {
    "SGD": [
        {"lr": 0.0},
        {"lr": 0.05, "momentum": 0.0},
        {"momentum": 0.5},
        {"nesterov": True, "weight_decay": 0.3},
        {"nesterov": False, "dampening": 0.5},
        {"maximize": True, "dampening": 0},
        {"maximize": False, "weight_decay": 0, "lr": 1},
        {"lr": numpy.float64(0.01), "momentum": 0.9},
    ],
    "Adam": [
        {"lr": 0.0},
        {"lr": 0.05, "betas": (0.5, 0.9)},
        {"betas": (0.0, 0.99), "eps": 0.1},
        {"eps": 1e-8, "weight_decay": 0.3},
        {"maximize": True},
        {"maximize": False, "weight_decay": 0, "lr": 1},
        {"lr": numpy.float64(0.01), "betas": (0.9, 0.999)},
    ],
}
EDITS["AdamW"] = EDITS["Adam"]


@each_usual
@pytest.mark.parametrize("fused", [None, True])
def test_every_hyper_parameter_is_read_at_each_step(usual, fused, device, gradients):
    def make_optimizer(model):
        groups = [{"params": m.parameters()} for m in (model.a, model.b)]
        return usual.native(groups, **usual.options, fused=fused)

    a, oa, b, ob = pair(Two, make_optimizer, device, gradients=gradients)

    def loss(model):
        return model(x_of(device), "ab")

    both(a, oa, b, ob, loss)
    for i, edit in enumerate(EDITS[usual.native.__name__]):
        for optimizer in (oa, ob):
            for group in optimizer.param_groups[: 1 + i % 2]:
                group.update(edit)
        before = values_of(b.a.parameters())
        both(a, oa, b, ob, loss)
        assert equal(b.a.parameters(), before) == (ob.param_groups[0]["lr"] == 0)  # bit by bit
        both(a, oa, b, ob, loss)
        same(a, b)
    same_state(oa, ob)


def test_momentum_switched_on_begins_anew_and_amsgrad_switched_off_rests(device, gradients):
    a, oa, b, ob = pair(
        mlp, lambda m: torch.optim.SGD(m.parameters(), 0.1), device, gradients=gradients
    )
    both(a, oa, b, ob, square, steps=2)
    assert not ob.state_dict()["state"]
    for optimizer in (oa, ob):
        optimizer.param_groups[0].update(momentum=0.9, dampening=0.5)
    both(a, oa, b, ob, square, steps=2)
    same(a, b)
    same_state(oa, ob)
    a, oa, b, ob = pair(mlp, lambda m: torch.optim.Adam(m.parameters(), 0.1, amsgrad=True), device)
    for amsgrad in (True, False, True):
        for optimizer in (oa, ob):
            optimizer.param_groups[0]["amsgrad"] = amsgrad
        both(a, oa, b, ob, square, steps=2)
        same(a, b)
        same_state(oa, ob)


@each_usual
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("scheduled", [False, True])
def test_a_tensor_as_lr(usual, shape, scheduled, device, gradients):
    runs = []
    for accelerated in (False, True):
        torch.manual_seed(0)
        model = mlp().to(device, torch.float64)
        options = usual.options | {"lr": torch.full(shape, 0.05, dtype=torch.float64)}
        optimizer = usual.native(model.parameters(), **options, foreach=False)
        scheduler = S.ExponentialLR(optimizer, 0.5) if scheduled else None
        if accelerated:
            tr.accelerate(model, optimizer, gradients=gradients)
        for i in range(6):
            optimizer.zero_grad()
            square(model).backward()
            optimizer.step()
            if scheduler:
                scheduler.step()
            elif i == 2:
                options["lr"].fill_(0.2)  # the user's tensor is the one that is read
            elif i == 4:
                optimizer.param_groups[0]["lr"] = torch.tensor(0.01, dtype=torch.float64)
        assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
        runs.append((model, optimizer))
    same(runs[0][0], runs[1][0])
    same_state(runs[0][1], runs[1][1])


@each_usual
def test_a_group_added_later(usual, device, gradients):
    runs = []
    for accelerated in (False, True):
        torch.manual_seed(0)
        model, head = (m.to(device, torch.float64) for m in (mlp(), nn.Linear(4, 1)))
        offset = nn.Parameter(torch.zeros(1, dtype=torch.float32, device=device))
        optimizer = usual.native(model.parameters(), **usual.options)
        if accelerated:
            tr.accelerate(model, optimizer, gradients=gradients)
        for step in range(6):
            if step == 2:
                optimizer.add_param_group({"params": head.parameters(), "lr": 0.01})
            if step == 4:
                optimizer.add_param_group({"params": [offset], "weight_decay": 0.0})
            optimizer.zero_grad()
            y = model(x_of(device)) + head(x_of(device))
            (y.pow(2).sum() + (offset - 1).pow(2).sum()).backward()
            optimizer.step()
        runs.append((model, head, offset, optimizer))
    (a, head_a, offset_a, oa), (b, head_b, offset_b, ob) = runs
    same(a, b)
    same(head_a, head_b)
    close(offset_b.detach(), offset_a.detach())
    same_state(oa, ob)


@each_usual
def test_frozen_and_unfrozen(usual, device, gradients):
    def frozen_first():
        model = Two()
        model.b.requires_grad_(False)
        return model

    a, oa, b, ob = usual_pair(frozen_first, usual, device, gradients=gradients)

    def loss(model):
        return model(x_of(device), "ab")

    before = values_of(b.b.parameters())
    both(a, oa, b, ob, loss, steps=2)
    assert equal(b.b.parameters(), before)
    same_state(oa, ob)
    for frozen, free in (("a", "b"), ("b", "a")):
        for model in (a, b):
            getattr(model, frozen).requires_grad_(False)
            getattr(model, free).requires_grad_(True)
        for optimizer in (oa, ob):
            optimizer.step()  # the gradients that are still there count
        same(a, b)
        both(a, oa, b, ob, loss, steps=2)
        same(a, b)
        same_state(oa, ob)


@each_usual
def test_lists_of_parameters_edited(usual, device, gradients):
    a, oa, b, ob = usual_pair(Two, usual, device, gradients=gradients)

    def loss(model):
        return model(x_of(device), "ab")

    def grow(model, optimizer):
        wider = nn.Parameter(torch.cat([model.b.weight.detach()] * 2))
        index = next(
            i for i, p in enumerate(optimizer.param_groups[0]["params"]) if p is model.b.weight
        )
        optimizer.state.pop(model.b.weight, None)
        optimizer.param_groups[0]["params"][index] = wider
        model.b.weight = wider
        model.b.bias.data = torch.zeros(8, device=device, dtype=torch.float64)
        model.b.bias.grad = None
        optimizer.state.pop(model.b.bias, None)

    edits = [
        lambda m, o: o.param_groups[0]["params"].pop(),
        lambda m, o: o.param_groups[0]["params"].insert(0, m.b.bias),
        grow,
        lambda m, o: o.param_groups[0].update(params=list(reversed(o.param_groups[0]["params"]))),
        lambda m, o: o.param_groups.append(
            o.param_groups[0] | {"params": [o.param_groups[0]["params"].pop(0)], "lr": 0.001}
        ),
        lambda m, o: o.param_groups.pop(),
    ]
    for edit in edits:
        both(a, oa, b, ob, loss, steps=2)
        for model, optimizer in ((a, oa), (b, ob)):
            model.zero_grad()
            edit(model, optimizer)
        both(a, oa, b, ob, loss, steps=2)
        same(a, b)
        assert len(ob.param_groups) == len(oa.param_groups)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        for key, value in oa.state.get(p, {}).items():
            close(ob.state[q][key].cpu(), value.cpu(), key)


@each_usual
@pytest.mark.parametrize("name", ["lr", "weight_decay"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_values_beyond_float32(dtype, name, usual, device, gradients):
    """Refused as by torch's for-loop form, infinite as in its fused one."""
    if usual.native is torch.optim.AdamW and name == "weight_decay":
        pytest.skip("times lr it may be within, as natively")
    for fused in (False, True):
        options = {**usual.options, "fused": True} if fused else {**usual.options, "foreach": False}
        a, oa, b, ob = pair(
            mlp,
            lambda m, o=options: usual.native(m.parameters(), **o),
            device,
            dtype,
            gradients=gradients,
        )
        both(a, oa, b, ob, square)
        for optimizer in (oa, ob):
            optimizer.param_groups[0][name] = 1e39
        before = values_of(b.parameters())
        if dtype != torch.float64 and not fused:
            oa.zero_grad()
            square(a).backward()
            with pytest.raises(RuntimeError, match="without overflow"):
                oa.step()
            ob.zero_grad()
            square(b).backward()
            message = rf"param_groups\[0\]\['{name}'\] is 1e\+39, more than float32 holds"
            with pytest.raises(RuntimeError, match=message):
                ob.step()
            assert equal(values_of(b.parameters()), before)
        else:
            both(a, oa, b, ob, square)
            assert not equal(values_of(b.parameters()), before)
            finite = [p.isfinite() for p in a.parameters()]
            assert equal([p.isfinite() for p in b.parameters()], finite)
        for optimizer in (oa, ob):
            optimizer.param_groups[0][name] = math.inf
        ob.step()  # which every form takes


@each_usual
def test_a_tuple_of_parameters(usual, device, gradients):
    a, oa, b, ob = usual_pair(mlp, usual, device, gradients=gradients)
    both(a, oa, b, ob, square)
    for optimizer in (oa, ob):
        optimizer.param_groups[0]["params"] = tuple(optimizer.param_groups[0]["params"])
    both(a, oa, b, ob, square, 2)
    same(a, b)
    same_state(oa, ob)


def test_other_collections_of_parameters_are_refused(device, gradients):
    _, _, b, ob = usual_pair(mlp, USUAL[0], device, gradients=gradients)
    both(b, ob, b, ob, square)
    before = values_of(b.parameters())
    params = ob.param_groups[0]["params"]
    for value, title in (
        (dict.fromkeys(params).keys(), "dict_keys"),
        (nn.ParameterList(params), "ParameterList"),
    ):
        ob.param_groups[0]["params"] = value
        with pytest.raises(TypeError, match=rf"\['params'\] must be a list .*, got a {title}; use"):
            ob.step()
        assert equal(values_of(b.parameters()), before)
    ob.param_groups[0]["params"] = params
    ob.step()
