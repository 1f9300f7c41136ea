# SPDX-License-Identifier: BSD-3-Clause
# LARS against its formula in float64: dtypes, odd values, what counts as a weight, state and
# resuming, and bad input.

import copy
import itertools
import math
import pickle

import pytest
import torch
from lars_formula import FP32, TRUST, Formula, cpu, each_device, grads_of
from testing import (
    FP64,
    clones,
    conv_bn,
    equal,
    mlp,
    parameters,
    set_gradients,
    square,
    train,
    values_of,
    worst,
)
from torch import nn

import torch_renaissance as tr

OPTIONS = [
    {"lr": 0.1},
    TRUST,
    TRUST | {"weight_decay": 0.1},
    TRUST | {"momentum": 0},
    TRUST | {"momentum": 0, "weight_decay": 0.1, "maximize": True},
    TRUST | {"nesterov": True, "weight_decay": 0.1},
    TRUST | {"lr_in_velocity": False, "weight_decay": 0.1},
    TRUST | {"lr_in_velocity": False, "nesterov": True, "momentum": 0.8},
    TRUST | {"lr_in_velocity": False, "momentum": 0},
    TRUST | {"maximize": True, "weight_decay": 0.1},
    TRUST | {"eps": 3.0, "weight_decay": 0.1},
    TRUST | {"max_trust_ratio": 0.015},
    TRUST | {"lr": 0},
]
TRAINED = 1e-10  # in fp64, by gradients of a model, which hands rounding on


# --- the formula ----------------------------------------------------------------------------------


def one(w, g, **options):
    """The move of one weight by one step."""
    p = nn.Parameter(w.clone())
    p.grad = g.clone()
    tr.optim.LARS([p], **options).step()
    return p.detach() - w


@each_device
@pytest.mark.parametrize("dtype, bound", [(torch.float32, FP32), (torch.float64, FP64)])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_formula_over_100_steps(device, dtype, bound, options):
    params = parameters(device, dtype)
    formula = Formula(params, **options)
    optimizer = tr.optim.LARS(params, **options)
    for step in range(100):
        set_gradients(params, step)
        formula.step(grads_of(params))
        optimizer.step()
    assert worst(cpu(params), formula.w) <= bound
    if options.get("momentum") != 0:
        buffers = [optimizer.state[p]["momentum_buffer"] for p in params]
        assert worst(cpu(buffers), formula.m) <= bound
    else:
        assert not optimizer.state


@each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters(device, dtype):
    params = parameters(device, dtype)
    options = TRUST | {"weight_decay": 0.1}
    formula = Formula(params, dtype, **options)
    optimizer = tr.optim.LARS(params, **options)
    for step in range(1, 6):
        set_gradients(params, step)
        formula.step(grads_of(params))
        optimizer.step()
    # A value may round to a neighbour once, and the error of a velocity is handed on.
    assert worst(cpu(params), formula.w) <= 4 * torch.finfo(dtype).eps


@each_device
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradients_of_float32_parameters(device, grad_dtype):
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch has no gradients of another dtype")
    params = [nn.Parameter(torch.randn(s, device=device)) for s in ((70, 51), (2051,), (3, 2051))]
    formula = Formula(params, **TRUST)
    optimizer = tr.optim.LARS(params, **TRUST)
    for _ in range(5):
        for p in params:
            p.grad_dtype = None
            p.grad = torch.randn_like(p).to(grad_dtype)
        formula.step(grads_of(params))
        optimizer.step()
    assert worst(cpu(params), formula.w) <= FP32


@each_device
def test_zero_weights_move_and_zero_gradients_stand_still(device):
    weight = torch.full((2, 3), 2.0, device=device)
    gradient = torch.ones(2, 3, device=device)
    moved = one(torch.zeros_like(weight), gradient, lr=0.1)
    torch.testing.assert_close(moved, -0.1 * gradient)
    assert not one(weight, 0 * gradient, lr=0.1).any()
    decayed = one(weight, 0 * gradient, lr=0.1, weight_decay=0.5)
    torch.testing.assert_close(decayed, -0.05 * weight)  # as the ratio is 1


