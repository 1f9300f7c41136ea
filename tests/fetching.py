# SPDX-License-Identifier: BSD-3-Clause
# What the tests of prefetch share with those of CachedValidation: batches, a comparison with the
# loader's own, and loaders that fail or know how far they came.

import pytest
import torch
from torch.utils import _pytree as pytree

each_depth = pytest.mark.parametrize("depth", [1, 2, 3])


def batches_of(n, rows=6, first=0):
    generator = torch.Generator().manual_seed(first)
    return [
        (torch.randn(rows, 4, generator=generator), torch.randint(9, (rows,), generator=generator))
        for _ in range(n)
    ]


def assert_same(got, expected, device="cpu"):
    ours, spec = pytree.tree_flatten(got)
    theirs, expected_spec = pytree.tree_flatten(expected)
    assert spec == expected_spec
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(b, torch.Tensor):
            assert a.device.type == torch.device(device).type
            torch.testing.assert_close(a.cpu(), b.cpu(), rtol=0, atol=0)
            assert a.stride() == b.stride()
        else:
            assert a is b


def failing(batches, error):
    yield from batches
    raise error


class Closing:
    """A loader that knows whether its generator has been closed, and how far it came."""

    def __init__(self, n):
        self.n, self.open, self.given = n, 0, 0

    def __iter__(self):
        self.open += 1
        try:
            for batch in batches_of(self.n):
                self.given += 1
                yield batch
        finally:
            self.open -= 1
