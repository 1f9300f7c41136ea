# SPDX-License-Identifier: BSD-3-Clause
# What all ops of compiled steps have in common: opcheck, which on a CPU holds what a compiler is
# told against the references of compiled_ops.py, the same bits again and in CUDA graphs. Values
# are in test_batch_norm_ops.py and test_column_ops.py.

from contextlib import nullcontext

import pytest
import torch
from compiled_ops import OPS, on_cpu
from testing import DEVICES, LOW_PRECISION
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_renaissance._ops import ops

on_a_gpu = pytest.mark.parametrize("device", DEVICES[1:])
each_dtype = pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)


def rows(*shape):
    """Channels last in memory."""
    t = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t


def forward(shape, residual=False, absent_bias=False, stats=True, relu=False):
    vector = rows(shape[1])
    options = rows(*shape) if residual else None, vector if absent_bias else None
    statistics = (vector * 0, vector * 0 + 1) if stats else (None, None)
    return rows(*shape), vector + 3, vector, *options, *statistics, 0.1, 1e-5, relu


def backward(shape, more=False, result=False, relu=False, absent_bias=False):
    vector, x = rows(shape[1]), rows(*shape)
    options = x.flip(0) if more else None, x.sin() if result else None
    more, result = (
        t if t is None or t.dim() == 2 else t.contiguous(memory_format=torch.channels_last)
        for t in options
    )
    return x, more, x, vector + 3, vector, vector * 0, vector * 0 + 1, result, relu, absent_bias


def stream(shape, branch=True, bias=True):
    vector = rows(shape[-1])
    options = rows(*shape).cos() if branch else None, vector.cos() if branch and bias else None
    return rows(*shape), *options, vector + 3, vector, 1e-5, torch.float32


def stream_backward(shape, branch=True):
    per_row = rows(rows(*shape).flatten(0, -2).shape[0])
    grad_sum = rows(*shape).cos() if branch else None
    return rows(*shape), grad_sum, rows(*shape), rows(shape[-1]), per_row, per_row, branch, branch


def heads(batch, heads, length, size):
    packed = rows(batch * length, 3 * heads * size).view(batch, length, 3, heads, size)
    return packed.permute(2, 0, 3, 1, 4)


WINDOW = (3, 3), (2, 2), (1, 1)


def pool_backward(shape, size):
    positions = torch.full(shape, 4).contiguous(memory_format=torch.channels_last)  # the middle
    return rows(*shape), positions, size, *WINDOW


SMALL, LARGE, FLAT = (2, 12, 3, 3), (32, 64, 56, 56), (200, 96)
SAMPLES = {
    "norm": ("batch_norm_forward", forward(SMALL)),
    "norm without statistics": ("batch_norm_forward", forward(FLAT, stats=False)),
    "norm with everything": ("batch_norm_forward", forward(SMALL, True, True, True, True)),
    "large norm": ("batch_norm_forward", forward(LARGE, True, True, True, True)),
    "norm's backward": ("batch_norm_backward", backward(SMALL)),
    "with ReLU": ("batch_norm_backward", backward(FLAT, relu=True)),
    "with a result": ("batch_norm_backward", backward(SMALL, result=True, relu=True)),
    "with everything": ("batch_norm_backward", backward(SMALL, True, True, True, True)),
    "large with everything": ("batch_norm_backward", backward(LARGE, True, True, True, True)),
    "heads": ("pack_heads", tuple(rows(2, 3, 5, 8) + n for n in range(3))),
    "large heads": ("pack_heads", tuple(heads(64, 12, 197, 64))),
    "layer norm": ("layer_norm_forward", stream((5, 12), branch=False)),
    "of a sum": ("layer_norm_forward", stream((2, 3, 12), bias=False)),
    "of a sum with a bias": ("layer_norm_forward", stream((2, 3, 12))),
    "large layer norm": ("layer_norm_forward", stream((12608, 768))),
    "layer norm's backward": ("layer_norm_backward", stream_backward((5, 12), branch=False)),
    "of a sum, backward": ("layer_norm_backward", stream_backward((2, 3, 12))),
    "large, backward": ("layer_norm_backward", stream_backward((12608, 768))),
    "pool": ("max_pool2d_forward", (rows(2, 8, 7, 9), *WINDOW, False)),
    "pool, cut off": ("max_pool2d_forward", (rows(2, 16, 6, 8), *WINDOW, True)),
    "large pool": ("max_pool2d_forward", (rows(32, 64, 112, 112), *WINDOW, False)),
    "pool's backward": ("max_pool2d_backward", pool_backward((2, 8, 4, 5), (7, 9))),
    "large pool's backward": ("max_pool2d_backward", pool_backward((32, 64, 56, 56), (112, 112))),
    "counters": ("count_batches_", ([torch.tensor(n) for n in (0, 7, 1 << 40)],)),
    "sums": ("column_sums", (rows(33, 12),)),
    "large sums": ("column_sums", (rows(12608, 768),)),
    "GELU": ("bias_gelu", (rows(5, 12), rows(12), False)),
    "GELU by tanh": ("bias_gelu", (rows(2, 3, 12), rows(12), True)),
    "large GELU": ("bias_gelu", (rows(12608, 768), rows(768), False)),
    "GELU's backward": ("bias_gelu_backward", (rows(5, 12), rows(5, 12), rows(12), False)),
    "by tanh": ("bias_gelu_backward", (rows(2, 3, 12), rows(2, 3, 12), rows(12), True)),
    "large": ("bias_gelu_backward", (rows(12608, 768), rows(12608, 768), rows(768), False)),
}
each_sample = pytest.mark.parametrize("name", SAMPLES)
WIDE = {"weight", "bias", "running_mean", "running_var", "mean", "invstd", "rstd"}  # of norms
WIDE |= {"sum", "grad_sum"}  # and of a layer norm's


