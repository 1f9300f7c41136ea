# SPDX-License-Identifier: BSD-3-Clause
# What the tests of tr.ab_test share: a small training, variants of the user's own, right, wrong and
# failing, and a run without a budget.

import torch
from torch import nn
from torch.nn import functional as F

import torch_renaissance as tr

CPU = torch.device("cpu")
DECAY, LR = 0.1, 1e-3
DTYPES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}


def make_model():
    return nn.Sequential(
        nn.Linear(12, 96), nn.ReLU(), nn.Linear(96, 16), nn.ReLU(), nn.Linear(16, 3)
    )


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)


def loss_fn(model, x, y):
    return F.cross_entropy(model(x), y)


def batch(step=0):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(32, 12, generator=generator), torch.randint(3, (32,), generator=generator)


def by_hand(change=lambda optimizer: None, precision="fp32", after=lambda model: None):
    """A variant of the user's own, whose optimizer is changed before the first step."""

    def make(make_model, make_optimizer, loss_fn):
        model = make_model()
        optimizer = make_optimizer(model)
        change(optimizer)
        dtype = DTYPES[precision]

        def step(*batch):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = loss_fn(model, *batch)
            loss.backward()
            optimizer.step()
            after(model)
            return loss

        return step

    return make


def decay_of(value):
    def change(optimizer):
        for group in optimizer.param_groups:
            group["weight_decay"] = value

    return change


def failing(error, first=0):
    """A variant whose step raises after `first` steps."""

    def make(*functions):
        step, calls = by_hand()(*functions), 0

        def fail(*batch):
            nonlocal calls
            calls += 1
            if calls > first:
                raise error
            return step(*batch)

        return fail

    return make


def run(variants, model=make_model, optimizer=make_optimizer, loss=loss_fn, data=batch, **options):
    # With so large a budget the number of steps compared doesn't depend on the machine.
    options = {"steps": 4, "progress": False, "budget": 5000.0, **options}
    return tr.ab_test(model, optimizer, loss, data, variants=variants, **options)
