# SPDX-License-Identifier: BSD-3-Clause
# max_grad_norm against torch.nn.utils.clip_grad_norm_ before torch's own step: the same weights and
# state, the same norm, the same meaning of what isn't finite, isn't there, or isn't one dtype.

import copy
import math

import pytest
import torch
from clipping import (
    ROWS,
    accelerated,
    both_clip,
    clipped_pair,
    clipped_step,
    each_gradients,
    each_row,
)
from testing import (
    DEVICES,
    FP64,
    LM,
    Two,
    bounds,
    conv_bn,
    equal,
    mlp,
    parameters,
    same,
    same_state,
    set_gradients,
    square,
    values_of,
    worst,
    x_of,
)
from torch import nn
from torch.nn.utils import clip_grad_norm_

pytestmark = pytest.mark.parametrize("device", DEVICES)
each_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


def native_and_ours(row, make, max_norm, set_each, steps, **options):
    """Both ways to train `make()`, whose gradients `set_each(params, step)` sets; for each the
    parameters, the optimizer and its last norm."""
    runs = []
    for ours in (False, True):
        params = make()
        optimizer = (
            accelerated(row, params, max_norm, **options)
            if ours
            else row.native(params, **row.options)
        )
        for step in range(steps):
            set_each(params, step)
            norm = optimizer.step() if ours else clipped_step(params, optimizer, max_norm)
        runs.append((params, optimizer, optimizer.grad_norm if ours else norm))
    return runs


def scaled_gradients(params, step):
    """Of norms from far below to far above 1, where every test's limit lies."""
    set_gradients(params, step, plain=True)
    for p in params:
        if p.grad is not None:
            p.grad.mul_(10.0 ** (step % 5 - 4))


@each_row
@each_gradients
@pytest.mark.parametrize("max_norm", [1.0, 0.0])
def test_fp64_equals_clip_grad_norm_and_step(row, gradients, max_norm, device):
    native, ours = (parameters(device, torch.float64, plain=True) for _ in "ab")
    torchs = row.native(native, **row.options)
    optimizer = accelerated(row, ours, max_norm, gradients=gradients)
    below = 0
    for step in range(20):
        scaled_gradients(native, step)
        scaled_gradients(ours, step)
        given = [None if p.grad is None else p.grad.clone() for p in ours]
        norm = clipped_step(native, torchs, max_norm)
        optimizer.step()
        below += bool(norm < 1)
        torch.testing.assert_close(optimizer.grad_norm, norm, rtol=FP64, atol=0)
        for p, before in zip(ours, given, strict=True):  # .grad stays unclipped
            assert p.grad is before if before is None else torch.equal(p.grad, before)
    assert 0 < below < 20
    assert worst(ours, native) <= FP64
    same_state(torchs, optimizer)


@each_row
@each_gradients
def test_fp32_error_is_at_most_twice_torchs(row, gradients, device):
    runs = {}
    for name, dtype in (
        ("exact", torch.float64),
        ("torch", torch.float32),
        ("ours", torch.float32),
    ):
        params = parameters(device, dtype, plain=True)
        ours = name == "ours"
        optimizer = (
            accelerated(row, params, 1.0, gradients=gradients)
            if ours
            else row.native(params, **row.options)
        )
        for step in range(20):
            scaled_gradients(params, step)
            norm = None if ours else clip_grad_norm_(params, 1.0)
            optimizer.step()
            runs[name, step] = (optimizer.grad_norm if ours else norm).double()
            assert not ours or optimizer.grad_norm.dtype == torch.float32
        runs[name] = torch.cat([p.detach().double().flatten() for p in params])
    error = {name: (runs[name] - runs["exact"]).norm() for name in ("torch", "ours")}
    assert error["ours"] <= 2 * error["torch"]
    for step in range(20):  # sums of up to 701 * 3 squares in eight or more parts
        torch.testing.assert_close(runs["ours", step], runs["exact", step], rtol=1e-5, atol=0)


