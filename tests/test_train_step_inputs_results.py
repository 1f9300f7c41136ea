# SPDX-License-Identifier: BSD-3-Clause
# What goes into a TrainStep and what comes out: extras and losses that keep their value, batches of
# every structure, layout, dtype and device, and the static inputs.

from collections import namedtuple

import pytest
import replaying
import torch
from stepping import (
    ADAMW,
    NESTEROV,
    WARMUP,
    Twins,
    agree,
    fit,
    no_fallback,
    noise,
    noises,
    on,
    vectors,
)
from testing import DEVICES, close, mlp
from torch import nn
from torch.utils import _pytree as pytree

import torch_renaissance as tr
from torch_renaissance._ops import _C

pytestmark = [pytest.mark.parametrize("device", DEVICES), no_fallback]


# -- results ---------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["left", "right"])


def with_extras(model):
    def loss_fn(x):
        out = model(x)
        extras = {
            "out": out,
            "large": x.repeat(100, 40),
            "turned": out.t(),
            "expanded": out.sum().expand(3),
            "every second": x[:, ::2],
            "empty": out[:0],
            "best": out.argmax(),
            "on the CPU": torch.tensor([1.0, 2.0]),
            "a number on the CPU": torch.tensor(len(x)),
            "is large": out > 0,
            "no tensor": [None, 3, "text", 0.5, (out.mean(),)],
            "pair": Pair(out.float(), x),
        }
        return out.pow(2).mean(), extras

    return loss_fn


def test_extras_are_copies_that_keep_their_value(device):
    twins = Twins(mlp, NESTEROV, with_extras, device)
    batches = noises(10, 5, 4, device=device)
    kept, at_once = [], []
    for batch in batches:
        kept += twins.run([batch])
        at_once.append(pytree.tree_map(lambda x: x.clone() if hasattr(x, "clone") else x, kept[-1]))
    twins.check_replays(*[True] * (10 - WARMUP))
    for got, expected in zip(kept, at_once, strict=True):
        assert isinstance(got, tuple) and isinstance(got[1]["pair"], Pair)
        agree(got, expected, rtol=0, atol=0)
    _, extras = kept[-1]
    extras["out"].fill_(7.0)  # a copy of the program's own
    extras["large"].fill_(7.0)
    twins.run(batches[:2])
    assert (extras["out"] == 7).all() and (extras["large"] == 7).all()


@pytest.mark.parametrize("extras", [None, (), 3], ids=str)
def test_extras_without_tensors(extras, device):
    twins = Twins(mlp, NESTEROV, lambda m: lambda x: (m(x).pow(2).mean(), extras), device)
    for _, got in twins.run(noises(6, 5, 4, device=device)):
        assert got == extras
    twins.check_replays(True, True, True)


KEEPING = {
    "itself": lambda loss: loss,
    "detach": lambda loss: loss.detach(),
    "view": lambda loss: loss.view(1),
    "expand": lambda loss: loss.expand(3),
    "data": lambda loss: loss.data,
}


@pytest.mark.parametrize("keep", KEEPING.values(), ids=KEEPING)
def test_losses_keep_their_value(keep, device):
    twins = Twins(mlp, ADAMW, fit, device)
    losses, values = [], []
    for (x,) in noises(WARMUP + 20, 5, 4, device=device):
        losses.append(keep(twins.step(x)))
        values.append(losses[-1].flatten()[0].item())
    assert twins.step.captured == (device == "cuda")
    assert [loss.flatten()[0].item() for loss in losses] == values
    assert len(set(values)) == len(values)


def test_losses_keep_their_value_without_any_wait(device):
    """Nothing is read until the end, so that a buffer used twice would show."""
    twins = Twins(mlp, ADAMW, fit, device)
    batches = noises(60, 5, 4, device=device)
    expected = torch.stack([twins.native(x) for (x,) in batches])
    losses = []
    for i, (x,) in enumerate(batches):
        loss = twins.step(x)
        losses.append(loss if i % 3 else loss.clone())  # some are given back at once
    assert twins.step.captured == (device == "cuda")
    close(torch.stack(losses), expected)


@pytest.mark.parametrize("extras", [False, True])
def test_a_loss_in_a_parameters_memory_is_read_after_the_update(extras, device, monkeypatch):
    """As in a loop, where it is the parameter; other losses are copied beside the update."""
    if device == "cpu":
        replaying.capture_steps(monkeypatch)
    scale = nn.Parameter(torch.ones(4, device=device))
    optimizer = tr.optim.SGD([scale], lr=0.5)
    step = tr.TrainStep(
        lambda x: (scale[3], scale.detach()[3]) if extras else scale[3], optimizer, warmup=WARMUP
    )
    for i in range(6):
        found = step(torch.ones(1, device=device))
        losses = found if extras else (found,)
        assert [float(loss) for loss in losses] == [1 - 0.5 * (i + 1)] * (1 + extras)
    assert step.captured