@each_device
@pytest.mark.parametrize("shape", [(3,), (1,), ()], ids=str)
def test_bias_like_tensors_have_neither_ratio_nor_decay(device, shape):
    w, g = torch.full(shape, 2.0, device=device), torch.ones(shape, device=device)
    torch.testing.assert_close(one(w, g, lr=0.1, weight_decay=0.5), -0.1 * g)


SCALES = (1e-30, 1e-10, 1.0, 1e18, 1e30)


@each_device
@pytest.mark.parametrize("w_scale, g_scale", list(itertools.product(SCALES, SCALES)))
def test_huge_and_tiny_values(device, w_scale, g_scale):
    generator = torch.Generator().manual_seed(0)
    w, g = (torch.rand(40, 60, generator=generator) + 0.5 for _ in range(2))
    for bound in (100.0, math.inf):
        p = nn.Parameter((w * w_scale).to(device))
        p.grad = (g * g_scale).to(device)
        options = TRUST | {"max_trust_ratio": bound}
        formula = Formula([p], **options)
        optimizer = tr.optim.LARS([p], **options)
        formula.step([p.grad])
        optimizer.step()
        assert worst([p.cpu()], formula.w) <= 1e-6
        assert worst([optimizer.state[p]["momentum_buffer"].cpu()], formula.m) <= 1e-6


@each_device
def test_scale_of_a_gradient_does_not_matter(device):
    w, g = torch.randn(5, 7, device=device), torch.randn(5, 7, device=device)
    torch.testing.assert_close(one(w, g, lr=0.1), one(w, 1000 * g, lr=0.1))


@each_device
def test_a_gradient_that_is_not_finite_stays_in_its_tensor(device):
    params = [nn.Parameter(torch.ones(3, 3, device=device)) for _ in range(2)]
    for p in params:
        p.grad = torch.ones_like(p)
    params[0].grad[1, 1] = math.inf
    tr.optim.LARS(params, lr=0.1).step()
    assert not params[0].isfinite().all()
    assert params[1].isfinite().all()


# --- what is a weight -----------------------------------------------------------------------------


