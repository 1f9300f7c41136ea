# SPDX-License-Identifier: BSD-3-Clause
# In a captured step with precision=, the bias of a convolution is added by a kernel for
# channels_last, and by batch norm's where that follows: to the bits of torch's.

import pytest
import torch
import torch.nn.functional as F
from batch_norms import HALVES, make_inputs, norm_add_relu, norm_alone, run, running_stats
from testing import DEVICES
from torch import nn

import torch_renaissance as tr
from torch_renaissance._ops import _C
from torch_renaissance._precision import own_kernels

pytestmark = pytest.mark.parametrize("device", DEVICES[1:])
each_half = pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)
SHAPES = [(1, 8, 1, 1), (3, 24, 5, 7), (8, 64, 9, 9), (32, 64, 112, 112), (4, 2056, 3, 3)]


def random(shape, dtype):
    x = torch.randn(shape, device="cuda").to(dtype)
    return x.contiguous(memory_format=torch.channels_last), torch.randn(shape[1]).to(x)


@each_half
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_adds_as_torch_does(shape, dtype, device):
    x, bias = random(shape, dtype)
    expected = x + bias.view(-1, 1, 1)
    assert _C.add_channel_bias(x, bias)
    assert torch.equal(x, expected)


def test_what_is_left_to_torch(device):
    x, bias = random((2, 16, 4, 4), torch.float16)
    others = [
        (x.contiguous(), bias),
        (x.float(), bias.float()),
        (x, bias.float()),
        (x, bias[:8]),
        (x[:, :12], bias[:12]),
        (x[:0], bias),
        (x, bias.repeat(2)[::2]),
        (x.cpu(), bias.cpu()),
    ]
    for output, other in others:
        before = output.clone()
        assert not _C.add_channel_bias(output, other)
        assert torch.equal(output, before)


def capture(work):
    """A graph of `work`, how many biases were given back, and what it returned."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = work()
        capture = _C.current_capture()
    given_back = _C.settle_joins(capture)
    graph.instantiate()
    return graph, given_back, found


@each_half
@pytest.mark.parametrize("shape", [(3, 24, 5, 7), (32, 64, 56, 56), (64, 512, 1, 1)], ids=str)
@pytest.mark.parametrize("function", [norm_alone, norm_add_relu])
def test_batch_norm_adds_it(function, shape, dtype, device):
    inputs, grad = make_inputs(shape, dtype)
    bias = torch.randn(shape[1], device=device).to(dtype)
    start = inputs[0].detach().clone()
    with torch.no_grad():
        inputs[0] += bias.view(-1, 1, 1)
    expected = run(function, inputs, grad)
    sum_of_both = inputs[0].detach().clone()
    x, stats = torch.empty_like(start), running_stats(shape[1])

    def work():
        x.copy_(start)
        stats[0].zero_()
        stats[1].fill_(1)
        assert _C.add_channel_bias(x, bias)
        with torch.no_grad():
            inputs[0].set_(x)
        return run(function, inputs, grad, stats=stats)

    for _ in range(2):  # whatever is made at the first call
        graph, given_back, found = capture(work)
    graph.replay()
    torch.cuda.synchronize()
    assert given_back == 0
    assert torch.equal(x, sum_of_both)
    assert all(map(torch.equal, found, expected))


def test_it_is_given_back_where_another_stream_reads(device):
    (x, weight, bias_of_norm, _), _ = make_inputs((64, 64, 28, 28), torch.float16)
    start, bias = x.detach().clone(), torch.randn(64, device=device).half()
    other, stats = torch.cuda.Stream(), running_stats(64)
    expected = start + bias.view(-1, 1, 1)

    def work():
        x = start.clone()
        assert _C.add_channel_bias(x, bias)
        event = torch.cuda.current_stream().record_event()
        with own_kernels(), torch.autocast("cuda", torch.float16):
            y = F.batch_norm(x, *stats, weight, bias_of_norm, training=True)
        other.wait_event(event)
        with torch.cuda.stream(other):
            copy = x.clone()
        torch.cuda.current_stream().wait_stream(other)
        return x, copy, y.detach()

    with own_kernels(), torch.autocast("cuda", torch.float16):
        wanted = F.batch_norm(expected, *running_stats(64), weight, bias_of_norm, training=True)
    graph, given_back, (x, copy, y) = capture(work)
    assert given_back == 1
    for _ in range(3):
        graph.replay()
        assert torch.equal(x, expected) and torch.equal(copy, expected)
        assert torch.equal(y, wanted)


# -- In a step -------------------------------------------------------------------------------------


def train(device, precision, warmup, **options):
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 16, 3), nn.ReLU(inplace=True), nn.Conv2d(16, 12, 3), nn.Flatten(2)),
    ).to(device, **options)
    _, optimizer = tr.accelerate(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9))
    step = tr.TrainStep(
        lambda x: model(x).float().square().mean(),
        optimizer,
        precision=precision,
        warmup=warmup,
        strict=True,
    )
    x = torch.randn(5, 16, 3, 12, 12, device=device)
    losses = [step(x[i % 5]).item() for i in range(12)]
    return losses, [t.clone() for t in (*model.parameters(), *model.buffers())], step


@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("options", [{}, {"memory_format": torch.channels_last}], ids=str)
def test_replays_are_eager_steps(options, precision, device):
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        losses, values, step = train(device, precision, 3, **options)
        eager_losses, eager_values, _ = train(device, precision, 50, **options)
    assert step.captured and losses == eager_losses
    assert all(map(torch.equal, values, eager_values))
    kernels = " ".join(step.explain().kernels)
    assert ("channel_bias_kernel" in kernels) == bool(options)
