# SPDX-License-Identifier: BSD-3-Clause
# Within a step with precision= on a GPU, batch norm of channels_last tensors is ours: as exact as
# torch's, there alone. What joins its kernel is in test_train_step_batch_norm_joins.py.

import pytest
import torch
import torch.nn.functional as F
from batch_norms import (
    BEFORE_RELU,
    FOLLOWS,
    HALVES,
    OURS,
    exactly,
    make_inputs,
    norm_alone,
    run,
    running_stats,
)
from testing import DEVICES
from torch import nn

import torch_renaissance as tr
from torch_renaissance._precision import own_kernels

pytestmark = pytest.mark.parametrize("device", DEVICES[1:])
each_half = pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)

# Of few rows and many, in clusters and in two launches, with channels that don't fill a tile.
SHAPES = [
    (2, 4, 1, 1),
    (3, 12, 5, 7),
    (8, 64, 9, 9),
    (128, 64, 8, 8),
    (128, 512, 1, 1),
    (16, 100, 31, 17),
    (32, 2048, 7, 7),
    (32, 64, 112, 112),
    (16, 256, 56, 56),
    (7, 4096, 3, 3),
    (2, 24, 3, 4, 5),
    (200, 96),
]


def error(found, exact):
    return (found.double() - exact).norm()


@each_half
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("function", FOLLOWS)
def test_as_exact_as_torchs(function, shape, dtype, device):
    inputs, grad = make_inputs(shape, dtype)
    if function in BEFORE_RELU:  # at its kink, rounding decides whether a gradient passes
        grad[exactly(BEFORE_RELU[function], inputs, grad)[0].abs() < 0.05] = 0
    exact = exactly(function, inputs, grad)
    natively = run(function, inputs, grad, own=False)
    ours = run(function, inputs, grad)
    assert len(ours) == len(natively)
    for found, native, wanted in zip(ours, natively, exact, strict=True):
        assert found.dtype == native.dtype and found.stride() == native.stride()
        # The statistics are sums in float32 in either, in another order.
        bound = 1.1 * error(native, wanted) + 1e-6 * wanted.norm() + 1e-6
        assert error(found, wanted) <= bound


