# SPDX-License-Identifier: BSD-3-Clause
# LARS on a GPU: launches, synchronisation, captures, and its agreement with a CPU.

import copy

import pytest
import torch
from lars_formula import FP32, TRUST, Formula, cpu, grads_of
from testing import equal, mlp, parameters, set_gradients, train, values_of, worst, x_of
from torch import nn

import torch_renaissance as tr


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
