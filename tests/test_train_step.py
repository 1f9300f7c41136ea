# SPDX-License-Identifier: BSD-3-Clause
# TrainStep trains as the loop does that it stands for: all kinds of models, inputs and results,
# random numbers, two steps side by side, and sums over micro-batches.

import warnings
from collections import namedtuple
from dataclasses import dataclass

import pytest
import replaying
import torch
import torch.nn.functional as F
from stepping import (
    ADAMW,
    BOTH,
    NESTEROV,
    WARMUP,
    Twins,
    agree,
    by_hand,
    mean_square,
    no_fallback,
    noise,
    noises,
)
from testing import DEVICES, LM, Two, close, conv_bn, equal, mlp, pair, same, same_state, values_of
from torch import nn
from torch.utils import _pytree as pytree

import torch_renaissance as tr
from torch_renaissance._ops import _C

pytestmark = [pytest.mark.parametrize("device", DEVICES), no_fallback]
each_row = pytest.mark.parametrize("row", BOTH, ids=lambda row: row.native.__name__)
NEVER = 10**9  # a warm-up that doesn't end


# -- parity ----------------------------------------------------------------------------------------


class Transformer(nn.Module):
    """No biases: that of the keys has no gradient but rounding, which Adam would blow up."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, bias=False)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens):
        return self.head(self.layer(self.embedding(tokens))).transpose(1, 2)


def weight_norm():
    norm = nn.utils.parametrizations.weight_norm
    return nn.Sequential(norm(nn.Linear(4, 8)), nn.Tanh(), norm(nn.Linear(8, 1)))


def fit(model):
    return lambda x: F.mse_loss(model(x), x.sum(1, keepdim=True).sin())


def classify_images(model):
    return lambda x, y: F.cross_entropy(model(x).mean((2, 3)), y)


def next_token(model):
    return lambda tokens: F.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


def vectors(i):
    return (noise(i, 16, 4),)


def images(i):
    return noise(i, 6, 3, 8, 8), noise(i, 6).gt(0).long()


def tokens(limit):
    return lambda i: ((noise(i, 5, 7).abs() * 5).long().clamp(max=limit - 1),)


def nhwc(i):
    x, y = images(i)
    return x.to(memory_format=torch.channels_last), y


@dataclass(frozen=True)
class Case:
    name: str
    make: object
    loss_of: object
    batch: object


CASES = [
    Case("mlp", mlp, fit, vectors),
    Case("conv and batch norm", conv_bn, classify_images, images),
    Case("transformer", Transformer, next_token, tokens(11)),
    Case("tied embeddings", LM, lambda model: lambda tokens: model(tokens.flatten()), tokens(7)),
    Case("weight_norm", weight_norm, fit, vectors),
    Case(
        "channels_last",
        lambda: conv_bn().to(memory_format=torch.channels_last),
        classify_images,
        nhwc,
    ),
]


def on(device, batch):
    """Moved as it is, with its strides."""
    return pytree.tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, batch)


@each_row
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fifty_steps_equal_the_native_loop_eager_and_captured(case, row, device):
    captured = Twins(case.make, row, case.loss_of, device)
    eager = Twins(case.make, row, case.loss_of, device, warmup=NEVER)
    batches = [on(device, case.batch(i)) for i in range(50)]
    if case.batch is nhwc and device == "cuda":
        assert batches[0][0].is_contiguous(memory_format=torch.channels_last)
    first, last = captured.run(batches[:25]), captured.run(batches[25:])
    eager.run(batches)
    captured.check_replays(*[False] * WARMUP, *[True] * (50 - WARMUP))
    assert not any(eager.replayed)
    for twins in (captured, eager):
        twins.check()
        for module in twins.models[1].modules():
            if isinstance(module, nn.BatchNorm2d):
                assert module.num_batches_tracked == 50
    assert sum(last) < sum(first)  # it does learn


@each_row
def test_of_the_packages_own_optimizers(row, device):
    torch.manual_seed(0)
    model = mlp().to(device, torch.float64)
    torchs = mlp().to(device, torch.float64)
    torchs.load_state_dict(model.state_dict())
    optimizer = row.ours(model, **row.options | {"weight_decay": 0.0})  # given a module
    native = row.native(torchs.parameters(), **row.options | {"weight_decay": 0.0})
    step, loop = tr.TrainStep(mean_square(model), optimizer), by_hand(mean_square(torchs), native)
    for i, (x,) in enumerate(noises(10, 5, 4, device=device)):
        close(step(x), loop(x))
        if i != WARMUP:  # the first call may move the parameters, which begins the warm-up anew
            assert step.captured == (device == "cuda" and i > WARMUP)
    same(torchs, model)


@each_row
def test_gradients_flat(row, device):
    runs = []
    for accelerated in (False, True):
        torch.manual_seed(0)
        model = mlp().to(device, torch.float64)
        optimizer = row.native(model.parameters(), **row.options)
        if accelerated:
            tr.accelerate(model, optimizer, gradients="flat")
            step = tr.TrainStep(fit(model), optimizer)
        else:
            step = by_hand(fit(model), optimizer)
        losses = torch.stack([step(x) for (x,) in noises(12, 5, 4, device=device)])
        runs.append((model, optimizer, losses))
    assert step.captured == (device == "cuda")
    close(runs[1][2], runs[0][2])
    same(runs[0][0], runs[1][0])
    same_state(runs[0][1], runs[1][1])


# -- random numbers --------------------------------------------------------------------------------


def with_dropout():
    return nn.Sequential(
        nn.Linear(4, 32), nn.Dropout(0.5), nn.Tanh(), nn.Linear(32, 8), nn.Dropout(0.2)
    )


def random_states(device):
    states = [torch.get_rng_state()]
    return states + ([torch.cuda.get_rng_state()] if device == "cuda" else [])


@each_row
def test_dropout_draws_as_the_native_loop_does(row, device):
    a, oa, b, ob = pair(with_dropout, lambda m: row.native(m.parameters(), **row.options), device)
    _, _, c, oc = pair(with_dropout, lambda m: row.native(m.parameters(), **row.options), device)
    captured = tr.TrainStep(mean_square(b), ob)
    eager = tr.TrainStep(mean_square(c), oc, warmup=NEVER)
    runs = []
    for step in (by_hand(mean_square(a), oa), eager, captured):
        torch.manual_seed(5)
        losses = [step(x) for (x,) in noises(12, 6, 4, device=device)]
        runs.append((torch.stack(losses), random_states(device)))
    assert captured.captured == (device == "cuda")
    for losses, states in runs[1:]:
        close(losses, runs[0][0])
        assert equal(states, runs[0][1])
    same(a, b)
    same(a, c)


def test_every_step_draws_anew_and_obeys_the_seed(device):
    """With an lr of zero and one batch, nothing but the masks makes losses differ."""
    row = NESTEROV
    _, _, model, optimizer = pair(
        with_dropout, lambda m: row.native(m.parameters(), lr=0.0), device
    )
    step = tr.TrainStep(mean_square(model), optimizer)
    x = noise(0, 6, 4, device=device)
    torch.manual_seed(1)
    first = [step(x).item() for _ in range(WARMUP + 5)]  # seeded before the capture
    assert len(set(first)) == len(first)
    torch.manual_seed(1)
    again = []
    for _ in first:
        again.append(step(x).item())  # seeded after it
        assert step.captured == (device == "cuda")
    assert again == pytest.approx(first, rel=1e-12)
    torch.manual_seed(2)
    assert not set(again) & {step(x).item() for _ in first}
    if device == "cuda":
        state = torch.cuda.get_rng_state()
        drawn = [step(x).item() for _ in range(3)]
        torch.cuda.set_rng_state(state)
        assert [step(x).item() for _ in range(3)] == drawn
        assert torch.rand(1, device=device) != torch.rand(1, device=device)


def test_draws_of_the_program_between_steps_are_the_native_ones(device):
    twins = Twins(with_dropout, ADAMW, mean_square, device)
    runs = []
    for step in (twins.native, twins.step):
        torch.manual_seed(3)
        runs.append(torch.stack([step(torch.rand(6, 4, device=device).double()) for _ in range(9)]))
    assert twins.step.captured == (device == "cuda")
    close(runs[1], runs[0])
    twins.check()


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


# -- two steps side by side ------------------------------------------------------------------------


def test_two_models_take_turns(device):
    """As a generator and a discriminator that share nothing; one of them more often."""
    one = Twins(mlp, ADAMW, fit, device)
    two = Twins(conv_bn, NESTEROV, classify_images, device)
    for i in range(12):
        one.run([on(device, vectors(i))])
        two.run([on(device, images(i))])
        if i % 2:
            two.run([on(device, images(100 + i))])
    one.check_replays(*[True] * 9)
    two.check_replays(*[True] * 15)
    one.check()
    two.check()


def test_two_steps_of_one_model(device):
    """Two losses of one model and optimizer; each step is captured for itself."""
    twins = Twins(mlp, ADAMW, fit, device)
    other_fns = [mean_square(model) for model in twins.models]
    other = by_hand(other_fns[0], twins.optimizers[0])
    other_step = tr.TrainStep(other_fns[1], twins.optimizers[1])
    for i, (x,) in enumerate(noises(10, 5, 4, device=device)):
        twins.run([(x,)])
        close(other_step(x), other(x))
        assert other_step.captured == (device == "cuda" and i >= WARMUP)
    twins.check_replays(*[True] * 7)
    twins.check()


def test_a_loop_by_hand_and_train_step_take_turns(device):
    """After captured steps the native loop goes on with our optimizer, and the other way round."""
    twins = Twins(conv_bn, ADAMW, classify_images, device)
    ours = by_hand(twins.loss_fns[1], twins.optimizers[1])
    for i in range(0, 24, 3):
        twins.run([on(device, images(i)), on(device, images(i + 1))])
        batch = on(device, images(i + 2))
        close(ours(*batch), twins.native(*batch))
    twins.check_replays(*[True] * 10)
    twins.check()


# -- micro-batches ---------------------------------------------------------------------------------


def accumulating(loss_fn, optimizer):
    """By hand: the mean of `k` micro-batches, one call each."""
    count = 0

    def micro_batch(k, *batch):
        nonlocal count
        loss = loss_fn(*batch)
        (loss / k).backward()
        count += 1
        if count == k:
            optimizer.step()
            optimizer.zero_grad()
            count = 0
        return loss.detach()

    return micro_batch


class MicroTwins(Twins):
    """Twins whose steps are micro-batches; run([(k, *batch), ...])."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.native = accumulating(self.loss_fns[0], self.optimizers[0])
        step = self.step

        def micro_batch(k, *batch):
            if step.accumulate != k:
                step.accumulate = k
            return step(*batch)

        self.train_step, self.step = step, micro_batch

    def run(self, batches):
        for k, *batch in batches:
            expected, got = self.native(k, *batch), self.step(k, *batch)
            close(got, expected, f"call {len(self.replayed)}")
            assert all(p.grad is None for p in self.models[1].parameters())
            self.replayed.append(self.train_step.captured)


