# SPDX-License-Identifier: BSD-3-Clause
# tr.data.CachedValidation: reads a loader once, keeps its batches where they fit, and says so when
# somebody changes them.

import importlib
import re

import pytest
import torch
from fetching import Closing, assert_same, batches_of, failing
from testing import DEVICES
from torch.utils.data import DataLoader, TensorDataset

from torch_renaissance.data import CachedValidation, prefetch

validation = importlib.import_module("torch_renaissance.data.validation")
pytestmark = pytest.mark.parametrize("device", DEVICES)
BATCH = 6 * 4 * 4 + 6 * 8  # bytes of one of batches_of()


@pytest.fixture
def little_room(monkeypatch, device):
    """For two batches. A CPU has no pinned memory; a copy stands for it."""
    monkeypatch.setattr(validation, "room", lambda device: 2 * BATCH + 5)
    if device == "cpu":
        monkeypatch.setattr(
            validation,
            "pinned_copy",
            lambda t, dtype: t.to(validation.low(t, dtype), copy=True),
        )


def test_batches_are_read_once(device):
    loader = Closing(5)
    cached = CachedValidation(loader, device=device)
    assert (loader.given, cached.nbytes, cached.resident) == (0, 0, False)
    for _ in range(3):
        assert_same(list(cached), batches_of(5), device)
    assert (loader.given, loader.open, len(cached)) == (5, 0, 5)
    assert cached.resident and cached.nbytes == 5 * BATCH
    cached.clear()
    assert (cached.nbytes, cached.resident) == (0, False)
    assert_same(list(cached), batches_of(5), device)
    assert loader.given == 10


def test_length(device):
    loader = DataLoader(TensorDataset(torch.randn(10, 2)), batch_size=4)
    cached = CachedValidation(loader, device=device)
    assert len(cached) == 3 == len(list(cached)) == len(cached)
    cached = CachedValidation((b for b in batches_of(2)), device=device)
    with pytest.raises(TypeError, match="generator"):
        len(cached)
    assert len(list(cached)) == 2 == len(cached)


def test_transform_and_dtype(device):
    calls = []

    def transform(batch):
        calls.append(batch[0])
        return {"x": batch[0] * 2, "y": batch[1], "n": len(calls)}

    batches = batches_of(3)
    cached = CachedValidation(batches, transform=transform, device=device, dtype=torch.float16)
    for _ in range(2):
        expected = [{"x": (x * 2).half(), "y": y, "n": i + 1} for i, (x, y) in enumerate(batches)]
        assert_same(list(cached), expected, device)
    assert all(got is x for got, (x, _) in zip(calls, batches, strict=True))
    assert len(calls) == 3
    assert cached.nbytes == 3 * (6 * 4 * 2 + 6 * 8)


def test_transform_on_the_device(device):
    loader = prefetch(batches_of(3), device=device)
    seen = []
    cached = CachedValidation(loader, transform=lambda b: seen.append(b[0]) or b, device=device)
    assert_same(list(cached), batches_of(3), device)
    assert {x.device.type for x in seen} == {device}


def test_tensors_that_the_loader_fills_again(device):
    static = torch.zeros(3, device=device)
    cached = CachedValidation([static.fill_(k) for k in range(1)], device=device)

    def loader():
        for k in range(4):
            yield static.fill_(k), k

    cached = CachedValidation(loader(), device=device)
    assert [(x[0].item(), k) for x, k in cached] == [(float(k), k) for k in range(4)]
    static.fill_(9)
    assert [x[0].item() for x, _ in cached] == [0.0, 1.0, 2.0, 3.0]


def test_a_container_that_is_changed_is_the_programs_own(device):
    cached = CachedValidation([{"x": torch.ones(2)}], device=device)
    for batch in cached:
        batch.clear()
    assert [list(batch) for batch in cached] == [["x"]]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_batch_changed_in_place_is_an_error(mode, last, device):
    cached = CachedValidation(batches_of(3), device=device)
    message = re.escape(
        f"a tensor of batch {2 * last} (torch.float32, shape [6, 4]) was changed in place"
    )
    with mode():
        with pytest.raises(RuntimeError, match=message):
            for i, (x, _) in enumerate(cached):
                if i == 2 * last:
                    x.add_(1)
        with pytest.raises(RuntimeError, match=message):
            list(cached)
        cached.clear()
        assert_same(list(cached), batches_of(3), device)


