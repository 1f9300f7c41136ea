# SPDX-License-Identifier: BSD-3-Clause
# What the tests of max_grad_norm share: the optimizers that clip, and the native way, which is
# clip_grad_norm_ and a step, beside ours.

import pytest
import torch
from testing import GRADIENTS, Optimizer, pair, values_of
from torch import nn
from torch.nn.utils import clip_grad_norm_

import torch_renaissance as tr

ROWS = [
    Optimizer(torch.optim.SGD, tr.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    Optimizer(torch.optim.SGD, tr.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    Optimizer(torch.optim.SGD, tr.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    Optimizer(torch.optim.Adam, tr.optim.Adam, {"lr": 0.02, "weight_decay": 0.1}),
    Optimizer(torch.optim.AdamW, tr.optim.AdamW, {"lr": 0.02, "weight_decay": 0.5}),
]
each_row = pytest.mark.parametrize("row", ROWS, ids=str)
each_gradients = pytest.mark.parametrize("gradients", GRADIENTS)


def accelerated(row, params, max_grad_norm, **options):
    optimizer = row.native(params, **row.options)
    tr.accelerate(nn.ParameterList(params), optimizer, max_grad_norm=max_grad_norm, **options)
    return optimizer


def clipped_step(params, optimizer, max_norm):
    """The native step; returns the norm before clipping."""
    norm = None if max_norm is None else clip_grad_norm_(params, max_norm)
    optimizer.step()
    return norm


def clipped_pair(make, row, device, max_norm, **options):
    return pair(
        make,
        lambda m: row.native(m.parameters(), **row.options),
        device,
        max_grad_norm=max_norm,
        **options,
    )


def both_clip(a, oa, b, ob, loss, max_norm, steps=1):
    for _ in range(steps):
        for model, optimizer in ((a, oa), (b, ob)):
            optimizer.zero_grad()
            loss(model).backward()
        norm = clipped_step(list(a.parameters()), oa, max_norm)
        ob.step()
        torch.testing.assert_close(ob.grad_norm, norm)


def everything(model, optimizer):
    """All that a step may change, as copies."""
    state = optimizer.state_dict()["state"]
    moments = [v for entries in state.values() for v in entries.values() if v is not None]
    return values_of([*model.parameters(), *model.buffers(), *moments])
