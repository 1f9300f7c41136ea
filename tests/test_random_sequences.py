# SPDX-License-Identifier: BSD-3-Clause
# Random sequences of what programs do between steps, natively and accelerated: after each action
# parameters, gradients, groups and state are the same.

import copy
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from testing import GRADIENTS, USUAL, same, same_state
from torch import nn

import torch_renaissance as tr


class Several(nn.Module):
    """Parts that a loss uses or not; tied, transposed, channels_last, 0-dim, empty parameters."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(6, 5), nn.LayerNorm(5)
        self.linear, self.tied = nn.Linear(5, 5), nn.Linear(5, 5)
        self.tied.weight = self.linear.weight
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(4, 5).t())
        self.scale, self.empty = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.zeros(0, 3))

    def forward(self, n):
        generator = torch.Generator().manual_seed(n)
        images = torch.randn(2, 2, 5, 5, generator=generator, dtype=self.scale.dtype)
        rows = self.norm(self.embedding(torch.randint(6, (4,), generator=generator)))
        parts = [
            self.linear(rows).sin().sum(),
            self.conv(images).square().mean() * self.scale,
            (rows @ self.transposed).tanh().sum() + self.empty.sum(),
            self.tied(rows).square().mean(),
        ]
        return sum(part for i, part in enumerate(parts) if n >> i & 1 or i == n % 4)


def backward(model, n):
    loss = model(n)
    if loss.requires_grad:
        loss.backward()


def parameter(model, n):
    parameters = list(model.parameters())
    return parameters[n % len(parameters)]


# -- actions: of a model, its optimizer and a number; some return others to go on with ------------


def train(model, optimizer, n):
    optimizer.zero_grad(set_to_none=n % 2 == 0)
    backward(model, n)
    optimizer.step()


def accumulate(model, optimizer, n):
    backward(model, n)
    backward(model, n + 1)
    optimizer.step()


def step_again(model, optimizer, n):
    optimizer.step()


def call_with_closure(model, optimizer, n):
    def closure():
        optimizer.zero_grad()
        loss = model(n)
        if loss.requires_grad:
            loss.backward()
        return loss

    optimizer.step(closure)


def set_gradients(model, optimizer, n):
    generator = torch.Generator().manual_seed(n)
    for i, p in enumerate(model.parameters()):
        grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        if p.requires_grad and n >> i % 5 & 1:
            p.grad = grad.t().contiguous().t() if p.dim() == 2 else grad
    optimizer.step()


def clip(model, optimizer, n):
    backward(model, n)
    grads = [p for p in model.parameters() if p.grad is not None]
    nn.utils.clip_grad_norm_(grads, 0.1)
    optimizer.step()


def change_options(model, optimizer, n):
    group = optimizer.param_groups[n % 2]
    group["lr"], group["weight_decay"] = 1e-3 * (1 + n % 30), 1e-3 * (n % 7)
    group["maximize"] = n % 5 == 0


def freeze_or_thaw(model, optimizer, n):
    p = parameter(model, n)
    p.requires_grad_(not p.requires_grad)


def add_group(model, optimizer, n):
    name = f"added{len(optimizer.param_groups)}"
    p = nn.Parameter(torch.full((3, 2), 0.1 * (n % 5), dtype=model.scale.dtype))
    model.register_parameter(name, p)
    optimizer.add_param_group({"params": [p], "lr": 0.05})


def reorder(model, optimizer, n):
    optimizer.param_groups[n % 2]["params"].reverse()


def go_back(model, optimizer, n):
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, n)
    train(model, optimizer, n + 1)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])


def copy_both(model, optimizer, n):
    return copy.deepcopy((model, optimizer))


def save_and_load(model, optimizer, n):
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def change_weights(model, optimizer, n):
    p = parameter(model, n)
    with torch.no_grad():
        p.mul_(0.99).add_(0.01)


def replace_data(model, optimizer, n):
    p = parameter(model, n)
    p.data = p.data.clone() * 1.01


def assign_weights(model, optimizer, n):
    """The optimizer keeps the old parameters, which nothing uses any more."""
    model.load_state_dict({k: v * 1.01 for k, v in model.state_dict().items()}, assign=True)


def forget_state(model, optimizer, n):
    optimizer.state.pop(parameter(model, n), None)


def replace_state(model, optimizer, n):
    entry = optimizer.state.get(parameter(model, n), {})
    for key in [k for k, v in entry.items() if k != "step" and torch.is_tensor(v)]:
        entry[key] = entry[key].clone() * 0.9


ACTIONS = [
    *(train, accumulate, step_again, call_with_closure, set_gradients, clip, change_options),
    *(freeze_or_thaw, add_group, reorder, go_back, copy_both, save_and_load, change_weights),
    *(replace_data, assign_weights, forget_state, replace_state),
]


def made(usual):
    torch.manual_seed(0)
    model = Several().double()
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.02},
    ]
    return model, usual.native(groups, **usual.options)


def same_gradients(native, ours):
    for (name, a), b in zip(native.named_parameters(), ours.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None) and a.requires_grad == b.requires_grad, name
        if a.grad is not None:
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gradients", GRADIENTS)
@pytest.mark.parametrize("usual", USUAL, ids=str)
@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 999)), min_size=8, max_size=20))
def test_any_sequence_is_as_natively(usual, gradients, sequence):
    native, optimizer = made(usual)
    ours, accelerated = tr.accelerate(*made(usual), gradients=gradients)
    for action, n in sequence:
        native, optimizer = action(native, optimizer, n) or (native, optimizer)
        ours, accelerated = action(ours, accelerated, n) or (ours, accelerated)
        same(native, ours)
        same_gradients(native, ours)
        same_state(optimizer, accelerated)
        groups = optimizer.state_dict()["param_groups"]
        assert accelerated.state_dict()["param_groups"] == groups
