# SPDX-License-Identifier: BSD-3-Clause
# The edges of the kernels: sizes about a chunk's, odd addresses, many tensors and segments, tensors
# without gradient, counters over many launches. Small, so that compute-sanitizer gets through.

from functools import partial

import pytest
import torch
from testing import (
    DEVICES,
    FP64,
    USUAL,
    Optimizer,
    clones,
    close,
    equal,
    parameters,
    same_state,
    train,
    values_of,
)
from torch import nn

import torch_renaissance as tr
from torch_renaissance._ops import _C, ops
from torch_renaissance.regions import layout

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
CHUNK_BYTES = 8192
CASES = [
    *USUAL,
    Optimizer(torch.optim.SGD, tr.optim.SGD, {"lr": 0.1}),
    Optimizer(torch.optim.SGD, tr.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    Optimizer(torch.optim.AdamW, tr.optim.AdamW, {"lr": 0.02, "amsgrad": True}),
]
each_device = pytest.mark.parametrize("device", DEVICES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_case = pytest.mark.parametrize("case", CASES, ids=str)


def randn(*shape, seed=0, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def edges(dtype):
    """Sizes about those of a vector of 16 bytes, a warp's and a chunk's."""
    vector, chunk = 16 // dtype.itemsize, CHUNK_BYTES // dtype.itemsize
    return [0, 1, vector - 1, vector, vector + 1, 0, 31, 33, chunk - 1, chunk, chunk + 1, 257]


def updates(optimizer):
    """Takes a step and returns how many launches it took."""
    optimizer.step()
    return optimizer._plan.host.launched()


def flat_state(optimizer, params):
    """Each entry of the state as one flat tensor over all parameters; step counters apart."""
    entries = [{k: v for k, v in optimizer.state[p].items() if k != "step"} for p in params]
    return [torch.cat([e[key].flatten() for e in entries]) for key in entries[0]]


def padding_is_zero(optimizer):
    """Whether all that is not zero in a plane belongs to a tensor."""
    return all(
        memory.count_nonzero()
        == sum(block.slice(plane, i).count_nonzero() for i in range(len(block.slots)))
        for block in tr.regions(optimizer).blocks
        for plane, memory in block.planes.items()
    )


class Spread:
    """Tensors of `sizes` in one buffer, `gap` elements apart and full of a value to be left alone
    between."""

    GUARD = 77.0

    def __init__(self, values, sizes, gap):
        size = sum(sizes) + gap * (len(sizes) + 1)
        self.buffer = torch.full((size,), self.GUARD, device=values.device, dtype=values.dtype)
        self.guards = torch.ones(size, dtype=torch.bool, device=values.device)
        self.tensors, at = [], gap
        for part in values.split(sizes):
            self.tensors.append(self.buffer[at : at + part.numel()].copy_(part))
            self.guards[at : at + part.numel()] = False
            at += part.numel() + gap

    def intact(self):
        return bool((self.buffer[self.guards] == self.GUARD).all())


def agree(parts, whole, steps):
    """Bitwise on a CPU. nvcc may contract the same formula otherwise in the loop over vectors than
    in the tail, which leaves one rounding of the dtype a step."""
    part = torch.cat([p.detach().flatten() for p in parts])
    eps = steps * torch.finfo(whole.dtype).eps if whole.is_cuda else 0.0
    torch.testing.assert_close(part, whole, rtol=eps, atol=eps)


@each_device
@each_dtype
@each_case
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
def test_an_element_is_updated_alike_wherever_it_lies(scaled, case, dtype, device):
    """One long tensor beside its pieces of all sizes: in regions with gradients at odd addresses,
    then at odd addresses themselves, each among values that nobody may touch."""
    sizes, steps = edges(dtype), 3
    values = randn(sum(sizes), device=device, dtype=dtype)
    whole = nn.Parameter(values.clone())
    pieces = [nn.Parameter(v.clone()) for v in values.split(sizes)]
    spread = Spread(values, sizes, gap=3)
    odd = [nn.Parameter(t) for t in spread.tensors]
    optimizers = [case.ours(params, **case.options) for params in ([whole], pieces, odd)]
    for step in range(steps):
        gradient = randn(sum(sizes), seed=step + 1, device=device, dtype=dtype)
        gradients = Spread(gradient, sizes, gap=1)
        whole.grad = gradient.clone()
        for p, piece, g in zip(pieces, odd, gradients.tensors, strict=True):
            p.grad, piece.grad = g, g.clone()
        for optimizer in optimizers:
            if scaled:
                optimizer.grad_scale = torch.tensor(0.5, device=device)
                optimizer.found_inf = torch.tensor(0.0, device=device)
            assert updates(optimizer) == 1
        assert gradients.intact()
        assert torch.equal(torch.cat(gradients.tensors), whole.grad)
        assert torch.equal(whole.grad, gradient * 2 if scaled else gradient)
    assert not torch.equal(whole, values)
    assert [len(tr.regions(o).loose) for o in optimizers[1:]] == [0, len(sizes)]
    for optimizer, params in zip(optimizers[1:], (pieces, odd), strict=True):
        agree(params, whole.detach(), steps)
        mine = flat_state(optimizer, params) if optimizer.state else []
        wholes = flat_state(optimizers[0], [whole]) if optimizer.state else []
        for a, b in zip(mine, wholes, strict=True):
            agree([a], b, steps)
        assert padding_is_zero(optimizer)
    assert spread.intact()


@each_device
@pytest.mark.parametrize("case", USUAL, ids=str)
def test_more_tensors_than_a_launch_takes(case, device):
    n, steps = _C.MAX_SLOTS + 90, 2
    values = randn(3 * n, device=device)
    whole = nn.Parameter(values.clone())
    pieces = [nn.Parameter(v.clone()) for v in values.split(3)]
    optimizers = [case.ours(params, **case.options) for params in ([whole], pieces)]
    for step in range(steps):
        whole.grad = randn(3 * n, seed=step + 1, device=device)
        for p, g in zip(pieces, whole.grad.split(3), strict=True):
            p.grad = g
        assert [updates(optimizer) for optimizer in optimizers] == [1, 2]
    agree(pieces, whole.detach(), steps)
    for a, b in zip(
        flat_state(optimizers[1], pieces), flat_state(optimizers[0], [whole]), strict=True
    ):
        agree([a], b, steps)


@each_device
@pytest.mark.parametrize("case", USUAL, ids=str)
def test_first_gradients_at_different_steps(case, device):
    """Each step brings a parameter its first gradient, so a segment; then others are without one,
    in the middle of segments too. Sixteen segments fit a launch."""
    n = _C.MAX_SEGMENTS + 2
    randn64 = partial(randn, device=device, dtype=torch.float64)
    values = [randn64(2 * i + 1, 3, seed=i) for i in range(2 * n)]
    params, natives = ([nn.Parameter(v.clone()) for v in values] for _ in range(2))
    optimizer, native = case.ours(params, **case.options), case.native(natives, **case.options)
    counts = []
    for step in range(n + 4):
        for i, (p, q) in enumerate(zip(params, natives, strict=True)):
            has = i // 2 == step or (i // 2 < step and (i + step) % 3)
            p.grad = randn64(*p.shape, seed=100 * step + i) if has else None
            q.grad = None if p.grad is None else p.grad.clone()
        counts.append(updates(optimizer))
        native.step()
    assert counts == [1] * _C.MAX_SEGMENTS + [2] * (len(counts) - _C.MAX_SEGMENTS)
    for i, (p, q) in enumerate(zip(params, natives, strict=True)):
        close(p, q, f"parameter {i}")
    same_state(native, optimizer)
    assert padding_is_zero(optimizer)


@each_device
@pytest.mark.parametrize(
    ("native", "ours", "usual", "special", "key"),
    [
        (torch.optim.AdamW, tr.optim.AdamW, {}, {"amsgrad": True}, "max_exp_avg_sq"),
        (
            torch.optim.SGD,
            tr.optim.SGD,
            {"weight_decay": 0.1},
            {"momentum": 0.9},
            "momentum_buffer",
        ),
    ],
    ids=["amsgrad", "momentum"],
)
@pytest.mark.parametrize("where", [0, 1])
def test_a_plane_that_only_one_group_needs(native, ours, usual, special, key, where, device):
    randn64 = partial(randn, device=device, dtype=torch.float64)
    params = [nn.Parameter(randn64(3, 700, seed=i)) for i in range(4)]
    runs = []
    for make in (native, ours):
        own = clones(params)
        groups = [{"params": own[:2]}, {"params": own[2:]}]
        groups[where] |= special
        optimizer = make(groups, lr=0.05, **usual)
        for step in range(5):
            for i, p in enumerate(own):
                # The largest second moment is an old one.
                p.grad = randn64(*p.shape, seed=10 * step + i) / (step + 1)
            if make is ours:
                assert updates(optimizer) == 1
            else:
                optimizer.step()
        runs.append((own, optimizer))
    (theirs, theirs_optimizer), (mine, optimizer) = runs
    for i, (p, q) in enumerate(zip(mine, theirs, strict=True)):
        close(p, q, f"parameter {i}")
        assert (key in optimizer.state.get(p, {})) == (i // 2 == where)
    same_state(theirs_optimizer, optimizer)
    assert padding_is_zero(optimizer)


@each_device
@each_dtype
@pytest.mark.parametrize("case", USUAL, ids=str)
def test_skipped_steps_leave_every_bit_and_are_counted(case, dtype, device):
    params = [nn.Parameter(randn(n, device=device, dtype=dtype)) for n in edges(dtype)]
    others = clones(params)
    optimizer, other = (case.ours(p, **case.options) for p in (params, others))
    skipped, steps = {0, 3, 4, 7}, 9
    for step in range(steps):
        before = values_of(params)
        for i, (p, q) in enumerate(zip(params, others, strict=True)):
            gradient = randn(*p.shape, seed=100 * step + i, device=device, dtype=dtype)
            p.grad, q.grad = gradient * 8, gradient * 2
        if step in skipped:
            params[-1].grad[5] = float("inf")
        optimizer.grad_scale = torch.tensor(8.0, device=device)
        optimizer.found_inf = torch.tensor(float(step in skipped), device=device)
        optimizer.step()
        if step in skipped:
            assert equal(params, before)
        else:
            other.grad_scale = torch.tensor(2.0, device=device)
            other.found_inf = torch.zeros((), device=device)
            other.step()
            assert equal([p.grad for p in params], [q.grad for q in others])
    # Scaling by a power of two is exact, so it leaves no trace.
    assert equal(params, others)
    assert optimizer.skipped_steps == len(skipped) and other.skipped_steps == 0
    (block,) = tr.regions(optimizer).blocks
    assert (block.steps == steps - len(skipped)).all()
    assert padding_is_zero(optimizer)


@each_device
@pytest.mark.parametrize("op", ["adam_", "sgd_"])
def test_counters_over_many_launches(op, device):
    """Each slot's steps go up once per launch in which it takes part, whatever number of
    blocks; the ticket is zero again after each."""
    generator = torch.Generator().manual_seed(0)
    numels = [[1, 0, 5000, 64], [9000, 3]]
    n_planes = {"adam_": 3, "sgd_": 1}[op]
    layouts = [layout(n, 4) for n in numels]
    planes = [[torch.zeros(size, device=device) for _, size in layouts] for _ in range(n_planes)]
    chunks = [
        _C.chunk_table(n, offsets, 4).to(device)
        for n, (offsets, _) in zip(numels, layouts, strict=True)
    ]
    steps = [torch.zeros(len(n), device=device) for n in numels]
    counters = torch.zeros(_C.COUNTERS, dtype=torch.int32, device=device)
    # Row 0 counts its steps. Row 1 does too for Adam, but not for SGD, having no momentum.
    hyper = torch.zeros(2, _C.HYPER_COLUMNS, dtype=torch.float64, device=device)
    hyper[:, 2:4] = 0.5
    hyper[:, 4:6] = hyper[:, 2:4].log()
    hyper[1, 2] = 0.0
    params = [torch.zeros(n, device=device) for segment in numels for n in segment]
    expected, skips = [0] * len(params), 0
    for launch in range(60):
        chosen = [s for s in range(len(params)) if torch.rand((), generator=generator) < 0.6]
        chosen = chosen or [2]
        rows = [(s + launch) % 2 for s in chosen]
        inf = bool(torch.rand((), generator=generator) < 0.3)
        counted = launch % 2 == 0
        getattr(ops, op)(
            *([params[s] for s in chosen], [torch.ones_like(params[s]) for s in chosen]),
            *(*planes, steps, counters, chunks, chosen, rows, hyper, counted),
            found_inf=torch.tensor(float(inf), device=device),
        )
        skips += inf and counted
        for s, row in zip(chosen, rows, strict=True):
            expected[s] += not inf and (op == "adam_" or row == 0)
        assert counters.tolist() == [0, skips, 0, 0, 0, 0]
        assert torch.cat(steps).tolist() == expected
    assert skips > 5 and min(expected) > 5


@each_device
@each_dtype
@each_case
def test_two_runs_are_bitwise_equal(case, dtype, device):
    runs = []
    for _ in range(2):
        params = parameters(device, dtype)
        optimizer = case.ours(params, **case.options)
        train(optimizer, params, range(5))
        state = [v for p in params for v in optimizer.state.get(p, {}).values() if v is not None]
        runs.append([*values_of(params), *values_of(state)])
    assert equal(*runs)
    assert not equal(runs[0][: len(params)], parameters(device, dtype))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@each_case
def test_cpu_and_cuda_agree(case, dtype):
    """Equal gradients, so only rounding differs: some multiply-adds are fused and some quotients
    are products with a reciprocal on CUDA. 12 steps of 10 roundings each make 7e-6 of a weight in
    fp32, and 1e-6 where it passes through zero."""
    runs = []
    for device in ("cpu", "cuda"):
        params = parameters(device, dtype)
        optimizer = case.ours(params, **case.options)
        train(optimizer, params, range(12))
        state = [v for p in params for v in optimizer.state.get(p, {}).values() if v is not None]
        runs.append([t.cpu() for t in values_of([*params, *state])])
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (FP64, FP64)
    torch.testing.assert_close(runs[1], runs[0], rtol=rtol, atol=atol)
