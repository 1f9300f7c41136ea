# SPDX-License-Identifier: BSD-3-Clause
# Exceptions of the program reach it, and training goes on; what TrainStep refuses: what is no loss,
# autocast around precision=, and bad arguments of the constructor.

import copy
import io
import itertools
import pickle
import re

import pytest
import torch
from failing import ON_THE_CPU, Bystander, Net, Warned, bits, capturing, net_pair
from stepping import ADAMW, NESTEROV, WARMUP, Twins, mean_square, noise, noises
from testing import DEVICES, equal, mlp
from torch import nn

import torch_renaissance as tr

pytestmark = pytest.mark.parametrize("device", DEVICES)


# -- exceptions of the program ---------------------------------------------------------------------


class BadBatchError(Exception):
    pass


def raises_for_bad_batches(model):
    def loss_fn(x, bad):
        loss = model(x).pow(2).mean()
        if bad:
            raise BadBatchError("a bad batch")
        return loss

    return loss_fn


@pytest.mark.parametrize("at", [0, 1, WARMUP, WARMUP + 1, WARMUP + 3])
@pytest.mark.parametrize("new_shape", [False, True])
def test_exceptions_of_loss_fn_reach_the_program(new_shape, at, device):
    """At the first call, in the warm-up, where a capture is tried, and afterwards. The other
    argument makes it a step of its own, with or without another shape."""
    twins = Twins(mlp, ADAMW, raises_for_bad_batches, device)
    bad = noise(99, 3 if new_shape else 6, 4, device=device)
    with Warned() as found:
        for i in range(at + 8):
            if i >= at and i < at + 4:
                for step in (twins.native, twins.step):
                    with pytest.raises(BadBatchError, match="a bad batch"):
                        step(bad, True)
                assert all(p.grad is None for p in twins.models[1].parameters())
            twins.run([(noise(i, 6, 4, device=device), False)])
    twins.check_replays(True, True)
    twins.check()
    assert len(found) <= 1 if device == "cuda" else found.texts == [ON_THE_CPU]


@pytest.mark.parametrize("at", [1, WARMUP])
def test_an_exception_that_passes(at, device):
    """The same arguments raise once and never again. What batch norm did before the error counts
    in both loops: a capture that raises does nothing, and the eager step after it raises anew."""
    tries = 2 if at == WARMUP and device == "cuda" else 1
    calls = [range(at, at + 1), range(at, at + tries)]  # that raise: of the native loop, and ours

    def loss_of(model):
        counter, bad = itertools.count(), calls.pop(0)

        def loss_fn(x):
            loss = model(x).pow(2).mean()
            if next(counter) in bad:
                raise BadBatchError("a bad batch")
            return loss

        return loss_fn

    twins = Twins(Net, NESTEROV, loss_of, device)
    batches = noises(14, 6, 4, device=device)
    with Warned() as found:
        twins.run(batches[:at])
        for step in (twins.native, twins.step):
            torch.manual_seed(at)
            with pytest.raises(BadBatchError):
                step(*batches[at])
        assert all(p.grad is None for p in twins.models[1].parameters())
        twins.run(batches[at:])
    twins.check()
    assert len(found) <= 1
    if at == 1:
        twins.check_replays(True)


def test_an_interrupt_in_a_capture(device):
    """KeyboardInterrupt is no Exception; the program goes on where it catches it."""
    bystander = Bystander(device)
    interrupts = ["now"]

    def loss_of(model):
        def loss_fn(x):
            loss = model(x).pow(2).mean()
            if capturing(x) and interrupts:
                interrupts.clear()
                raise KeyboardInterrupt
            return loss

        return loss_fn

    twins = Twins(Net, NESTEROV, loss_of, device)
    batches = noises(12, 6, 4, device=device)
    with Warned():
        twins.run(batches[:WARMUP])
        if device == "cuda":
            before = bits(twins.models[1], twins.optimizers[1], device)
            with pytest.raises(KeyboardInterrupt):
                twins.step(*batches[WARMUP])
            assert equal(bits(twins.models[1], twins.optimizers[1], device), before)
        twins.run(batches[WARMUP:])
    twins.check_replays(True)
    twins.check()
    bystander.check()


NO_LOSSES = {
    "a number": (lambda out: 1.0, TypeError, "got float"),
    "None": (lambda out: None, TypeError, "got NoneType"),
    "two elements": (lambda out: out[:2].flatten(), TypeError, r"got shape \[2\]"),
    "no elements": (lambda out: out[:0].flatten(), TypeError, r"got shape \[0\]"),
    "three values": (lambda out: (out.mean(), 1, 2), TypeError, "got tuple"),
    "a list": (lambda out: [out.mean(), 1], TypeError, "got list"),
    "no gradient": (lambda out: out.detach().mean(), RuntimeError, "doesn't require a gradient"),
}