def test_a_batch_changed_later_is_an_error_too(device):
    cached = CachedValidation(batches_of(3), device=device)
    kept = list(cached)
    kept[1][0][2].zero_()  # through a view
    with pytest.raises(RuntimeError, match=r"batch 1 .* was changed in place"):
        list(cached)


def test_read_in_inference_mode(device):
    cached = CachedValidation(batches_of(2), device=device)
    with torch.inference_mode():
        assert len(list(cached)) == 2
    for x, _ in cached:
        assert not x.is_inference()
        (x.clone().requires_grad_() * x).sum().backward()


def test_an_error_leaves_nothing_half_read(device):
    class Loader:
        broken = True

        def __iter__(self):
            batches = batches_of(4)
            return failing(batches[:2], OSError("disk")) if self.broken else iter(batches)

    loader = Loader()
    cached = CachedValidation(loader, device=device)
    for _ in range(2):
        with pytest.raises(OSError, match="disk"):
            list(cached)
        assert (cached.nbytes, cached.resident) == (0, False)
    loader.broken = False
    assert_same(list(cached), batches_of(4), device)


def test_a_break_in_the_first_iteration(device):
    loader = Closing(4)
    cached = CachedValidation(loader, device=device)
    for _ in cached:
        break
    assert_same(list(cached), batches_of(4), device)
    assert loader.given == 4


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_what_does_not_fit_is_kept_on_the_host(dtype, device, little_room):
    """Those that were on the device already move too."""
    batches = batches_of(6)
    cached = CachedValidation(batches, device=device, dtype=dtype)
    expected = [(x.to(dtype or x.dtype), y) for x, y in batches]
    for _ in range(2):
        assert_same(list(cached), expected, device)
    assert not cached.resident and len(cached) == 6
    assert cached.nbytes == sum(t.nbytes for batch in expected for t in batch)
    held = [t for batch in cached._kept.batches for t in batch.leaves]
    assert {t.device.type for t in held} == {"cpu"}
    assert all(t.is_pinned() for t in held) == (device == "cuda")


def test_what_fits_exactly_stays(device, little_room):
    cached = CachedValidation(batches_of(2), device=device)
    list(cached)
    assert cached.resident and cached.nbytes == 2 * BATCH


def test_out_of_memory_is_no_error(device, little_room, monkeypatch):
    original, calls = CachedValidation._on_the_device, []

    def on_the_device(self, leaf):
        calls.append(leaf)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("no room")
        return original(self, leaf)

    monkeypatch.setattr(CachedValidation, "_on_the_device", on_the_device)
    cached = CachedValidation(batches_of(5), device=device)
    assert_same(list(cached), batches_of(5), device)
    assert not cached.resident and len(calls) == 4


def test_room(device):
    room = validation.room(torch.device(device))
    if device == "cpu":
        assert room is None
    else:
        free, total = torch.cuda.mem_get_info()
        assert 0 < room <= free - 0.09 * total


@pytest.mark.parametrize(
    ("loader", "options", "error", "message"),
    [
        (7, {}, TypeError, "CachedValidation: loader must be an iterable of batches, got int"),
        ([], {"transform": 3}, TypeError, "transform must be callable, got int"),
        ([], {"dtype": torch.int8}, ValueError, "CachedValidation: dtype must be a floating-point"),
        ([], {"device": "meta"}, ValueError, "CachedValidation: device must be a CPU or"),
    ],
)
def test_refusals(loader, options, error, message, device):
    with pytest.raises(error, match=re.escape(message)):
        CachedValidation(loader, **{"device": device, **options})


@pytest.mark.cuda
def test_used_and_dropped_on_another_stream(device):
    if device != "cuda":
        pytest.skip("a CPU has no streams")
    cached = CachedValidation([torch.full((1 << 22,), 3.0)])
    assert len(list(cached)) == 1
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for x in cached:
            torch.cuda._sleep(2_000_000)
            total = x.double().sum()
        del x
        cached.clear()
    torch.zeros(1 << 22, device="cuda")  # would get the memory, were its use not recorded
    stream.synchronize()
    assert total.item() == 3.0 * (1 << 22)
