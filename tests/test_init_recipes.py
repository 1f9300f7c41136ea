# SPDX-License-Identifier: BSD-3-Clause
# tr.init's recipes over models: kinds and names of parameters, seeds, devices, tied parameters,
# tr.accelerate and autograd; and zero_gamma beside torchvision's own and by structure.

import math

import pytest
import torch
import torchvision
from initializing import RECIPE, ZERO_GAMMA, each_device, each_dtype, filled, same_values
from testing import LM, conv_bn, equal, mlp, square, values_of
from torch import nn
from torchvision.models import resnet as resnet_blocks

import torch_renaissance as tr
from torch_renaissance import init
from torch_renaissance.init import _recipe
from torch_renaissance.init._residual import last_norm_weights
from torch_renaissance.regions import classify


def nets(device="cpu", dtype=torch.float32):
    """A network with every kind of parameter."""
    return Everything().to(device, dtype)


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.norm, self.linear = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 6)
        self.conv1, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.conv2, self.act = nn.Conv2d(4, 4, 3), nn.PReLU()
        self.other = nn.Parameter(torch.zeros(3, 5))


def values_by_name(model):
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


# -- recipes ---------------------------------------------------------------------------------------


@each_device
@each_dtype
def test_kinds_and_their_defaults(dtype, device):
    model = nets(device, dtype)
    assert {kind for _, kind in classify(model).values()} == set(tr.Kind)
    assert RECIPE.initialize(model, seed=0) is model
    for p, (name, kind) in classify(model).items():
        if kind is tr.Kind.NORM_WEIGHT:
            assert (p == 1).all(), name
        elif kind.bias_like:
            assert (p == 0).all(), name
        else:
            std = math.sqrt(2) / math.sqrt(p[0].numel())
            draw = ("normal", 0.0, std)
            expected = filled(p.shape, draw, 0, _recipe.stream_of(name), dtype, device)
            assert torch.equal(p, expected), name


def test_each_kind_can_be_told():
    for kind in tr.Kind:
        model = nets()
        recipe = init.Recipe(None, biases=None, norm_weights=None)
        before = values_by_name(model)
        recipe.on(kind, init.constant(0.125)).initialize(model)
        for p, (name, of) in classify(model).items():
            assert torch.equal(p, torch.full_like(p, 0.125) if of is kind else before[name])


def test_constants_and_groups_of_kinds():
    recipe = init.Recipe(
        init.constant(2.0), biases=init.constant(3.0), norm_weights=init.constant(4.0)
    )
    model = recipe.initialize(nets())
    for p, (name, kind) in classify(model).items():
        expected = 4.0 if kind is tr.Kind.NORM_WEIGHT else 3.0 if kind.bias_like else 2.0
        assert (p == expected).all(), name


def test_what_is_said_last_counts():
    kinds = (tr.Kind.FIRST_CONV, tr.Kind.DEEP_CONV)
    recipe = (
        RECIPE.on(kinds, init.constant(2.0))
        .on("conv2.*", init.constant(3.0))
        .on(["*.bias", tr.Kind.EMBEDDING], init.constant(4.0))
        .on("act.weight", None)
    )
    model = recipe.initialize(nets())
    for module, weight, bias in ((model.conv1, 2, 4), (model.conv2, 3, 4)):
        assert (module.weight == weight).all() and (module.bias == bias).all()
    assert (model.emb.weight == 4).all() and (model.norm.bias == 4).all()
    assert model.act.weight.item() == 0.25, "left as it was"
    assert (recipe.on("*", init.ones()).initialize(model).act.weight == 1).all()


def test_recipes_hold_no_state():
    recipe = init.Recipe(init.xavier_uniform())
    other = recipe.on(tr.Kind.EMBEDDING, init.normal(0.0, 0.02))
    assert recipe == init.Recipe(init.xavier_uniform()) != other
    a, b = (recipe.initialize(nets(), seed=3) for _ in range(2))
    assert same_values(values_by_name(a), values_by_name(b))


