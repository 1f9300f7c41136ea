# SPDX-License-Identifier: BSD-3-Clause
# What the tests share: devices, bounds with their reasons, the table of optimizers, small models,
# and `pair`, `both`, `same`, which train an accelerated model beside a native one.

import copy
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_renaissance as tr

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
GRADIENTS = ["gather", "flat"]
LOW_PRECISION = [torch.bfloat16, torch.float16]

# Bounds, as fractions of the largest value of a tensor (`worst`) or as assert_close takes them.
#
# fp64, given gradients: a step rounds some ten times at 1.1e-16, so 100 steps stay below 1.1e-13.
# Ten times that leaves room for another order of operations; no wrong formula is that close.
FP64 = 1e-12
# Training beside native (`pair`) is done in fp64 as well, since there a wrong step cannot hide: the
# model hands rounding on to the next gradients, and Adam's quotient hands the relative error of a
# small gradient on to the weight in full. A factor of 1e6 for that is generous in a dozen steps.
# In fp32 the same factor would hide a wrong step, so test_optim.py measures fp32 with gradients
# given, and the few trainings in fp32 get what was derived for given gradients, 12 x 10 roundings
# at 6e-8, times 10 for the model (on CUDA 100, where cuBLAS may change algorithms with addresses).
TRAINING = {
    (torch.float64, "cpu"): {"rtol": 1e-10, "atol": 1e-10},
    (torch.float64, "cuda"): {"rtol": 1e-10, "atol": 1e-10},
    (torch.float32, "cpu"): {"rtol": 1e-4, "atol": 1e-5},
    (torch.float32, "cuda"): {"rtol": 1e-3, "atol": 1e-4},
}


@dataclass(frozen=True)
class Optimizer:
    """One way to train: torch's class, ours, and the options given to both."""

    native: type
    ours: type
    options: dict = field(default_factory=dict)

    @property
    def plain(self):
        return bool(self.options.get("fused"))

    def __str__(self):
        words = [f"{key}={value}" for key, value in self.options.items()]
        return "-".join([self.native.__name__, *words]).replace(" ", "")


def _table(native, ours, *options):
    return [Optimizer(native, ours, chosen) for chosen in options]


