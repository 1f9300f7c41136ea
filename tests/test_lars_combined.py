# SPDX-License-Identifier: BSD-3-Clause
# LARS with all that stands around a step: clipping, averages, packed and scaled gradients,
# TrainStep, loss scales and schedules.

import math

import pytest
import torch
import torch.nn.functional as F
from lars_formula import FP32, TRUST, Formula, cpu, each_device, grads_of
from testing import (
    GRADIENTS,
    clones,
    conv_bn,
    equal,
    mlp,
    parameters,
    set_gradients,
    square,
    values_of,
    worst,
    x_of,
)
from torch import nn

import torch_renaissance as tr


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