@pytest.mark.parametrize("row", [ROWS[2], ROWS[4]], ids=str)
@each_dtype
@pytest.mark.parametrize("case", ["channels_last", "tied", "clipped", "not clipped"])
def test_trainings_equal_native_ones(row, dtype, case, device):
    def picture_loss(model):
        torch.manual_seed(7)
        x = torch.randn(2, 3, 7, 7).to(device, dtype).contiguous(memory_format=torch.channels_last)
        return model(x).pow(2).mean()

    make, loss, max_norm = {
        "channels_last": (
            lambda: conv_bn().to(memory_format=torch.channels_last),
            picture_loss,
            0.02,
        ),
        "tied": (LM, lambda m: m(torch.arange(7, device=device)), 0.3),
        "clipped": (mlp, square, 0.5),
        "not clipped": (mlp, square, 1e6),
    }[case]
    a, oa, b, ob = clipped_pair(make, row, device, max_norm, dtype=dtype)
    both_clip(a, oa, b, ob, loss, max_norm, steps=4)
    same(a, b)
    same_state(oa, ob, values=dtype == torch.float64)


@each_row
def test_at_the_limit_and_around_it(row, device):
    """The norm is 5, to the bit. torch divides by norm + 1e-6, which fp64 shows."""

    def make():
        return [nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64, device=device))]

    def set_each(params, step):
        params[0].grad = torch.tensor([3.0, 4.0], dtype=torch.float64, device=device)

    for max_norm in (5.0, 5.000001, 5.0000005, 4.999999, 5, 6, math.inf, 1e-300):
        native, ours = native_and_ours(row, make, max_norm, set_each, 2)
        assert native[2] == ours[2] == 5
        assert worst(ours[0], native[0]) <= FP64


@each_row
@each_dtype
@each_gradients
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_not_finite_without_a_scaler_is_as_natively(row, dtype, gradients, bad, device):
    """inf: a coefficient of 0, so NaN where the inf is and no gradient elsewhere. NaN: all NaN."""
    a, oa, b, ob = clipped_pair(mlp, row, device, 1.0, dtype=dtype, gradients=gradients)
    both_clip(a, oa, b, ob, square, 1.0)
    for model, optimizer in ((a, oa), (b, ob)):
        optimizer.zero_grad()
        square(model).backward()
        model[2].weight.grad[0, 3] = bad
    norm = clipped_step(list(a.parameters()), oa, 1.0)
    ob.step()
    torch.testing.assert_close(ob.grad_norm, norm, equal_nan=True)
    assert not math.isfinite(ob.grad_norm)
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(q, p, **bounds(p), equal_nan=True, msg=name)
    assert b[2].weight.isnan().sum() == (8 if math.isnan(bad) else 1)
    assert int(ob.skipped_steps) == 0


@each_row
@each_gradients
def test_parameters_without_a_gradient_count_for_nothing(row, gradients, device):
    a, oa, b, ob = clipped_pair(Two, row, device, 0.5, gradients=gradients)
    both_clip(
        a, oa, b, ob, lambda m: 100 * m(x_of(device), "ab"), 0.5
    )  # large ones to be forgotten
    before, state = values_of(b.b.parameters()), copy.deepcopy(ob.state.get(b.b.weight, {}))
    both_clip(a, oa, b, ob, lambda m: m(x_of(device), "a"), 0.5, steps=3)
    assert equal(b.b.parameters(), before) and b.b.weight.grad is None
    for key, value in state.items():
        assert value is None or torch.equal(ob.state[b.b.weight][key], value)
    same(a, b)
    same_state(oa, ob)
    before = values_of(b.parameters())
    ob.zero_grad()
    ob.step()  # no gradient at all
    assert equal(b.parameters(), before)


@each_row
def test_only_empty_gradients_and_only_a_scalar(row, device):
    def set_each(params, step):
        for p in params:
            p.grad = torch.full_like(p, 2.0)

    for shapes in ([(0,), (0, 3)], [()], [(), (0,), (1,)]):

        def make(shapes=shapes):
            ones = [torch.ones(s, dtype=torch.float64, device=device) for s in shapes]
            return [nn.Parameter(p) for p in ones]

        native, ours = native_and_ours(row, make, 0.5, set_each, 2)
        assert worst(ours[0], native[0]) <= FP64
        torch.testing.assert_close(ours[2], native[2])


def mixed(device, dtypes=(torch.float32, torch.bfloat16, torch.float64, torch.float16)):
    generator = torch.Generator().manual_seed(3)
    return [
        nn.Parameter(torch.randn(41, generator=generator).bfloat16().to(device, dtype))
        for dtype in dtypes
        for _ in range(2)
    ]


def set_mixed_gradients(params, step):
    generator = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p.device, p.dtype)


