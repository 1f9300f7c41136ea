# SPDX-License-Identifier: BSD-3-Clause
# Models that are converted after they were accelerated, by `.data` or by torch's swap_tensors: they
# go on learning as natively.

import pytest
import torch
from testing import (
    DEVICES,
    GRADIENTS,
    USUAL,
    both,
    mlp,
    same,
    same_state,
    square,
    usual_pair,
    values_of,
    x_of,
)
from torch import nn

pytestmark = [
    pytest.mark.parametrize("device", DEVICES),
    pytest.mark.parametrize("gradients", GRADIENTS),
]
each_usual = pytest.mark.parametrize("usual", USUAL, ids=str)


CONVERSIONS = {
    "bfloat16 and back": lambda m, device: m.bfloat16().float(),
    "double and back": lambda m, device: m.double().float(),
    "cpu and back": lambda m, device: m.to("cpu").to(device),
    "clones": lambda m, device: [setattr(p, "data", p.data.clone()) for p in m.parameters()],
    "to itself": lambda m, device: m.to(device).float(),
    "new memory": lambda m, device: m._apply(torch.clone),
}


@each_usual
@pytest.mark.parametrize("name", CONVERSIONS)
@pytest.mark.parametrize("swap", [False, True], ids=["data", "swap_tensors"])
def test_a_converted_model_goes_on_learning(usual, name, swap, device, gradients):
    a, oa, b, ob = usual_pair(mlp, usual, device, dtype=torch.float32, gradients=gradients)
    both(a, oa, b, ob, square, steps=2)
    for _ in range(2):
        torch.__future__.set_swap_module_params_on_conversion(swap)
        try:
            for model, optimizer in ((a, oa), (b, ob)):
                optimizer.zero_grad()
                CONVERSIONS[name](model, device)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        before = values_of(b.parameters())
        both(a, oa, b, ob, square, steps=3)
        assert not any(torch.equal(p, q) for p, q in zip(b.parameters(), before, strict=True))
        same(a, b)
        same_state(oa, ob)


@each_usual
def test_converted_for_good_before_the_first_step(usual, device, gradients):
    a, oa, b, ob = usual_pair(mlp, usual, device, dtype=torch.float32, gradients=gradients)
    for model in (a, b):
        model.double()

    def loss(model):
        return model(x_of(device).double()).pow(2).sum()

    both(a, oa, b, ob, loss, steps=4)
    assert b[0].weight.dtype == torch.float64
    same(a, b)
    same_state(oa, ob)


@each_usual
def test_swap_tensors(usual, device, gradients):
    a, oa, b, ob = usual_pair(mlp, usual, device, dtype=torch.float32, gradients=gradients)
    both(a, oa, b, ob, square, steps=2)
    for model, optimizer in ((a, oa), (b, ob)):
        optimizer.zero_grad()
        fresh = nn.Parameter(torch.full((8, 4), 0.1, device=device))
        torch.utils.swap_tensors(model[0].weight, fresh)
    both(a, oa, b, ob, square, steps=2)
    same(a, b)
    same_state(oa, ob)
