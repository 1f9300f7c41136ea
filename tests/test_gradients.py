# SPDX-License-Identifier: BSD-3-Clause
# What an accelerated optimizer makes of gradients: None, zeros, sums over micro-batches, clipped,
# of another layout, shared, with a history, not finite; and what it leaves of them.

import math

import pytest
import torch
from testing import (
    DEVICES,
    GRADIENTS,
    USUAL,
    Two,
    both,
    bounds,
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

import torch_renaissance as tr

pytestmark = [
    pytest.mark.parametrize("device", DEVICES),
    pytest.mark.parametrize("gradients", GRADIENTS),
]
each_usual = pytest.mark.parametrize("usual", USUAL, ids=str)


def uses(keys, device):
    return lambda model: model(x_of(device), keys)


@each_usual
def test_parameter_without_gradient_stands_still(usual, device, gradients):
    a, oa, b, ob = usual_pair(Two, usual, device, gradients=gradients)
    before = values_of(b.b.parameters())
    both(a, oa, b, ob, uses("a", device), steps=3)
    assert equal(b.b.parameters(), before)
    assert b.b.weight.grad is None and b.b.bias.grad is None
    assert not ob.state.get(b.b.weight)
    assert len(ob.state_dict()["state"]) == 2
    both(a, oa, b, ob, uses("b", device), steps=2)
    before = values_of(b.a.parameters())  # these have momentum by now
    both(a, oa, b, ob, uses("b", device))
    assert equal(b.a.parameters(), before)
    same(a, b)
    same_state(oa, ob)


@each_usual
def test_steps_are_counted_per_parameter(usual, device, gradients):
    a, oa, b, ob = usual_pair(Two, usual, device, gradients=gradients)
    both(a, oa, b, ob, uses("a", device), steps=20)
    for keys in ("b", "ab", "b", "a", "ab"):
        both(a, oa, b, ob, uses(keys, device))
    same(a, b)
    same_state(oa, ob)
    if "step" in ob.state[b.a.weight]:
        counts = [float(ob.state[p]["step"]) for p in (b.a.weight, b.b.weight)]
        assert counts == [23, 4]


def test_a_late_first_step_of_adam_is_one_lr(device, gradients):
    options = {"lr": 0.01, "weight_decay": 0.0, "eps": 1e-12}
    _, _, b, ob = pair(
        Two, lambda m: torch.optim.AdamW(m.parameters(), **options), device, gradients=gradients
    )
    for keys in ["a"] * 50 + ["b"]:
        ob.zero_grad()
        before = values_of(b.b.parameters())
        b(x_of(device), keys).backward()
        ob.step()
    for p, q in zip(b.b.parameters(), before, strict=True):
        torch.testing.assert_close((p - q).abs(), torch.full_like(q, 0.01), rtol=1e-4, atol=0)


@each_usual
@pytest.mark.parametrize("of", ["optimizer", "model"])
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_to_none_and_to_zero_differ(usual, of, to_none, device, gradients):
    a, oa, b, ob = usual_pair(mlp, usual, device, gradients=gradients)
    both(a, oa, b, ob, square)
    before = values_of(b.parameters())
    for model, optimizer in ((a, oa), (b, ob)):
        (optimizer if of == "optimizer" else model).zero_grad(set_to_none=to_none)
        optimizer.step()
        for p in model.parameters():
            assert p.grad is None if to_none else not p.grad.any()
    assert equal(b.parameters(), before) == to_none  # zeros coast and decay
    same(a, b)
    both(a, oa, b, ob, square, steps=2)
    same(a, b)
    same_state(oa, ob)


@each_usual
def test_micro_batches_add_up(usual, device, gradients):
    a, oa, b, ob = usual_pair(mlp, usual, device, gradients=gradients)
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(1)).to(device, torch.float64)
    for i, size in enumerate((4, 3, 12, 1, 6)):
        for model, optimizer in ((a, oa), (b, ob)):
            optimizer.zero_grad(set_to_none=bool(i % 2))
            for batch in x.split(size):
                (model(batch).pow(2).mean() * len(batch) / 12).backward()
        full = torch.autograd.grad(b(x).pow(2).mean(), list(b.parameters()))
        for g, p in zip(full, b.parameters(), strict=True):
            torch.testing.assert_close(p.grad, g, rtol=1e-4, atol=1e-6)
        for optimizer in (oa, ob):
            optimizer.step()
    for model in (a, b):  # and without a step
        model.zero_grad()
        model(x).sum().backward()
        model(x).sum().backward()
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        close(q.grad, p.grad)
    same(a, b)


