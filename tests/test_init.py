# SPDX-License-Identifier: BSD-3-Clause
# tr.init: the op, initializers beside torch.nn.init, recipes over models, zero_gamma, and refusals.

import copy
import hashlib
import math

import pytest
import torch
import torchvision
from testing import DEVICES, LM, conv_bn, equal, mlp, parameters, square, values_of
from torch import nn
from torchvision.models import resnet as resnet_blocks

import torch_renaissance as tr
from torch_renaissance import init
from torch_renaissance._ops import ops
from torch_renaissance.init import _recipe
from torch_renaissance.init._residual import last_norm_weights
from torch_renaissance.regions import classify

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
each_device = pytest.mark.parametrize("device", DEVICES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# The op's distributions, each with parameters that no other has.
DRAWS = [("uniform", -0.3, 0.7), ("normal", 0.25, 1.5), ("trunc_normal", -0.25, 0.5)]
each_draw = pytest.mark.parametrize("draw", DRAWS, ids=lambda d: d[0])


def filled(shape, draw=DRAWS[1], seed=0, stream=0, dtype=torch.float64, device="cpu"):
    out = torch.full(shape, 7.0, dtype=dtype, device=device)
    ops.fill_random_(out, seed, stream, *draw)
    return out


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


RECIPE = init.Recipe(init.kaiming_normal(nonlinearity="relu"))


# -- the op ----------------------------------------------------------------------------------------


@each_device
@each_draw
@pytest.mark.parametrize("shape", [(0,), (), (7,), (3, 5)], ids=str)
def test_opcheck(draw, shape, device):
    out = torch.zeros(shape, device=device)
    for tensor in (out, torch.zeros(4, 6, device=device).t()):
        results = torch.library.opcheck(ops.fill_random_.default, (tensor, 3, -5, *draw))
        assert set(results.values()) == {"SUCCESS"} and len(results) == 4


@pytest.mark.cuda
@each_draw
@each_dtype
def test_gpu_and_cpu_have_the_same_bits(draw, dtype):
    """Up to where a thread of the kernel takes several turns."""
    for count in (1, 2, 511, 512, 513, 100_001, 2**25 + 5):
        values = [filled((count,), draw, 5, 9, dtype, device) for device in ("cpu", "cuda")]
        assert torch.equal(values[0], values[1].cpu()), count


@pytest.mark.multigpu
def test_second_gpu():
    assert torch.equal(filled((999,), device="cuda:1").cpu(), filled((999,)))


@each_device
@each_draw
def test_narrow_dtypes_hold_the_same_values_rounded(draw, device):
    exact = filled((9999,), draw, device=device)
    for dtype in DTYPES:
        expected = exact.float().to(dtype) if dtype.itemsize == 2 else exact.to(dtype)
        assert torch.equal(filled((9999,), draw, dtype=dtype, device=device), expected)


@each_device
@each_dtype
def test_values_go_by_index_not_by_memory(dtype, device):
    for p in parameters(device, dtype):
        before = p._version
        with torch.no_grad():
            ops.fill_random_(p, 1, 2, "normal", 0.0, 1.0)
        assert torch.equal(p, filled(p.shape, ("normal", 0.0, 1.0), 1, 2, dtype, device))
        assert p._version > before


@each_device
def test_neighbours_in_memory_are_left_alone(device):
    buffer = torch.zeros(20, device=device)
    ops.fill_random_(buffer[3:10], 0, 0, "uniform", 1.0, 2.0)
    ops.fill_random_(buffer[12::3], 0, 0, "uniform", 1.0, 2.0)
    written = torch.nonzero(buffer).flatten().tolist()
    assert written == [3, 4, 5, 6, 7, 8, 9, 12, 15, 18]


@each_device
def test_a_longer_tensor_begins_with_the_shorter_ones_values(device):
    longest = filled((1001,), device=device)
    for count in (1, 2, 3, 1000):
        assert torch.equal(filled((count,), device=device), longest[:count])


def test_threads_change_nothing():
    threads, values = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            values.append(filled((100_003,)))
    finally:
        torch.set_num_threads(threads)
    assert equal(values[:1] * 2, values[1:])


def test_seeds_and_streams_are_independent():
    """Of n pairs of independent values the correlation is normal with standard deviation
    n^-0.5; five of these."""
    n = 100_000
    one = filled((n,), ("normal", 0.0, 1.0), 0, 0)
    others = [filled((n,), ("normal", 0.0, 1.0), *key) for key in ((1, 0), (0, 1), (0, -1))]
    for other in [*others, one.roll(1), one.roll(2)]:
        assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1]) < 5 / math.sqrt(n)


