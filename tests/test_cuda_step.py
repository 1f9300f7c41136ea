# SPDX-License-Identifier: BSD-3-Clause
# The step on a GPU: one kernel for all groups, no synchronisation, the user's own capture of it,
# and parameters on two devices.

import pytest
import torch
from testing import (
    GRADIENTS,
    USUAL,
    Two,
    both,
    mlp,
    pair,
    parameters,
    same,
    same_state,
    set_gradients,
    square,
    train,
    usual_pair,
    worst,
    x_of,
)
from torch import nn

import torch_renaissance as tr

pytestmark = [pytest.mark.cuda, pytest.mark.parametrize("gradients", GRADIENTS)]
each_usual = pytest.mark.parametrize("usual", USUAL, ids=str)


def many_groups(usual, copies):
    """`copies` groups of parameters of every shape and layout, each with an lr of its own."""
    params = [p for _ in range(copies) for p in parameters("cuda", torch.float32, plain=True)]
    size = len(params) // copies
    groups = [
        {"params": params[i * size : (i + 1) * size], "lr": 0.001 * (i + 1)} for i in range(copies)
    ]
    return params, usual.native(groups, **usual.options)


@each_usual
def test_one_kernel_for_all_groups(usual, gradients):
    params, optimizer = many_groups(usual, 50)
    tr.accelerate(nn.ParameterList(params), optimizer, gradients=gradients)
    train(optimizer, params, range(1, 3), plain=True)
    optimizer.step()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        optimizer.step()
        torch.cuda.synchronize()
    on_gpu = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    names = [e.name for e in on_gpu if not e.name.startswith("Optimizer")]  # the record of a step
    assert len(names) == {"gather": 1, "flat": 2}[gradients], names  # flat packs before it updates
    assert not [name for name in names if name.startswith(("Memcpy", "Memset"))]


def kernels_of(step) -> list[str]:
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    on_gpu = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [e.name for e in on_gpu if "_kernel" in e.name]


# Tensors and elements of each: one chunk; several; many slots; more chunks than fit on a device at
# once, and more slots than the kernel that checks and updates takes, which both need two kernels.
@each_usual
@pytest.mark.parametrize(
    "tensors,size,expected",
    [(1, 5, 1), (4, 5001, 1), (100, 300, 1), (4, 3_000_000, 2), (200, 9, 2)],
)
def test_clipping_in_the_kernel_that_updates(usual, tensors, size, expected, gradients):
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn():
        return torch.randn(size, generator=generator, device="cuda")

    values = [drawn() for _ in range(tensors)]
    native = [nn.Parameter(v.clone()) for v in values]
    ours = [nn.Parameter(v.clone()) for v in values]
    torchs, optimizer = (usual.native(p, **usual.options) for p in (native, ours))
    tr.accelerate(nn.ParameterList(ours), optimizer, max_grad_norm=0.7, gradients=gradients)
    for step in range(4):
        for a, b in zip(native, ours, strict=True):
            a.grad = drawn()
            b.grad = a.grad.clone()
        norm = nn.utils.clip_grad_norm_(native, 0.7)
        torchs.step()
        if step < 3:
            optimizer.step()
        else:
            names = kernels_of(optimizer.step)
            packs = gradients == "flat"
            assert len(names) == expected + packs, names
        torch.testing.assert_close(optimizer.grad_norm, norm, rtol=1e-6, atol=0)
    torch.testing.assert_close(ours, native, rtol=1e-5, atol=1e-6)


