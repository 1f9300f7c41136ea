# SPDX-License-Identifier: BSD-3-Clause
# Loss functions that can't be captured, or must not be, each with what the warning says of it.

import itertools
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from failing import SYNC, capturing
from stepping import WARMUP

FILE = Path(__file__).name


def asks_for_the_value(model):
    def loss_fn(x):
        loss = model(x).pow(2).mean()
        loss.item()
        return loss

    return loss_fn


def copies_to_the_cpu(model):
    def loss_fn(x):
        loss = model(x).pow(2).mean()
        loss.detach().cpu().numpy()
        return loss

    return loss_fn


def masks(model):
    def loss_fn(x):
        out = model(x)
        return out[out > -1e9].pow(2).mean()

    return loss_fn


def prints(model):
    def loss_fn(x):
        loss = model(x).pow(2).mean()
        print(f"{loss.detach():.12f}")
        return loss

    return loss_fn


def prints_the_tensor(model):
    def loss_fn(x):
        loss = model(x).pow(2).mean()
        print(loss.detach())
        return loss

    return loss_fn


def synchronizes(model):
    def loss_fn(x):
        loss = model(x).pow(2).mean()
        if x.is_cuda:
            torch.cuda.synchronize()
        return loss

    return loss_fn


def synchronizes_the_stream(model):
    def loss_fn(x):
        loss = model(x).pow(2).mean()
        if x.is_cuda:
            torch.cuda.current_stream().synchronize()
        return loss

    return loss_fn


def branches(model):
    def loss_fn(x):
        loss = model(x).pow(2).mean()
        if loss > 0.01:
            return loss * 0.5
        return loss

    return loss_fn


def copies_from_the_cpu(model):
    def loss_fn(x):
        weight = torch.tensor([0.5, 1.0, 2.0, 1.0], dtype=x.dtype, device=x.device)
        return model(x * weight).pow(2).mean()

    return loss_fn


class AsksInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        grad.sum().item()
        return grad


def asks_in_backward(model):
    return lambda x: AsksInBackward.apply(model(x)).pow(2).mean()


def raises_in_the_capture(model):
    def loss_fn(x):
        loss = model(x).pow(2).mean()
        if capturing(x):
            raise ZeroDivisionError("only now")
        return loss

    return loss_fn


def raises_at_the_call_of_the_capture(model):
    counter = itertools.count()

    def loss_fn(x):
        loss = model(x).pow(2).mean()
        if next(counter) == WARMUP and x.is_cuda:
            raise ZeroDivisionError("only now")
        return loss

    return loss_fn


def runs_out_of_memory(model):
    def loss_fn(x):
        loss = model(x).pow(2).mean()
        if capturing(x):
            torch.empty(1 << 50, dtype=torch.uint8, device=x.device)
        return loss

    return loss_fn


def draws_from_torch(model):
    return lambda x: model(x).pow(2).mean() * torch.rand((), dtype=torch.float64)


def draws_from_python(model):
    return lambda x: model(x).pow(2).mean() * random.random()


def draws_from_numpy(model):
    numpy = pytest.importorskip("numpy")
    return lambda x: model(x).pow(2).mean() * float(numpy.random.rand())


def counts(model):
    model.calls = 0

    def loss_fn(x):
        model.calls += 1
        return model(x).pow(2).mean() * (1 + model.calls % 3)

    return loss_fn


def stores_an_activation(model):
    """As models do whose attention maps a program looks at now and then."""
    model.out = None

    def loss_fn(x):
        model.out = model(x)
        return model.out.pow(2).mean()

    return loss_fn


def counts_in_the_capture(model):
    model.captures = 0

    def loss_fn(x):
        model.captures += capturing(x)
        return model(x).pow(2).mean()

    return loss_fn


def hooks_an_activation(model):
    def loss_fn(x):
        out = model(x)
        out.register_hook(lambda grad: grad * 2)
        return out.pow(2).mean()

    return loss_fn


@dataclass(frozen=True)
class Failure:
    loss_of: object
    reason: str  # on a GPU, a pattern
    line: str = ""  # of this file, that the warning names

    def __str__(self):
        return self.loss_of.__name__


FAILURES = [
    Failure(asks_for_the_value, SYNC, "loss.item()"),
    Failure(copies_to_the_cpu, SYNC, "loss.detach().cpu().numpy()"),
    Failure(masks, SYNC, "return out[out > -1e9].pow(2).mean()"),
    Failure(prints, SYNC, 'print(f"{loss.detach():.12f}")'),
    Failure(prints_the_tensor, SYNC, "print(loss.detach())"),
    Failure(synchronizes, "captur|synchroniz", "torch.cuda.synchronize()"),
    Failure(
        synchronizes_the_stream, "captur|synchroniz", "torch.cuda.current_stream().synchronize()"
    ),
    Failure(branches, SYNC, "if loss > 0.01:"),
    Failure(copies_from_the_cpu, SYNC, "weight = torch.tensor("),
    Failure(asks_in_backward, SYNC),
    Failure(raises_in_the_capture, "only now", 'raise ZeroDivisionError("only now")'),
    Failure(raises_at_the_call_of_the_capture, "only now", 'raise ZeroDivisionError("only now")'),
    Failure(runs_out_of_memory, "out of memory", "torch.empty(1 << 50"),
    Failure(draws_from_torch, "draws from torch's CPU generator on the host"),
    Failure(draws_from_python, "draws from Python's random on the host"),
    Failure(draws_from_numpy, r"draws from numpy\.random on the host"),
    Failure(counts, "it changes at every step: .*'calls'"),
    Failure(stores_an_activation, "it changes at every step: .*'out'"),
    Failure(counts_in_the_capture, "changes Python's state: .*'captures'"),
    Failure(hooks_an_activation, "a tensor gets a hook at ", "out.register_hook("),
]
each_failure = pytest.mark.parametrize("failure", FAILURES, ids=str)
# Those that a capture finds out, at the first call after the warm-up.
CAPTURED = [f for f in FAILURES if f.loss_of not in (counts, stores_an_activation)]
each_captured_failure = pytest.mark.parametrize("failure", CAPTURED, ids=str)
