# SPDX-License-Identifier: BSD-3-Clause
# Captured with precision=, gradients of weights are computed beside the rest of backward: to the
# same bits, and only where nothing else touches them before the update. On a CPU with the tests'
# stand-in for graphs.

import sys
from typing import ClassVar

import pytest
import replaying
import torch
import torch.nn.functional as F
from testing import DEVICES
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torch_renaissance as tr
from torch_renaissance._eager import Eager, _Aids
from torch_renaissance._weight_gradients import WeightGradients

has_grad_dtype = hasattr(torch.Tensor, "grad_dtype")
pytestmark = [
    pytest.mark.parametrize("device", DEVICES),
    pytest.mark.skipif(not has_grad_dtype, reason="torch before 2.10 casts gradients at once"),
]


@pytest.fixture(autouse=True)
def puts(device, monkeypatch):
    """How many gradients were put on a branch, in a list."""
    if device == "cpu":
        replaying.capture_steps(monkeypatch)
        train_step = sys.modules["torch_renaissance.train_step"]
        monkeypatch.setattr(train_step, "static_input", replaying.filled)
    count = [0]

    def enter(self, enter=WeightGradients.__enter__):
        entered = enter(self)
        if entered._modules:
            put = entered._put

            def counted(work):
                count[0] += 1
                put(work)

            entered._put = counted
        return entered

    def aside(self, kind, work, names, reads, aside=WeightGradients.aside):
        before = count[0]
        found = aside(self, kind, work, names, reads)
        for t, name in zip(found, names, strict=False):
            if count[0] > before and t is not None:  # else autograd would copy it at once
                assert t.stride() == self._stand_ins[name].stride()
        return found

    monkeypatch.setattr(WeightGradients, "__enter__", enter)
    monkeypatch.setattr(WeightGradients, "aside", aside)
    return count


# -- models, and losses of them --------------------------------------------------------------------


def mlp():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8, bias=False), nn.Linear(8, 5))


def convs():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, groups=8, bias=False),
        nn.Conv2d(8, 6, 2, dilation=2),
        nn.Flatten(),
        nn.Linear(6, 5),
    )


def transposed():
    model = mlp()
    model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
    return model


def channels_last():
    return convs().to(memory_format=torch.channels_last)


def padded():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding="same"),
        nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular"),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


class TurnedInput(nn.Module):
    """Weights are contiguous; with an input of channels_last torch makes their gradients so."""

    def __init__(self):
        super().__init__()
        self.convs = convs()

    def forward(self, x):
        return self.convs(x.contiguous(memory_format=torch.channels_last))


class Sequences(nn.Module):
    """Rows of more than one dimension, a convolution of one, and weights that attention reads."""

    def __init__(self):
        super().__init__()
        self.up, self.conv = nn.Linear(6, 8), nn.Conv1d(8, 8, 3, padding=1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.up(x)
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


def parametrized():
    """Their weights are computed at each forward; a spectral norm moves on as it is."""
    return nn.Sequential(
        spectral_norm(nn.Linear(6, 16)), nn.ReLU(), weight_norm(nn.Linear(16, 8)), nn.Linear(8, 5)
    )


class Twice(nn.Module):
    """One layer is called twice, two share a weight, and of one the weight is used by hand too."""

    def __init__(self):
        super().__init__()
        self.twice, self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight = self.a.weight
        self.by_hand, self.head = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x):
        x = self.b(torch.tanh(self.a(self.twice(torch.tanh(self.twice(x))))))
        return self.head(self.by_hand(x) + F.linear(x, self.by_hand.weight))


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.reentrant = reentrant

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = checkpoint(
            lambda x: torch.tanh(self.inner(x)),
            x,
            use_reentrant=self.reentrant,
            preserve_rng_state=False,
        )
        return self.last(x)


def frozen():
    model = mlp()
    model[0].weight.requires_grad_(False)
    model[2].requires_grad_(False)
    return model


def of_logits(model, x, y):
    return F.cross_entropy(model(x), y)


def penalty_on_gradient(model, x, y):
    """Differentiates twice, through gradients of weights."""
    loss = of_logits(model, x, y)
    (grad,) = torch.autograd.grad(loss, model[0].weight, create_graph=True)
    return loss + grad.float().square().sum()


def penalty(model, x, y):
    """On a parameter that the program has kept, beside the copy that its layer has."""
    return of_logits(model, x, y) + model.kept[0].square().sum() + model.kept[-1].square().sum()


def uses_gradient(model, x, y):
    """A backward in forward, whose results are read at once."""
    inner = of_logits(model, x, y)
    (grad,) = torch.autograd.grad(inner, model[0].weight, retain_graph=True)
    return inner * (1 + grad.float().detach().norm())


def in_float32(model, x, y):
    with torch.autocast(x.device.type, enabled=False):
        first = F.linear(x, model[0].weight.float(), model[0].bias.float())
    return F.cross_entropy(model[1:](first), y)


VECTOR, IMAGE, SEQUENCE = (4, 6), (4, 3, 8, 8), (4, 7, 6)
CASES = {  # model, shape of its input, loss, and how many layers' gradients go aside
    "mlp": (mlp, VECTOR, of_logits, 3),
    "convs": (convs, IMAGE, of_logits, 4),
    "channels_last": (channels_last, IMAGE, of_logits, 4),
    "transposed": (transposed, VECTOR, of_logits, 3),
    "turned input": (TurnedInput, IMAGE, of_logits, 4),
    "padded": (padded, IMAGE, of_logits, 1),
    "sequences": (Sequences, SEQUENCE, of_logits, 3),
    "parametrized": (parametrized, VECTOR, of_logits, 1),
    "twice": (Twice, VECTOR, of_logits, 1),
    "frozen": (frozen, VECTOR, of_logits, 1),
    "checkpoint": (lambda: Checkpointed(False), VECTOR, of_logits, 3),
    "reentrant checkpoint": (lambda: Checkpointed(True), VECTOR, of_logits, 0),
    "penalty": (mlp, VECTOR, penalty, 1),
    "penalty on a gradient": (mlp, VECTOR, penalty_on_gradient, None),
    "gradient in forward": (mlp, VECTOR, uses_gradient, 2),  # it reads the first layer's weight
    "in float32": (mlp, VECTOR, in_float32, None),
}


