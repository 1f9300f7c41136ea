# SPDX-License-Identifier: BSD-3-Clause
# gradients="flat": what pack_gradients() returns, and that the next step uses it, as an all-reduce
# needs.

import pytest
import torch
from testing import DEVICES, USUAL, Two, both, equal, same, same_state, usual_pair, values_of, x_of

import torch_renaissance as tr

pytestmark = pytest.mark.parametrize("device", DEVICES)
each_usual = pytest.mark.parametrize("usual", USUAL, ids=str)


@each_usual
def test_the_next_step_uses_the_packed_gradients(usual, device):
    a, oa, b, ob = usual_pair(Two, usual, device, gradients="flat")
    for keys in ("ab", "a", "b", "ab"):
        for model, optimizer in ((a, oa), (b, ob)):
            optimizer.zero_grad()
            model(x_of(device), keys).backward()
        for p in a.parameters():
            p.grad = None if p.grad is None else p.grad * 0.5
        existing = [p.grad.double().sum() for p in b.parameters() if p.grad is not None]
        planes = ob.pack_gradients()
        torch.testing.assert_close(sum(p.double().sum() for p in planes), sum(existing))
        for plane in planes:  # contiguous, zero where there is no gradient
            assert plane.is_contiguous() and plane.ndim == 1
            plane.mul_(0.5)  # as an all-reduce would
        oa.step()
        ob.step()
        same(a, b)
        same_state(oa, ob)


@each_usual
def test_zero_grad_forgets_them(usual, device):
    a, oa, b, ob = usual_pair(Two, usual, device, gradients="flat")
    both(a, oa, b, ob, lambda m: m(x_of(device), "ab"))
    b(x_of(device), "ab").backward()
    ob.pack_gradients()
    both(a, oa, b, ob, lambda m: m(x_of(device), "a"), steps=2)
    same(a, b)
    ob.pack_gradients()
    before = values_of(b.parameters())
    ob.zero_grad()
    ob.step()
    assert equal(b.parameters(), before)


@each_usual
def test_packing_needs_flat_gradients(usual, device):
    a, oa, b, ob = usual_pair(Two, usual, device, gradients="gather")
    both(a, oa, b, ob, lambda m: m(x_of(device), "ab"))
    before = values_of(b.parameters())
    with pytest.raises(RuntimeError, match="flat"):
        ob.pack_gradients()
    assert equal(b.parameters(), before)
    both(a, oa, b, ob, lambda m: m(x_of(device), "b"))
    same(a, b)


def test_a_gradient_that_comes_after_packing_is_refused(device):
    ones = torch.ones(3, device=device)
    a, b = (torch.nn.Parameter(ones.clone()) for _ in range(2))
    optimizer = torch.optim.SGD([a, b], 0.1, momentum=0.9, weight_decay=0.5)
    tr.accelerate(torch.nn.ParameterList([a, b]), optimizer, gradients="flat")
    a.grad = ones.clone()
    optimizer.pack_gradients()
    b.grad = ones.clone()
    with pytest.raises(RuntimeError, match=r"since pack_gradients\(\); call it again"):
        optimizer.step()
    assert torch.equal(a, ones) and torch.equal(b, ones)
    optimizer.step()  # packs anew
    assert torch.equal(a, b) and not torch.equal(b, ones)
