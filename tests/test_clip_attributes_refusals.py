# SPDX-License-Identifier: BSD-3-Clause
# The attributes max_grad_norm and grad_norm: when they have which value, and how edits, copies and
# another accelerate change them; and the limits and parameters with which clipping is refused.

import copy
import io
import math
import pickle
import re

import pytest
import torch
from clipping import (
    accelerated,
    both_clip,
    clipped_pair,
    clipped_step,
    each_gradients,
    each_row,
    everything,
)
from test_refusals import refused, trained
from testing import (
    DEVICES,
    FP64,
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

import torch_renaissance as tr

pytestmark = pytest.mark.parametrize("device", DEVICES)


@each_row
@each_gradients
def test_grad_norm_is_none_before_the_first_clipped_step(row, gradients, device):
    _, _, b, ob = clipped_pair(mlp, row, device, None, gradients=gradients)
    assert ob.grad_norm is None
    square(b).backward()
    ob.step()
    assert ob.grad_norm is None
    tr.accelerate(b, ob, max_grad_norm=0.5, gradients=gradients)  # with state from before
    assert ob.grad_norm is None
    ob.step()
    assert ob.grad_norm > 0


@each_row
@each_gradients
def test_grad_norm_keeps_its_value_after_the_next_step(row, gradients, device):
    a, oa, b, ob = clipped_pair(mlp, row, device, 0.5, gradients=gradients)
    kept = []
    for _ in range(3):
        both_clip(a, oa, b, ob, square, 0.5)
        kept.append((ob.grad_norm, float(ob.grad_norm)))
    assert all(norm == value for norm, value in kept)
    assert len({value for _, value in kept}) == 3
    norm = ob.grad_norm
    assert norm.ndim == 0 and norm.device.type == device and norm.dtype == torch.float64
    norm.zero_()  # it is the program's
    assert ob.grad_norm == kept[-1][1]


@each_row
@each_gradients
def test_edits_of_max_grad_norm_count_at_once(row, gradients, device):
    a, oa, b, ob = clipped_pair(mlp, row, device, 0.5, gradients=gradients)
    assert ob.max_grad_norm == 0.5
    for max_norm in (0.5, 0.01, None, 0.1, 0, None, None, 1e9, 0.2):
        ob.max_grad_norm = max_norm
        last = ob.grad_norm
        for model, optimizer in ((a, oa), (b, ob)):
            optimizer.zero_grad()
            square(model).backward()
        norm = clipped_step(list(a.parameters()), oa, max_norm)
        ob.step()
        torch.testing.assert_close(ob.grad_norm, last if max_norm is None else norm)
        same(a, b)
    same_state(oa, ob)


@each_row
def test_set_on_an_optimizer_of_ours_without_accelerate(row, device):
    native, ours = (parameters(device, torch.float64, plain=True) for _ in "ab")
    torchs, optimizer = row.native(native, **row.options), row.ours(ours, **row.options)
    assert optimizer.max_grad_norm is None and optimizer.grad_norm is None
    optimizer.max_grad_norm = 0.25
    for step in range(6):
        set_gradients(native, step, plain=True)
        set_gradients(ours, step, plain=True)
        clipped_step(native, torchs, 0.25)
        optimizer.step()
    assert worst(ours, native) <= FP64


@each_row
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_keep_max_grad_norm(row, how, device):
    a, oa, b, ob = clipped_pair(mlp, row, device, 0.5)
    both_clip(a, oa, b, ob, square, 0.5, steps=2)
    if how == "deepcopy":
        c, oc = copy.deepcopy((b, ob))
    elif how == "pickle":
        c, oc = pickle.loads(pickle.dumps((b, ob)))
    else:
        file = io.BytesIO()
        torch.save((b, ob), file)
        file.seek(0)
        c, oc = torch.load(file, weights_only=False)
    assert oc.max_grad_norm == 0.5
    ob.max_grad_norm = None  # the copy's is its own
    both_clip(a, oa, c, oc, square, 0.5, steps=3)
    same(a, c)
    same_state(oa, oc)


@each_row
def test_accelerating_again_sets_it_anew(row, device):
    a, oa, b, ob = clipped_pair(mlp, row, device, 0.5)
    both_clip(a, oa, b, ob, square, 0.5, steps=2)
    tr.accelerate(b, ob, max_grad_norm=0.05)
    both_clip(a, oa, b, ob, square, 0.05, steps=2)
    tr.accelerate(b, ob)
    assert ob.max_grad_norm is None
    for model, optimizer in ((a, oa), (b, ob)):
        optimizer.zero_grad()
        square(model).backward()
        optimizer.step()
    same(a, b)


@each_row
@pytest.mark.parametrize("value", [-1, -1e-9, True, False, "1", math.nan, [1.0]], ids=str)
def test_other_limits_are_refused(row, value, device):
    model, optimizer = trained(lambda params: row.native(params, **row.options), device)
    words = [r"max_grad_norm must be a number >= 0 or None, got " + re.escape(repr(value))]
    refused(model, optimizer, ValueError, words, max_grad_norm=value)
    assert type(optimizer) is row.native


@pytest.mark.cuda
@each_row
@each_gradients
def test_parameters_on_two_devices_are_refused(row, gradients, device):
    places = [device, "cuda" if device == "cpu" else "cpu"]
    first, second = params = [nn.Parameter(torch.ones(4, device=place)) for place in places]
    optimizer = accelerated(row, params, 0.5, gradients=gradients)
    for p in params:
        p.grad = torch.ones_like(p)
    before = values_of(params)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"one device, got .*clip_grad_norm_ instead"):
            optimizer.step()
        assert equal(params, before) and optimizer.grad_norm is None
        assert optimizer.state_dict()["state"] == {}
    first.grad = None  # then the other's alone is the norm
    optimizer.step()
    assert torch.equal(first, before[0]) and not torch.equal(second, before[1])
    torch.testing.assert_close(optimizer.grad_norm, torch.tensor(2.0, device=places[1]))
    optimizer.max_grad_norm, first.grad = None, torch.ones_like(first)
    optimizer.step()
    assert not torch.equal(first, before[0])