def test_a_loss_of_shape_one_and_of_16_bits(device):
    def loss_of(model):
        return lambda x: (model(x).float().pow(2).mean()[None], model(x).mean().bfloat16())

    twins = Twins(mlp, NESTEROV, loss_of, device, torch.float32)
    results = twins.run(noises(6, 5, 4, device=device, dtype=torch.float32))
    assert all(loss.shape == (1,) for loss, _ in results)
    twins.check_replays(True, True, True)
    twins.check()


# -- inputs ----------------------------------------------------------------------------------------


def test_nested_batches(device):
    def loss_of(model):
        def loss_fn(batch, options):
            (x, y), more = batch["xy"], batch["more"][0]
            assert options is None or options["power"] == 2
            return (model(x) - y).pow(2).mean() + model(more["x"]).abs().mean()

        return loss_fn

    def batch(i, options):
        x = noise(i, 5, 4, device=device)
        return {"xy": (x, x.sum(1, keepdim=True)), "more": [{"x": x.flip(0) * 2}]}, options

    twins = Twins(mlp, NESTEROV, loss_of, device)
    twins.run([batch(i, {"power": 2}) for i in range(8)])
    twins.check_replays(*[True] * 5)
    twins.run([batch(i, None) for i in range(8, 12)])
    twins.check_replays(False, True, True, True)
    twins.run([batch(12, {"power": 2})])
    twins.check_replays(True)
    twins.check()


def test_python_values_of_a_batch(device):
    def loss_of(model):
        def loss_fn(x, factor, kind):
            out = model(x) * (3 if factor is True else factor)
            return out.pow(2).mean() if kind == "square" else out.abs().mean()

        return loss_fn

    twins = Twins(mlp, NESTEROV, loss_of, device)
    xs = noises(30, 5, 4, device=device)
    values = [(1.0, "square"), (0.5, "square"), (1, "abs"), (True, "abs")]  # 1 == True == 1.0
    for (x,) in xs[:6]:
        twins.run([(x, *values[0])])
    for i, (x,) in enumerate(xs[6:]):
        twins.run([(x, *values[i % 4])])
    twins.check_replays(*[True] * 8)
    twins.check()


def test_batches_written_into_the_static_inputs(device):
    def loss_of(model):
        return lambda x, factor, y: (model(x) - y).pow(2).mean() * factor

    twins = Twins(mlp, NESTEROV, loss_of, device)
    assert twins.step.inputs == ()

    def batch(i):
        return noise(i, 5, 4, device=device), 0.5, noise(-i, 5, 1, device=device)

    twins.run([batch(i) for i in range(1, 6)])
    if device != "cuda":
        assert twins.step.inputs == ()
        return
    inputs = twins.step.inputs
    assert [x is None for x in inputs] == [False, True, False]
    for i in range(6, 12):
        x, factor, y = batch(i)
        inputs[0].copy_(x)
        inputs[2].copy_(y)
        twins.run([(inputs[0], factor, inputs[2])])
        assert all(a is b for a, b in zip(twins.step.inputs, inputs, strict=True))
        close(inputs[0], x)
    twins.check_replays(*[True] * 6)
    twins.run([batch(12)])
    twins.check()


def test_batches_on_the_cpu(device):
    def loss_of(model):
        def loss_fn(x, y):
            x, y = x.to(device), y.to(device)
            return (model(x) - y).pow(2).mean()

        return loss_fn

    twins = Twins(mlp, ADAMW, loss_of, device)
    twins.run([(noise(i, 5, 4), noise(-i, 5, 1)) for i in range(1, 11)])
    twins.check_replays(*[True] * 7)
    if device == "cuda":
        twins.run([(noise(i, 5, 4).pin_memory(), noise(-i, 5, 1)) for i in range(12, 16)])
        twins.run([(noise(i, 5, 4, device=device), noise(-i, 5, 1)) for i in range(16, 20)])
        twins.check_replays(True, True, True)
    twins.check()


