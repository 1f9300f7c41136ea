# SPDX-License-Identifier: BSD-3-Clause
# prefetch on streams that are simulated to be as late as they may be: the order of its copies and
# waits, and what lives how long.

import importlib
import weakref
from contextlib import contextmanager

import pytest
import torch
from fetching import Closing, assert_same, batches_of, each_depth
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torch_renaissance.data import _copies, prefetch

prefetching = importlib.import_module("torch_renaissance.data.prefetch")


class SlowStream:
    """Does what it is given as late as possible: when somebody waits for it."""

    def __init__(self):
        self.work, self.done = [], 0

    def put(self, work):
        self.work.append(work)

    def run_to(self, position):
        while self.done < position:
            self.done += 1
            self.work[self.done - 1]()

    def wait_event(self, event):
        self.put(event.waiter())

    def record_event(self):
        event = SlowEvent()
        event.record(self)
        return event


class SlowEvent:
    def __init__(self):
        self.at, self.waits = None, 0

    def record(self, stream):
        self.at = (stream, len(stream.work))

    def waiter(self):
        at = self.at
        return lambda: at and at[0].run_to(at[1])

    def synchronize(self):
        self.waits += 1
        self.waiter()()


class Simulated(TorchFunctionMode):
    """A GPU whose memory is the CPU's: two streams, pinned memory and what is recorded."""

    def __init__(self):
        super().__init__()
        self.consumer, self.side = SlowStream(), SlowStream()
        self.current, self.recorded, self.pinned, self.capturing = self.consumer, [], set(), False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.copy_ and kwargs.get("non_blocking"):
            target, source = args
            self.current.put(lambda: target.copy_(source))
            return target
        if func is torch.Tensor.is_pinned:
            return args[0].data_ptr() in self.pinned
        return func(*args, **kwargs)

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def iterate(self, loader, depth=2, dtype=None):
        copies = _copies.Copies(torch.device("cpu"), dtype, self.side, depth)
        batches = prefetch(loader, depth, device="cpu")._ahead(copies)
        return prefetching._Guarded(batches, torch.device("cpu"))


@pytest.fixture
def gpu(monkeypatch):
    simulated = Simulated()
    record = simulated.recorded.append
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, stream: record((t, stream)))
    monkeypatch.setattr(torch.cuda, "Event", SlowEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: simulated.current)
    monkeypatch.setattr(torch.cuda, "stream", simulated.stream)
    monkeypatch.setattr(_copies, "pinned", lambda size: torch.empty(size, dtype=torch.uint8))
    for module in (_copies, prefetching):
        monkeypatch.setattr(module, "is_capturing", lambda device: simulated.capturing)
    with simulated:
        yield simulated


def used(gpu, batches):
    """What the consumer's stream sees of each batch when its turn comes."""
    seen = []
    for batch in batches:
        gpu.consumer.put(lambda b=batch: seen.append(pytree.tree_map(torch.clone, b)))
    gpu.consumer.run_to(len(gpu.consumer.work))
    return seen


@each_depth
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_staging_memory_waits_for_its_copies(gpu, depth, dtype):
    batches = batches_of(9)
    expected = [(x.to(dtype or x.dtype), y) for x, y in batches]
    assert_same(used(gpu, gpu.iterate(batches, depth, dtype)), expected)


@each_depth
def test_batches_that_grow_and_shrink(gpu, depth):
    batches = [b for rows in (3, 50, 1, 0, 70, 2) for b in batches_of(2, rows)]
    assert_same(used(gpu, gpu.iterate(batches, depth)), batches)


@each_depth
def test_a_loader_may_fill_its_tensors_again(gpu, depth):
    """Be they pinned or not."""
    batches = batches_of(7)
    x, y = torch.empty(6, 4), torch.empty(6, dtype=torch.int64)
    gpu.pinned.add(x.data_ptr())

    def loader():
        for new_x, new_y in batches:
            x.copy_(new_x)
            y.copy_(new_y)
            yield x, y

    assert_same(used(gpu, gpu.iterate(loader(), depth)), batches)


