# SPDX-License-Identifier: BSD-3-Clause
# max_grad_norm together with what else takes part in a step: GradScaler, TrainStep, packed
# gradients, closures, hooks and parameter groups.

import math
from functools import partial

import pytest
import torch
from clipping import ROWS, clipped_pair, clipped_step, each_gradients, each_row, everything
from testing import DEVICES, Two, equal, mlp, pair, same, same_state, square, x_of
from torch.nn.utils import clip_grad_norm_

import torch_renaissance as tr

pytestmark = pytest.mark.parametrize("device", DEVICES)


@each_row
@each_gradients
def test_a_scaler_clips_what_it_has_unscaled(row, gradients, device):
    a, oa, b, ob = clipped_pair(mlp, row, device, 0.3, gradients=gradients)
    seen = {a: [], b: []}
    for model, optimizer in ((a, oa), (b, ob)):
        scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=2)
        for bad in (None, None, math.inf, None, math.nan, None, None):
            optimizer.zero_grad()
            scaler.scale(square(model)).backward()
            if bad is not None:
                model[0].weight.grad[1, 2] = bad
            before = everything(model, optimizer)
            unscaled = [p.grad / scaler.get_scale() for p in model.parameters()]
            if model is a:
                scaler.unscale_(optimizer)
                norm = clip_grad_norm_(model.parameters(), 0.3)
            scaler.step(optimizer)
            if model is b:
                norm = optimizer.grad_norm
                whole = torch.cat([g.flatten() for g in unscaled])
                torch.testing.assert_close(norm, whole.norm(), equal_nan=True)
                assert bad is not None or equal([p.grad for p in b.parameters()], unscaled)
            assert equal(everything(model, optimizer), before) == (bad is not None)
            scaler.update()
            seen[model].append((scaler.get_scale(), float(norm)))
    assert (
        [s for s, _ in seen[b]]
        == [s for s, _ in seen[a]]
        == [1024, 2048, 1024, 1024, 512, 512, 1024]
    )
    assert [n for _, n in seen[b]] == pytest.approx([n for _, n in seen[a]], rel=1e-10, nan_ok=True)
    assert int(ob.skipped_steps) == 2
    same(a, b)
    same_state(oa, ob)


@each_gradients
def test_gradients_that_the_program_has_unscaled_itself(gradients, device):
    a, oa, b, ob = clipped_pair(mlp, ROWS[1], device, 0.3, gradients=gradients)
    for model, optimizer in ((a, oa), (b, ob)):
        scaler = torch.amp.GradScaler(device, init_scale=256.0)
        for bad in (False, False, True, False):
            optimizer.zero_grad()
            scaler.scale(square(model)).backward()
            if bad:
                model[0].bias.grad[0] = math.inf
            scaler.unscale_(optimizer)
            if model is a:
                clip_grad_norm_(model.parameters(), 0.3)
            scaler.step(optimizer)
            scaler.update()
    same(a, b)
    assert int(ob.skipped_steps) == 1


@each_row
@each_gradients
@pytest.mark.filterwarnings("ignore:TrainStep runs eagerly. the parameters are on the CPU")
def test_a_train_step_clips_too(row, gradients, device):
    """On a GPU from the fourth call on as a replay, and anew where clipping starts or stops."""
    a, oa, b, ob = clipped_pair(mlp, row, device, 0.5, gradients=gradients)
    step = tr.TrainStep(lambda x: b(x).pow(2).sum(), ob)
    limits = [*[0.5] * 6, 0.01, 0, 0.3, None, None, 0.2, 0.1]
    for i, max_norm in enumerate(limits):
        ob.max_grad_norm = max_norm
        oa.zero_grad()
        square(a).backward()
        norm = clipped_step(list(a.parameters()), oa, max_norm)
        step(x_of(device))
        assert step.captured == (device == "cuda") or i not in range(3, 9)
        if max_norm is not None:
            torch.testing.assert_close(ob.grad_norm, norm)
        same(a, b)
    same_state(oa, ob)


@each_row
def test_packed_gradients_are_clipped_as_they_are_in_the_planes(row, device):
    a, oa, b, ob = clipped_pair(mlp, row, device, 0.2, gradients="flat")
    for _ in range(3):
        for model, optimizer in ((a, oa), (b, ob)):
            optimizer.zero_grad()
            square(model).backward()
        for p in a.parameters():
            p.grad.mul_(3.0)
        for plane in ob.pack_gradients():
            plane.mul_(3.0)
        norm = clipped_step(list(a.parameters()), oa, 0.2)
        ob.step()
        torch.testing.assert_close(ob.grad_norm, norm)
    same(a, b)
    same_state(oa, ob)


@each_row
@each_gradients
def test_with_closures_hooks_and_groups(row, gradients, device):
    def make_optimizer(model):
        groups = [{"params": model.a.parameters()}, {"params": model.b.parameters(), "lr": 0.03}]
        return row.native(groups, **row.options)

    a, oa, b, ob = pair(Two, make_optimizer, device, max_grad_norm=0.4, gradients=gradients)
    calls, norms = [], []
    ob.register_step_pre_hook(lambda *_: calls.append("pre"))
    ob.register_step_post_hook(lambda *_: calls.append(float(ob.grad_norm)))

    def closure(model, optimizer, keys):
        optimizer.zero_grad()
        loss = model(x_of(device), keys)
        loss.backward()
        if model is a:
            norms.append(float(clip_grad_norm_(model.parameters(), 0.4)))
        return loss

    for keys in ("a", "ab", "b", "ab"):
        losses = [o.step(partial(closure, m, o, keys)) for m, o in ((a, oa), (b, ob))]
        torch.testing.assert_close(losses[1], losses[0])
    assert calls[::2] == ["pre"] * 4
    assert calls[1::2] == pytest.approx(norms, rel=1e-10)
    same(a, b)
    same_state(oa, ob)