@each_usual
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_clipping_sees_the_gradients_that_exist(usual, norm_type, device, gradients):
    clip = torch.nn.utils.clip_grad_norm_
    a, oa, b, ob = usual_pair(Two, usual, device, gradients=gradients)
    both(a, oa, b, ob, lambda model: 100 * model(x_of(device), "b"))
    for model, optimizer in ((a, oa), (b, ob)):
        optimizer.zero_grad()
        model(x_of(device), "a").backward()
        norms = torch.stack([p.grad.norm(norm_type) for p in model.a.parameters()])
        torch.testing.assert_close(clip(model.parameters(), 0.5, norm_type), norms.norm(norm_type))
        norms = torch.stack([p.grad.norm(norm_type) for p in model.a.parameters()])
        clipped = torch.tensor(0.5, device=device, dtype=torch.float64)
        torch.testing.assert_close(norms.norm(norm_type), clipped, rtol=1e-4, atol=0)
        assert model.b.weight.grad is None
        optimizer.step()
    same(a, b)
    for model in (a, b):
        model.zero_grad()
        model(x_of(device), "a").backward()
        model.a.bias.grad[0] = math.inf
        with pytest.raises(RuntimeError, match="non-finite"):
            clip(model.parameters(), 1.0, norm_type, error_if_nonfinite=True)
        assert torch.isinf(clip(model.parameters(), 1.0, norm_type))
        assert model.a.bias.grad[0].isnan() and not model.a.weight.grad.any()
    for model, optimizer in ((a, oa), (b, ob)):
        optimizer.zero_grad()
        model(x_of(device), "ab").backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
    same(a, b)


@each_usual
def test_gradients_of_any_layout_and_origin(usual, device, gradients):
    def square_linear():
        return nn.Linear(6, 6)

    a, oa, b, ob = usual_pair(square_linear, usual, device, gradients=gradients)
    values = torch.randn(7, 12, 12, generator=torch.Generator().manual_seed(1)).to(device).double()
    views = [
        lambda v: v[:6, :6].t(),
        lambda v: v[::2, ::2],
        lambda v: v[0, :1].expand(6, 6),
        lambda v: v.flatten()[5:41].view(6, 6),
        lambda v: v.flatten()[1:37].view(6, 6),
        lambda v: v[:6, :6].clone().requires_grad_() * 2,
        lambda v: v[:6, :6].flip(0),
    ]
    for v, view in zip(values, views, strict=True):
        for model, optimizer in ((a, oa), (b, ob)):
            gradient = view(v.clone())
            model.weight.grad, model.bias.grad = gradient.detach(), gradient.detach()[0]
            if gradient.requires_grad:  # as backward(create_graph=True) leaves it
                model.weight.grad = gradient
            kept = model.weight.grad
            optimizer.step()
            assert model.weight.grad is kept
            assert torch.equal(kept, view(v.clone()))
    same(a, b)
    same_state(oa, ob)


@each_usual
def test_one_tensor_as_gradient_of_two_parameters(usual, device, gradients):
    a, oa, b, ob = usual_pair(Two, usual, device, gradients=gradients)
    for model, optimizer in ((a, oa), (b, ob)):
        for _ in range(3):
            model.a.weight.grad = model.b.weight.grad = torch.ones_like(model.a.weight)
            model.a.bias.grad = model.a.weight.grad[1]
            optimizer.step()
    same(a, b)


@each_usual
def test_gradients_are_left_as_they_were_and_are_nobodys_view(usual, device, gradients):
    _, _, b, ob = usual_pair(mlp, usual, device, gradients=gradients)
    for _ in range(3):
        ob.zero_grad()
        square(b).backward()
        kept, before = [p.grad for p in b.parameters()], values_of(p.grad for p in b.parameters())
        if gradients == "flat":
            ob.pack_gradients()
        ob.step()
        for p, grad, value in zip(b.parameters(), kept, before, strict=True):
            assert p.grad is grad and torch.equal(grad, value)
            assert grad.untyped_storage().nbytes() == grad.nbytes


@each_usual
def test_gradients_that_are_not_finite_act_as_natively_without_a_scaler(usual, device, gradients):
    a, oa, b, ob = usual_pair(mlp, usual, device, gradients=gradients)
    for i, bad in enumerate((math.inf, -math.inf, math.nan)):
        for model, optimizer in ((a, oa), (b, ob)):
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.5)
            model[0].weight.grad[i, 1] = bad
            optimizer.step()
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            torch.testing.assert_close(q, p, **bounds(p), equal_nan=True)
    assert b[0].weight.isfinite().sum() == 29 and int(ob.skipped_steps) == 0


@each_usual
def test_step_inside_backward(usual, device, gradients):
    """A hook on the last gradient to arrive steps and frees them, before backward() returns."""
    a, oa, b, ob = usual_pair(mlp, usual, device, gradients=gradients)
    seen = []
    for model, optimizer in ((a, oa), (b, ob)):
        last = next(model.parameters())

        def finish(p, optimizer=optimizer, last=last):
            seen.append(p.grad.norm())
            if p is last:
                optimizer.step()
                optimizer.zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(finish)
        for _ in range(3):
            square(model).backward()
        assert all(p.grad is None for p in model.parameters())
    assert len(seen) == 24
    same(a, b)


@each_usual
def test_gradients_of_another_dtype(usual, device, gradients):
    """What native cannot do with them (AdamW's moments, say) raises the same error."""
    runs = []
    for accelerated in (False, True):
        torch.manual_seed(0)
        model = mlp().to(device)
        optimizer = usual.native(model.parameters(), **usual.options, foreach=False)
        if accelerated:
            tr.accelerate(model, optimizer, gradients=gradients)
        words = None
        for i, p in enumerate(model.parameters()):
            p.grad_dtype = None
            p.grad = torch.full_like(p, 0.25 * i, dtype=torch.bfloat16)
        try:
            for _ in range(3):
                optimizer.step()
        except RuntimeError as error:
            words = str(error)
        runs.append((model, words))
    assert runs[0][1] == runs[1][1]
    same(runs[0][0], runs[1][0])