@each_row
@pytest.mark.parametrize("k", [1, 2, 4])
def test_micro_batches_equal_one_big_batch(k, row, device):
    a, oa, b, ob = pair(mlp, lambda m: row.native(m.parameters(), **row.options), device)
    step = tr.TrainStep(fit(b), ob, accumulate=k)
    big = by_hand(fit(a), oa)
    assert step.accumulate == k
    for i in range(8):
        x = noise(i, 8, 4, device=device)
        expected, losses = big(x), []
        before = values_of(b.parameters())
        for n, part in enumerate(x.chunk(k)):
            assert equal(b.parameters(), before)  # until the last one there is no update
            losses.append(step(part))
            assert step.captured == (device == "cuda" and i * k + n >= WARMUP)
            assert all(p.grad is None for p in b.parameters())
        assert not equal(b.parameters(), before)
        close(torch.stack(losses).mean(), expected)
    same(a, b)
    same_state(oa, ob)


@each_row
def test_the_number_of_micro_batches_may_change_between_updates(row, device):
    twins = MicroTwins(mlp, row, fit, device, accumulate=2)
    ks = [2] * 8 + [4] * 8 + [1] * 4 + [3] * 6 + [2] * 4 + [1] * 2
    twins.run([(k, *on(device, vectors(i))) for i, k in enumerate(ks)])
    twins.check_replays(*[True] * 12)
    twins.check()


