# SPDX-License-Identifier: BSD-3-Clause
# Steps that run eagerly though nothing in them fails: gradients that a replay would overwrite,
# batches that are no plain data, what changes at every step, and parameters on the CPU.

import copy
import random
import re
import types

import pytest
import torch
from failing import ON_THE_CPU, SYNC, Bystander, Net, Warned, bits, net_pair, seed
from stepping import ADAMW, NESTEROV, Twins, by_hand, mean_square, noise, noises
from testing import DEVICES, close, equal, mlp, pair, same, same_state
from torch import nn

import torch_renaissance as tr

pytestmark = pytest.mark.parametrize("device", DEVICES)


# -- failures of other kinds -----------------------------------------------------------------------


class WithExtra(Net):
    """Two parameters more, which no optimizer has."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return super().forward(x) * self.scale + self.shift


def without_extra(model):
    return [p for name, p in model.named_parameters() if name not in ("scale", "shift")]


@pytest.mark.parametrize("zeroed", [False, True], ids=["sums", "zeroed by the program"])
def test_gradients_of_parameters_outside_of_the_optimizer(zeroed, device):
    """They add up in `.grad` as in the native loop, which replays would overwrite."""
    bystander = Bystander(device)
    a, oa, b, ob = pair(WithExtra, lambda m: torch.optim.AdamW(without_extra(m), lr=0.01), device)
    runs = []
    with Warned() as found:
        for model, step in (
            (a, by_hand(mean_square(a), oa)),
            (b, tr.TrainStep(mean_square(b), ob)),
        ):
            seed()
            gradients = []
            for batch in noises(8, 6, 4, device=device):
                if zeroed:
                    model.zero_grad()
                step(*batch)
                gradients += [model.scale.grad.clone(), model.shift.grad.clone()]
            runs.append(torch.stack([g.flatten()[0] for g in gradients]))
    close(runs[1], runs[0])
    same(a, b)
    same_state(oa, ob)
    assert not step.captured
    assert len(found) == 1
    if device == "cuda":
        assert re.search(r"scale gets a gradient but isn't in the optimizer", found.texts[0])
    bystander.check()


def test_a_gradient_of_a_tensor_of_the_closure(device):
    """A leaf that belongs to no module."""
    leaves = []

    def loss_of(model):
        leaf = torch.ones(4, dtype=torch.float64, device=device, requires_grad=True)
        leaves.append(leaf)
        return lambda x: model(x * leaf).pow(2).mean()

    twins = Twins(mlp, NESTEROV, loss_of, device)
    with Warned() as found:
        twins.run(noises(8, 6, 4, device=device))
    assert len(found) == 1
    close(leaves[1].grad, leaves[0].grad)
    twins.check()


def test_a_new_module_whose_parameters_no_optimizer_has(device):
    twins = Twins(mlp, NESTEROV, mean_square, device)
    with Warned() as found:
        twins.run(noises(6, 6, 4, device=device))
        twins.check_replays(True, True, True)
        torch.manual_seed(1)
        new = nn.Linear(8, 1).to(device, torch.float64)
        for model, _ in twins:
            model[2] = copy.deepcopy(new)
        for batch in noises(6, 6, 4, device=device, first=6):
            close(twins.step(*batch), twins.native(*batch))
            assert not twins.step.captured
    assert len(found) == 1
    twins.check()
    close(twins.models[1][2].weight.grad, twins.models[0][2].weight.grad)


def test_a_batch_that_requires_a_gradient(device):
    """As for adversarial inputs."""
    twins = Twins(Net, ADAMW, mean_square, device)
    with Warned() as found:
        for i in range(8):
            xs = [noise(i, 6, 4, device=device).requires_grad_() for _ in "ab"]
            torch.manual_seed(i)
            expected = twins.native(xs[0])
            torch.manual_seed(i)
            close(twins.step(xs[1]), expected)
            assert xs[1].grad is not None
            close(xs[1].grad, xs[0].grad)
            assert not twins.step.captured
    assert len(found) == 1
    if device == "cuda":
        assert "isn't plain data" in found.texts[0]
    twins.check()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_scripted_module(device):
    """Its numbers lie outside of Python, where a change isn't seen."""
    runs = []
    with Warned() as found:
        for make_step in (by_hand, lambda *args: tr.TrainStep(*args)):
            torch.manual_seed(0)
            model = torch.jit.script(mlp().to(device))
            optimizer = tr.accelerate(model, torch.optim.AdamW(model.parameters(), lr=0.01))[1]
            step = make_step(mean_square(model), optimizer)
            runs.append([step(*batch) for batch in noises(6, 6, 4, device=device)])
    assert len(found) == 1 and not step.captured
    if device == "cuda":
        assert "model is a torch.jit.ScriptModule" in found.texts[0]
    close(torch.stack(runs[1]), torch.stack(runs[0]))