@pytest.mark.cuda
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_a_batch_on_the_cpu_may_be_refilled_at_once(pinned, device):
    """The native `.to("cuda")` of it has read it before it returns."""
    if device != "cuda":
        pytest.skip("nothing is copied")
    twins = Twins(mlp, ADAMW, lambda m: lambda x: m(x.to(device)).pow(2).mean(), device)
    batch = torch.empty(5, 4, dtype=torch.float64, pin_memory=pinned)
    for i in range(12):
        batch.copy_(noise(i, 5, 4))
        expected = twins.native(batch)
        torch.cuda._sleep(20_000_000)  # the device lags behind
        loss = twins.step(batch)
        batch.fill_(1e6)
        close(loss, expected)
    assert twins.step.captured
    twins.check()


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "a slice": lambda x: x.repeat(1, 2)[:, :4],
    "expanded": lambda x: x[:1].expand(6, 4),
    "every second": lambda x: x.repeat_interleave(2, 0)[::2],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_inputs_of_every_layout_and_dtype(layout, device):
    def loss_of(model):
        def loss_fn(x, index, small, scalar, empty):
            rows = model(x)[index] + small.double().mean()
            return rows.pow(2).mean() * scalar + empty.sum()

        return loss_fn

    def batch(i):
        x = layout(noise(i, 6, 4, device=device))
        index = torch.arange(5, device=device).roll(i)
        small = noise(i, 3, device=device, dtype=torch.bfloat16)
        scalar = torch.tensor(1.0 + i % 3, device=device)
        return x, index, small, scalar, torch.empty(0, 3, device=device)

    twins = Twins(mlp, NESTEROV, loss_of, device)
    twins.run([batch(i) for i in range(8)])
    twins.check_replays(*[True] * 5)
    twins.check()


def test_results_that_are_kept_have_memory_of_their_own(device):
    """More of them than a graph has buffers for."""
    source = torch.zeros(3, device="cpu")  # on a GPU, copying is a node of a graph
    copies = _C.GraphCopies(())
    copies.add_results([source])
    kept = []
    for i in range(200):
        source.fill_(i)
        kept += copies.prepare(0, ())
    assert [k.tolist() for k in kept] == [[i] * 3 for i in range(200)]
    again, first = {k.data_ptr() for k in kept[:9]}, kept[9:]
    del kept
    assert {t.data_ptr() for t in (copies.prepare(0, ())[0] for _ in range(9))} <= again
    assert first[0].tolist() == [9] * 3


def test_a_batch_in_the_memory_of_static_inputs(device):
    """Copies go side by side: none may read what another one writes."""
    a, b = torch.arange(4.0), torch.arange(4.0, 8.0)  # on a GPU, copying is a node of a graph
    copies = _C.GraphCopies((a, None, b))
    copies.prepare(0, (b, 1, a))
    assert a.tolist() == [4, 5, 6, 7] and b.tolist() == [0, 1, 2, 3]
    copies.prepare(0, (a, 1, a))
    assert a.tolist() == b.tolist() == [4, 5, 6, 7]
    copies.prepare(0, (torch.arange(5.0)[1:], 1, b))
    copies.prepare(0, (a[[0, 0, 1, 2]], 1, a.view(2, 2).T.reshape(-1)))
    assert a.tolist() == [1, 1, 2, 3] and b.tolist() == [1, 3, 2, 4]


def test_steps_whose_batch_is_their_inputs_swapped(device):
    twins = Twins(mlp, NESTEROV, lambda m: lambda x, y: (m(x) - 0.5 * m(y)).pow(2).mean(), device)
    x, y = noise(0, 6, 4, device=device), noise(1, 6, 4, device=device)
    twins.run([(x, y)] * 5)
    for _ in range(3):
        first, second = twins.step.inputs or (x, y)
        twins.run([(second, first)])
    twins.check_replays(*[True] * 5)
    twins.check()


def test_dense_inputs_keep_their_strides(device):
    """Kernels may sum in another order for others, and a program may ask."""
    x = LAYOUTS["transposed"](noise(0, 6, 4, device=device))
    twins = Twins(mlp, NESTEROV, lambda m: lambda x: (m(x).pow(2).mean(), x.stride()), device)
    assert {strides for _, strides in twins.run([(x,)] * 6)} == {(1, 6)}
    twins.check_replays(True, True, True)


@pytest.mark.cuda
def test_on_a_stream_of_the_program(device):
    if device != "cuda":
        pytest.skip("a CPU has no streams")
    twins = Twins(mlp, ADAMW, fit, device)
    batches = [on(device, vectors(i)) for i in range(16)]
    stream = torch.cuda.Stream()
    for some in (batches[:8], batches[12:]):  # captured there, and again there
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            twins.run(some)
        torch.cuda.current_stream().wait_stream(stream)
        twins.check_replays(True, True, True, True)
        twins.run(batches[8:12])
    twins.check_replays(True, True, True, True)
    twins.check()
