# SPDX-License-Identifier: BSD-3-Clause
# torch.compile over an accelerated model, its step, or both in one function.

import pytest
import torch
from testing import DEVICES, USUAL, mlp, same, same_state, square, usual_pair

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("device", DEVICES)]


@pytest.mark.parametrize("usual", USUAL, ids=str)
@pytest.mark.parametrize("what", ["model", "step", "everything"])
def test_compiled_training_is_native_training(usual, what, device):
    torch._dynamo.reset()
    # in fp32, as torch's Adam corrects the bias in fp32 when it is compiled
    a, oa, b, ob = usual_pair(mlp, usual, device, dtype=torch.float32)
    for model, optimizer in ((a, oa), (b, ob)):

        def train_once(model, step, optimizer=optimizer):
            square(model).backward()
            step()
            optimizer.zero_grad()

        step = optimizer.step
        if what == "model":
            model = torch.compile(model, backend="eager")
        elif what == "step":
            step = torch.compile(step, backend="eager")
        else:
            train_once = torch.compile(train_once, backend="eager")
        for _ in range(4):
            train_once(model, step)
    same(a, b)
    if device == "cpu" or what == "model":  # a compiled Adam of torch's moves its steps to the GPU
        same_state(oa, ob)
