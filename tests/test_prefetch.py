# SPDX-License-Identifier: BSD-3-Clause
# tr.data.prefetch against the loader itself: its batches, length and attributes, what is refused,
# and what a loader's error, a break and the end leave behind.

import gc
import re
import weakref
from collections import namedtuple

import pytest
import torch
from fetching import Closing, assert_same, batches_of, each_depth, failing
from testing import DEVICES
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from torch_renaissance.data import prefetch

each_device = pytest.mark.parametrize("device", DEVICES)
Pair = namedtuple("Pair", "x y")


# -- batches ---------------------------------------------------------------------------------------


@each_device
@each_depth
@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_the_loaders_batches_on_the_device(n, depth, device):
    batches = batches_of(n)
    assert_same(list(prefetch(batches, depth, device=device)), batches, device)


@each_device
def test_any_form_of_batch(device):
    note, x = object(), torch.arange(24.0)
    batches = [
        x,
        x[0],
        {"x": x, "rest": [note, "text", None, 3]},
        Pair(x.view(2, 3, 2, 2).to(memory_format=torch.channels_last), x.bool()),
        [x.view(4, 6).t(), x[:0], x.to(torch.complex64), x.double()],
        (),
        note,
    ]
    assert_same(list(prefetch(batches, device=device)), batches, device)


@each_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_floating_tensors_are_converted(dtype, device):
    batch = [torch.randn(3), torch.arange(3), torch.ones(2, dtype=torch.bool), torch.randn(2) * 1j]
    (got,) = prefetch([batch], device=device, dtype=dtype)
    assert_same(got, [batch[0].to(dtype), *batch[1:]], device)


@each_device
def test_rows_of_larger_tensors_and_expanded_ones(device):
    x = torch.arange(24.0).view(4, 6)
    for source in (x[:, ::2], x[1:3], x[0].expand(3, 6), x.t()[1:4]):
        (got,) = prefetch([source], device=device)
        assert got.device.type == device and torch.equal(got.cpu(), source)


@each_device
def test_dataloaders_with_and_without_pinned_memory(device):
    x, y = torch.randn(17, 4), torch.arange(17)
    for pin in {False, device == "cuda"}:
        loader = DataLoader(TensorDataset(x, y), batch_size=4, pin_memory=pin)
        got = list(prefetch(loader, device=device))
        assert len(got) == len(loader) == 5
        assert torch.equal(torch.cat([b[0] for b in got]).cpu(), x)
        assert torch.equal(torch.cat([b[1] for b in got]).cpu(), y)


@each_device
def test_it_is_iterated_again_and_twice_at_once(device):
    batches = batches_of(5)
    loader = prefetch(batches, device=device)
    for _ in range(2):
        assert_same(list(loader), batches, device)
    pairs = list(zip(loader, loader, strict=True))
    assert_same([a for a, _ in pairs], batches, device)
    assert_same([b for _, b in pairs], batches, device)


def test_length_and_attributes_are_the_loaders():
    dataset = TensorDataset(torch.randn(10, 2))
    sampler = torch.utils.data.distributed.DistributedSampler(dataset, num_replicas=2, rank=0)
    native = DataLoader(dataset, batch_size=2, sampler=sampler)
    loader = prefetch(native, device="cpu")
    assert len(loader) == len(native) == 3
    assert loader.loader is native and loader.batch_size == 2
    loader.sampler.set_epoch(4)
    assert sampler.epoch == 4
    with pytest.raises(AttributeError):
        loader.nonsense  # noqa: B018


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


@pytest.mark.parametrize("make", [lambda: DataLoader(Stream()), lambda: (x for x in range(4))])
def test_no_length_where_the_loader_has_none(make):
    with pytest.raises(TypeError) as native:
        len(make())
    with pytest.raises(TypeError, match=re.escape(str(native.value))):
        len(prefetch(make(), device="cpu"))
    assert len(list(prefetch(make(), device="cpu"))) == 4


def test_the_device_is_the_gpu_if_there_is_one():
    expected = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    assert prefetch([]).device == expected


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((3,), {}, TypeError, "loader must be an iterable of batches, got int"),
        ((nn.Linear(1, 1),), {}, TypeError, "loader must be an iterable of batches, got Linear"),
        (([], 0), {}, ValueError, "depth must be an int >= 1, got 0"),
        (([], True), {}, ValueError, "depth must be an int >= 1, got True"),
        (([], 1.5), {}, ValueError, "depth must be an int >= 1, got 1.5"),
        (([],), {"dtype": torch.int64}, ValueError, "must be a floating-point dtype such as"),
        (([],), {"dtype": "fp16"}, TypeError, "dtype must be a torch.dtype, got 'fp16'"),
        (([],), {"device": "meta"}, ValueError, "device must be a CPU or a CUDA GPU, got meta"),
        (([],), {"device": "cuda:77"}, RuntimeError, "device is cuda:77, but torch sees"),
    ],
)
def test_refusals(arguments, options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        prefetch(*arguments, **options)


# -- errors and ends -------------------------------------------------------------------------------


@each_device
@each_depth
@pytest.mark.parametrize("n", [0, 1, 4])
def test_an_error_comes_after_the_batches_before_it(n, depth, device):
    batches, error = batches_of(n), ZeroDivisionError("at last")
    got = []
    with pytest.raises(ZeroDivisionError) as raised:
        for batch in prefetch(failing(batches, error), depth, device=device):
            got.append(batch)
    assert raised.value is error
    assert "failing" in [entry.name for entry in raised.traceback]
    assert_same(got, batches, device)


@each_device
@each_depth
def test_a_break_ends_the_loader_too(depth, device):
    loader = Closing(9)
    for _ in prefetch(loader, depth, device=device):
        assert loader.open == 1
        break
    assert loader.open == 0
    assert loader.given == (depth if device == "cuda" else 1)


@each_device
def test_a_break_ends_the_workers(device):
    dataset = TensorDataset(torch.randn(64, 2))
    native = DataLoader(dataset, batch_size=2, num_workers=2, persistent_workers=True)
    for _ in prefetch(native, device=device):
        break
    workers = native._iterator._workers
    assert all(w.is_alive() for w in workers)
    native._iterator = None  # the last to hold them: prefetch doesn't
    gc.collect()
    assert not any(w.is_alive() for w in workers)


@each_device
def test_nothing_is_kept_after_the_end(device):
    kept = []

    def loader():
        for x, _ in batches_of(5):
            kept.append(weakref.ref(x))
            yield x
        raise KeyError("end")

    gc.disable()
    try:
        with pytest.raises(KeyError):
            for x in prefetch(loader(), device=device):
                kept.append(weakref.ref(x))
        del x
        assert [r() for r in kept] == [None] * 10
    finally:
        gc.enable()