def test_meta_tensors_stay_without_values():
    out = torch.empty(3, device="meta")
    ops.fill_random_(out, 0, 0, "normal", 0.0, 1.0)
    assert out.is_meta


OP_REFUSALS = [
    (torch.int64, "normal", 0.0, 1.0, "dtype Long is not supported; use float32, float64,"),
    (torch.float32, "cauchy", 0.0, 1.0, "must be uniform, normal or trunc_normal, got cauchy"),
    (torch.float32, "uniform", 1.0, 0.5, "in order and within .*, got a = 1 and b = 0.5"),
    (torch.float32, "uniform", math.nan, 0.5, "got a = nan and b = 0.5"),
    (torch.float32, "uniform", -1.0, 1e39, r"got a = -1 and b = 1e\+39"),
    (torch.float16, "uniform", -65505.0, 0.0, "got a = -65505 and b = 0"),
    (torch.float64, "uniform", -1e308, 1e308, r"got a = -1e\+308 and b = 1e\+308"),
    (torch.float32, "normal", 0.0, -1.0, "deviation of at least 0, got a = 0 and b = -1"),
    (torch.float32, "normal", math.inf, 1.0, "finite mean .*, got a = inf and b = 1"),
    (torch.float32, "trunc_normal", 0.0, math.nan, "got a = 0 and b = nan"),
]


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
@pytest.mark.parametrize(("dtype", "distribution", "a", "b", "message"), OP_REFUSALS)
def test_op_refuses(dtype, distribution, a, b, message, device):
    out = torch.ones(3, dtype=dtype, device=device)
    version = out._version
    with pytest.raises(RuntimeError, match=f"^fill_random_: .*{message}"):
        ops.fill_random_(out, 0, 0, distribution, a, b)
    assert out._version == version
    assert device == "meta" or (out == 1).all()


# -- initializers ----------------------------------------------------------------------------------

SHAPES = [(6, 4), (5, 7, 3), (8, 3, 3, 5), (2, 9, 1, 2, 3)]
NONLINEARITIES = ("linear", "conv2d", "sigmoid", "tanh", "relu", "leaky_relu", "selu")
KAIMING = [
    {"mode": mode, "nonlinearity": nonlinearity, "a": a}
    for mode in ("fan_in", "fan_out")
    for nonlinearity in NONLINEARITIES
    for a in (0, 0.3)
]
# Ours, torch's, the arguments of both.
TORCHS = [
    *((init.kaiming_uniform, nn.init.kaiming_uniform_, options) for options in KAIMING),
    *((init.kaiming_normal, nn.init.kaiming_normal_, options) for options in KAIMING),
    *(
        (ours, theirs, options)
        for ours, theirs in (
            (init.xavier_uniform, nn.init.xavier_uniform_),
            (init.xavier_normal, nn.init.xavier_normal_),
        )
        for options in ({}, {"gain": 2.5})
    ),
    (init.uniform, nn.init.uniform_, {}),
    (init.uniform, nn.init.uniform_, {"a": -2.0, "b": 0.5}),
    (init.normal, nn.init.normal_, {}),
    (init.normal, nn.init.normal_, {"mean": 0.5, "std": 0.02}),
]


@pytest.mark.parametrize(("ours", "theirs", "options"), TORCHS)
def test_bounds_and_deviations_are_torchs(ours, theirs, options, monkeypatch):
    """What torch.nn.init hands to the tensor's own uniform_ or normal_."""
    asked = []
    for name in ("uniform_", "normal_"):
        record = lambda t, a, b, generator=None, name=name[:-1]: asked.append((name, a, b))  # noqa: E731
        monkeypatch.setattr(torch.Tensor, name, record)
    for shape in SHAPES:
        asked.clear()
        theirs(torch.empty(shape), **options)
        initializer = ours(**options)
        a, b = initializer.parameters(torch.Size(shape))
        assert [(initializer.distribution, pytest.approx(a), pytest.approx(b))] == asked


def test_defaults_are_torchs():
    """Arguments have torch.nn.init's names, order and defaults."""
    assert init.kaiming_normal() == init.kaiming_normal(0, "fan_in", "leaky_relu")
    assert init.kaiming_uniform() == init.kaiming_uniform(0, "fan_in", "leaky_relu")
    assert init.xavier_normal() == init.xavier_normal(1)
    assert init.normal() == init.normal(0, 1) == init.normal(mean=0, std=1)
    assert init.uniform() == init.uniform(0, 1) == init.uniform(a=0, b=1)


