# SPDX-License-Identifier: BSD-3-Clause
# What the tests of tr.Evaluator share: a network, its batches, the loop that an Evaluator stands
# for, and captures on a CPU by replaying.py, which go stale as a CUDA graph does.

import math
import sys
import warnings
from contextlib import contextmanager

import replaying
import torch
import torch.nn.functional as F
from torch import nn

import torch_renaissance as tr
from torch_renaissance import _measures, graphs

SCALE = 1.0


class Net(nn.Module):
    """With what behaves otherwise in eval mode, a number, a global and a buffer."""

    def __init__(self, classes=7):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.5)
        self.act, self.last = nn.Tanh(), nn.Linear(16, classes)
        self.factor = 1.0
        self.register_buffer("shift", torch.zeros(classes))

    def forward(self, x):
        hidden = self.drop(self.act(self.norm(self.first(x.to(self.first.weight.dtype)))))
        return self.last(hidden) * self.factor * SCALE + self.shift


def net(device, classes=7, seed=0):
    torch.manual_seed(seed)
    model = Net(classes)
    model(torch.randn(32, 4))  # statistics
    return model.to(device, torch.float64)


def batches_of(device, sizes=(8, 8, 8, 8, 3), classes=7, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(n, 4, generator=generator).to(device),
            torch.randint(classes, (n,), generator=generator).to(device),
        )
        for n in sizes
    ]


@torch.no_grad()
def by_hand(model, batches, loss_fn=F.cross_entropy, topk=(1, 5)):
    """The common recipe."""
    modes = {m: m.training for m in model.modules()}
    model.eval()
    loss, correct, samples = 0.0, dict.fromkeys(topk, 0), 0
    device = next(model.parameters()).device
    for *inputs, y in batches:
        output = model(*(x.to(device) for x in inputs))
        y = y.to(device)
        loss += loss_fn(output, y).item() * len(y)
        for k in topk:
            best = output.topk(min(k, output.shape[1]), 1).indices
            correct[k] += int((best == y.unsqueeze(1)).sum())
        samples += len(y)
    for m, mode in modes.items():
        m.training = mode
    return tr_evaluation(loss / samples, {k: c / samples for k, c in correct.items()}, samples)


def tr_evaluation(loss, accuracy, samples):
    return _measures.Evaluation(loss, accuracy, samples)


def agree(got, expected, rtol=1e-9):
    """fp64 rounds some hundred times at 1e-16; fp32 is compared with another bound."""
    assert math.isclose(got.loss, expected.loss, rel_tol=rtol), (got, expected)
    assert got.accuracy == expected.accuracy
    assert got.samples == expected.samples


@contextmanager
def captured_evaluators(monkeypatch, device):
    """Makes an Evaluator of a CPU capture, by the stand-in."""
    if device == "cpu":
        monkeypatch.setattr(tr.Evaluator, "_why_no_graphs", lambda self: "")
        monkeypatch.setattr(graphs, "Pool", replaying.Pool)
        monkeypatch.setattr(sys.modules[tr.Evaluator.__module__], "static_input", replaying.filled)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Evaluator runs eagerly")
        yield


def replays(evaluator):
    return sum(g.replays for g in evaluator._graphs)