_ADAM = (
    {},
    {"lr": 0.05, "weight_decay": 0.3},
    {"lr": 0.05, "weight_decay": 0.0, "betas": (0.8, 0.95), "eps": 0.1},
    {"lr": 0.05, "amsgrad": True},
    {"lr": 0.05, "maximize": True, "weight_decay": 0.1},
    {"lr": 0.05, "amsgrad": True, "maximize": True, "weight_decay": 0.1, "betas": (0.0, 0.5)},
    {"lr": 0.0},
    {"lr": 0.05, "foreach": False},
    {"lr": 0.05, "fused": True, "weight_decay": 0.1},
)
OPTIMIZERS = [
    *_table(
        torch.optim.SGD,
        tr.optim.SGD,
        {},
        {"lr": 0.05, "weight_decay": 0.3},
        {"lr": 0.05, "momentum": 0.9},
        {"lr": 0.05, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
        {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"lr": 0.05, "momentum": 0.9, "maximize": True, "weight_decay": 0.1},
        {"lr": 0.0, "momentum": 0.9},
        {"lr": 0.05, "momentum": 0.9, "foreach": False},
        {"lr": 0.05, "momentum": 0.9, "fused": True},
    ),
    *_table(torch.optim.Adam, tr.optim.Adam, *_ADAM, {"weight_decay": 0.1, "lr": 1}),
    *_table(torch.optim.AdamW, tr.optim.AdamW, *_ADAM),
]
OPTIMIZERS.append(
    Optimizer(torch.optim.Adam, tr.optim.Adam, {"decoupled_weight_decay": True, "lr": 0.05})
)
# One of each class, with everything that can go wrong switched on: for tests of meaning.
USUAL = [
    *_table(torch.optim.SGD, tr.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    *_table(torch.optim.Adam, tr.optim.Adam, {"lr": 0.02, "weight_decay": 0.1}),
    *_table(torch.optim.AdamW, tr.optim.AdamW, {"lr": 0.02, "weight_decay": 0.5}),
]


class Two(nn.Module):
    """Two branches, of which a call uses those named in `keys`."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, keys):
        return sum(getattr(self, key)(x).pow(2).sum() for key in keys)


class LM(nn.Module):
    """A language model's skeleton: the embedding and the head are one parameter."""

    def __init__(self):
        super().__init__()
        self.emb, self.mid, self.norm = nn.Embedding(7, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens):
        return F.cross_entropy(self.head(self.norm(torch.tanh(self.mid(self.emb(tokens))))), tokens)


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def conv_bn():
    """No bias before a norm: its gradient is zero but for rounding, which Adam would blow up."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 1),
        nn.Conv2d(4, 4, 3, groups=4),
    )


def x_of(device, dtype=torch.float64):
    return torch.linspace(-1, 1, 8, device=device, dtype=dtype).view(2, 4)


def square(model):
    """The usual loss of an `mlp` on `x_of` its device and dtype."""
    p = next(model.parameters())
    return model(x_of(p.device, p.dtype)).pow(2).sum()


def parameters(device, dtype, plain=False):
    """Parameters of every shape and layout, with the same values for every device and dtype.

    `plain`, here and below: only what torch's own fused kernels can do. They take no tensor with
    gaps, no gradient of another layout, and no parameter that joins SGD's momentum late.
    """
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        values = torch.randn(shape, generator=generator).bfloat16()  # exact in every dtype
        return values.to(device, dtype)

    buffer = randn(97)
    values = [
        *(randn(*shape) for shape in ((0,), (0, 3), (), (1,), (7,), (33, 5), (3, 701), (2500,))),
        randn(6, 4).t(),
        randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        randn(4, 3, 1, 1).to(memory_format=torch.channels_last),
        buffer[1:18],
        buffer[18:49],
    ]
    return [nn.Parameter(value) for value in values + ([] if plain else [randn(10, 4)[:, ::2]])]


def set_gradients(params, step, plain=False, dtype=torch.float32):
    """Gradients of step `step`: random, some of them None, some of another layout."""
    generator = torch.Generator().manual_seed(step)
    for i, p in enumerate(params):
        values = torch.randn(p.shape, generator=generator).to(dtype)
        gradient = values.to(p.device, p.dtype)
        if plain or step % 3:
            gradient = torch.empty_like(p).copy_(gradient).detach()
        missing = (step + i) % 5 == 0 and not (plain and step == 0)
        p.grad = None if missing else gradient


def train(optimizer, params, steps, **options):
    for step in steps:
        set_gradients(params, step, **options)
        optimizer.step()


def skip_where_torchs_fused_is_wrong(native, device, dtype):
    """torch 2.11's fused SGD on a CPU leaves most of a 16-bit tensor as it was; 2.14's is right."""
    p, gradient, momentum = (torch.ones(64, dtype=dtype, device=device) for _ in range(3))
    options = {"weight_decay": 0.0, "momentum": 0.5, "lr": 1.0, "dampening": 0.0}
    flags = {"nesterov": False, "maximize": False, "is_first_step": False}
    torch._fused_sgd_([p], [gradient], [momentum], **options, **flags)
    if native is torch.optim.SGD and not (p == -0.5).all():
        pytest.skip("torch's own fused SGD is wrong here")


def clones(params):
    """Parameters with the same values, in memory of their own."""
    return [nn.Parameter(p.detach().clone()) for p in params]


def values_of(params):
    return [p.detach().clone() for p in params]


def equal(xs, ys):
    """Bitwise equality of two lists of tensors."""
    return all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


def worst(xs, ys):
    """Largest difference, as a fraction of the largest value of its tensor."""
    pairs = [
        (x.detach().double(), y.detach().double()) for x, y in zip(xs, ys, strict=True) if y.numel()
    ]
    shares = [(x - y).abs().max() / y.abs().max().clamp(min=1e-300) for x, y in pairs]
    return float(torch.stack(shares).max()) if shares else 0.0


def bounds(x):
    return TRAINING.get((x.dtype, x.device.type), {"rtol": 0, "atol": 0})


def close(ours, native, what=""):
    torch.testing.assert_close(ours, native, **bounds(native), msg=lambda text: f"{what}: {text}")


def same(native, ours):
    """Equal parameters and buffers, under equal names."""
    a, b = native.state_dict(), ours.state_dict()
    assert list(a) == list(b)
    for name in a:
        close(b[name], a[name], name)


def same_state(native, ours, values=True):
    """Equal keys, shapes, dtypes, devices and (unless only these are asked for) values."""
    a, b = native.state_dict(), ours.state_dict()
    assert [g.keys() for g in b["param_groups"]] == [g.keys() for g in a["param_groups"]]
    assert b["state"].keys() == a["state"].keys()
    for i, entries in a["state"].items():
        assert b["state"][i].keys() == entries.keys()
        for key, x in entries.items():
            y = b["state"][i][key]
            assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device), (i, key)
            if values:
                close(y, x, f"state {i} {key}")


def pair(make, make_optimizer, device, dtype=torch.float64, **options):
    """(native model, its optimizer, accelerated model, its optimizer), from equal weights.

    dtype=None leaves the model's dtypes alone.
    """
    torch.manual_seed(0)
    native = make().to(device, dtype) if dtype else make().to(device)
    model = copy.deepcopy(native)
    native_optimizer, optimizer = make_optimizer(native), make_optimizer(model)
    returned = tr.accelerate(model, optimizer, **options)
    assert returned[0] is model and returned[1] is optimizer
    return native, native_optimizer, model, optimizer


def usual_pair(make, usual, device, **options):
    return pair(make, lambda m: usual.native(m.parameters(), **usual.options), device, **options)


def both(a, oa, b, ob, loss, steps=1):
    """Step the native and the accelerated model alike."""
    for _ in range(steps):
        for model, optimizer in ((a, oa), (b, ob)):
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