def test_a_number_set_amid_micro_batches_counts_from_the_next_update_on(device):
    twins = MicroTwins(mlp, NESTEROV, fit, device, accumulate=2)
    step, xs = twins.train_step, [on(device, vectors(i)) for i in range(20)]
    twins.run([(2, *x) for x in xs[:7]])
    step.accumulate = 3
    assert step.accumulate == 3
    close(step(*xs[7]), twins.native(2, *xs[7]))  # the second of two
    twins.run([(3, *x) for x in xs[8:14]])
    twins.check_replays(*[True] * 5)
    twins.check()


def branches(model):
    return lambda x, keys: model(x, keys)


# A replay must mark the gradients that it makes, and no others: neither those of micro-batches that
# came before it when it was captured, nor those of the cycle before.
SEQUENCES = {
    "a then b": ["a", "b"] * 5 + ["a", "a", "b", "b", "a", "a", "b", "b", "b", "a"],
    "b is captured in the middle": ["ab", "b"] * 4 + ["b", "b"] * 3 + ["a", "a", "a", "b"],
    "a is new in the middle": ["b"] * 8 + ["b", "a"] * 4 + ["a", "a"] * 2 + ["b", "b"],
    "all, then one": ["ab"] * 8 + ["a"] * 6 + ["b"] * 6 + ["ab", "a"],
}


