# SPDX-License-Identifier: BSD-3-Clause
# Compiled steps through Inductor with ops of ours, on a CPU: losses, gradients and buffers are
# torch.compile's, and what should be replaced is. Arguments are in test_compile_loss.py.

import copy

import pytest
import torch
import torch.nn.functional as F
from compiled_ops import on_cpu
from compiling import as_exact, random
from torch import nn

from torch_renaissance._compiled import compile_loss, late

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiles_again")]
LABELS = torch.tensor([0, 1, 2, 3])


@pytest.fixture
def compiles_again(monkeypatch):
    """What was compiled for a GPU's tensors, or in another run, knows nothing of these ops."""
    torch._dynamo.reset()
    monkeypatch.setattr(late, "_LEAST_ROWS", 2)
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, 1)
        self.norm, self.aside = nn.BatchNorm2d(outputs), nn.Identity()
        if stride != 1:
            aside = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.aside = nn.Sequential(aside, nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = self.norm(self.conv(x))
        y += self.aside(x)
        return F.relu_(y)


def residual_net():
    stem = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
    stem += (nn.MaxPool2d(3, 2, 1),)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)
    blocks = Block(8, 8, 1), Block(8, 16, 2), Block(16, 16, 1)
    return nn.Sequential(*stem, *blocks, *head).to(memory_format=torch.channels_last)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 16, 4, 4), nn.LayerNorm(16)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, "gelu", batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.layer(x)).mean(1))


def train(compile, model, half=torch.bfloat16):
    """Two steps' losses, and gradients and buffers after the second."""
    model = copy.deepcopy(model) if half else copy.deepcopy(model).double()
    images = random(2, 4, 3, 8, 8, dtype=torch.float32).to(next(model.parameters()).dtype)
    function = compile(lambda x: F.cross_entropy(model(x), LABELS))
    found = {}
    for i, x in enumerate(images):
        model.zero_grad()
        with torch.autocast("cpu", half, enabled=half is not None):
            loss = function(x)
        loss.backward()
        found[f"loss {i}"] = loss.detach()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.05 * p.grad
    return found | {n: p.grad for n, p in model.named_parameters()} | dict(model.named_buffers())


def compare(model):
    """With torch.compile; returns the arguments of all calls of ops of ours."""
    exact = train(lambda f: f, model, half=None)
    natively = train(torch.compile, model)
    with on_cpu() as calls:
        found = train(lambda f: compile_loss(f, {}, own=True), model)
    as_exact(found, natively, exact, torch.bfloat16)
    return calls


def test_a_residual_net():
    torch.manual_seed(0)
    model = residual_net()
    calls = compare(model)
    counters = [name for name, _ in model.named_buffers() if name.endswith("batches_tracked")]
    norms = 2 * len(counters)
    assert len(calls["batch_norm_forward"]) == len(calls["batch_norm_backward"]) == norms
    assert sum(residual is not None for _, _, _, residual, *_ in calls["batch_norm_forward"]) == 6
    assert sum(absent is not None for _, _, _, _, absent, *_ in calls["batch_norm_forward"]) == 6
    # Of the last block's input, which is the result of the one before, and of the second's.
    assert sum(more is not None for _, more, *_ in calls["batch_norm_backward"]) == 4
    assert calls["column_sums"]
    assert len(calls["max_pool2d_forward"]) == len(calls["max_pool2d_backward"]) == 2


def test_a_transformer():
    torch.manual_seed(0)
    calls = compare(Transformer())
    assert len(calls["bias_gelu"]) == len(calls["bias_gelu_backward"]) == 2
    assert len(calls["column_sums"]) >= 2 * 3  # at least, of patches, attention and the head


def test_sums_of_columns_that_inductor_would_pad():
    """As it does on a GPU, where rows are longer than 1024 and no multiple of 128 bytes."""
    linear = nn.Linear(8, 1028)
    with on_cpu() as calls, torch._inductor.config.patch(disable_padding_cpu=False):
        loss = compile_loss(lambda x: linear(x).float().sin().sum(), {}, own=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss(random(64, 8)).backward()
    assert len(calls["column_sums"]) == 1
