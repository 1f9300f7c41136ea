# SPDX-License-Identifier: BSD-3-Clause
# What a tr.Evaluator is given: loaders of all kinds, and what it refuses.

import re

import pytest
import torch
from evaluators import (
    agree,
    batches_of,
    by_hand,
    captured_evaluators,
    net,
    replays,
)
from testing import DEVICES
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_renaissance as tr

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture
def captures(monkeypatch, device):
    with captured_evaluators(monkeypatch, device):
        yield


# -- loaders ---------------------------------------------------------------------------------------


class Static:
    """Batches in the same memory again and again, as a loader on a device may have it."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        memory = {}
        for x, y in self.batches:
            static = memory.setdefault(len(y), (x.clone(), y.clone()))
            static[0].copy_(x)
            static[1].copy_(y)
            yield static


def loader_of(kind, batches, device):
    host = [(x.cpu(), y.cpu()) for x, y in batches]
    x, y = (torch.cat(parts) for parts in zip(*host, strict=True))
    pin = device == "cuda"
    return {
        "list": lambda: batches,
        "list on the host": lambda: host,
        "DataLoader": lambda: DataLoader(TensorDataset(x, y), 8, pin_memory=pin, num_workers=2),
        "unpinned DataLoader": lambda: DataLoader(TensorDataset(x, y), 8),
        "prefetch": lambda: tr.data.prefetch(DataLoader(TensorDataset(x, y), 8), device=device),
        "CachedValidation": lambda: tr.data.CachedValidation(
            DataLoader(TensorDataset(x, y), 8), device=device
        ),
        "static": lambda: Static(batches),
        "static on the host": lambda: Static(host),
        "lists": lambda: [list(batch) for batch in host],
    }[kind]()


@pytest.mark.parametrize(
    "kind",
    [
        *("list", "list on the host", "DataLoader", "unpinned DataLoader", "prefetch"),
        *("CachedValidation", "static", "static on the host", "lists"),
    ],
)
def test_loaders(kind, device, captures):
    model, batches = net(device), batches_of(device, (8,) * 6 + (5,))
    expected, evaluator = by_hand(model, batches), tr.Evaluator(model)
    loader = loader_of(kind, batches, device)
    for _ in range(3):
        agree(evaluator(loader), expected)
    assert replays(evaluator) == 5 + 7 + 7 and evaluator.captured
    with torch.no_grad():
        model.last.bias.add_(torch.arange(7.0, device=device))
    agree(evaluator(loader), by_hand(model, batches))


def test_an_error_of_the_loader(device, captures):
    model, batches = net(device), batches_of(device)

    def loader():
        yield from batches[:3]
        raise OSError("disk")

    evaluator = tr.Evaluator(model)
    with pytest.raises(OSError, match="disk"):
        evaluator(loader())
    assert replays(evaluator) == 2 and model.training
    agree(evaluator(batches), by_hand(model, batches))  # the sums begin anew


# -- refusals --------------------------------------------------------------------------------------

X, Y = torch.randn(4, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (X, TypeError, "batch 1 is a Tensor, but must be (input, target)"),
        ({"x": X, "y": Y}, TypeError, "batch 1 is a dict, but must be (input, target)"),
        ([X], TypeError, "batch 1 is a list of length 1, but must be"),
        ((X, None), TypeError, "must end with a tensor of targets, got NoneType"),
        ((X, Y[0]), TypeError, "got a tensor without dimensions"),
        ((X, Y[:2]), ValueError, "accuracy needs scores (N, C, ...) and integer labels (N, ...)"),
        ((X, Y.double()), ValueError, "torch.float64 [4, 7] and torch.float64 [4]"),
        ((X, Y.bool()), ValueError, "torch.float64 [4, 7] and torch.bool [4]"),
    ],
)
def test_bad_batches(batch, error, message, device):
    model = net(device)
    with pytest.raises(error, match=re.escape(message)):
        tr.evaluate(model, [(X, Y), batch])
    assert all(m.training for m in model.modules())


@pytest.mark.parametrize("loader", [[], [(X[:0], Y[:0])], [(X, torch.full_like(Y, -100))]])
def test_no_samples(loader, device):
    with pytest.raises(ValueError, match="there are no samples; the loader is empty or all"):
        tr.evaluate(net(device), loader)


def test_outputs_and_losses_that_do_not_fit(device):
    model = net(device)
    with pytest.raises(ValueError, match=r"a tensor of one element, got shape \[4\]"):
        tr.evaluate(model, [(X, Y)], nn.CrossEntropyLoss(reduction="none"))
    with pytest.raises(ValueError, match="a tensor of one element, got float"):
        tr.evaluate(model, [(X, Y)], lambda output, y: 0.5)
    model.forward = lambda x: {"logits": x}
    with pytest.raises(TypeError, match="the model must return a tensor, got dict"):
        tr.evaluate(model, [(X, Y)])


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((len,), {}, TypeError, "model must be an nn.Module, got builtin_function_or_method"),
        ((nn.ReLU(), 3), {}, TypeError, "loss_fn must be callable, got int"),
        ((nn.ReLU(), nn.MSELoss(reduction="sum")), {}, ValueError, "got one with reduction='sum'"),
        ((nn.ReLU(),), {"precision": "tf32"}, ValueError, "one of ['fp16', 'bf16'] or None"),
        ((nn.ReLU(),), {"topk": 5}, TypeError, "topk must be a tuple of ints, such as (1, 5)"),
        ((nn.ReLU(),), {"topk": (1, 0)}, ValueError, "every k of topk must be an int >= 1, got 0"),
        ((nn.ReLU(),), {"topk": (5, 5)}, ValueError, "topk has a number twice: (5, 5)"),
        ((nn.ReLU(),), {"max_graphs": 0}, ValueError, "max_graphs must be an int >= 1, got 0"),
        ((nn.ReLU(),), {"max_graphs": True}, ValueError, "must be an int >= 1, got True"),
    ],
)
def test_bad_arguments(arguments, options, error, message, device):
    with pytest.raises(error, match=re.escape(message)):
        tr.Evaluator(*arguments, **options)


def test_loader_that_is_none(device):
    model = net(device)
    with pytest.raises(TypeError, match="loader must be an iterable of batches, got int"):
        tr.evaluate(model, 3)
    assert model.training


def test_an_evaluation_inside_of_itself(device):
    evaluator = tr.Evaluator(net(device))

    def loader():
        yield X, Y
        evaluator([(X, Y)])

    with pytest.raises(RuntimeError, match="it is evaluating already"):
        evaluator(loader())
    assert evaluator([(X, Y)]).samples == 4
