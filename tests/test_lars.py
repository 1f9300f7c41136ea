# SPDX-License-Identifier: BSD-3-Clause
# LARS against its formula in float64, and in everything that an optimizer is asked to do.
import copy
import itertools
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from testing import (
    DEVICES,
    FP64,
    GRADIENTS,
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
    x_of,
)
from torch import nn

import torch_renaissance as tr

each_device = pytest.mark.parametrize("device", DEVICES)
TRUST = {"lr": 0.5, "trust_coefficient": 0.02}
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
# A step rounds some five times at 6e-8: 100 of them stay below 3e-5 even if all err the same way.
FP32 = 3e-5
TRAINED = 1e-10  # in fp64, by gradients of a model, which hands rounding on


class Formula:
    """LARS as its docstring has it, in float64; storage is rounded to `dtype` after each step."""

    def __init__(self, params, dtype=torch.float64, bias_like=None, **options):
        self.w = [p.detach().double().cpu() for p in params]
        self.m = [torch.zeros_like(w) for w in self.w]
        self.dtype, self.bias_like = dtype, bias_like or [w.ndim <= 1 for w in self.w]
        self.options = {
            "momentum": 0.9,
            "weight_decay": 0.0,
            "trust_coefficient": 0.001,
            "eps": 0.0,
            "nesterov": False,
            "max_trust_ratio": 100.0,
            "maximize": False,
            "lr_in_velocity": True,
        } | options

    def ratio(self, i, grad):
        o, w = self.options, self.w[i].norm()
        if self.bias_like[i] or w < 1e-12 or grad.norm() < 1e-12:
            return 1.0
        ratio = o["trust_coefficient"] * w / (grad.norm() + o["weight_decay"] * w + o["eps"])
        return min(float(ratio), o["max_trust_ratio"])

    def step(self, grads, **changes):
        self.options |= changes
        o = self.options
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            grad = grad.double().cpu()
            decay = 0.0 if self.bias_like[i] else o["weight_decay"]
            g = (-grad if o["maximize"] else grad) + decay * self.w[i]
            g = g * self.ratio(i, grad) * (o["lr"] if o["lr_in_velocity"] else 1.0)
            m = self.m[i] = o["momentum"] * self.m[i] + g
            move = o["momentum"] * m + g if o["nesterov"] else m
            self.w[i] = self.w[i] - move * (1.0 if o["lr_in_velocity"] else o["lr"])
            self.w[i], self.m[i] = (t.to(self.dtype).double() for t in (self.w[i], self.m[i]))


def grads_of(params):
    return [None if p.grad is None else p.grad.clone() for p in params]


def cpu(tensors):
    return [t.detach().cpu() for t in tensors]


def one(w, g, **options):
    """The move of one weight by one step."""
    p = nn.Parameter(w.clone())
    p.grad = g.clone()
    tr.optim.LARS([p], **options).step()
    return p.detach() - w


# --- the formula ----------------------------------------------------------------------------------


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


# --- with everything around it --------------------------------------------------------------------


@each_device
def test_what_the_kernels_leave_alone_is_updated_alike(device):
    torch.manual_seed(0)
    gaps = [nn.Parameter(torch.randn(10, 4, device=device)[:, ::2]) for _ in range(2)]
    dense = clones(p.contiguous() for p in gaps)
    options = TRUST | {"weight_decay": 0.1, "nesterov": True}
    a, b = tr.optim.LARS(gaps, **options), tr.optim.LARS(dense, **options)
    assert len(tr.regions(a).native) == 2 and not tr.regions(b).native
    for step in range(20):
        for params, optimizer in ((gaps, a), (dense, b)):
            set_gradients(params, step)
            optimizer.step()
    assert worst(gaps, dense) <= FP32
    buffers = [[o.state[p]["momentum_buffer"] for p in ps] for o, ps in ((a, gaps), (b, dense))]
    assert worst(*buffers) <= FP32


def test_bias_like_parameters_with_gaps_have_neither_ratio_nor_decay():
    p = nn.Parameter(torch.ones(8)[::2])
    p.grad = torch.ones_like(p)
    tr.optim.LARS([p], lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close(p.detach(), torch.full((4,), 0.9))


def test_sparse_gradients_are_refused_before_anything_changes():
    embedding, linear = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3)
    params = [*embedding.parameters(), *linear.parameters()]
    optimizer = tr.optim.LARS(params, lr=0.1)
    linear(embedding(torch.tensor([1, 2]))).sum().backward()
    before = values_of(params)
    with pytest.raises(RuntimeError, match="LARS does not support gradients of layout"):
        optimizer.step()
    assert equal(params, before)