@each_row
@pytest.mark.parametrize("sequence", SEQUENCES.values(), ids=SEQUENCES)
def test_parameters_without_a_gradient_in_some_micro_batches(sequence, row, device):
    """Momentum and decay would move those that had none in a whole cycle."""
    twins = MicroTwins(Two, row, branches, device, accumulate=2)
    xs = [noise(i, 3, 4, device=device) for i in range(len(sequence))]
    twins.run([(2, x, tuple(keys)) for x, keys in zip(xs, sequence, strict=True)])
    twins.check_replays(True)
    twins.check()


@each_row
def test_another_shape_amid_micro_batches(row, device):
    """Eager and captured micro-batches add up."""
    twins = MicroTwins(mlp, row, fit, device, accumulate=3)
    sizes = [6] * 6 + [6, 2, 6] + [6, 6, 2] + [2, 6, 6] + [6, 9, 2] * 3
    batches = [(3, noise(i, size, 4, device=device)) for i, size in enumerate(sizes)]
    twins.run(batches[:9])
    twins.check_replays(True, True, True, True, False, True)
    twins.run(batches[9:])
    twins.check_replays(True, True, True)
    twins.check()


def test_batch_norm_sees_every_micro_batch(device):
    twins = MicroTwins(conv_bn, NESTEROV, classify_images, device, accumulate=2)
    twins.run([(2, *on(device, images(i))) for i in range(10)])
    assert twins.models[1][1].num_batches_tracked == 10
    twins.check_replays(*[True] * 7)
    twins.check()


