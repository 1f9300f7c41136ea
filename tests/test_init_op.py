# SPDX-License-Identifier: BSD-3-Clause
# The op that fills a tensor for tr.init: opcheck, the same values on every device, in every dtype
# and in memory of every layout, independent seeds and streams, and meta tensors.

import math

import pytest
import torch
from initializing import DTYPES, each_device, each_draw, each_dtype, filled
from testing import equal, parameters

from torch_renaissance._ops import ops


@each_device
@each_draw
@pytest.mark.parametrize("shape", [(0,), (), (7,), (3, 5)], ids=str)
def test_opcheck(draw, shape, device):
    out = torch.zeros(shape, device=device)
    for tensor in (out, torch.zeros(4, 6, device=device).t()):
        results = torch.library.opcheck(ops.fill_random_.default, (tensor, 3, -5, *draw))
        assert set(results.values()) == {"SUCCESS"} and len(results) == 4


@pytest.mark.cuda
@each_draw
@each_dtype
def test_gpu_and_cpu_have_the_same_bits(draw, dtype):
    """Up to where a thread of the kernel takes several turns."""
    for count in (1, 2, 511, 512, 513, 100_001, 2**25 + 5):
        values = [filled((count,), draw, 5, 9, dtype, device) for device in ("cpu", "cuda")]
        assert torch.equal(values[0], values[1].cpu()), count


@pytest.mark.multigpu
def test_second_gpu():
    assert torch.equal(filled((999,), device="cuda:1").cpu(), filled((999,)))


@each_device
@each_draw
def test_narrow_dtypes_hold_the_same_values_rounded(draw, device):
    exact = filled((9999,), draw, device=device)
    for dtype in DTYPES:
        expected = exact.float().to(dtype) if dtype.itemsize == 2 else exact.to(dtype)
        assert torch.equal(filled((9999,), draw, dtype=dtype, device=device), expected)


@each_device
@each_dtype
def test_values_go_by_index_not_by_memory(dtype, device):
    for p in parameters(device, dtype):
        before = p._version
        with torch.no_grad():
            ops.fill_random_(p, 1, 2, "normal", 0.0, 1.0)
        assert torch.equal(p, filled(p.shape, ("normal", 0.0, 1.0), 1, 2, dtype, device))
        assert p._version > before


@each_device
def test_neighbours_in_memory_are_left_alone(device):
    buffer = torch.zeros(20, device=device)
    ops.fill_random_(buffer[3:10], 0, 0, "uniform", 1.0, 2.0)
    ops.fill_random_(buffer[12::3], 0, 0, "uniform", 1.0, 2.0)
    written = torch.nonzero(buffer).flatten().tolist()
    assert written == [3, 4, 5, 6, 7, 8, 9, 12, 15, 18]


@each_device
def test_a_longer_tensor_begins_with_the_shorter_ones_values(device):
    longest = filled((1001,), device=device)
    for count in (1, 2, 3, 1000):
        assert torch.equal(filled((count,), device=device), longest[:count])


def test_threads_change_nothing():
    threads, values = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            values.append(filled((100_003,)))
    finally:
        torch.set_num_threads(threads)
    assert equal(values[:1] * 2, values[1:])


def test_seeds_and_streams_are_independent():
    """Of n pairs of independent values the correlation is normal with standard deviation
    n^-0.5; five of these."""
    n = 100_000
    one = filled((n,), ("normal", 0.0, 1.0), 0, 0)
    others = [filled((n,), ("normal", 0.0, 1.0), *key) for key in ((1, 0), (0, 1), (0, -1))]
    for other in [*others, one.roll(1), one.roll(2)]:
        assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1]) < 5 / math.sqrt(n)


def test_meta_tensors_stay_without_values():
    out = torch.empty(3, device="meta")
    ops.fill_random_(out, 0, 0, "normal", 0.0, 1.0)
    assert out.is_meta