@pytest.mark.parametrize(("make", "error", "text"), NO_LOSSES.values(), ids=NO_LOSSES)
def test_what_is_no_loss(make, error, text, device):
    def loss_of(model):
        def loss_fn(x, good):
            out = model(x)
            return out.pow(2).mean() if good else make(out)

        return loss_fn

    twins = Twins(mlp, ADAMW, loss_of, device)
    with Warned():
        for i in range(8):
            x = noise(i, 6, 4, device=device)
            if i in (0, 2, 5):
                with pytest.raises(error, match=f"TrainStep: .*{text}"):
                    twins.step(x, False)
            twins.run([(x, True)])
    twins.check_replays(True, True)
    twins.check()


def test_the_programs_autocast_and_precision_exclude_each_other(device):
    _, _, model, optimizer = net_pair(device)
    model.float()
    step = tr.TrainStep(mean_square(model), optimizer, precision="bf16")
    x = noise(0, 6, 4, device=device)
    with Warned(), torch.autocast(device, torch.bfloat16):
        with pytest.raises(RuntimeError, match="does its own autocast; call the step outside"):
            step(x)
    with Warned():
        for _ in range(WARMUP + 4):
            assert step(x).isfinite()
    assert step.captured == (device == "cuda")


# -- what the constructor refuses ------------------------------------------------------------------


def refusals():
    numbers = [0, -1, True, 2.0, "3", None]
    for name in ("warmup", "max_graphs", "accumulate"):
        for value in numbers:
            yield {name: value}, ValueError, f"{name} must be an int >= 1, got {value!r}"
    yield {"loss_fn": 3}, TypeError, "loss_fn must be callable, got int"
    yield {"loss_fn": None}, TypeError, "loss_fn must be callable, got NoneType"
    yield {"model": "net"}, TypeError, "model must be an nn.Module, got str"
    yield {"model": nn.Linear}, TypeError, "model must be an nn.Module, got type"
    yield {"precision": "bf8"}, ValueError, "precision must be one of ['fp16', 'bf16'] or None"
    yield {"precision": "float32"}, ValueError, "got 'float32'"
    yield {"precision": torch.bfloat16}, ValueError, "got torch.bfloat16"
    yield {"scaler": 2.0**16}, TypeError, "scaler must be a torch.amp.GradScaler, got float"
    scaler = torch.amp.GradScaler("cpu")
    for precision in ("bf16", "fp16"):
        options = {"precision": precision, "scaler": scaler}
        yield options, ValueError, "pass either precision or scaler"


REFUSALS = list(refusals())
NAMES = [f"{'-'.join(options)}-{i}" for i, (options, _, _) in enumerate(REFUSALS)]


@pytest.mark.parametrize(("options", "error", "text"), REFUSALS, ids=NAMES)
def test_what_the_constructor_refuses(options, error, text, device):
    _, _, model, optimizer = net_pair(device)
    before = set(vars(optimizer))
    with pytest.raises(error, match=re.escape(text)) as raised:
        tr.TrainStep(**{"loss_fn": mean_square(model), "optimizer": optimizer, **options})
    assert str(raised.value).startswith("TrainStep: ")
    assert optimizer.amp is None and set(vars(optimizer)) == before


@pytest.mark.parametrize(
    "make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop], ids=lambda f: f.__name__
)
def test_an_optimizer_that_was_not_accelerated(make, device):
    model = Net().to(device)
    text = f"{make.__name__} is not one of ours; pass it through tr.accelerate(model, optimizer)"
    with pytest.raises(TypeError, match=re.escape(text)):
        tr.TrainStep(mean_square(model), make(model.parameters(), lr=0.1))


def test_what_is_no_optimizer(device):
    model = Net().to(device)
    for optimizer in (None, model, model.parameters()):
        with pytest.raises(TypeError, match=r"TrainStep: .* is not one of ours"):
            tr.TrainStep(mean_square(model), optimizer)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps, torch.save])
def test_a_step_is_not_copied(copied, device):
    """Its copy would run the old model and update another one."""
    model = mlp().to(device)
    model, optimizer = tr.accelerate(model, torch.optim.SGD(model.parameters(), 0.1))
    step = tr.TrainStep(lambda x: model(x).pow(2).mean(), optimizer)
    arguments = (step, io.BytesIO()) if copied is torch.save else (step,)
    with pytest.raises(TypeError, match="can't be copied or pickled; copy the model and the opt"):
        copied(*arguments)