def train(case, device, precision="fp16", steps=7, **options):
    """Losses, parameters, buffers and state after some steps."""
    make, shape, loss, _ = CASES[case]
    torch.manual_seed(0)
    model = make().to(device)
    model.kept = list(model.parameters())
    _, optimizer = tr.accelerate(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    step = tr.TrainStep(
        lambda x, y: loss(model, x, y), optimizer, precision=precision, strict=True, **options
    )
    if precision == "fp16":
        optimizer.amp.load_state_dict(optimizer.amp.state_dict() | {"scale": 128.0})
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randn(shape, generator=generator).to(device)
        y = torch.randint(5, shape[:1], generator=generator).to(device)
        losses.append(step(x, y))
    assert step.captured
    state = optimizer.state_dict()["state"].values()
    values = *losses, *model.parameters(), *model.buffers()
    return [*values, *(t for entries in state for t in entries.values())]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_to_the_same_bits_as_torchs(case, precision, device, puts, monkeypatch):
    wanted = CASES[case][3]
    ours = train(case, device, precision)
    assert wanted is None or puts[0] == wanted
    before = puts[0]
    monkeypatch.setattr(Eager, "_aids", lambda self, pool: _Aids())
    torchs = train(case, device, precision)
    assert puts[0] == before
    assert all(map(torch.equal, ours, torchs))


class Backwards(TorchDispatchMode):
    """Counts what computes gradients; where no step looks for Python's state."""

    counts: ClassVar[list[int]] = []

    def __enter__(self):
        self.counts.append(0)
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "aten::convolution_backward":
            self.counts[-1] += sum(args[-1])
        self.counts[-1] += func._schema.name in ("aten::mm", "aten::sum")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make, shape", [(mlp, VECTOR), (convs, IMAGE)])
def test_a_backward_for_the_input_computes_no_gradients_of_weights(make, shape, device, puts):
    model = make().to(device)
    _, optimizer = tr.accelerate(model, torch.optim.SGD(model.parameters(), lr=0.1))
    Backwards.counts.clear()

    def loss_fn(x):
        x = x.detach().requires_grad_()
        score = model(x).square().mean()
        with Backwards():
            (grad,) = torch.autograd.grad(score, x, create_graph=True)
        return score + grad.square().sum()

    step = tr.TrainStep(loss_fn, optimizer, precision="bf16", strict=True, warmup=2)
    for _ in range(4):
        step(torch.randn(shape, device=device))
    assert step.captured
    assert Backwards.counts == [Backwards.counts[0]] * 3  # two natively, and one in the capture


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"verify": True}], ids=str)
def test_with_other_options(options, device, puts, monkeypatch):
    ours = train("convs", device, steps=8, **options)
    assert puts[0] == 4
    monkeypatch.setattr(Eager, "_aids", lambda self, pool: _Aids())
    assert all(map(torch.equal, ours, train("convs", device, steps=8, **options)))


@pytest.mark.parametrize(
    "bound, most, wanted",
    [
        ("MOST_KEPT", 2 * 4 * (8 + 5), 1),  # of the last layer 4 x 8 inputs and 4 x 5 gradients
        ("MOST_KEPT", 0, 0),
        ("LARGEST", 2 * 4 * (8 + 5), 1),
        ("LARGEST", 2 * 4 * (6 + 16), 2),  # of the first layer; the second reads 4 x (16 + 8)
    ],
)
def test_bounds_on_what_goes_aside(bound, most, wanted, device, puts, monkeypatch):
    ours = train("mlp", device)
    assert puts[0] == 3
    most = {"linear": most, "conv": 0} if bound == "LARGEST" else most
    monkeypatch.setattr(WeightGradients, bound, most)
    bounded = train("mlp", device)
    assert puts[0] == 3 + wanted
    assert all(map(torch.equal, ours, bounded))


def test_nothing_goes_aside_without_16_bit_copies_or_with_compiled_code(device, puts):
    train("mlp", device, precision=None)
    assert puts[0] == 0
    torch.manual_seed(0)
    model = mlp().to(device)
    _, optimizer = tr.accelerate(model, torch.optim.SGD(model.parameters(), lr=0.1))
    compiled = torch.compile(model, backend="eager")
    step = tr.TrainStep(
        lambda x: compiled(x).square().mean(), optimizer, precision="bf16", strict=True
    )
    for _ in range(5):
        step(torch.randn(4, 6, device=device))
    assert step.captured and puts[0] == 0


def test_modules_are_as_before(device):
    torch.manual_seed(0)
    model = mlp().to(device)
    _, optimizer = tr.accelerate(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fails = []

    def loss_fn(x):
        if fails:
            raise KeyError("on purpose")
        return model(x).square().mean()

    step = tr.TrainStep(loss_fn, optimizer, precision="bf16", warmup=2)
    x = torch.randn(4, 6, device=device)
    for _ in range(4):
        step(x)
    assert step.captured
    assert not any("forward" in vars(m) for m in model.modules())
    fails.append(True)
    with pytest.raises(KeyError, match="on purpose"):
        step(x)
    assert not any("forward" in vars(m) for m in model.modules())