@each_gradients
@pytest.mark.parametrize("turned", [False, True])
def test_one_norm_over_all_dtypes(gradients, turned, device):
    """Natively the norm of a bfloat16 gradient is rounded to bfloat16, and ours isn't: the
    reference is exact."""
    params = mixed(device)
    given = params[:: -1 if turned else 1]
    optimizer = accelerated(ROWS[0], given, 1.5, gradients=gradients)
    for step in range(4):
        set_mixed_gradients(params, step)
        exact = torch.cat([p.grad.double() for p in params]).norm()
        wanted = [
            p.detach().double() * 0.99 - 0.1 * p.grad.double() * (1.5 / (exact + 1e-6))
            for p in params
        ]
        optimizer.step()
        assert optimizer.grad_norm.dtype == torch.float64
        torch.testing.assert_close(optimizer.grad_norm, exact, rtol=1e-6, atol=0)
        for p, want in zip(params, wanted, strict=True):
            # The norm may have been rounded to fp32 on its way.
            eps = max(torch.finfo(p.dtype).eps, 1e-6)
            torch.testing.assert_close(p.detach().double(), want, rtol=eps, atol=eps)


@pytest.mark.parametrize("turned", [False, True])
def test_a_double_gradient_beyond_float32_beside_float32_parameters(turned, device):
    dtypes = [torch.float64, torch.float32][:: -1 if turned else 1]

    def make():
        return [nn.Parameter(torch.ones(3, dtype=dtype, device=device)) for dtype in dtypes]

    def set_each(params, step):
        for p in params:
            p.grad = torch.full_like(p, 1e100 if p.dtype == torch.float64 else 1.0)

    native, ours = native_and_ours(ROWS[1], make, 1.0, set_each, 2)
    torch.testing.assert_close(ours[2], native[2])
    assert worst(ours[0], native[0]) <= 1e-6


@each_row
@pytest.mark.parametrize(
    ("dtype", "powers"),
    [
        (torch.float32, (-30, -20, -10, -4, 10, 18, 20, 30)),
        (torch.float64, (-150, -30, -20, 20, 30, 150)),
    ],
    ids=str,
)
def test_huge_and_tiny_gradients(row, dtype, powers, device):
    """Squares of fp32 overflow above 1.8e19, as native's own: the norm is then inf and every
    gradient 0. Below 1e-19 they vanish, and the norm with them."""

    def make():
        return [nn.Parameter(torch.ones(n, dtype=dtype, device=device)) for n in (5, 17)]

    for power in powers:

        def set_each(params, step, size=10.0**power):
            for p in params:
                p.grad = torch.full_like(p, size * (1 + step))

        for max_norm in (1.0, 1e-3, 10.0**power):
            native, ours = native_and_ours(row, make, max_norm, set_each, 2)
            assert worst(ours[0], native[0]) <= (FP64 if dtype == torch.float64 else 1e-6)
            torch.testing.assert_close(ours[2], native[2], rtol=1e-5, atol=1e-19)


@each_row
@each_dtype
@each_gradients
def test_two_runs_are_bitwise_equal(row, dtype, gradients, device):
    runs = []
    for _ in range(2):
        params = parameters(device, dtype, plain=True)
        params.append(nn.Parameter(torch.ones(300_001, dtype=dtype, device=device)))
        optimizer = accelerated(row, params, 1.0, gradients=gradients)
        norms = []
        for step in range(4):
            scaled_gradients(params, step)
            optimizer.step()
            norms.append(optimizer.grad_norm)
        runs.append([*values_of(params), *norms])
    assert equal(*runs)


def test_more_tensors_than_one_launch_takes_and_large_ones(device):
    generator = torch.Generator().manual_seed(1)
    sizes = [2] * 1400 + [70_001, 4096]
    values = [torch.randn(n, generator=generator, dtype=torch.float64) for n in sizes]

    def set_each(params, step):
        for i, p in enumerate(params):
            p.grad = None if (i + step) % 7 == 0 else p.detach() * (step + 1)

    native, ours = native_and_ours(
        ROWS[1], lambda: [nn.Parameter(v.to(device, copy=True)) for v in values], 0.7, set_each, 3
    )
    torch.testing.assert_close(ours[2], native[2], rtol=FP64, atol=0)
    flat = [[torch.cat([p.detach() for p in run[0]])] for run in (ours, native)]
    assert worst(*flat) <= FP64