class Labelled(torch.Tensor):
    pass


def test_a_batch_of_a_subclass_of_tensor(device):
    twins = Twins(
        mlp, ADAMW, lambda m: lambda x: m(x.as_subclass(torch.Tensor)).pow(2).mean(), device
    )
    with Warned() as found:
        twins.run([(x.as_subclass(Labelled),) for (x,) in noises(8, 6, 4, device=device)])
    assert len(found) == 1
    if device == "cuda":
        assert "Labelled" in found.texts[0]
    twins.check()


def test_a_batch_in_an_object_that_the_program_refills(device):
    """What it holds is not among the arguments, so a replay would read its first tensors."""

    def loss_of(model):
        return lambda batch: model(batch.x).pow(2).mean()

    twins = Twins(mlp, ADAMW, loss_of, device)
    batch = types.SimpleNamespace()
    with Warned() as found:
        for i in range(10):
            batch.x = noise(i, 6, 4, device=device)
            twins.run([(batch,)])
    assert len(found) == 1
    twins.check()


def test_a_number_of_the_batch_that_changes_at_every_step(device):
    twins = Twins(mlp, ADAMW, lambda m: lambda x, factor: m(x).pow(2).mean() * factor, device)
    with Warned() as found:
        twins.run([(x, 1.0 + i / 7) for i, (x,) in enumerate(noises(40, 6, 4, device=device))])
    assert len(found) == 1, found.texts  # or nobody would learn why nothing is captured
    assert len(twins.step.explain().fallbacks) == 1
    twins.check()


def test_a_second_kind_of_failure_is_told_too(device):
    def loss_of(model):
        def loss_fn(x, kind):
            loss = model(x).pow(2).mean()
            if kind == "item":
                loss.item()
            return loss * random.random() if kind == "random" else loss

        return loss_fn

    twins = Twins(mlp, ADAMW, loss_of, device)
    xs = noises(24, 6, 4, device=device)
    with Warned() as found:
        for i, (x,) in enumerate(xs):
            random.seed(i)
            expected = twins.native(x, ("item", "random", "none")[i % 3])
            random.seed(i)
            close(twins.step(x, ("item", "random", "none")[i % 3]), expected)
            if i > 12:
                assert twins.step.captured == (i % 3 == 2 and device == "cuda")
    if device == "cuda":
        assert len(found) == 2
        assert re.search(SYNC, found.texts[0]) and "Python's random" in found.texts[1]
    else:
        assert found.texts == [ON_THE_CPU]
    twins.check()


# -- on a CPU --------------------------------------------------------------------------------------


def test_on_a_cpu_one_warning_and_no_more(device):
    _, _, model, optimizer = net_pair("cpu")
    step = tr.TrainStep(mean_square(model), optimizer)
    x = noise(0, 6, 4)
    with Warned() as found:
        step(x)
    assert found.texts == [ON_THE_CPU] and found[0].filename == __file__
    with Warned() as found:
        for i in range(5):
            step(noise(i, 3 + i, 4))
        model.eval()
        step(x)
    assert not found and not step.captured and step.inputs == ()


def test_on_a_cpu_strict_raises_and_nothing_has_changed(device):
    _, _, model, optimizer = net_pair("cpu")
    step = tr.TrainStep(mean_square(model), optimizer, strict=True)
    before = bits(model, optimizer, "cpu")
    for _ in range(2):
        with Warned() as found, pytest.raises(tr.CaptureError, match="are on the CPU"):
            step(noise(0, 6, 4))
    assert not found
    assert equal(bits(model, optimizer, "cpu"), before)
    assert issubclass(tr.CaptureError, RuntimeError)