def sample(name, dtype, device):
    """The op, and its arguments: in 16 bits but for what norms have in float32."""
    op, given = SAMPLES[name]
    op = getattr(ops, op).default
    wide = WIDE if "norm" in str(op) else set()
    wide = wide | {"input"} if "layer_norm" in str(op) else wide

    def cast(argument, value):
        if argument.name == "dtype":
            return dtype
        if not isinstance(value, torch.Tensor):
            return tree_map_only(torch.Tensor, lambda t: t.clone().to(device), value)
        kind = torch.float32 if argument.name in wide else dtype
        return value.to(device, torch.uint8 if argument.name == "positions" else kind, copy=True)

    return op, tuple(map(cast, op._schema.arguments, given))


def outcome(op, arguments):
    """What a call returns, and its arguments after it."""
    arguments = tree_map_only(torch.Tensor, torch.clone, arguments)
    return [t for t in tree_leaves((op(*arguments), arguments)) if isinstance(t, torch.Tensor)]


def test_every_op_has_a_reference_and_a_sample():
    assert {op for op, _ in SAMPLES.values()} == {f.__name__ for f in OPS} | {"count_batches_"}


@each_dtype
@each_sample
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device, name, dtype):
    with on_cpu() if device == "cpu" else nullcontext():
        results = torch.library.opcheck(*sample(name, dtype, device))
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4


@on_a_gpu
@each_dtype
@each_sample
def test_the_same_bits_again(name, dtype, device):
    op, arguments = sample(name, dtype, device)
    first = outcome(op, arguments)
    for _ in range(10):
        assert all(map(torch.equal, outcome(op, arguments), first))


@on_a_gpu
@each_dtype
@each_sample
def test_in_a_graph(name, dtype, device):
    op, arguments = sample(name, dtype, device)
    expected = outcome(op, arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = outcome(op, arguments)
    for _ in range(2):  # memory that a replay leaves behind serves the next one
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, expected))


@on_a_gpu
@each_sample
def test_anywhere_in_memory(name, device):
    """Where vectors of several numbers can't be read, as in a slice of another tensor."""
    op, arguments = sample(name, torch.float16, device)
    expected = outcome(op, arguments)

    def moved(t):
        memory = t.new_empty(t.untyped_storage().nbytes() // t.element_size() + 1)
        return memory.as_strided(t.shape, t.stride(), t.storage_offset() + 1).copy_(t)

    written = {i for i, a in enumerate(op._schema.arguments) if a.alias_info is not None}
    arguments = [
        a if i in written else tree_map_only(torch.Tensor, moved, a)
        for i, a in enumerate(arguments)
    ]
    found = [t for t in tree_leaves(op(*arguments)) if isinstance(t, torch.Tensor)]
    assert all(map(torch.equal, found, expected))


@on_a_gpu
def test_counters_are_moved_on(device):
    counters = [torch.tensor(n, device=device) for n in range(300)]
    ops.count_batches_(counters)
    assert [c.item() for c in counters] == list(range(1, 301))