def refused_step(model, optimizer, words):
    before, held = everything(model, optimizer), [p.grad for p in model.parameters()]
    for _ in range(2):  # the first attempt finds the parameter, the second knows it
        with pytest.raises(RuntimeError, match=words):
            optimizer.step()
        assert equal(everything(model, optimizer), before)
        assert all(p.grad is g for p, g in zip(model.parameters(), held, strict=True))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@each_gradients
def test_a_sparse_gradient_is_refused_by_name(momentum, gradients, device):
    def make():
        return nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 2))

    a, oa, b, ob = pair(
        make,
        lambda m: torch.optim.SGD(m.parameters(), 0.05, momentum=momentum),
        device,
        max_grad_norm=0.5,
        gradients=gradients,
    )
    tokens = torch.tensor([1, 1, 4], device=device)
    for model in (a, b):
        model(tokens).pow(2).sum().backward()
    refused_step(b, ob, r"max_grad_norm can't be had with 0\.weight.*sparse")
    for model in (a, b):
        model.zero_grad()
        model[1](x_of(device)).pow(2).sum().backward()  # none for the embedding now
    clipped_step([p for p in a.parameters() if p.grad is not None], oa, 0.5)
    ob.step()
    same(a, b)
    ob.max_grad_norm = None
    for model, optimizer in ((a, oa), (b, ob)):
        model.zero_grad()
        model(tokens).pow(2).sum().backward()
        optimizer.step()
    same(a, b)


@each_row
def test_other_parameters_left_to_torch_are_refused_by_name(row, device):
    gaps = nn.Parameter(torch.ones(4, 6, device=device)[:, ::2])
    model = nn.ParameterDict({"plain": nn.Parameter(torch.ones(3, device=device)), "gaps": gaps})
    optimizer = row.native(model.parameters(), **row.options)
    tr.accelerate(model, optimizer, max_grad_norm=0.5)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    refused_step(model, optimizer, "max_grad_norm can't be had with gaps.*gaps.*by hand")