@each_device
def test_a_step_that_grad_scaler_skips_changes_nothing(device):
    model = mlp().to(device)
    optimizer = tr.optim.LARS(model.parameters(), weight_decay=0.1, **TRUST)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)

    def step(bad):
        optimizer.zero_grad()
        scaler.scale(square(model)).backward()
        if bad:
            next(model.parameters()).grad[0, 0] = math.nan
        scaler.step(optimizer)
        scaler.update()

    step(False)
    params = list(model.parameters())
    before = values_of(params)
    buffers = [optimizer.state[p]["momentum_buffer"].clone() for p in params]
    step(True)
    assert equal(params, before)
    assert equal([optimizer.state[p]["momentum_buffer"] for p in params], buffers)
    assert optimizer.skipped_steps == 1 and scaler.get_scale() == 512.0
    step(False)
    assert not equal(params, before)


@each_device
def test_a_gradient_scale_of_a_power_of_two_changes_no_bit(device):
    runs = []
    for scale in (1.0, 1024.0):
        params = parameters(device, torch.float32, plain=True)
        optimizer = tr.optim.LARS(params, weight_decay=0.1, **TRUST)
        for step in range(1, 5):
            set_gradients(params, step, plain=True)
            grads = grads_of(params)
            for p in params:
                p.grad = None if p.grad is None else p.grad * scale
            optimizer.grad_scale = torch.tensor(scale, device=device)
            optimizer.found_inf = torch.tensor(0.0, device=device)
            optimizer.step()
            kept = [(p.grad, g) for p, g in zip(params, grads, strict=True) if g is not None]
            assert equal(*zip(*kept, strict=True))  # unscaled in place
        runs.append(values_of(params))
    assert equal(*runs)


@each_device
@pytest.mark.parametrize("gradients", GRADIENTS)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_clipping_and_averages(device, gradients, clip):
    runs = []
    for accelerated in (False, True):
        torch.manual_seed(0)
        model = conv_bn().to(device, torch.float64)
        optimizer = tr.optim.LARS(model, weight_decay=0.1, **TRUST)
        averages = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        if accelerated:
            tr.accelerate(model, optimizer, max_grad_norm=clip, ema_decay=0.9, gradients=gradients)
        for _ in range(6):
            optimizer.zero_grad()
            x = torch.linspace(-1, 1, 2 * 3 * 64, device=device, dtype=torch.float64)
            x = x.view(2, 3, 8, 8)
            model(x).pow(2).sum().backward()
            if clip is not None and not accelerated:
                norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            averages.update_parameters(model)
        if accelerated and clip is not None:
            torch.testing.assert_close(optimizer.grad_norm, norm, rtol=1e-8, atol=0)
        if accelerated:
            found = tr.Ema(model, optimizer).state_dict()
            names = [name for name, _ in model.named_parameters()]
            runs.append(cpu(model.parameters()) + cpu(found[name] for name in names))
        else:
            runs.append(cpu(model.parameters()) + cpu(averages.module.parameters()))
    assert worst(*runs) <= 1e-9  # BatchNorm divides by small deviations


@each_device
def test_packed_gradients(device):
    runs = []
    for flat in (False, True):
        params = parameters(device, torch.float32, plain=True)
        optimizer = tr.optim.LARS(params, **TRUST)
        if flat:
            tr.accelerate(nn.ParameterList(params), optimizer, gradients="flat")
        for step in range(1, 5):
            set_gradients(params, step, plain=True)
            if flat:
                for plane in optimizer.pack_gradients():
                    plane.mul_(2)
            else:
                for p in params:
                    if p.grad is not None:
                        p.grad.mul_(2)
            optimizer.step()
        runs.append(values_of(params))
    assert equal(*runs)


@each_device
@pytest.mark.parametrize("clip", [None, 0.5])
def test_several_dtypes_share_one_norm(device, clip):
    """Each dtype is a launch of its own; clipping and ratios follow the norm of all."""
    torch.manual_seed(0)
    dtypes = (torch.float32, torch.float64, torch.float32, torch.float64)
    params = [nn.Parameter(torch.randn(30, 90, device=device, dtype=d)) for d in dtypes]
    formula = Formula(params, **TRUST)
    optimizer = tr.optim.LARS(params, **TRUST)
    optimizer.max_grad_norm = clip
    for step in range(1, 5):
        set_gradients(params, step, plain=True)
        grads = grads_of(params)
        total = torch.stack([g.double().norm() for g in grads if g is not None]).norm()
        shrink = 1.0 if clip is None else min(1.0, clip / (float(total) + 1e-6))
        formula.step([None if g is None else g.double() * shrink for g in grads])
        optimizer.step()
        assert float(optimizer.grad_norm) == pytest.approx(float(total), rel=1e-6)
    assert worst(cpu(params), formula.w) <= 1e-5


