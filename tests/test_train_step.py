# SPDX-License-Identifier: BSD-3-Clause
# TrainStep trains as the loop does that it stands for: all kinds of models, random numbers, two
# steps side by side, and compile=.

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from stepping import (
    ADAMW,
    NESTEROV,
    NEVER,
    WARMUP,
    Twins,
    by_hand,
    classify_images,
    each_row,
    fit,
    images,
    mean_square,
    no_fallback,
    noise,
    noises,
    on,
    vectors,
)
from testing import DEVICES, LM, close, conv_bn, equal, mlp, pair, same, same_state
from torch import nn

import torch_renaissance as tr

pytestmark = [pytest.mark.parametrize("device", DEVICES), no_fallback]


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


def next_token(model):
    return lambda tokens: F.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


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
