# SPDX-License-Identifier: BSD-3-Clause
# What the tests of averages share: `Averaged`, a native training with an AveragedModel beside an
# accelerated one with ema_decay, and all that a step may change.

import pytest
import torch
from testing import GRADIENTS, USUAL, Optimizer, close, pair, same, square, values_of
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torch_renaissance as tr

ROWS = [
    Optimizer(torch.optim.SGD, tr.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    Optimizer(torch.optim.SGD, tr.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    *USUAL,
]
each_row = pytest.mark.parametrize("row", ROWS, ids=str)
each_usual = pytest.mark.parametrize("row", USUAL, ids=str)
each_gradients = pytest.mark.parametrize("gradients", GRADIENTS)


class Averaged:
    """A native and an accelerated training side by side, each with averages."""

    def __init__(self, make, row, device, decay, dtype=torch.float64, **options):
        def make_optimizer(model):
            return row.native(model.parameters(), **row.options)

        self.decay, self.device = decay, device
        self.a, self.oa, self.b, self.ob = pair(
            make, make_optimizer, device, dtype=dtype, ema_decay=decay, **options
        )
        self.native, self.ours = AveragedModel(self.a), tr.Ema(self.b, self.ob)
        self.steps = 0

    def average(self):
        """After a native step."""
        decay = self.decay(self.steps) if callable(self.decay) else self.decay
        self.native.multi_avg_fn = get_ema_multi_avg_fn(decay)
        self.native.update_parameters(self.a)

    def step(self, loss=square, steps=1, zero=True):
        for _ in range(steps):
            for model, optimizer in ((self.a, self.oa), (self.b, self.ob)):
                if zero:
                    optimizer.zero_grad()
                if loss is not None:
                    loss(model).backward()
                optimizer.step()
            self.average()
            self.steps += 1

    def check(self):
        """Equal weights, averages and number of updates."""
        same(self.a, self.b)
        native, ours = self.native.module.state_dict(), self.ours.state_dict()
        assert list(ours) == list(native)
        for name, want in native.items():
            assert (ours[name].dtype, ours[name].shape) == (want.dtype, want.shape)
            close(ours[name], want, name)
        assert self.ours.updates == int(self.native.n_averaged)


def everything(model, optimizer):
    """All that a step may change, as copies."""
    state = optimizer.state_dict()["state"]
    moments = [v for entries in state.values() for v in entries.values() if v is not None]
    averages = tr.Ema(model, optimizer).state_dict().values()
    return [*values_of([*model.parameters(), *model.buffers(), *moments]), *averages]