@each_device
def test_more_tensors_than_a_launch_takes(device):
    params = [nn.Parameter(torch.full((2, 2), 1.0 + i % 7, device=device)) for i in range(2600)]
    formula = Formula(params, **TRUST)
    optimizer = tr.optim.LARS(params, **TRUST)
    for i, p in enumerate(params):
        p.grad = torch.full_like(p, 1.0 + i % 5)
    formula.step(grads_of(params))
    optimizer.step()
    total = torch.stack([p.grad.norm() for p in params]).norm()
    torch.testing.assert_close(optimizer.grad_norm, total, rtol=1e-6, atol=0)
    assert worst(cpu(params), formula.w) <= FP32


@each_device
def test_large_tensors(device):
    """Many chunks of a slot, an odd tail, and an address that vectors can't take."""
    buffer = torch.randn(1 + 3 * 70_001, device=device)
    params = [
        nn.Parameter(torch.randn(301, 1003, device=device)),
        nn.Parameter(buffer[1:].view(3, 70_001)),
        nn.Parameter(torch.randn(2, 2, device=device)),
    ]
    formula = Formula(params, **TRUST)
    optimizer = tr.optim.LARS(params, **TRUST)
    for step in range(1, 4):
        set_gradients(params, step, plain=True)
        formula.step(grads_of(params))
        optimizer.step()
    assert worst(cpu(params), formula.w) <= FP32


