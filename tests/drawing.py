# SPDX-License-Identifier: BSD-3-Clause
# What the tests of batches drawn ahead share: a training that keeps what its steps saw, and two of
# them compared.


import torch
from torch import nn
from torch.utils import _pytree as pytree

import torch_renaissance as tr
from torch_renaissance.data import (
    DeviceDataset,
    DeviceLoader,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
)

NEVER = 10**9  # calls of warm-up: no capture


def dataset_of(n, device):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (n, 1, 8, 8), generator=generator, dtype=torch.uint8)
    return DeviceDataset(images, torch.arange(n) % 10, device=device)


class Net(nn.Module):
    """Keeps the batch that it saw last in buffers."""

    def __init__(self, batch_size):
        super().__init__()
        self.last = nn.Linear(64, 10)
        self.scale = nn.Parameter(torch.ones(10))
        self.register_buffer("x", torch.zeros(batch_size, 1, 8, 8))
        self.register_buffer("y", torch.zeros(batch_size, dtype=torch.int64))

    def forward(self, x, y):
        self.x[: len(x)].copy_(x)
        self.y[: len(y)].copy_(y)
        return self.last(x.flatten(1)) * self.scale


class Training:
    """`step`, and what each of its steps saw, returned and led to.

    `extras(x, y, logits)` are returned beside the loss.
    """

    def __init__(
        self, device, *, n=52, batch_size=8, extras=None, data=None, steps=None, **options
    ):
        torch.manual_seed(0)
        self.model = Net(batch_size).to(device)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer = tr.accelerate(self.model, optimizer)
        transforms = (RandomCrop(8, padding=2), RandomHorizontalFlip(), Normalize(0.5, 0.25))
        self.loader = DeviceLoader(
            dataset_of(n, device), batch_size, transforms=transforms, seed=7, **data or {}
        )
        self.extras, self.bad = extras, False
        self.step = tr.TrainStep(self.loss, self.optimizer, data=self.loader, **options)
        self.seen, self.replays = [], 0

    def loss(self, x, y):
        logits = self.model(x, y)
        if self.bad:
            raise ZeroDivisionError("bad")
        loss = nn.functional.cross_entropy(logits, y)
        return loss if self.extras is None else (loss, self.extras(x, y, logits))

    def steps(self, n, step=None):
        for _ in range(n):
            size = self.loader.upcoming()
            result = (step or self.step)()
            self.replays += (step or self.step).captured
            leaves = pytree.tree_leaves((self.model.x[:size], self.model.y[:size], result))
            self.seen.append([torch.as_tensor(leaf).detach().clone() for leaf in leaves])


def compare(device, scenario, *, atol=1e-5, least=1, **options):
    """Of two trainings, one captures: both must see the same."""
    captured, eager = Training(device, **options), Training(device, **options, warmup=NEVER)
    for t in (captured, eager):
        scenario(t)
    assert captured.replays >= least and not eager.replays
    assert len(captured.seen) == len(eager.seen) > 0
    for i, (got, expected) in enumerate(zip(captured.seen, eager.seen, strict=True)):
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1]), f"batch {i}"
        for a, b in zip(got[2:], expected[2:], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=atol, msg=lambda m, i=i: f"{i}: {m}")
    for a, b in zip(captured.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=atol)
    assert captured.loader.state_dict() == eager.loader.state_dict()
    return captured