@each_usual
@pytest.mark.parametrize("scaled", [False, True])
def test_no_synchronisation(usual, scaled, gradients):
    params, optimizer = many_groups(usual, 3)
    tr.accelerate(nn.ParameterList(params), optimizer, gradients=gradients)
    if scaled:
        optimizer.found_inf = torch.zeros((), device="cuda")
        optimizer.grad_scale = torch.ones((), device="cuda")
    train(optimizer, params, range(1), plain=True)  # lays out the regions
    for step in range(1, 5):
        set_gradients(params, step)
        optimizer.param_groups[step % 3]["lr"] *= 0.9
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def captured(step, warm_up=3):
    """The user's own graph of a step, made as torch's documentation says."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


@each_usual
def test_the_users_own_capture_follows_a_tensor_lr(usual, gradients):
    sgd = usual.native is torch.optim.SGD
    runs = []
    for accelerated in (False, True):
        params = parameters("cuda", torch.float32, plain=True)
        lr = torch.tensor(0.05, device="cuda")
        options = usual.options | {"lr": lr} | ({"fused": True} if sgd else {"capturable": True})
        optimizer = usual.native(params, **options)
        for i, p in enumerate(params):
            p.grad = torch.full_like(p, 0.01 * (i + 1))
        if accelerated:
            tr.accelerate(nn.ParameterList(params), optimizer, gradients=gradients)
            step = captured(optimizer.step).replay
        else:
            step = optimizer.step
            for _ in range(3):
                step()
        for i in range(6):
            lr.fill_(0.1 / (i + 1))
            for p in params:
                p.grad.mul_(-0.7).add_(0.01)
            step()
        runs.append((params, optimizer))
    assert worst(runs[1][0], runs[0][0]) <= 1e-5
    same_state(runs[0][1], runs[1][1])


@each_usual
def test_capture_needs_no_capturable(usual, gradients):
    """torch's Adam refuses a capture unless capturable; ours keeps its counters on the device."""
    a, oa, b, ob = usual_pair(mlp, usual, "cuda", gradients=gradients)
    for model in (a, b):
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.1)
    replay = captured(ob.step).replay
    for _ in range(4):
        replay()
    for _ in range(3 + 4):
        oa.step()
    same(a, b)
    same_state(oa, ob)


@each_usual
def test_on_a_stream_of_the_users(usual, gradients):
    a, oa, b, ob = usual_pair(mlp, usual, "cuda", gradients=gradients)
    both(a, oa, b, ob, square)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both(a, oa, b, ob, square, steps=3)
    torch.cuda.current_stream().wait_stream(stream)
    same(a, b)


@each_usual
def test_a_cuda_tensor_as_lr(usual, gradients):
    def make_optimizer(model):
        lr = torch.tensor(0.05, device="cuda", dtype=torch.float64)
        return usual.native(model.parameters(), **usual.options | {"lr": lr, "foreach": False})

    a, oa, b, ob = pair(mlp, make_optimizer, "cuda", gradients=gradients)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.7) for o in (oa, ob)]
    for i in range(5):
        both(a, oa, b, ob, square)
        for scheduler in schedulers:
            scheduler.step()
        if i == 2:
            for optimizer in (oa, ob):
                optimizer.param_groups[0]["lr"].fill_(0.2)
    same(a, b)
    same_state(oa, ob)


@each_usual
def test_parameters_on_cpu_and_gpu_in_one_optimizer(usual, gradients):
    on_two_devices(usual, "cpu", "cuda", gradients)


@each_usual
@pytest.mark.multigpu
def test_parameters_on_two_gpus_in_one_optimizer(usual, gradients):
    on_two_devices(usual, "cuda:0", "cuda:1", gradients)


@each_usual
@pytest.mark.multigpu
def test_parameters_on_a_gpu_that_is_not_the_current_one(usual, gradients):
    a, oa, b, ob = usual_pair(mlp, usual, "cuda:1", gradients=gradients)
    assert torch.cuda.current_device() == 0
    both(a, oa, b, ob, square, steps=4)
    same(a, b)
    same_state(oa, ob)


def on_two_devices(usual, first, second, gradients):
    """Bad steps are announced by hand: GradScaler copies its flag to a CPU without waiting."""
    runs = []
    for accelerated in (False, True):
        torch.manual_seed(0)
        model = Two().double()
        model.a.to(first)
        model.b.to(second)
        optimizer = usual.native(model.parameters(), **usual.options)
        if accelerated:
            tr.accelerate(model, optimizer, gradients=gradients)
        for step in range(5):
            optimizer.zero_grad()
            model.b(model.a(x_of(first)).to(second)).pow(2).sum().backward()
            bad = step in (2, 3)
            if accelerated:
                optimizer.found_inf = torch.full((), float(bad), device=second)
            if accelerated or not bad:
                optimizer.step()
        runs.append((model, optimizer))
    same(runs[0][0], runs[1][0])
    same_state(runs[0][1], runs[1][1])
    assert int(runs[1][1].skipped_steps) == 2
