# SPDX-License-Identifier: BSD-3-Clause
# prefetch on a GPU: the order of copies, waits and lifetimes on a device that is busy, with streams
# of the program's own, and around the capture of CUDA graphs.

import pytest
import torch
from fetching import assert_same, batches_of, each_depth
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_renaissance as tr
from torch_renaissance.data import prefetch

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