@each_half
def test_far_from_zero(dtype, device):
    # Where a sum of squares in float32 has lost the variance.
    inputs, grad = make_inputs((64, 64, 16, 16), dtype, mean=64.0)
    exact = exactly(norm_alone, inputs, grad)
    ours = run(norm_alone, inputs, grad)
    assert error(ours[0], exact[0]) <= torch.finfo(dtype).eps * exact[0].norm()
    torch.testing.assert_close(ours[1:3], [t.float() for t in exact[1:3]], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_spreads_in_its_channel(bad, device):
    inputs, grad = make_inputs((16, 8, 4, 4), torch.float16)
    with torch.no_grad():
        inputs[0][3, 2, 1, 1] = bad
        grad[5, 6, 0, 0] = bad
    y, _, _, of_x, of_weight, of_bias = run(norm_alone, inputs, grad)
    assert [c for c in range(8) if not y[:, c].isfinite().all()] == [2]
    assert [c for c in range(8) if not of_x[:, c].isfinite().all()] == [2, 6]
    assert not of_weight[[2, 6]].isfinite().any() and not of_bias[6].isfinite()


@pytest.mark.parametrize("shape", [(32, 64, 8, 8), (32, 64, 112, 112)], ids=str)
def test_the_same_bits_again(shape, device):
    inputs, grad = make_inputs(shape, torch.float16)
    first = run(norm_alone, inputs, grad)
    for _ in range(20):
        assert all(map(torch.equal, first, run(norm_alone, inputs, grad)))


def test_streams_do_not_disturb_each_other(device):
    given = [make_inputs((16, 64, 56, 56), torch.float16, seed) for seed in range(3)]
    expected = [run(norm_alone, *each) for each in given]
    streams = [torch.cuda.Stream() for _ in given]
    for _ in range(10):
        torch.cuda.synchronize()
        found = []
        for stream, each in zip(streams, given, strict=True):
            with torch.cuda.stream(stream):
                found.append(run(norm_alone, *each))
        torch.cuda.synchronize()
        for a, b in zip(found, expected, strict=True):
            assert all(map(torch.equal, a, b))


# -- What is left to torch -------------------------------------------------------------------------


def name_of(x, *args, **options):
    with own_kernels(), torch.autocast("cuda", torch.float16):
        return F.batch_norm(x, *args, **options).grad_fn.name()


def test_which_calls_are_ours(device):
    (x, weight, bias, _), _ = make_inputs((8, 64, 4, 4), torch.float16)
    stats, options = running_stats(64), {"training": True}
    assert name_of(x, *stats, weight, bias, **options) == OURS
    assert name_of(x, None, None, weight, bias, **options) == OURS
    assert name_of(x.detach(), *stats, weight, bias, **options) == OURS
    others = [
        (x.contiguous(), *stats, weight, bias),
        (x.float(), *stats, weight, bias),
        (x, *stats, None, None),
        (x, *stats, weight, None),
        (x, *stats, weight.half(), bias.half()),
        (x[:, :, ::2], *stats, weight, bias),
        (x[:, :6], *[t[:6] for t in (*stats, weight, bias)]),
    ]
    for other in others:
        assert name_of(*other, **options) != OURS
    assert name_of(x, *stats, weight, bias, training=False) != OURS
    with torch.autocast("cuda", torch.float16):
        assert F.batch_norm(x, *stats, weight, bias, training=True).grad_fn.name() != OURS
    with own_kernels():
        assert F.batch_norm(x, *stats, weight, bias, training=True).grad_fn.name() != OURS


def test_errors_are_torchs(device):
    (x, weight, bias, _), _ = make_inputs((8, 64, 4, 4), torch.float16)
    stats = running_stats(64)
    for args in [(x, *running_stats(32), weight, bias), (x, *stats, weight[:32], bias)]:
        with pytest.raises(RuntimeError) as natively:
            F.batch_norm(*args, training=True)
        with own_kernels(), torch.autocast("cuda", torch.float16):
            with pytest.raises(RuntimeError) as ours:
                F.batch_norm(*args, training=True)
        assert str(ours.value) == str(natively.value)


def test_under_torch_func_it_is_torchs(device):
    (x, weight, bias, _), grad = make_inputs((8, 64, 4, 4), torch.float16)

    def loss(x):
        return (F.batch_norm(x, None, None, weight, bias, training=True) * grad).sum()

    expected = torch.func.grad(loss)(x.detach())
    with own_kernels(), torch.autocast("cuda", torch.float16):
        found = torch.func.grad(loss)(x.detach())
    assert torch.equal(found, expected)


# -- Autograd --------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (1, 2), (0, 2)], ids=str)
def test_gradients_of_some(wanted, device):
    inputs, grad = make_inputs((8, 64, 4, 4), torch.float16)
    expected = run(norm_alone, inputs, grad)[3:]
    for i in range(3):
        inputs[i].requires_grad_(i in wanted)
    with own_kernels(), torch.autocast("cuda", torch.float16):
        y = norm_alone(*inputs, running_stats(64))
    found = torch.autograd.grad(y, [inputs[i] for i in wanted], grad)
    assert all(torch.equal(g, expected[i]) for g, i in zip(found, wanted, strict=True))


def test_without_gradients(device):
    inputs, grad = make_inputs((8, 64, 4, 4), torch.float16)
    expected, stats = run(norm_alone, inputs, grad), running_stats(64)
    with own_kernels(), torch.autocast("cuda", torch.float16), torch.no_grad():
        y = norm_alone(*inputs, stats)
    assert y.grad_fn is None
    assert all(map(torch.equal, (y, *stats), expected))


@pytest.mark.parametrize("function", FOLLOWS[:2])
def test_second_derivatives(function, device):
    inputs, grad = make_inputs((8, 16, 4, 4), torch.float16)
    found = []
    for own in (False, True):
        with own_kernels(own), torch.autocast("cuda", torch.float16):
            y = function(*inputs, running_stats(16))
        (of_x,) = torch.autograd.grad(y, inputs[:1], grad, create_graph=True)
        found.append(torch.autograd.grad(of_x.float().pow(2).sum(), inputs[:2]))
    torch.testing.assert_close(found[1], found[0], rtol=0.02, atol=0.05)


def test_backward_twice_and_a_changed_input(device):
    inputs, grad = make_inputs((8, 16, 4, 4), torch.float16)
    with own_kernels(), torch.autocast("cuda", torch.float16):
        y = norm_alone(*inputs, running_stats(16))
        again = norm_alone(*inputs, running_stats(16))
    y.backward(grad, retain_graph=True)
    y.backward(grad)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward(grad)
    with torch.no_grad():
        inputs[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        again.backward(grad)


def test_gradients_of_another_layout(device):
    inputs, grad = make_inputs((8, 16, 4, 4), torch.float16)
    expected = run(norm_alone, inputs, grad)
    assert all(map(torch.equal, run(norm_alone, inputs, grad.contiguous()), expected))
    ones = torch.ones(1, 1, 1, 1, dtype=torch.float16, device=device).expand_as(grad)
    assert run(norm_alone, inputs, ones)[5].eq(8 * 4 * 4).all()


def test_in_a_step_it_is_used(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten()).to(device)
    model.to(memory_format=torch.channels_last)
    _, optimizer = tr.accelerate(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step = tr.TrainStep(lambda x: model(x).square().mean(), optimizer, precision="bf16")
    for _ in range(5):
        step(torch.randn(4, 3, 6, 6, device=device))
    kernels = step.explain().kernels
    assert step.captured and any("batch_norm_backward" in name for name in kernels)
