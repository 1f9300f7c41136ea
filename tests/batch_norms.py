# SPDX-License-Identifier: BSD-3-Clause
# What the tests of batch norm within a step share: calls with our kernels, torch's, and in float64.

import torch
import torch.nn.functional as F

from torch_renaissance import graphs
from torch_renaissance._precision import own_kernels

OURS = "torch_renaissance::BatchNormBackward"
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def make_inputs(shape, dtype, seed=0, mean=0.0):
    """Input, weight, bias, residual and the gradient of the output; channels last in memory."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def random(*size):
        return torch.randn(size, generator=generator, device="cuda")

    channels = shape[1]
    large = [(random(*shape) * (1 + 0.1 * n) + mean * (n == 0)).to(dtype) for n in range(3)]
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    large = [t.contiguous(memory_format=formats[t.dim()]) if t.dim() > 2 else t for t in large]
    x, residual, grad = large
    weight, bias = random(channels) + 0.5, random(channels)
    return [t.requires_grad_() for t in (x, weight, bias, residual)], grad


def running_stats(channels, dtype=torch.float32):
    zeros = torch.zeros(channels, dtype=dtype, device="cuda")
    return zeros, torch.ones_like(zeros)


def norm_alone(x, weight, bias, residual, stats):
    return F.batch_norm(x, *stats, weight, bias, training=True, momentum=0.1)


def norm_relu(*args):
    return F.relu_(norm_alone(*args))


def norm_add(x, weight, bias, residual, stats):
    y = norm_alone(x, weight, bias, residual, stats)
    y += residual
    return y


def norm_add_relu(*args):
    return F.relu_(norm_add(*args))


# Functions, and what comes before their ReLU.
BEFORE_RELU = {norm_relu: norm_alone, norm_add_relu: norm_add}
FOLLOWS = [norm_alone, norm_relu, norm_add, norm_add_relu]


def run(function, inputs, grad, *, own=True, stats=None):
    """Output, running statistics, and the gradients of all inputs."""
    if stats is None:
        stats = running_stats(inputs[1].numel(), inputs[1].dtype)
    with own_kernels(own):  # backward too, as in a step: a checkpoint's forward runs there
        with torch.autocast("cuda", torch.float16):
            y = function(*inputs, stats)
        grads = torch.autograd.grad(y, inputs, grad, allow_unused=True)
    return [y.detach(), *stats, *(g for g in grads if g is not None)]


def replay(function, inputs, grad):
    """The same from a graph, and the graph's kernels by name."""
    run(function, inputs, grad)  # whatever is made at the first call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = run(function, inputs, grad)
    graph.instantiate()
    graph.replay()
    torch.cuda.synchronize()
    return [t.clone() for t in found], graphs.nodes(graph)


def exactly(function, inputs, grad):
    """In float64, from the same numbers."""
    exact = [t.detach().double().requires_grad_() for t in inputs]
    stats = running_stats(exact[1].numel(), torch.float64)
    y = function(*exact, stats)
    grads = torch.autograd.grad(y, exact, grad.double(), allow_unused=True)
    return [y.detach(), *stats, *(g for g in grads if g is not None)]
