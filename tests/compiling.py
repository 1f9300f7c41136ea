# SPDX-License-Identifier: BSD-3-Clause
# What the tests of rewritten graphs share: a model's step as it is, with Dynamo's graph rewritten,
# and in float64.

import copy
from collections import Counter

import torch
from compiled_ops import on_cpu
from torch import nn

from torch_renaissance._compiled import backend as _backend


class Model(nn.Module):
    """Modules, and a function of them and of the input."""

    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def random(*shape, dtype=torch.bfloat16, channels_last=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).to(dtype)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.dim()]) if channels_last else x


def rewritten(function, backend="eager"):
    """`function` with Dynamo's graphs rewritten, for another backend than Inductor; the graphs."""
    graphs, compiler = [], torch._dynamo.lookup_backend(backend)

    def rewrite(module, inputs):
        _backend.rewrite(module)
        graphs.append(module.graph)
        return compiler(module, inputs)

    return torch.compile(function, backend=rewrite, fullgraph=True), graphs


def step(function, model, inputs, half=None):
    """The results of forward and backward, by name; autocast to `half`."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    with torch.autocast("cpu", half, enabled=half is not None):
        y = function(*inputs)
    y.backward(random(*y.shape, seed=1).to(y.dtype))
    leaves = {f"input {i}": x for i, x in enumerate(inputs)} | dict(model.named_parameters())
    grads = {name: t.grad for name, t in leaves.items() if t.grad is not None}
    return {"output": y.detach()} | grads | dict(model.named_buffers())


def form_of(t):
    """Dtype, sizes, and strides where those mean anything."""
    strides = [stride for n, stride in zip(t.shape, t.stride(), strict=True) if n > 1]
    return t.dtype, t.shape, strides


def error(found, exact):
    return float((found.double() - exact).norm())


def as_exact(found, native, exact, half):
    """Results of a step in 16 bits are at most twice as far from float64's as torch's are."""
    assert found.keys() == native.keys() == exact.keys()
    eps = torch.finfo(half).eps
    for name, t in found.items():
        assert form_of(t) == form_of(native[name]), name
        if t.is_floating_point():
            # Where rounding alone keeps a gradient from zero, it is that of numbers around 1.
            room = eps * float(exact[name].norm() + 1)
            assert error(t, exact[name]) <= 2 * error(native[name], exact[name]) + room, name
        else:
            assert torch.equal(t, native[name]), name


def check(model, *inputs, half=torch.bfloat16, backend="eager"):
    """That a rewritten step is as exact as torch's; returns its graph."""
    torch._dynamo.reset()
    exact, native, own = (copy.deepcopy(model) for _ in range(3))
    exact = step(exact.double(), exact, [x.double() for x in inputs])
    native = step(native, native, inputs, half)
    with on_cpu():
        compiled, graphs = rewritten(lambda *inputs: own(*inputs), backend)
        found = step(compiled, own, inputs, half)
    as_exact(found, native, exact, half)
    (graph,) = graphs
    return graph


def ours(graph):
    """How many calls of which functions of ours a graph has."""
    called = [node.target for node in graph.nodes if node.op == "call_function"]
    return Counter(f.__name__.split(".")[0] for f in called if is_ours(f))


def is_ours(function):
    place = getattr(function, "namespace", function.__module__) or ""
    return place.startswith("torch_renaissance")