def test_pinned_tensors_are_read_where_they_lie_and_not_waited_for(gpu, monkeypatch):
    batches = batches_of(3)
    gpu.pinned |= {t.data_ptr() for batch in batches for t in batch}
    monkeypatch.setattr(_copies, "pinned", lambda size: pytest.fail("it was staged"))
    iterator = gpu.iterate(batches)
    next(iterator)
    assert gpu.side.done == 0, "a list's tensors stay as they are"
    assert_same(used(gpu, iterator), batches[1:])


def test_pinned_tensors_live_until_they_are_read(gpu):
    refs = []

    def loader():
        for _ in range(2):
            x = torch.ones(3)
            gpu.pinned.add(x.data_ptr())
            refs.append(weakref.ref(x))
            yield x
            del x

    iterator = gpu.iterate(loader(), depth=2)
    next(iterator)
    assert len(refs) == 2 and None not in [r() for r in refs]


@each_depth
def test_as_many_are_fetched_ahead_as_said(gpu, depth):
    loader = Closing(6)
    for k, _ in enumerate(gpu.iterate(loader, depth)):
        assert loader.given == min(k + depth, 6)


def test_a_copy_waits_for_the_steps_before_and_a_step_for_its_copies(gpu):
    """The memory of a batch may be that of one that was used by the step before the last."""
    steps = []
    iterator = gpu.iterate(batches_of(4))
    for k in range(4):
        next(iterator)
        gpu.consumer.put(lambda k=k: steps.append(k))
    gpu.side.run_to(len(gpu.side.work))  # the copies of the last batch, issued before step 2
    assert steps == [0, 1]


def test_batches_with_the_loaders_own_tensors_are_not_fetched_ahead(gpu):
    """A parameter stands for a tensor that is on the device: it is passed on."""
    static = nn.Parameter(torch.zeros(3), requires_grad=False)
    given = []

    def loader():
        for k in range(4):
            static.fill_(k)
            given.append(k)
            yield static, k

    for k, (x, number) in enumerate(gpu.iterate(loader(), depth=3)):
        assert x is static and x[0] == number == k
        assert given == list(range(k + 1))


def test_abandoned_batches_are_waited_for(gpu):
    iterator = gpu.iterate(batches_of(9), depth=3)
    next(iterator)
    assert gpu.side.done == 0 and not gpu.recorded
    del iterator
    assert gpu.side.done == len(gpu.side.work)
    assert [s for _, s in gpu.recorded] == [gpu.side] * 4  # two batches of two tensors


def test_abandoned_in_a_capture_nothing_is_waited_for(gpu):
    iterator = gpu.iterate(batches_of(9))
    next(iterator)
    gpu.capturing = True
    del iterator
    assert gpu.side.done == 0
    assert [s for _, s in gpu.recorded] == [gpu.side] * 2


def test_another_stream_records_its_use(gpu):
    iterator, other = gpu.iterate(batches_of(4)), SlowStream()
    next(iterator)
    with gpu.stream(other):
        x, y = next(iterator)
    assert len(gpu.recorded) == 2
    assert [(t is expected, s) for (t, s), expected in zip(gpu.recorded, (x, y), strict=True)] == [
        (True, other)
    ] * 2


def test_inside_of_a_capture_a_batch_is_refused_and_none_is_lost(gpu):
    batches = batches_of(5)
    iterator, got = gpu.iterate(batches), []
    for capturing in (True, False, True, False):
        gpu.capturing, work = capturing, len(gpu.side.work)
        if capturing:
            with pytest.raises(RuntimeError, match="while a CUDA graph is being captured"):
                next(iterator)
            assert len(gpu.side.work) == work
        else:
            got.append(next(iterator))
    gpu.side.run_to(len(gpu.side.work))
    assert_same([*got, *used(gpu, iterator)], batches)