def test_an_exception_amid_micro_batches_counts_for_nothing(device):
    def loss_of(model):
        def loss_fn(x):
            if len(x) == 3:
                raise ValueError("a bad batch")
            return model(x).pow(2).mean()

        return loss_fn

    twins = MicroTwins(mlp, ADAMW, loss_of, device, accumulate=2)
    for i in range(16):
        twins.run([(2, noise(i, 5, 4, device=device))])
        if i in (0, 4, 9):
            with warnings.catch_warnings(), pytest.raises(ValueError, match="a bad batch"):
                warnings.simplefilter("ignore")  # at the second one a capture is tried
                twins.train_step(noise(i, 3, 4, device=device))
    twins.check_replays(True, True, True)
    twins.check()


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("captured", [False, True])
def test_an_infinite_micro_batch_skips_the_update(captured, at, device):
    """In fp16; the next cycle starts from zero sums."""
    torch.manual_seed(0)
    model = mlp().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tr.accelerate(model, optimizer)
    step = tr.TrainStep(
        mean_square(model),
        optimizer,
        precision="fp16",
        accumulate=3,
        warmup=WARMUP if captured else NEVER,
    )
    optimizer.amp.load_state_dict({**optimizer.amp.state_dict(), "scale": 1024.0})
    xs = [noise(i, 5, 4, device=device, dtype=torch.float32) for i in range(24)]
    for i in range(2):
        for x in xs[3 * i : 3 * i + 3]:
            step(x)
    assert int(optimizer.skipped_steps) == 0
    before = values_of(model.parameters())
    state = pytree.tree_leaves(optimizer.state_dict()["state"])
    state = [x.clone() for x in state if isinstance(x, torch.Tensor)]
    for n, x in enumerate(xs[6:9]):
        bad = torch.full_like(x, torch.inf) if n == at else x
        step(bad)
        assert step.captured == (captured and device == "cuda")
    assert equal(model.parameters(), before)
    after = pytree.tree_leaves(optimizer.state_dict()["state"])
    assert equal([x for x in after if isinstance(x, torch.Tensor)], state)
    assert int(optimizer.skipped_steps) == 1
    assert optimizer.amp.get_scale() == 512.0
    for x in xs[9:12]:
        step(x)
    assert int(optimizer.skipped_steps) == 1
    assert not equal(model.parameters(), before)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("accumulate", [0, -1, 2.0, True, "2", None], ids=repr)
def test_what_accumulate_must_not_be(accumulate, device):
    twins = Twins(mlp, NESTEROV, fit, device, accumulate=2)
    with pytest.raises(ValueError, match=r"accumulate must be an int >= 1, got"):
        twins.step.accumulate = accumulate
    assert twins.step.accumulate == 2
    with pytest.raises(ValueError, match=r"accumulate must be an int >= 1, got"):
        tr.TrainStep(twins.loss_fns[1], twins.optimizers[1], accumulate=accumulate)


# --- compile -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:TrainStep runs eagerly")
@pytest.mark.parametrize("compile", [{"backend": "eager"}, {"backend": "aot_eager"}], ids=str)
def test_compile_takes_torch_compiles_arguments(compile, device):
    losses = []
    for option in (False, compile):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).to(device)
        model, optimizer = tr.accelerate(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def loss_fn(x, y, model=model):
            return nn.functional.cross_entropy(model(x), y)

        step = tr.TrainStep(loss_fn, optimizer, compile=option)
        x, y = torch.randn(4, 8).to(device), torch.randint(3, (4,)).to(device)
        losses.append([step(x, y).item() for _ in range(6)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    "compile, error, message",
    [
        (1, TypeError, "compile must be a bool, a mode of torch.compile or a dict"),
        (None, TypeError, "compile must be a bool"),
        ("reduce-overhead", ValueError, "asks for CUDA graphs of torch.compile's"),
        ({"options": {"triton.cudagraphs": True}}, ValueError, "asks for CUDA graphs"),
        ({"backend": "cudagraphs"}, ValueError, "asks for CUDA graphs"),
    ],
)
def test_compile_is_refused_in_a_sentence(compile, error, message, device):
    model, optimizer = tr.accelerate(
        model := nn.Linear(2, 2, device=device), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    with pytest.raises(error, match=message):
        tr.TrainStep(lambda x: model(x).sum(), optimizer, compile=compile)