@each_device
@pytest.mark.filterwarnings("ignore:TrainStep runs eagerly")
@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_train_step(device, precision, accumulate):
    """Against a loop with autocast, which casts the weights itself."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    # Sums over micro-batches are kept in fp32 by one and in 16 bits by the other.
    bound = 1e-4 if dtype is None else 0.1
    x = torch.linspace(-1, 1, 32 * 8, device=device).view(32, 8).sin()
    y = (x[:, :1] * 2).tanh()
    runs, losses = [], []
    for fused in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
        start = values_of(model.parameters())
        optimizer = tr.optim.LARS(model, lr=1.0, trust_coefficient=0.02, weight_decay=1e-3)

        def loss_fn(x, y, model=model):
            return F.mse_loss(model(x).float(), y)

        if fused:
            step = tr.TrainStep(loss_fn, optimizer, precision=precision, accumulate=accumulate)
            if precision == "fp16":
                optimizer.amp.scale.fill_(2.0**8)  # nothing is skipped
        for _ in range(8):
            for part in range(accumulate):
                batch = x[part::accumulate], y[part::accumulate]
                if fused:
                    loss = step(*batch)
                    continue
                with torch.autocast(device, dtype, enabled=dtype is not None):
                    loss = loss_fn(*batch)
                (loss / accumulate).backward()
            if not fused:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
        if fused:
            assert step.captured is (device == "cuda")
        runs.append([p.detach() - s for p, s in zip(model.parameters(), start, strict=True)])
    assert losses[-1] < 0.9 * losses[8]
    assert worst(runs[1], runs[0]) <= bound


@each_device
@pytest.mark.filterwarnings("ignore:TrainStep runs eagerly")
def test_a_loss_scale_that_overflows_skips_and_backs_off(device):
    torch.manual_seed(0)
    model = mlp().to(device)
    optimizer = tr.optim.LARS(model, **TRUST)
    x = x_of(device, torch.float32)
    step = tr.TrainStep(lambda x: model(x).pow(2).sum(), optimizer, precision="fp16")
    optimizer.amp.scale.fill_(2.0**8)
    step(x)
    assert optimizer.skipped_steps == 0
    before = values_of(model.parameters())
    optimizer.amp.scale.fill_(2.0**40)  # no gradient times this is finite in fp16
    step(x)
    assert equal(model.parameters(), before)
    assert optimizer.skipped_steps == 1
    assert optimizer.amp.get_scale() == 2.0**39
    optimizer.amp.scale.fill_(2.0**8)
    step(x)
    assert not equal(model.parameters(), before)


@each_device
def test_lr_inside_and_outside_of_the_velocity(device):
    """Alike at a constant lr; a new lr reaches the velocity only where it stands outside."""
    for schedule in ((0.5, 0.5, 0.5), (0.5, 0.5, 0.05)):
        moves = []
        for inside in (True, False):
            p = nn.Parameter(torch.ones(3, 4, device=device))
            options = TRUST | {"lr_in_velocity": inside}
            formula = Formula([p], **options)
            optimizer = tr.optim.LARS([p], **options)
            for lr in schedule:
                p.grad = torch.ones_like(p)
                optimizer.param_groups[0]["lr"] = lr
                formula.step([p.grad], lr=lr)
                optimizer.step()
            assert worst([p.cpu()], formula.w) <= 1e-6
            moves.append(float(p.detach()[0, 0]) - 1)
        assert (moves[0] == pytest.approx(moves[1], rel=1e-3)) is (schedule[2] == 0.5)


@each_device
@pytest.mark.parametrize("tensor", [False, True])
def test_schedulers(device, tensor):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(5, 6, device=device))]
    formula = Formula(params, **TRUST)
    lr = torch.tensor(0.5, device=device) if tensor else 0.5
    optimizer = tr.optim.LARS(params, **TRUST | {"lr": lr})
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    for step in range(1, 7):
        set_gradients(params, step, plain=True)
        formula.step(grads_of(params), lr=0.5 * 0.7 ** (step - 1))
        optimizer.step()
        scheduler.step()
    assert worst(cpu(params), formula.w) <= 1e-5


@each_device
def test_a_schedule_of_ours(device):
    schedule = tr.lr.Cosine(0.5, total=20, warmup=5)
    params = [nn.Parameter(torch.ones(5, 6, device=device))]
    formula = Formula(params, **TRUST)
    optimizer = tr.optim.LARS(params, **TRUST)
    scheduler = schedule.attach(optimizer)
    for step in range(20):
        params[0].grad = torch.ones_like(params[0])
        formula.step(grads_of(params), lr=schedule(step))
        optimizer.step()
        scheduler.step()
    assert worst(cpu(params), formula.w) <= FP32


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


# --- on a GPU -------------------------------------------------------------------------------------


def launches_of(step):
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    on_gpu = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [e.name for e in on_gpu if not e.name.startswith("Optimizer")]


@pytest.mark.cuda
def test_three_launches_for_all_groups():
    params = [p for _ in range(50) for p in parameters("cuda", torch.float32, plain=True)]
    groups = [{"params": [p], "lr": 0.001 * (i + 1)} for i, p in enumerate(params)]
    optimizer = tr.optim.LARS(groups, lr=0.1, weight_decay=0.1)
    tr.accelerate(nn.ParameterList(params), optimizer, max_grad_norm=1.0, ema_decay=0.9)
    train(optimizer, params, range(1, 3), plain=True)
    optimizer.step()
    names = launches_of(optimizer.step)
    assert 1 <= len(names) <= 3, names


@pytest.mark.cuda
def test_no_synchronisation():
    params = parameters("cuda", torch.float32, plain=True)
    optimizer = tr.optim.LARS(params, **TRUST)
    optimizer.found_inf = torch.zeros((), device="cuda")
    optimizer.grad_scale = torch.ones((), device="cuda")
    train(optimizer, params, range(1), plain=True)
    for step in range(1, 5):
        set_gradients(params, step)
        optimizer.param_groups[0]["lr"] *= 0.9
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
            optimizer.trust_ratios()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
def test_the_users_own_capture():
    runs = []
    for capture in (False, True):
        params = parameters("cuda", torch.float32, plain=True)
        lr = torch.tensor(0.5, device="cuda")
        optimizer = tr.optim.LARS(params, **TRUST | {"lr": lr})
        for i, p in enumerate(params):
            p.grad = torch.full_like(p, 0.01 * (i + 1))
        step = optimizer.step
        if capture:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            step = graph.replay
        else:
            for _ in range(3):
                step()
        for i in range(6):
            lr.fill_(0.5 / (i + 1))
            for p in params:
                p.grad.mul_(-0.7).add_(0.01)
            step()
        runs.append(values_of(params))
    assert equal(*runs)


@pytest.mark.cuda
def test_a_captured_step_survives_a_load():
    """Loading writes into the regions, and the norms stay where the graph has them."""
    torch.manual_seed(0)
    model = mlp().cuda()
    optimizer = tr.optim.LARS(model, **TRUST)
    step = tr.TrainStep(lambda x: model(x).pow(2).sum(), optimizer)
    x = x_of("cuda", torch.float32)
    for _ in range(5):
        step(x)
    assert step.captured
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    step(x)
    after = values_of(model.parameters())
    step(x)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    step(x)
    assert step.captured
    assert equal(model.parameters(), after)


@pytest.mark.cuda
def test_parameters_on_cpu_and_gpu_in_one_optimizer():
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(30, 50).to(d)) for d in ("cpu", "cuda", "cpu", "cuda")]
    formula = Formula(params, **TRUST)
    optimizer = tr.optim.LARS(params, **TRUST)
    for step in range(1, 5):
        set_gradients(params, step, plain=True)
        formula.step(grads_of(params))
        optimizer.step()
    assert worst(cpu(params), formula.w) <= FP32


@pytest.mark.cuda
def test_cpu_and_gpu_agree():
    runs = []
    for device in ("cpu", "cuda"):
        params = parameters(device, torch.float32)
        optimizer = tr.optim.LARS(params, weight_decay=0.1, **TRUST)
        train(optimizer, params, range(20))
        runs.append(cpu(params))
    assert worst(*runs) <= FP32