def test_fan_avg_and_variance_scaling():
    """fan_in 4 · 6, fan_out 8 · 6, by hand."""
    shape = torch.Size((8, 4, 2, 3))
    for mode, fan in (("fan_in", 24), ("fan_out", 48), ("fan_avg", 36)):
        std = math.sqrt(2 / fan)
        relu = {"mode": mode, "nonlinearity": "relu"}
        assert init.kaiming_normal(**relu).parameters(shape) == (0, pytest.approx(std))
        bound = std * math.sqrt(3)
        assert init.kaiming_uniform(**relu).parameters(shape) == pytest.approx((-bound, bound))
        for distribution, same in (
            ("normal", init.kaiming_normal),
            ("uniform", init.kaiming_uniform),
        ):
            scaled = init.variance_scaling(2.0, mode, distribution)
            assert scaled.distribution == distribution
            assert scaled.parameters(shape) == pytest.approx(same(**relu).parameters(shape))
        # Keras's and JAX's constant for the loss of variance.
        truncated = init.variance_scaling(2.0, mode)
        assert truncated.distribution == "trunc_normal"
        assert truncated.parameters(shape) == (0, pytest.approx(std / 0.87962566103423978))
    glorot = init.variance_scaling(1.0, "fan_avg", "normal")
    assert glorot.parameters(shape) == pytest.approx(init.xavier_normal().parameters(shape))


def distance(xs, ys):
    """The two-sample Kolmogorov-Smirnov statistic, in units of sqrt(1/n + 1/m)."""
    xs, ys = xs.flatten().double().sort().values, ys.flatten().double().sort().values
    both = torch.cat([xs, ys])
    shares = [torch.searchsorted(s, both, right=True) / len(s) for s in (xs, ys)]
    return (shares[0] - shares[1]).abs().max().item() / math.sqrt(1 / len(xs) + 1 / len(ys))


def bounded_normal(t, mean=0.0, std=1.0):
    return nn.init.trunc_normal_(t, mean, std, mean - 2 * std, mean + 2 * std)


DISTRIBUTIONS = [
    (
        init.kaiming_uniform(nonlinearity="relu"),
        lambda t: nn.init.kaiming_uniform_(t, nonlinearity="relu"),
    ),
    (init.kaiming_normal(0.2, "fan_out"), lambda t: nn.init.kaiming_normal_(t, 0.2, "fan_out")),
    (init.xavier_uniform(2.0), lambda t: nn.init.xavier_uniform_(t, 2.0)),
    (init.xavier_normal(), nn.init.xavier_normal_),
    (init.uniform(-3.0, 5.0), lambda t: nn.init.uniform_(t, -3.0, 5.0)),
    (init.normal(2.0, 0.1), lambda t: nn.init.normal_(t, 2.0, 0.1)),
    (init.trunc_normal(), nn.init.trunc_normal_),
    (init.trunc_normal(0.5, 0.02), lambda t: bounded_normal(t, 0.5, 0.02)),
]


@each_device
@each_dtype
@pytest.mark.parametrize(("ours", "theirs"), DISTRIBUTIONS)
def test_distribution_is_torchs(ours, theirs, dtype, device):
    """Equal distributions differ by more than 2.63 of these units once in a million times,
    wrong ones by many. Both sides are rounded alike, since rounding makes ties."""
    model = nn.Linear(250, 200, bias=False, device=device, dtype=dtype)
    init.Recipe(ours).initialize(model, seed=0)
    torch.manual_seed(0)
    native = theirs(torch.empty(200, 250, dtype=torch.float64, device=device)).to(dtype)
    assert distance(model.weight.detach(), native) < 2.63
    assert distance(model.weight.detach() * 1.2, native) > 2.63, "the test sees a difference"


def moments(distribution, a, b):
    """Mean, variance, and the variance of squares about the mean, of the exact distribution."""
    if distribution == "uniform":
        v = (b - a) ** 2 / 12
        return (a + b) / 2, v, v * v * 0.8
    if distribution == "normal":
        return a, b * b, 2 * b**4
    inside, edge = math.erf(math.sqrt(2)), 2 * math.exp(-2) / math.sqrt(2 * math.pi)
    second = 1 - 2 * edge / inside
    fourth = 3 * second - 8 * edge / inside
    return a, b * b * second, b**4 * (fourth - second**2)