class Odd(nn.Module):
    """A norm whose parameters have two dimensions, beside a weight."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm((4, 3)), nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(self.norm(x)).pow(2).sum()


@each_device
@pytest.mark.parametrize("way", ["module", "accelerate"])
def test_the_module_says_what_is_bias_like(device, way):
    torch.manual_seed(0)
    model = Odd().to(device)
    params = list(model.parameters())
    options = TRUST | {"weight_decay": 0.1}
    bias_like = [name != "linear.weight" for name, _ in model.named_parameters()]
    formula = Formula(params, bias_like=bias_like, **options)
    if way == "module":
        optimizer = tr.optim.LARS(model, **options)
        assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    else:
        optimizer = tr.optim.LARS(params, **options)
        assert tr.accelerate(model, optimizer) == (model, optimizer)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(2, 4, 3, device=device)).backward()
        formula.step(grads_of(params))
        optimizer.step()
    assert worst(cpu(params), formula.w) <= FP32
    assert list(optimizer.trust_ratios()) == ["linear.weight"]


@each_device
def test_accelerate_in_the_middle_goes_on(device):
    runs = []
    for accelerated in (False, True):
        torch.manual_seed(0)
        model = mlp().to(device, torch.float64)
        optimizer = tr.optim.LARS(model.parameters(), **TRUST)
        for step in range(6):
            if accelerated and step == 3:
                tr.accelerate(model, optimizer, decay_bias_like=True)
            optimizer.zero_grad()
            square(model).backward()
            optimizer.step()
        runs.append(values_of(model.parameters()))
    assert worst(*runs) <= TRAINED


@each_device
def test_groups_keep_their_own_values(device):
    params = [nn.Parameter(torch.randn(6, 5, device=device)) for _ in range(3)]
    own = [
        {},
        {"lr": 0.1, "momentum": 0, "trust_coefficient": 0.5},
        {"nesterov": True, "weight_decay": 0.3, "max_trust_ratio": 0.01, "lr_in_velocity": False},
    ]
    formulas = [Formula([p], **TRUST | o) for p, o in zip(params, own, strict=True)]
    groups = [{"params": [p], **o} for p, o in zip(params, own, strict=True)]
    optimizer = tr.optim.LARS(groups[:2], **TRUST)
    optimizer.add_param_group(groups[2])
    for step in range(10):
        set_gradients(params, step, plain=True)
        for p, formula in zip(params, formulas, strict=True):
            formula.step(grads_of([p]))
        optimizer.step()
    assert worst(cpu(params), [f.w[0] for f in formulas]) <= FP32


@each_device
def test_missing_gradients_leave_everything_alone(device):
    params = [nn.Parameter(torch.randn(4, 4, device=device)) for _ in range(2)]
    before = params[1].detach().clone()
    optimizer = tr.optim.LARS(params, weight_decay=0.1, **TRUST)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert torch.equal(params[1], before)
    assert list(optimizer.state) == [params[0]]
    ratios = optimizer.trust_ratios()
    assert len(ratios) == 1


@each_device
def test_trust_ratios(device):
    model = conv_bn().to(device)
    optimizer = tr.optim.LARS(model, weight_decay=0.1, **TRUST)
    assert optimizer.trust_ratios() == {}
    names = [name for name, p in model.named_parameters() if p.ndim > 1]
    weights = dict(model.named_parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    for clip in (None, 0.01):
        optimizer.max_grad_norm = clip
        total = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        shrink = 1.0 if clip is None else clip / (float(total) + 1e-6)
        formula = Formula([weights[n] for n in names], weight_decay=0.1, **TRUST)
        expected = [
            formula.ratio(i, weights[n].grad.double().cpu() * shrink) for i, n in enumerate(names)
        ]
        optimizer.step()
        ratios = optimizer.trust_ratios()
        assert sorted(ratios) == sorted(names)
        for name, ratio in zip(names, expected, strict=True):
            found = ratios[name]
            assert (found.shape, found.dtype, found.device.type) == ((), torch.float32, device)
            torch.testing.assert_close(float(found), ratio, rtol=1e-6, atol=0)
    kept = {name: float(r) for name, r in ratios.items()}
    for p in model.parameters():
        p.grad.mul_(10)
    optimizer.max_grad_norm = None
    optimizer.step()
    assert kept == {name: float(r) for name, r in ratios.items()}


# --- state ----------------------------------------------------------------------------------------


@each_device
@pytest.mark.parametrize("way", ["state_dict", "torch.save", "deepcopy", "pickle"])
def test_resume(device, way, tmp_path):
    options = TRUST | {"weight_decay": 0.1, "nesterov": True}
    params = parameters(device, torch.float32, plain=True)
    optimizer = tr.optim.LARS(params, **options)
    train(optimizer, params, range(3), plain=True)
    if way in ("deepcopy", "pickle"):
        both = (params, optimizer)
        copied = copy.deepcopy(both) if way == "deepcopy" else pickle.loads(pickle.dumps(both))
        others, other = copied
    else:
        others = clones(params)
        other = tr.optim.LARS(others, lr=9.0)
        state = copy.deepcopy(optimizer.state_dict())  # load_state_dict takes tensors as they are
        if way == "torch.save":
            torch.save(state, tmp_path / "state.pt")
            state = torch.load(tmp_path / "state.pt", weights_only=True)
        other.load_state_dict(state)
    train(optimizer, params, range(3, 6), plain=True)
    train(other, others, range(3, 6), plain=True)
    assert equal(params, others)
    assert not {p.data_ptr() for p in params if p.numel()} & {p.data_ptr() for p in others}


def test_state_dict_has_a_velocity_and_nothing_else():
    params = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(3))]
    optimizer = tr.optim.LARS(params, lr=0.1)
    assert optimizer.state_dict()["state"] == {}
    params[0].grad = torch.ones(2, 2)
    optimizer.step()
    state = optimizer.state_dict()["state"]
    assert state.keys() == {0} and state[0].keys() == {"momentum_buffer"}
    assert state[0]["momentum_buffer"].shape == (2, 2)


def test_sgds_state_is_taken_with_defaults_for_what_it_lacks():
    w = torch.ones(2, 2)
    sgd_param, param = nn.Parameter(w.clone()), nn.Parameter(w.clone())
    sgd = torch.optim.SGD([sgd_param], lr=0.1, momentum=0.9)
    sgd_param.grad = torch.ones(2, 2)
    sgd.step()
    optimizer = tr.optim.LARS([param], lr=1.0, trust_coefficient=0.02)
    optimizer.load_state_dict(sgd.state_dict())
    formula = Formula([param], lr=0.1, trust_coefficient=0.02)
    formula.m = [torch.ones(2, 2, dtype=torch.float64)]
    param.grad = torch.ones(2, 2)
    formula.step([param.grad])
    optimizer.step()
    assert worst([param], formula.w) <= 1e-6


@each_device
def test_two_runs_are_bitwise_equal(device):
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        params = parameters(device, torch.float32)
        params.append(nn.Parameter(torch.randn(300, 1001).to(device)))
        optimizer = tr.optim.LARS(params, weight_decay=0.1, **TRUST)
        train(optimizer, params, range(5))
        runs.append(values_of(params))
    assert equal(*runs)


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ({"lr": -1.0}, r"lr must be >= 0, got -1\.0"),
        ({"lr": math.nan}, "lr must be >= 0, got nan"),
        ({"lr": torch.ones(2)}, r"a tensor as lr must have one element, got shape \[2\]"),
        ({"momentum": -0.1}, r"momentum must be >= 0, got -0\.1"),
        ({"weight_decay": -1}, "weight_decay must be >= 0, got -1"),
        ({"eps": -1e-8}, "eps must be >= 0, got -1e-08"),
        ({"trust_coefficient": 0}, "trust_coefficient must be > 0, got 0"),
        ({"trust_coefficient": -1}, "trust_coefficient must be > 0, got -1"),
        ({"max_trust_ratio": 0}, "max_trust_ratio must be > 0, got 0"),
        ({"nesterov": True, "momentum": 0}, "nesterov needs a momentum"),
    ],
    ids=str,
)
def test_bad_values_are_refused(options, message):
    params = [nn.Parameter(torch.ones(2, 2))]
    with pytest.raises(ValueError, match=f"LARS: {message}"):
        tr.optim.LARS(params, **{"lr": 0.1} | options)
    with pytest.raises(ValueError, match=f"LARS: {message}"):
        tr.optim.LARS([{"params": params, **options}], lr=0.1)
    optimizer = tr.optim.LARS(params, lr=0.1)
    with pytest.raises(ValueError, match=f"LARS: {message}"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], **options})
    assert len(optimizer.param_groups) == 1


def test_no_parameters_and_no_lr():
    with pytest.raises(ValueError, match="empty parameter list"):
        tr.optim.LARS([], lr=0.1)
    with pytest.raises(TypeError, match="lr"):
        tr.optim.LARS([nn.Parameter(torch.ones(1))])


def test_accelerate_refuses_a_subclass():
    class Mine(tr.optim.LARS):
        pass

    model = mlp()
    with pytest.raises(TypeError, match="Mine is not supported"):
        tr.accelerate(model, Mine(model.parameters(), lr=0.1))
