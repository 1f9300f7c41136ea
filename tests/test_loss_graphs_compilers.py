# SPDX-License-Identifier: BSD-3-Clause
# Cross entropy in CUDA graphs and on streams, compiled, under compiled autograd, and opcheck.

import pytest
import torch
from losses import IGNORED, LAYOUTS, both, cuda, labels_for, on_devices, randn
from testing import FP64, worst
from torch.library import opcheck

import torch_renaissance as tr
from torch_renaissance._ops import ops


def captured(x, target, **options):
    """A graph of forward and backward, and the loss and gradient that it writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.autograd.grad(tr.cross_entropy(x, target, **options), x)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = tr.cross_entropy(x, target, **options)
        (grad,) = torch.autograd.grad(loss, x)
    return graph, loss, grad


@cuda
@pytest.mark.parametrize("shape", [(200, 10), (256, 1000), (300, 5000), (4, 100, 77)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_graph_replays_see_new_values(shape, dtype):
    x = randn(*shape, device="cuda", dtype=dtype).requires_grad_()
    target = labels_for(x)
    options = {"weight": randn(shape[1], device="cuda", dtype=dtype, seed=2).abs()}
    options["label_smoothing"] = 0.1
    graph, loss, grad = captured(x, target, **options)
    for seed in range(3, 8):
        with torch.no_grad():
            x.copy_(randn(*shape, seed=seed))
            target.copy_(target.roll(1))
        graph.replay()
        eager = tr.cross_entropy(x, target, **options)
        assert torch.equal(loss, eager)
        assert torch.equal(grad, torch.autograd.grad(eager, x)[0])


@cuda
def test_streams_and_graphs_at_the_same_time():
    """Each launch that may overlap with another has a ticket of its own."""
    problems = []
    for seed in range(4):
        x = randn(40_000, 40, device="cuda", seed=seed).requires_grad_()
        target = labels_for(x)
        problems.append((x, target, tr.cross_entropy(x, target).detach().clone()))
    graphs = [captured(x, target) for x, target, _ in problems[:2]]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    for _ in range(50):
        losses = []
        for i, (stream, (x, target, _)) in enumerate(zip(streams, problems, strict=True)):
            with torch.cuda.stream(stream):
                if i < len(graphs):
                    graphs[i][0].replay()
                    losses.append(graphs[i][1])
                else:
                    losses.append(tr.cross_entropy(x, target))
        torch.cuda.synchronize()
        for loss, (_, _, expected) in zip(losses, problems, strict=True):
            assert torch.equal(loss, expected)


@on_devices
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_into_one_graph(dynamic, device):
    seen = []

    def backend(module, inputs):
        seen.extend(node.target for node in module.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)

    def f(x, target):
        return tr.cross_entropy(x.sin(), target, label_smoothing=0.1)

    torch._dynamo.reset()
    compiled = torch.compile(f, backend=backend, fullgraph=True, dynamic=dynamic)
    for rows in (6, 5, 4):
        x = randn(rows, 5, device=device, dtype=torch.float64)
        assert worst(both(compiled, x, labels_for(x)), both(f, x, labels_for(x))) < FP64
    assert ops.cross_entropy.default in seen


@on_devices
def test_compiles_under_autocast(device):
    x = randn(6, 5, device=device, dtype=torch.bfloat16)
    compiled = torch.compile(tr.cross_entropy, backend="aot_eager", fullgraph=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        found, eager = (both(f, x, labels_for(x)) for f in (compiled, tr.cross_entropy))
    assert found[0].dtype == torch.float32
    assert all(map(torch.equal, found, eager))


@on_devices
def test_compiled_autograd(device):
    x = randn(6, 5, device=device).requires_grad_()
    target = labels_for(x)
    (eager,) = torch.autograd.grad(tr.cross_entropy(x, target), x)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        tr.cross_entropy(x, target).backward()
    torch.testing.assert_close(x.grad, eager)


@on_devices
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_opcheck(dtype, grad, device):
    x = randn(6, 5, device=device, dtype=dtype).requires_grad_(grad)
    target, weight = labels_for(x), randn(5, device=device, seed=2).abs()
    opcheck(ops.cross_entropy.default, (x, target, weight.to(dtype), 1, IGNORED, 0.1))
    opcheck(ops.cross_entropy.default, (x, target, None, 0, IGNORED, 0.0))
    forward = (x, target, weight, 2, IGNORED, 0.1, torch.float32)
    opcheck(ops.cross_entropy_forward.default, forward)


@on_devices
@pytest.mark.parametrize("layout", LAYOUTS[:4] + LAYOUTS[-9:], ids=str)
def test_opcheck_backward(layout, device):
    x = layout.logits(device, torch.float32)
    arguments = (x, labels_for(x), None, 1, IGNORED, 0.1)
    loss, saved = ops.cross_entropy_forward.default(*arguments, torch.float32)
    opcheck(ops.cross_entropy_backward.default, (loss, *arguments[:3], saved, *arguments[3:]))


def test_opcheck_set_debug():
    opcheck(ops.set_debug.default, (False,))
