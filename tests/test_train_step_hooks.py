# SPDX-License-Identifier: BSD-3-Clause
# Hooks, a replaced optimizer.step and gradients left over, which a replay would pass over: the step
# runs eagerly as long as they are there.

import re
from dataclasses import dataclass

import pytest
import torch
from stepping import (
    NESTEROV,
    WARMUP,
    Twins,
    captured_twins,
    each_row,
    fallbacks,
    mean_square,
    no_fallback,
    noises,
)
from testing import DEVICES, close, mlp
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

import torch_renaissance as tr

pytestmark = [pytest.mark.parametrize("device", DEVICES), no_fallback]


@dataclass
class Hook:
    """Registers a hook that changes numbers, and notes its calls."""

    register: object
    title: str  # what the warning says of it


def doubling(calls):
    def hook(*args):
        calls.append("called")
        value = args[-1]
        if isinstance(value, tuple):
            return tuple(v * 2 for v in value)
        return value * 2

    return hook


def post_accumulate(model, optimizer, calls):
    def hook(p):
        calls.append("called")
        p.grad.mul_(2)

    return model[0].weight.register_post_accumulate_grad_hook(hook)


def backward_hook(model, optimizer, calls):
    def hook(module, grad_input, grad_output):
        calls.append("called")
        return tuple(None if g is None else g * 2 for g in grad_input)

    return model[2].register_full_backward_hook(hook)


def backward_pre_hook(model, optimizer, calls):
    def hook(module, grad_output):
        calls.append("called")
        return tuple(g * 2 for g in grad_output)

    return model[1].register_full_backward_pre_hook(hook)


def step_pre_hook(model, optimizer, calls):
    def hook(optimizer, args, kwargs):
        calls.append("called")
        for p in model.parameters():
            p.grad.mul_(2)

    return optimizer.register_step_pre_hook(hook)


def step_post_hook(model, optimizer, calls):
    def hook(optimizer, args, kwargs):
        calls.append("called")
        with torch.no_grad():
            model[0].weight.mul_(0.9)

    return optimizer.register_step_post_hook(hook)


def global_forward_hook(model, optimizer, calls):
    tanh = model[1]

    def hook(module, args, out):
        if module is tanh:
            calls.append("called")
            return out * 2

    return register_module_forward_hook(hook)


def global_step_hook(model, optimizer, calls):
    mine = optimizer

    def hook(optimizer, args, kwargs):
        if optimizer is mine:
            calls.append("called")

    return register_optimizer_step_post_hook(hook)


HOOKS = {
    "forward": Hook(lambda m, o, c: m[1].register_forward_hook(doubling(c)), r"1 \(Tanh\)"),
    "forward pre": Hook(lambda m, o, c: m[1].register_forward_pre_hook(doubling(c)), "Tanh"),
    "full backward": Hook(backward_hook, r"Linear\) has a hook"),
    "full backward pre": Hook(backward_pre_hook, r"Tanh\) has a hook"),
    "tensor": Hook(lambda m, o, c: m[0].weight.register_hook(doubling(c)), "0.weight has a tensor"),
    "post accumulate": Hook(post_accumulate, "0.weight has a tensor hook"),
    "step pre": Hook(step_pre_hook, "the optimizer has a hook"),
    "step post": Hook(step_post_hook, "the optimizer has a hook"),
    "global forward": Hook(global_forward_hook, "_global_forward_hooks has hooks"),
    "global step": Hook(global_step_hook, "torch.optim has global step hooks"),
}


@each_row
@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_a_hook_added_after_the_capture_runs(hook, row, device):
    batches = noises(30, 6, 4, device=device)
    twins = captured_twins(mlp, row, mean_square, device, batches)
    calls = [], []
    handles = []
    with fallbacks(device) as messages:
        try:
            for (model, optimizer), c in zip(twins, calls, strict=True):
                handles.append(hook.register(model, optimizer, c))
            twins.run(batches[6:11])
            assert len(calls[0]) == len(calls[1]) == 5
            twins.check_replays(*[False] * 5)
        finally:
            for handle in handles:
                handle.remove()
    if device == "cuda":
        assert len(messages) == 1
        assert re.search(hook.title, messages[0])
        assert sum(twins.step.explain().fallbacks.values()) == 5
    twins.run(batches[11:16])
    assert len(calls[1]) == 5
    twins.check_replays(True)
    twins.check()


def test_a_hook_added_before_the_first_step_runs(device):
    twins = Twins(mlp, NESTEROV, mean_square, device)
    calls = [], []
    with fallbacks(device) as messages:
        for (model, _), c in zip(twins, calls, strict=True):
            model[1].register_forward_hook(doubling(c))
        twins.run(noises(8, 6, 4, device=device))
    assert len(calls[0]) == len(calls[1]) == 8
    assert not any(twins.replayed)
    if device == "cuda":
        assert len(messages) == 1 and "test_train_step_hooks.py" in messages[0]
    twins.check()


def test_a_replaced_step_of_the_optimizer_is_called(device):
    batches = noises(20, 6, 4, device=device)
    twins = captured_twins(mlp, NESTEROV, mean_square, device, batches)
    calls = []
    for _, optimizer in twins:

        def step(closure=None, own=optimizer.step):
            calls.append("called")
            return own(closure)

        optimizer.step = step
    with fallbacks(device) as messages:
        twins.run(batches[6:11])
    assert len(calls) == 10
    twins.check_replays(*[False] * 5)
    assert len(messages) == (device == "cuda")
    twins.check()


def test_a_gradient_left_over_is_added_to(device):
    """As native backward does, in that one step."""
    batches = noises(20, 6, 4, device=device)
    twins = captured_twins(mlp, NESTEROV, mean_square, device, batches)
    with fallbacks(device) as messages:
        for model, _ in twins:
            model(batches[0][0]).abs().sum().backward()
        twins.run(batches[6:7])
        twins.check_replays(False)
        twins.run(batches[7:11])
    twins.check_replays(True)
    assert len(messages) == (device == "cuda")
    twins.check()


def test_a_decay_of_the_averages_counts_steps(device):
    """A function of the number of steps; replays that were refused are no steps."""
    runs = []
    for warmup in (10**9, WARMUP):
        torch.manual_seed(0)
        model = mlp().to(device, torch.float64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        tr.accelerate(model, optimizer, ema_decay=lambda n: n / (n + 2))
        step = tr.TrainStep(mean_square(model), optimizer, warmup=warmup)
        with fallbacks(device):
            for i, (x,) in enumerate(noises(24, 6, 4, device=device)):
                if i in (6, 9):
                    model(x).sum().backward()  # left over
                if i == 12:
                    hook = model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
                if i == 15:
                    hook.remove()
                step(x)
        runs.append(tr.Ema(model, optimizer).state_dict())
    for name, average in runs[0].items():
        close(runs[1][name], average, name)
