# SPDX-License-Identifier: BSD-3-Clause
# DeviceLoader: which samples in which order, and TrainStep drawing from it by itself (its captured
# steps: test_draw_ahead.py).

import copy
import re
import sys

import pytest
import torch
from testing import DEVICES
from torch import nn

import torch_renaissance as tr
from torch_renaissance.data import (
    DeviceDataset,
    DeviceLoader,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    ToFloat,
)

pytestmark = pytest.mark.parametrize("device", DEVICES)

# On a CPU TrainStep runs eagerly and says so.
on_the_cpu = pytest.mark.filterwarnings("ignore:TrainStep runs eagerly")


def dataset_of(n, device, size=4):
    """Image i is filled with i, and so is label i."""
    values = torch.arange(n, dtype=torch.int64)
    images = values.to(torch.uint8).view(n, 1, 1, 1).expand(n, 1, size, size).contiguous()
    return DeviceDataset(images, values, device=device)


def visited(loader):
    return torch.cat([y for _, y in loader]).tolist()


@pytest.mark.parametrize("n, batch_size", [(1, 1), (1, 8), (7, 3), (64, 64), (200, 33)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_visits_every_sample_once(n, batch_size, shuffle, device):
    loader = DeviceLoader(dataset_of(n, device), batch_size, shuffle=shuffle)
    batches = list(loader)
    assert len(batches) == len(loader) == -(-n // batch_size)
    assert [len(y) for _, y in batches][:-1] == [batch_size] * (len(loader) - 1)
    order = torch.cat([y for _, y in batches]).tolist()
    assert sorted(order) == list(range(n))
    assert shuffle or order == list(range(n))
    for x, y in batches:
        assert x.shape == (len(y), 1, 4, 4) and x.device == y.device == loader.device
        assert torch.equal(x.amax((1, 2, 3)).long(), y)


def test_epochs_and_seeds_have_orders_of_their_own(device):
    data = dataset_of(200, device)
    loader = DeviceLoader(data, 64, seed=3)
    first, second = visited(loader), visited(loader)
    assert loader.epoch == 2 and first != second
    again = DeviceLoader(data, 9, seed=3)
    assert visited(again) == first, "the order doesn't depend on the batch size"
    again.epoch = 1
    assert visited(again) == second
    assert visited(DeviceLoader(data, 64, seed=4)) != first


def test_the_cpu_has_the_same_order_and_draws(device):
    def batches(where):
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(256, (50, 3, 8, 8), generator=generator, dtype=torch.uint8)
        data = DeviceDataset(images, torch.arange(50), device=where)
        transforms = (RandomCrop(8, padding=2), RandomHorizontalFlip(), Normalize(0.5, 0.25))
        return list(DeviceLoader(data, 16, transforms=transforms, seed=1))

    for (x, y), (a, b) in zip(batches(device), batches("cpu"), strict=True):
        assert torch.equal(y.cpu(), b)
        torch.testing.assert_close(x.cpu(), a)


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("drop_last", [True, False])
def test_ranks_share_one_order(world_size, drop_last, device):
    """Batch by batch: the batches of all ranks together are one run of the common order."""
    n, batch_size = 101, 4
    data = dataset_of(n, device)
    common = visited(DeviceLoader(data, 7, seed=5))
    loaders = [
        DeviceLoader(
            data, batch_size, seed=5, drop_last=drop_last, rank=rank, world_size=world_size
        )
        for rank in range(world_size)
    ]
    assert len({len(loader) for loader in loaders}) == 1
    found = []
    for batches in zip(*loaders, strict=True):
        labels = [y.tolist() for _, y in batches]
        assert len({len(part) for part in labels}) == 1, "ranks must have as many"
        found += [label for part in labels for label in part]
    if drop_last:
        assert found == common[: len(found)]
        assert n - len(found) < batch_size * world_size
    else:
        assert found == (common + common)[: len(found)] and 0 <= len(found) - n < world_size


def test_augmented_images_do_not_depend_on_ranks_or_batches(device):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (23, 3, 8, 8), generator=generator, dtype=torch.uint8)
    data = DeviceDataset(images, torch.arange(23), device=device)
    transforms = (RandomCrop(8, padding=2), RandomHorizontalFlip(), Normalize(0.5, 0.25))

    def of_all_ranks(batch_size, world_size):
        found = {}
        for rank in range(world_size):
            loader = DeviceLoader(
                data, batch_size, seed=5, transforms=transforms, rank=rank, world_size=world_size
            )
            for x, y in loader:
                found |= dict(zip(y.tolist(), x.cpu(), strict=True))
        return torch.stack([found[label] for label in range(23)])

    alone = of_all_ranks(23, 1)
    for batch_size, world_size in ((4, 1), (4, 2), (3, 3), (1, 8)):
        assert torch.equal(of_all_ranks(batch_size, world_size), alone)


def test_drop_last(device):
    loader = DeviceLoader(dataset_of(10, device), 4, drop_last=True)
    assert [len(y) for _, y in loader] == [4, 4]


def test_indices_choose_who_takes_part(device):
    chosen = [5, 3, 8, 1, 30]
    loader = DeviceLoader(dataset_of(40, device), 2, indices=chosen)
    assert len(loader) == 3 and sorted(visited(loader)) == sorted(chosen)
    loader = DeviceLoader(dataset_of(40, device), 2, indices=torch.tensor(chosen), shuffle=False)
    assert visited(loader) == chosen


def test_loops_side_by_side_do_not_disturb_each_other(device):
    data = dataset_of(20, device)
    alone = DeviceLoader(data, 6)
    expected = [visited(alone), visited(alone)]
    loader = DeviceLoader(data, 6)
    pairs = [(a, b) for (_, a), (_, b) in zip(loader, loader, strict=True)]
    assert [torch.cat(side).tolist() for side in zip(*pairs, strict=True)] == expected


def test_batches_keep_their_values(device):
    loader = DeviceLoader(dataset_of(20, device), 5)
    batches = list(loader)
    loader.epoch = 0
    for (x, y), (a, b) in zip(batches, loader, strict=True):
        assert torch.equal(x, a) and torch.equal(y, b)


def test_an_epoch_goes_on_in_another_mode(device):
    loader = DeviceLoader(dataset_of(20, device), 5)
    expected = visited(loader)
    loader.epoch = 0
    batches = iter(loader)
    with torch.inference_mode():
        found = next(batches)[1].tolist()
    for _, y in batches:
        found += y.tolist()
    assert found == expected


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ({"batch_size": 2.5}, TypeError, "batch_size must be an int, got 2.5"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank must be from 0 to 1, got 2"),
        ({"world_size": 0}, ValueError, "world_size must be at least 1, got 0"),
        ({"indices": [3, 10]}, ValueError, "index 10 is not in the dataset, which has 10"),
        ({"indices": [-1]}, ValueError, "index -1 is not in the dataset"),
        ({"indices": [0.5]}, ValueError, "indices must be ints of shape (n,), got float32"),
        ({"indices": []}, ValueError, "make no batch"),
        ({"drop_last": True, "batch_size": 11}, ValueError, "10 samples make no batch of 11"),
        ({"seed": 2**63}, ValueError, "seed must fit in 64 bits with a sign"),
        ({"transforms": None}, TypeError, "transforms must be a list of those of tr.data.transf"),
    ],
)
def test_arguments_are_refused_in_a_sentence(arguments, error, message, device):
    arguments = {"batch_size": 4, **arguments}
    with pytest.raises(error, match=re.escape(message)):
        DeviceLoader(dataset_of(10, device), **arguments)


def test_a_dataset_of_another_kind_is_refused(device):
    with pytest.raises(TypeError, match=r"got list; DeviceDataset\.from_dataset"):
        DeviceLoader([1, 2], 1)
    loader = DeviceLoader(dataset_of(10, device), 4)
    for wrong in (-1, 2**24):
        with pytest.raises(ValueError, match=rf"epoch must be from 0 to 2\*\*24 - 1, got {wrong}"):
            loader.epoch = wrong
    assert loader.epoch == 0


# --- TrainStep(data=) ----------------------------------------------------------------------------


class Training:
    """A model whose loss also returns the labels it saw."""

    def __init__(self, device, *, n=50, batch_size=8, loss=None, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(16, 50)).to(device)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer = tr.accelerate(self.model, optimizer)
        self.loader = self.loader_of(n, device, batch_size)
        loss = loss or self.loss
        self.step = tr.TrainStep(loss, self.optimizer, data=self.loader, **options)

    @staticmethod
    def loader_of(n, device, batch_size):
        return DeviceLoader(dataset_of(n, device), batch_size, transforms=[ToFloat()], seed=7)

    def loss(self, x, y):
        return nn.functional.cross_entropy(self.model(x), y), y

    def steps(self, n):
        return [tuple(t.clone() for t in self.step()) for _ in range(n)]


@on_the_cpu
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_step_draws_what_a_loop_would(precision, device):
    """Three epochs with smaller last batches, of which the last ones are replays."""
    t = Training(device, precision=precision, max_graphs=2)
    twin = Training(device)
    loop = tr.TrainStep(twin.loss, twin.optimizer, precision=precision)
    expected = [loop(x, y) for _ in range(4) for x, y in twin.loader]
    for (loss, seen), (wanted, labels) in zip(t.steps(len(expected)), expected, strict=True):
        assert torch.equal(seen, labels)
        torch.testing.assert_close(loss, wanted)
    assert t.loader.epoch == 4
    if device == "cuda":
        assert t.step.captured and len(t.step.explain().graphs) == 2
        assert not t.step.explain().fallbacks


@on_the_cpu
def test_an_exception_uses_its_batch_up(device):
    """As a loop does, whose iterator has moved on."""
    bad = {"now": False}

    def loss(x, y):
        if bad["now"]:
            raise ZeroDivisionError("now")
        return nn.functional.cross_entropy(t.model(x), y), y

    t = Training(device, loss=loss)
    order = [y.tolist() for _, y in DeviceLoader(t.loader.dataset, 8, seed=7)]
    found = [y.tolist() for _, y in t.steps(5)]
    bad["now"] = True
    with pytest.raises(ZeroDivisionError):
        t.step()
    bad["now"] = False
    found += [y.tolist() for _, y in t.steps(1)]
    assert found == order[:5] + order[6:]


@on_the_cpu
def test_it_resumes_in_the_middle_of_an_epoch(device):
    t = Training(device)
    t.steps(10)
    state = t.loader.state_dict()
    assert state == {"seed": 7, "epoch": 1, "batch": 3, "next": 2}
    rest = [y.tolist() for _, y in t.steps(12)]
    for other in (Training(device), t):
        if other is not t:
            other.steps(5)
        other.loader.load_state_dict(copy.deepcopy(state))
        assert [y.tolist() for _, y in other.steps(12)] == rest
    with pytest.raises(ValueError, match="stands at batch 7, but an epoch has 7 here"):
        t.loader.load_state_dict({**state, "batch": 7})
    t.loader.epoch = 1
    assert t.loader.state_dict() == {"seed": 7, "epoch": 1, "batch": 0, "next": 1}


def test_a_state_between_epochs_goes_on_with_the_next_one(device):
    loader, other = (DeviceLoader(dataset_of(20, device), 8) for _ in range(2))
    visited(loader)
    state = loader.state_dict()
    other.load_state_dict(state)
    assert state == other.state_dict() == {"seed": 0, "epoch": 1, "batch": 0, "next": 1}
    assert other.epoch == loader.epoch == 1 and visited(other) == visited(loader)
    for wrong in ({"batch": 0.5}, {"batch": 1, "epoch": None}):
        with pytest.raises(TypeError, match="must be an int, got"):
            other.load_state_dict(state | wrong)
    with pytest.raises(KeyError):
        other.load_state_dict({"seed": 0})
    assert other.epoch == 2


@on_the_cpu
def test_memory_that_a_graph_reads_outlives_other_tensors_in_the_dataset(device):
    t = Training(device, n=48)
    whole = DeviceLoader(t.loader.dataset, 8, seed=7)
    order = [y.tolist() for _ in range(2) for _, y in whole]
    found = [y.tolist() for _, y in t.steps(6)]
    t.loader.dataset.images = torch.zeros_like(t.loader.dataset.images)
    t.loader.dataset.labels = torch.zeros_like(t.loader.dataset.labels)
    noise = [torch.full((48, 1, 4, 4), 99, dtype=torch.uint8, device=device) for _ in range(8)]
    assert found + [y.tolist() for _, y in t.steps(6)] == order and len(noise) == 8


@pytest.mark.parametrize(
    "name",
    "dataset device transforms batch_size drop_last shuffle seed rank world_size".split(),
)
def test_what_a_graph_has_for_good_is_read_only(name, device):
    loader = Training.loader_of(20, device, 8)
    before = getattr(loader, name)
    with pytest.raises(AttributeError, match=name if sys.version_info >= (3, 11) else "set"):
        setattr(loader, name, before)
    assert getattr(loader, name) is before


@on_the_cpu
def test_micro_batches_are_batches_of_the_loader(device):
    t = Training(device, accumulate=2)
    order = [y.tolist() for _, y in DeviceLoader(t.loader.dataset, 8, seed=7)]
    assert [y.tolist() for _, y in t.steps(7)] == order
    assert next(iter(t.optimizer.state.values()))["momentum_buffer"].any()


@on_the_cpu
def test_verify_draws_once(device):
    t = Training(device, verify=True)
    order = [y.tolist() for _, y in DeviceLoader(t.loader.dataset, 8, seed=7)]
    assert [y.tolist() for _, y in t.steps(7)] == order
    assert device == "cpu" or t.step.explain().graphs


def test_what_does_not_fit_is_refused(device):
    t = Training(device)
    with pytest.raises(TypeError, match="draws its batches and takes none"):
        t.step(torch.zeros(8, 1, 4, 4))
    with pytest.raises(TypeError, match=r"data must be a tr\.data\.DeviceLoader, got list"):
        tr.TrainStep(t.loss, t.optimizer, data=[1])
    if device == "cuda":
        elsewhere = DeviceLoader(dataset_of(10, "cpu"), 2)
        with pytest.raises(ValueError, match="data is on cpu, the parameters are on cuda"):
            tr.TrainStep(t.loss, t.optimizer, data=elsewhere)
