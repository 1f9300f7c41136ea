# SPDX-License-Identifier: BSD-3-Clause
# What the tests of cross entropy share: logits in many layouts, labels, and loss and gradient
# together.

from dataclasses import dataclass

import pytest
import torch
from testing import DEVICES

cuda = pytest.mark.cuda
on_devices = pytest.mark.parametrize("device", DEVICES)
IGNORED = -100


def randn(*shape, device="cpu", dtype=torch.float32, seed=0):
    """Equal for every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def labels_for(x, ignored=True):
    """Random labels for the logits `x`; every seventh row is ignored."""
    n_classes = x.shape[0 if x.dim() == 1 else 1]
    shape = x.shape[2:] if x.dim() > 1 else ()
    shape = (x.shape[0], *shape) if x.dim() > 1 else ()
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(n_classes, shape, generator=generator)
    if ignored and labels.dim():
        labels.view(-1)[3::7] = IGNORED
    return labels.to(x.device)


def both(f, x, target, **options):
    """The loss and the logits' gradient, for a loss whose own gradient is random."""
    x = x.detach().requires_grad_()
    loss = f(x, target, **options)
    (grad,) = torch.autograd.grad(loss, x, randn(*loss.shape).to(loss))
    return loss.detach(), grad


@dataclass(frozen=True)
class Layout:
    name: str
    shape: tuple
    change: object = staticmethod(lambda x: x)  # of contiguous logits

    def __str__(self):
        return self.name

    def logits(self, device, dtype):
        return self.change(randn(*self.shape, device=device, dtype=dtype))


def channels_last(x):
    return x.to(memory_format=torch.channels_last)


def odd_start(x):
    """Rows that start at other addresses within 16 bytes than those of their gradient."""
    return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)


LAYOUTS = [
    Layout("one-row", (7,)),
    Layout("few", (200, 10)),
    Layout("few-32", (9, 32)),
    Layout("warp", (256, 1000)),
    Layout("warp-33", (9, 33)),
    Layout("block", (9, 1025)),
    Layout("vocabulary", (64, 50257)),
    Layout("odd-start", (6, 1500), odd_start),
    Layout("odd-start-few", (6, 21), odd_start),
    Layout("columns-of-a-slice", (33, 80), lambda x: x[:, 3:70]),
    Layout("transposed", (100, 40), torch.t),
    Layout("sequence", (3, 70, 33)),
    Layout("sequence-last", (3, 33, 70), lambda x: x.transpose(1, 2)),
    Layout("images", (3, 21, 5, 9)),
    Layout("images-channels-last", (3, 21, 5, 9), channels_last),
    Layout("images-cropped", (3, 21, 5, 9), lambda x: x[:, :, 1:-1, 2:-2]),
    Layout("images-other-order", (5, 3, 9, 21), lambda x: x.permute(1, 3, 0, 2)),
    Layout("one-image", (1, 5, 4, 3)),
    Layout("expanded", (1, 12), lambda x: x.expand(8, 12)),
    Layout("volumes", (2, 4, 3, 2, 5)),
]