@each_device
@each_draw
def test_moments_and_bounds(draw, device):
    """Mean and variance of 10^6 values, to five standard errors of their own."""
    n = 1_000_000
    values = filled((n,), draw, device=device)
    distribution, a, b = draw
    mean, variance, spread = moments(*draw)
    assert abs(values.mean() - mean) < 5 * math.sqrt(variance / n)
    assert abs((values - mean).square().mean() - variance) < 5 * math.sqrt(spread / n)
    low, high = {"uniform": (a, b), "trunc_normal": (a - 2 * b, a + 2 * b)}.get(
        distribution, (-math.inf, math.inf)
    )
    assert low <= values.min() and values.max() <= high
    if distribution != "normal":  # and they come near their bounds: 5 standard deviations off none
        assert values.min() < low + 1e-4 * (high - low)
        assert values.max() > high - 1e-4 * (high - low)
    else:
        assert values.max() > a + 4 * b and values.min() < a - 4 * b


def test_variance_scaling_has_its_variance():
    model = nn.Linear(400, 500, bias=False)
    for distribution in ("uniform", "normal", "truncated_normal"):
        scaled = init.variance_scaling(3.0, "fan_in", distribution)
        init.Recipe(scaled).initialize(model, seed=1)
        # 200,000 values: the variance is off by at most 5 sqrt(2 / n) of itself.
        assert model.weight.var().item() == pytest.approx(3.0 / 400, rel=5 * math.sqrt(2 / 2e5))


def test_reference_by_hand():
    """One value all the way: SHA-256, Philox's published answer, quantile, fan."""
    stream = int.from_bytes(hashlib.sha256(b"0.weight").digest()[:8], "little", signed=True)
    assert _recipe.stream_of("0.weight") == stream
    model = nn.Sequential(nn.Linear(8, 3, dtype=torch.float64))
    init.Recipe(init.kaiming_normal(nonlinearity="relu")).initialize(model, seed=11)
    z = filled((3, 8), ("normal", 0.0, 1.0), 11, stream)
    torch.testing.assert_close(model[0].weight.detach(), z * math.sqrt(2 / 8), rtol=1e-15, atol=0)
    # With seed and stream 0 the first 64 bits are e169c58d 6627e8d5.
    q = (2 * (0xE169C58D6627E8D5 >> 12) + 1 - 2**52) / 2**53
    expected = torch.special.ndtri(torch.tensor(0.5 - q, dtype=torch.float64))
    torch.testing.assert_close(-filled((1,), ("normal", 0.0, 1.0))[0], expected, rtol=1e-14, atol=0)


# -- recipes ---------------------------------------------------------------------------------------


def values_by_name(model):
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def same_values(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


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

ZERO_GAMMA = init.Recipe(init.kaiming_normal(mode="fan_out", nonlinearity="relu"), zero_gamma=True)


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


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: init.constant("1"), TypeError, "constant: val must be a number, got '1'"),
        (lambda: init.constant(True), TypeError, "constant: val must be a number, got True"),
        (lambda: init.constant(math.nan), ValueError, "constant: val must be finite, got nan"),
        (lambda: init.normal(std=-1), ValueError, "normal: std must be at least 0, got -1"),
        (lambda: init.normal(mean=math.inf), ValueError, "normal: mean must be finite, got inf"),
        (lambda: init.normal(std=None), TypeError, "normal: std must be a number, got None"),
        (lambda: init.trunc_normal(0, -2), ValueError, "trunc_normal: std must be at least 0"),
        (lambda: init.trunc_normal([0]), TypeError, "trunc_normal: mean must be a number"),
        (lambda: init.uniform(1, 0), ValueError, "uniform: a must not be above b, got a = 1.0"),
        (lambda: init.uniform("0"), TypeError, "uniform: a must be a number, got '0'"),
        (lambda: init.uniform(0, math.inf), ValueError, "uniform: b must be finite, got inf"),
        (lambda: init.xavier_normal(-1), ValueError, "xavier_normal: gain must be at least 0"),
        (lambda: init.xavier_uniform("x"), TypeError, "xavier_uniform: gain must be a number"),
        (
            lambda: init.kaiming_normal(mode="fan"),
            ValueError,
            r"kaiming_normal: mode must be one of \('fan_in', 'fan_out', 'fan_avg'\), got 'fan'",
        ),
        (lambda: init.kaiming_uniform(mode=None), ValueError, "kaiming_uniform: mode .* got None"),
        (
            lambda: init.kaiming_uniform(nonlinearity="gelu"),
            ValueError,
            "kaiming_uniform: nonlinearity must be one that torch.nn.init.calculate_gain knows",
        ),
        (lambda: init.kaiming_normal("relu"), TypeError, "kaiming_normal: a must be a number"),
        (
            lambda: init.variance_scaling(-1),
            ValueError,
            "variance_scaling: scale must be at least 0, got -1",
        ),
        (
            lambda: init.variance_scaling(1, "fan_in", "cauchy"),
            ValueError,
            "variance_scaling: distribution must be one of .*'truncated_normal'.*, got 'cauchy'",
        ),
        (
            lambda: init.Recipe(nn.init.zeros_),
            TypeError,
            "Recipe: weights must be one of tr.init's",
        ),
        (lambda: init.Recipe(None, biases=0), TypeError, "Recipe: biases must be .* got 0"),
        (lambda: init.Recipe(None, norm_weights=1.0), TypeError, "norm_weights must be .* got 1.0"),
        (lambda: init.Recipe(None, zero_gamma=1), TypeError, "zero_gamma must be a bool, got 1"),
        (lambda: RECIPE.on(3, None), TypeError, "Recipe.on: where must be .*, got 3"),
        (lambda: RECIPE.on([tr.Kind.BIAS, 3], None), TypeError, "Recipe.on: where .*, got 3"),
        (lambda: RECIPE.on("x", 1.0), TypeError, "Recipe: initializer must be one of .* got 1.0"),
    ],
)
def test_bad_arguments(make, error, message):
    with pytest.raises(error, match=f"{message}"):
        make()