def test_values_depend_on_seed_and_name_alone():
    """Other parameters, their order, frozen ones and torch's generator don't matter."""
    a, b = nn.Linear(4, 6), nn.Linear(4, 6)
    one = RECIPE.initialize(nn.ModuleDict({"a": a, "b": b, "c": nn.Linear(2, 2)}), seed=5)
    expected = values_by_name(one)
    assert not torch.equal(expected["a.weight"], expected["b.weight"])
    torch.manual_seed(99)
    frozen = nn.Linear(4, 6).requires_grad_(False)
    other = RECIPE.initialize(nn.ModuleDict({"b": nn.Linear(4, 6), "a": frozen}), seed=5)
    found = values_by_name(other)
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert not other["a"].weight.requires_grad
    again = RECIPE.initialize(nn.ModuleDict({"a": nn.Linear(4, 6)}), seed=6)
    assert not torch.equal(values_by_name(again)["a.weight"], expected["a.weight"])


def test_torchs_generators_are_left_alone():
    model = nets()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    RECIPE.initialize(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_default_seed_is_torchs_last():
    for n, set_seed in ((5, torch.manual_seed), (6, tr.seed), (2**64 - 1, torch.manual_seed)):
        set_seed(n)
        torch.rand(3)
        a, b = RECIPE.initialize(nets()), RECIPE.initialize(nets(), seed=n)
        assert same_values(values_by_name(a), values_by_name(b))


def test_seeds_have_64_bits():
    seeds = (0, 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
    weights = [RECIPE.initialize(nn.Linear(4, 4), seed=s).weight for s in seeds]
    assert len({tuple(w.flatten().tolist()) for w in weights}) == len(seeds)


@pytest.mark.cuda
@each_dtype
def test_devices_agree(dtype):
    values = []
    for device in ("cpu", "cuda"):
        recipe = RECIPE.on("emb.*", init.trunc_normal(0, 0.02)).on("other", init.xavier_uniform())
        values.append(values_by_name(recipe.initialize(nets(device, dtype), seed=1)))
    assert same_values(*values)


@each_device
def test_without_a_kernel_of_ours(device, monkeypatch):
    expected = RECIPE.initialize(conv_bn().to(device), seed=1)
    monkeypatch.setattr(_recipe, "_NATIVE", frozenset())
    model = RECIPE.initialize(conv_bn().to(device, memory_format=torch.channels_last), seed=1)
    assert same_values(values_by_name(model), values_by_name(expected))


@each_device
def test_channels_last(device):
    a, b = conv_bn().to(device), conv_bn().to(device, memory_format=torch.channels_last)
    strides = [p.stride() for p in b.parameters()]
    RECIPE.initialize(a, seed=1)
    RECIPE.initialize(b, seed=1)
    assert same_values(values_by_name(a), values_by_name(b))
    assert [p.stride() for p in b.parameters()] == strides
    assert not b[0].weight.is_contiguous()


@each_device
def test_tied_parameters_have_their_first_name(device):
    model = RECIPE.initialize(LM().to(device, torch.float64), seed=2)
    assert model.head.weight is model.emb.weight
    draw = ("normal", 0.0, math.sqrt(2 / 4))
    stream = _recipe.stream_of("emb.weight")
    assert torch.equal(model.emb.weight, filled((7, 4), draw, 2, stream, device=device))


@each_device
@pytest.mark.parametrize("gradients", ["gather", "flat"])
def test_before_and_after_accelerate(gradients, device):
    """The same values in the same memory, and training goes on from them."""
    a, b = (mlp().to(device, torch.float64) for _ in range(2))
    results = []
    for model, first in ((a, True), (b, False)):
        if first:
            RECIPE.initialize(model, seed=4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        tr.accelerate(model, optimizer, gradients=gradients)
        if not first:
            addresses = [p.data_ptr() for p in model.parameters()]
            RECIPE.initialize(model, seed=4)
            assert [p.data_ptr() for p in model.parameters()] == addresses
        start = values_of(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            square(model).backward()
            optimizer.step()
        assert not tr.regions(optimizer).loose
        assert not equal(start, model.parameters())
        results.append((start, values_of(model.parameters())))
    assert equal(results[0][0], results[1][0]) and equal(results[0][1], results[1][1])


@each_device
def test_autograd_notices_the_change(device):
    model = mlp().to(device, torch.float64)
    loss = square(model)
    RECIPE.initialize(model, seed=0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_meta_models_stay_without_values():
    model = nets("meta")
    assert RECIPE.initialize(model) is model
    assert all(p.is_meta for p in model.parameters())


def test_empty_and_no_parameters():
    class Empty(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(0, 3))

    RECIPE.initialize(Empty(), seed=0)
    RECIPE.initialize(nn.ReLU(), seed=0)


# -- zero_gamma ------------------------------------------------------------------------------------


def zeroed(model):
    return [n for n, p in model.named_parameters() if n.endswith("weight") and not p.any()]


def resnet(block, **options):
    return torchvision.models.ResNet(block, [1, 2, 1, 1], num_classes=2, **options)


@pytest.mark.parametrize("block", [resnet_blocks.BasicBlock, resnet_blocks.Bottleneck])
def test_zero_gamma_is_torchvisions(block):
    """The norms that torchvision's own zero_init_residual starts from zero."""
    expected = zeroed(resnet(block, zero_init_residual=True))
    assert len(expected) == 5
    model = ZERO_GAMMA.initialize(resnet(block), seed=0)
    assert zeroed(model) == expected
    assert zeroed(RECIPE.initialize(model, seed=0)) == []


def test_zero_gamma_where_convolutions_bring_their_norm():
    """torchvision's video ResNets: conv2 is a Sequential of convolution and norm."""
    with torch.device("meta"):
        model = torchvision.models.video.r3d_18()
    found = set(last_norm_weights(model))
    assert [n for n, p in model.named_parameters() if p in found] == [
        f"layer{i}.{j}.conv2.1.weight" for i in range(1, 5) for j in range(2)
    ]


class Block(nn.Module):
    """A residual block; `order` says which children it has, and in which order."""

    def __init__(self, order, shortcut="shortcut", norm=nn.BatchNorm2d):
        super().__init__()
        setattr(self, shortcut, nn.Sequential(nn.Conv2d(4, 4, 1), norm(4)))
        for name in order.split():
            conv = name.startswith("conv")
            self.add_module(name, nn.Conv2d(4, 4, 3, padding=1) if conv else norm(4))
        self.se = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Sigmoid())


class NormAct(nn.BatchNorm2d):
    """As timm's norms with an activation inside."""

    def __init__(self, width):
        super().__init__(width)
        self.act = nn.ReLU()


def group_norm(width):
    return nn.GroupNorm(2, width)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, NormAct, group_norm])
@pytest.mark.parametrize("shortcut", ["shortcut", "downsample"])
@pytest.mark.parametrize(
    ("order", "last"),
    [
        ("conv1 bn1 conv2 bn2", "bn2"),
        ("conv1 bn1 conv2 bn2 conv3 bn3", "bn3"),
        ("conv1 norm1 conv2 norm2", "norm2"),
        ("conv1 conv2 bn1 bn2", "bn2"),
        ("bn1 conv1 bn2 conv2", None),  # the norm comes first: the branch ends in a convolution
        ("conv1 bn1 conv2", None),
        ("conv_dw bn1", None),
    ],
)
def test_zero_gamma_by_structure(order, last, shortcut, norm):
    model = nn.Sequential(Block(order, shortcut, norm), Block("conv1 bn1", "residual", norm))
    if last is None:
        with pytest.raises(ValueError, match="no residual branch was found"):
            ZERO_GAMMA.initialize(model)
    else:
        assert zeroed(ZERO_GAMMA.initialize(model)) == [f"0.{last}.weight"]


def test_zero_gamma_makes_blocks_identities():
    """For an input above 0, as a block's input is, and a shortcut without weights."""
    model = resnet(resnet_blocks.BasicBlock)
    x = torch.rand(2, 64, 6, 6) + 0.1
    assert torch.equal(ZERO_GAMMA.initialize(model, seed=0).layer1(x), x)
    assert not torch.equal(RECIPE.initialize(model, seed=0).layer1(x), x)


def test_zero_gamma_goes_above_what_is_said_by_name():
    model = resnet(resnet_blocks.BasicBlock)
    ZERO_GAMMA.on("layer1.*", init.constant(0.5)).initialize(model)
    assert not model.layer1[0].bn2.weight.any() and (model.layer1[0].bn1.weight == 0.5).all()
