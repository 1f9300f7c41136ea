# SPDX-License-Identifier: BSD-3-Clause
# The order of an epoch's samples: a permutation, uniform, the same for any batch size, rank and
# device.

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from testing import DEVICES

from torch_renaissance._ops import ops

each_device = pytest.mark.parametrize("device", DEVICES)


def order(
    count, size=None, seed=0, epoch=0, position=0, shuffle=True, rank=0, world=1, device="cpu"
):
    cursor = torch.tensor([seed, epoch, position, 0], device=device)
    found = ops.order(cursor, count, shuffle, rank, world, count if size is None else size)
    assert cursor.tolist() == [seed, epoch, position, 0], "it doesn't move the cursor"
    return found


@each_device
@pytest.mark.parametrize("size", [0, 1, 7])
def test_opcheck(size, device):
    cursor = torch.tensor([1, 2, 3, 0], device=device)
    results = torch.library.opcheck(ops.order.default, (cursor, 9, True, 1, 2, size))
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4


@each_device
def test_a_cursor_is_placed(device):
    cursor = torch.tensor([9, 8, 7, 6], device=device)
    results = torch.library.opcheck(ops.place_cursor_.default, (cursor, 1, 2, 3))
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4
    for place in ((2**63 - 1, 2**24 - 1, 5), (-(2**63), 0, 0)):
        version = cursor._version
        ops.place_cursor_(cursor, *place)
        assert cursor.tolist() == [*place, 0] and cursor._version == version + 1
    for wrong in (cursor[:3], cursor.int(), cursor.view(2, 2), torch.zeros(8).long()[::2]):
        with pytest.raises(RuntimeError, match="place_cursor_: cursor must be a contiguous int64"):
            ops.place_cursor_(wrong, 1, 2, 3)


@each_device
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 1000, 60_000, 2**18 + 1])
def test_an_epoch_is_a_permutation(count, device):
    for key in ({}, {"seed": 5}, {"epoch": 3}, {"seed": -1, "epoch": 2**24 - 1}):
        found = order(count, device=device, **key)
        assert found.dtype == torch.int64 and found.device.type == device
        assert torch.equal(found.sort().values, torch.arange(count, device=device))


@settings(deadline=None, max_examples=80)
@given(
    count=st.integers(1, 5000), seed=st.integers(-(2**63), 2**63 - 1), epoch=st.integers(0, 9999)
)
def test_any_count_is_permuted(count, seed, epoch):
    assert torch.equal(order(count, seed=seed, epoch=epoch).sort().values, torch.arange(count))


@each_device
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("position", [-1, -(10**12), 2**63 - 1])
def test_whatever_the_cursor_holds_the_samples_exist(position, shuffle, device):
    found = order(5, size=7, position=position, shuffle=shuffle, rank=1, world=2, device=device)
    assert 0 <= int(found.min()) and int(found.max()) < 5


def test_without_shuffle_the_order_is_the_images_own():
    assert torch.equal(order(17, shuffle=False), torch.arange(17))


def test_epochs_and_seeds_differ():
    """As many samples stay in place as of any two permutations: one, on average."""
    first = order(60_000)
    for key in ({"epoch": 1}, {"seed": 1}, {"epoch": 2, "seed": 2}):
        other = order(60_000, **key)
        assert (other == first).sum() < 10
    assert (first == torch.arange(60_000)).sum() < 10


@pytest.mark.parametrize("count", [3, 10, 100])
def test_each_position_has_each_sample_as_often(count):
    """Shares of 4000 epochs are normal with deviation sqrt(p (1 - p) / n); six of these, of up to
    10,000 pairs."""
    epochs = 4000
    orders = torch.stack([order(count, epoch=epoch) for epoch in range(epochs)])
    hits = torch.zeros(count, count)
    positions = torch.arange(count).expand(epochs, count)
    hits.index_put_((positions, orders), torch.ones(()), accumulate=True)
    bound = 6 * math.sqrt(1 / count / epochs)
    assert (hits / epochs - 1 / count).abs().max() < bound


def test_neighbours_are_far_apart():
    """Of a random order the distance of neighbours is a third of the count, and each position's
    rank is uncorrelated with it."""
    found = order(60_000).double()
    assert abs(found.diff().abs().mean() / 60_000 - 1 / 3) < 0.005
    correlation = torch.corrcoef(torch.stack([found, torch.arange(60_000).double()]))[0, 1]
    assert abs(correlation) < 5 / math.sqrt(60_000)


@each_device
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_of_any_size_and_rank_are_parts_of_one_order(shuffle, device):
    whole = order(60, shuffle=shuffle, seed=4, epoch=2, device=device)
    key = {"shuffle": shuffle, "seed": 4, "epoch": 2, "device": device}
    for world, size in ((1, 1), (1, 12), (2, 6), (3, 5), (4, 15)):
        found = [
            order(60, size, position=position, rank=rank, world=world, **key)
            for position in range(0, 60 // world, size)
            for rank in range(world)
        ]
        assert torch.equal(torch.cat(found), whole)


def test_past_the_end_it_begins_again():
    whole = order(10)
    assert torch.equal(order(10, 7, position=6), torch.cat([whole[6:], whole[:3]]))
    assert torch.equal(order(3, 8), torch.cat([order(3)] * 3)[:8])


@pytest.mark.cuda
def test_gpu_and_cpu_have_the_same_order():
    for count in (1, 17, 60_000, 20_000_000):
        assert torch.equal(order(count, device="cuda").cpu(), order(count))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5, True, 2, 2, 3), "rank must be from 0 to world_size - 1, got rank 2 and world_size 2"),
        ((5, True, -1, 2, 3), "got rank -1 and world_size 2"),
        ((5, True, 0, 1, -1), "size must be at least 0, got -1"),
        ((0, True, 0, 1, 3), "count is 0, but a batch of 3 needs samples to draw from"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(RuntimeError, match=f"^order: .*{message}"):
        ops.order(torch.zeros(4, dtype=torch.int64), *arguments)


@pytest.mark.parametrize("cursor", [torch.zeros(3, dtype=torch.int64), torch.zeros(4)])
def test_bad_cursors_are_refused(cursor):
    with pytest.raises(RuntimeError, match="cursor must be a contiguous int64 vector of 4 numbers"):
        ops.order(cursor, 5, True, 0, 1, 3)