class With(nn.Module):
    """A linear layer, so that something could be changed, and then the parameter in question."""

    def __init__(self, p):
        super().__init__()
        self.linear, self.p = nn.Linear(3, 3), p


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("recipe", "p", "message"),
    [
        (
            RECIPE,
            lambda: nn.parameter.UninitializedParameter(),
            "p has no shape yet; pass a batch through the model first",
        ),
        (
            RECIPE,
            lambda: nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64)),
            "p: fill_random_: dtype ComplexFloat is not supported; use float32, float64,",
        ),
        (
            RECIPE,
            lambda: nn.Parameter(torch.zeros(2, 2).as_subclass(Subclass)),
            "p is a Subclass of layout torch.strided; initialise the model before it is sharded",
        ),
        (
            RECIPE,
            lambda: nn.Parameter(torch.zeros(2, 2).to_sparse()),
            "p is a Tensor of layout torch.sparse_coo; initialise the model before",
        ),
        (
            RECIPE,
            lambda: nn.Parameter(torch.zeros(1, 2).expand(4, 2)),
            r"p has strides \(0, 1\), so its elements share memory",
        ),
        (
            init.Recipe(None, biases=init.xavier_normal()),
            lambda: nn.Parameter(torch.zeros(4)),
            r"p: a fan needs at least 2 dimensions, got shape \[4\]",
        ),
        (
            init.Recipe(None).on("p", init.constant(1e6)),
            lambda: nn.Parameter(torch.zeros(4, dtype=torch.float16)),
            "p is torch.float16, which cannot hold 1000000.0",
        ),
        (
            init.Recipe(init.uniform(0, 1e6)),
            lambda: nn.Parameter(torch.zeros(4, 4, dtype=torch.float16)),
            "p: fill_random_: the bounds .* within the dtype's range, got a = 0",
        ),
        (RECIPE.on("q.*", None), lambda: None, r"no parameter's name matches 'q\.\*'"),
        (
            ZERO_GAMMA,
            lambda: None,
            "zero_gamma=True, but no residual branch was found: .* downsample or",
        ),
    ],
)
def test_refused_models_stay_as_they_are(recipe, p, message):
    model = With(p())
    before = copy.deepcopy(model.linear.state_dict())
    versions = [q._version for q in model.linear.parameters()]
    with pytest.raises(ValueError, match=f"^initialize: {message}"):
        recipe.initialize(model)
    assert same_values(dict(model.linear.state_dict()), dict(before))
    assert [q._version for q in model.linear.parameters()] == versions


@pytest.mark.parametrize(
    ("seed", "error", "message"),
    [
        (1.0, TypeError, "initialize: seed must be an int, got 1.0"),
        ("1", TypeError, "initialize: seed must be an int, got '1'"),
        (True, TypeError, "initialize: seed must be an int, got True"),
        (-1, ValueError, r"initialize: seed must be from 0 to 2\*\*64 - 1, got -1"),
        (2**64, ValueError, "initialize: seed must be .* got 18446744073709551616"),
    ],
)
def test_bad_seeds(seed, error, message):
    with pytest.raises(error, match=message):
        RECIPE.initialize(mlp(), seed=seed)


@pytest.mark.parametrize("model", [None, [], nn.Linear, torch.zeros(3)])
def test_no_module(model):
    with pytest.raises(TypeError, match=r"^initialize: model must be an nn\.Module, got "):
        RECIPE.initialize(model)
