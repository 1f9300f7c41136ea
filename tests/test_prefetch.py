# SPDX-License-Identifier: BSD-3-Clause
# tr.data.prefetch against the loader itself. The order of copies, waits and lifetimes is tested
# twice: on a GPU, and on streams that are simulated to be as late as they may be.

import gc
import importlib
import re
import weakref
from collections import namedtuple
from contextlib import contextmanager

import pytest
import torch
from testing import DEVICES
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import torch_renaissance as tr
from torch_renaissance.data import _copies, prefetch

prefetching = importlib.import_module("torch_renaissance.data.prefetch")
each_device = pytest.mark.parametrize("device", DEVICES)
each_depth = pytest.mark.parametrize("depth", [1, 2, 3])
Pair = namedtuple("Pair", "x y")


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


def failing(batches, error):
    yield from batches
    raise error


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


# -- order and lifetimes, simulated ----------------------------------------------------------------


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


# -- on a GPU --------------------------------------------------------------------------------------

only_cuda = pytest.mark.cuda


def delay():
    torch.cuda._sleep(2_000_000)  # cycles: about a millisecond


@only_cuda
@each_depth
@pytest.mark.parametrize("pin", [False, True])
def test_a_busy_device_and_batches_changed_in_place(depth, pin):
    """Writing into a used batch reaches neither the next one nor what its memory was before."""
    batches = batches_of(40, rows=5000)
    if pin:
        batches = [tuple(t.pin_memory() for t in batch) for batch in batches]
    sums = []
    for x, y in prefetch(batches, depth):
        delay()
        sums.append(torch.stack([x.double().sum(), y.double().sum()]))
        x.fill_(float("nan"))
        y.fill_(-1)
    expected = [torch.stack([x.double().sum(), y.double().sum()]) for x, y in batches]
    torch.testing.assert_close(torch.stack(sums).cpu(), torch.stack(expected))


@only_cuda
def test_pinned_memory_filled_again():
    x = torch.empty(100_000).pin_memory()

    def loader():
        for k in range(30):
            x.fill_(k)
            yield x

    seen = []
    for batch in prefetch(loader()):
        delay()
        seen.append(batch.sum())
    assert torch.stack(seen).tolist() == [100_000 * k for k in range(30)]


@only_cuda
def test_memory_does_not_grow_with_a_host_that_runs_ahead():
    batches = [torch.ones(1 << 20).pin_memory() for _ in range(40)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for x in prefetch(batches):
        delay()
        x.add_(1)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 4 * batches[0].nbytes


@only_cuda
def test_batches_abandoned_in_flight_leave_memory_alone():
    loader = prefetch([torch.full((1 << 22,), 1.0) for _ in range(4)], 3)
    for _ in range(10):
        delay()
        for _ in loader:
            break
        others = [torch.zeros(1 << 22, device="cuda") for _ in range(3)]
        assert all(int(t.count_nonzero()) == 0 for t in others)


@only_cuda
def test_the_consumer_has_a_stream_of_its_own():
    batches, seen = batches_of(20, rows=5000), []
    stream = torch.cuda.Stream()
    iterator = iter(prefetch(batches))
    for k in range(20):
        with torch.cuda.stream(stream if k % 2 else torch.cuda.default_stream()):
            x, y = next(iterator)
            delay()
            seen.append(x.double().sum() + y.sum())
            del x, y
    torch.cuda.synchronize()
    expected = torch.stack([x.double().sum() + y.sum() for x, y in batches])
    torch.testing.assert_close(torch.stack(seen).cpu(), expected)


@only_cuda
def test_static_tensors_of_a_loader_on_the_device():
    static = torch.zeros(3, device="cuda")

    def loader():
        for k in range(5):
            yield static.fill_(k)

    assert [x.sum().item() for x in prefetch(loader(), 3)] == [3.0 * k for k in range(5)]


@only_cuda
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("error:TrainStep runs eagerly")
def test_a_step_is_captured_while_the_loader_runs(workers):
    """Workers, the thread that pins, and copies are all alive during the capture."""
    x, y = torch.randn(400, 4), torch.randint(3, (400,))
    results = []
    for train in (native_training, captured_training):
        torch.manual_seed(1)
        native = DataLoader(
            TensorDataset(x, y), batch_size=10, pin_memory=True, num_workers=workers
        )
        results.append(train(native))
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


def model_and_optimizer():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).cuda()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def native_training(loader):
    model, optimizer = model_and_optimizer()
    losses = []
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def captured_training(loader):
    model, optimizer = tr.accelerate(*model_and_optimizer())
    step = tr.TrainStep(lambda x, y: tr.cross_entropy(model(x), y), optimizer)
    losses = [step(x, y) for x, y in prefetch(loader)]
    assert step.captured
    return torch.stack(losses).cpu()


@only_cuda
def test_a_capture_that_asks_for_a_batch_lives_on():
    loader = iter(prefetch(batches_of(4)))
    next(loader)
    x, graph = torch.zeros(3, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        with pytest.raises(RuntimeError, match="while a CUDA graph is being captured"):
            next(loader)
        x.add_(1)
    graph.replay()
    assert x.tolist() == [1.0] * 3
    assert_same(list(loader), batches_of(4)[1:], "cuda")


@only_cuda
def test_a_loader_let_go_inside_of_a_capture():
    loader = iter(prefetch(batches_of(9, rows=50_000), 3))
    next(loader)
    x, graph = torch.zeros(3, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        del loader
        x.add_(1)
    graph.replay()
    assert x.tolist() == [1.0] * 3
    assert_same(list(prefetch(batches_of(3))), batches_of(3), "cuda")
