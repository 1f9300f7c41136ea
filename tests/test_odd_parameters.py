# SPDX-License-Identifier: BSD-3-Clause
# Parameters that are not the usual ones: sparse, complex, of mixed dtypes, not yet initialised,
# outside of the model, in two optimizers, edited by hand; and what autograd knows of their steps.

import copy
import gc
import weakref

import pytest
import torch
from testing import (
    DEVICES,
    GRADIENTS,
    USUAL,
    Two,
    both,
    close,
    equal,
    mlp,
    pair,
    parameters,
    same,
    same_state,
    square,
    train,
    usual_pair,
    values_of,
    x_of,
)
from torch import nn

import torch_renaissance as tr

pytestmark = [
    pytest.mark.parametrize("device", DEVICES),
    pytest.mark.parametrize("gradients", GRADIENTS),
]
each_usual = pytest.mark.parametrize("usual", USUAL, ids=str)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.linear = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4)

    def forward(self, tokens):
        return self.linear(self.emb(tokens)).pow(2).sum()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sparse_gradients_train_as_native(momentum, device, gradients):
    def make_optimizer(model):
        return torch.optim.SGD(model.parameters(), 0.02, momentum=momentum)

    a, oa, b, ob = pair(Sparse, make_optimizer, device, gradients=gradients)
    for first in (0, 3, 6, 1):
        tokens = torch.tensor([first, first, first + 2], device=device)
        both(a, oa, b, ob, lambda model, tokens=tokens: model(tokens))
        assert b.emb.weight.grad.is_sparse
    same(a, b)
    if momentum:
        momenta = [o.state[m.emb.weight]["momentum_buffer"] for m, o in ((a, oa), (b, ob))]
        assert momenta[0].is_sparse == momenta[1].is_sparse
        close(momenta[1].to_dense(), momenta[0].to_dense())
        close(
            ob.state[b.linear.bias]["momentum_buffer"], oa.state[a.linear.bias]["momentum_buffer"]
        )
    assert str(tr.regions(ob))


@pytest.mark.parametrize("usual", USUAL[1:], ids=str)
def test_sparse_gradients_in_adam_raise_as_natively(usual, device, gradients):
    a, oa, b, ob = usual_pair(Sparse, usual, device, gradients=gradients)
    before, words = values_of(b.parameters()), []
    for model, optimizer in ((a, oa), (b, ob)):
        model(torch.tensor([1, 2], device=device)).backward()
        with pytest.raises(RuntimeError, match="does not support sparse gradients") as error:
            optimizer.step()
        words.append(str(error.value))
    assert words[0] == words[1]
    assert equal(b.parameters(), before)


@each_usual
def test_complex_parameters_train_as_native(usual, device, gradients):
    def make():
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(3, 2, dtype=d, generator=generator) for d in (torch.cfloat, None)]
        return nn.ParameterList(values)

    a, oa, b, ob = usual_pair(make, usual, device, dtype=None, gradients=gradients)
    both(a, oa, b, ob, lambda m: (m[0] * m[1] + 1).abs().pow(2).sum(), steps=5)
    assert b[0].is_complex()
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(q, p, rtol=1e-5, atol=1e-6)
    same_state(oa, ob, values=False)


@each_usual
def test_mixed_dtypes_and_frozen_parameters(usual, device, gradients):
    def make():
        mixed = [
            *parameters("cpu", torch.float32),
            *parameters("cpu", torch.float64),
            *parameters("cpu", torch.bfloat16, plain=True)[:5],
            *parameters("cpu", torch.float32, plain=True)[4:6],
        ]
        for p in mixed[-2:]:
            p.requires_grad_(False)
        return nn.ParameterList(mixed)

    a, oa, b, ob = usual_pair(make, usual, device, dtype=None, gradients=gradients)
    for model, optimizer in ((a, oa), (b, ob)):
        train(optimizer, list(model)[:-2], range(6))
    for p, q in zip(a, b, strict=True):
        if p.dtype == torch.bfloat16:  # native's for-loop rounds after each operation, ours once
            torch.testing.assert_close(q, p, rtol=6 * 2**-8, atol=6 * 2**-8)
        else:
            close(q, p)
    same_state(oa, ob, values=False)


@each_usual
def test_parameters_that_are_not_initialised_yet(usual, device, gradients):
    def make():
        return nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 1))

    a, oa, b, ob = usual_pair(make, usual, device, gradients=gradients)
    for model in (a, b):
        torch.manual_seed(1)
        model(x_of(device))
    both(a, oa, b, ob, square, steps=4)
    same(a, b)
    same_state(oa, ob)


@each_usual
def test_parameters_outside_of_the_model(usual, device, gradients):
    runs = []
    for accelerated in (False, True):
        torch.manual_seed(0)
        model = mlp().to(device, torch.float64)
        scale = nn.Parameter(torch.tensor(0.7, device=device, dtype=torch.float64))
        optimizer = usual.native([*model.parameters(), scale], **usual.options)
        if accelerated:
            tr.accelerate(model, optimizer, gradients=gradients)
        for _ in range(5):
            optimizer.zero_grad()
            (square(model) * scale.exp() - scale).backward()
            optimizer.step()
        runs.append((model, scale))
    same(runs[0][0], runs[1][0])
    close(runs[1][1].detach(), runs[0][1].detach())


class Special(nn.Parameter):
    """A parameter with a class of its own, as quantization libraries have."""


@each_usual
def test_parameters_that_are_subclasses_or_plain_tensors(usual, device, gradients):
    runs = []
    for accelerated in (False, True):
        torch.manual_seed(0)
        model = mlp().to(device, torch.float64)
        model[0].weight = Special(model[0].weight.data.clone())
        plain = torch.zeros(3, dtype=torch.float64, device=device, requires_grad=True)
        optimizer = usual.native([*model.parameters(), plain], **usual.options)
        if accelerated:
            tr.accelerate(model, optimizer, gradients=gradients)
        for _ in range(4):
            optimizer.zero_grad()
            (square(model) + (plain - 1).pow(2).sum()).backward()
            optimizer.step()
        assert type(model[0].weight) is Special
        runs.append((model, optimizer, plain))
    same(runs[0][0], runs[1][0])
    same_state(runs[0][1], runs[1][1])
    close(runs[1][2].detach(), runs[0][2].detach())
    assert "0.weight" in str(tr.regions(runs[1][1]))


@each_usual
@pytest.mark.filterwarnings("ignore:.*duplicate parameters")
def test_a_parameter_twice_in_a_group_is_stepped_twice(usual, device, gradients):
    runs = []
    for accelerated in (False, True):
        torch.manual_seed(0)
        model = mlp().to(device, torch.float64)
        params = [*model.parameters(), model[0].weight, model[2].bias]
        optimizer = usual.native(params, **usual.options, foreach=False)
        if accelerated:
            tr.accelerate(model, optimizer, gradients=gradients)
        for _ in range(3):
            optimizer.zero_grad()
            square(model).backward()
            optimizer.step()
        runs.append((model, optimizer))
    same(runs[0][0], runs[1][0])
    same_state(runs[0][1], runs[1][1])


@each_usual
@pytest.mark.parametrize("overlapping", [False, True])
def test_two_optimizers_on_one_model(usual, overlapping, device, gradients):
    runs = []
    for accelerated in (False, True):
        torch.manual_seed(0)
        model = Two().to(device, torch.float64)
        second = model.parameters() if overlapping else model.b.parameters()
        optimizers = [
            usual.native(model.a.parameters(), **usual.options),
            torch.optim.AdamW(second, lr=0.03),
        ]
        if accelerated:
            for optimizer in optimizers:
                tr.accelerate(model, optimizer, gradients=gradients)
        for keys in ("ab", "a", "b", "ab", "ab"):
            model.zero_grad()
            model(x_of(device), keys).backward()
            for optimizer in optimizers:
                optimizer.step()
        runs.append((model, optimizers))
    same(runs[0][0], runs[1][0])
    for native, ours in zip(runs[0][1], runs[1][1], strict=True):
        same_state(native, ours)


@each_usual
def test_accelerating_again_changes_nothing(usual, device, gradients):
    a, oa, b, ob = usual_pair(mlp, usual, device, gradients=gradients)
    both(a, oa, b, ob, square, steps=2)
    assert tr.accelerate(b, ob, gradients=gradients) == (b, ob)
    both(a, oa, b, ob, square, steps=2)
    same(a, b)
    same_state(oa, ob)
    optimizer = usual.ours(b.parameters(), **usual.options)  # a new one, made as ours
    native = usual.native(a.parameters(), **usual.options)
    tr.accelerate(b, optimizer, gradients=gradients)
    both(a, native, b, optimizer, square, steps=2)
    same(a, b)


@each_usual
def test_weights_edited_by_hand(usual, device, gradients):
    a, oa, b, ob = usual_pair(mlp, usual, device, gradients=gradients)
    edits = [
        lambda m: m[0].weight.data.clamp_(-0.2, 0.2),
        lambda m: nn.init.constant_(m[0].bias, 0.3),
        lambda m: m[2].weight.data.mul_(torch.tensor([[1, 0] * 4], device=device)),
        lambda m: torch._foreach_mul_([p.data for p in m.parameters()], 0.9),
        lambda m: nn.utils.vector_to_parameters(
            nn.utils.parameters_to_vector(m.parameters()) * 0.5, m.parameters()
        ),
    ]
    for edit in edits:
        both(a, oa, b, ob, square)
        for model in (a, b):
            with torch.no_grad():
                edit(model)
        same(a, b)
    both(a, oa, b, ob, square)
    same(a, b)


@each_usual
def test_autograd_notices_a_step_in_between(usual, device, gradients):
    _, _, b, ob = usual_pair(Two, usual, device, gradients=gradients)
    b(x_of(device), "a").backward()
    versions = [p._version for p in (b.a.weight, b.a.bias, b.b.weight)]
    ob.step()
    assert b.a.weight._version > versions[0] and b.a.bias._version > versions[1]
    assert b.b.weight._version == versions[2]  # had no gradient
    y = b.a(b.a(x_of(device))).sum()
    y.backward(retain_graph=True)
    ob.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@each_usual
def test_model_outlives_its_optimizer(usual, device, gradients):
    a, oa, b, ob = usual_pair(mlp, usual, device, gradients=gradients)
    both(a, oa, b, ob, square, steps=2)
    held = copy.deepcopy(ob.state_dict())
    del ob
    gc.collect()
    junk = [torch.full((64,), 7.0, device=device) for _ in range(64)]
    same(a, b)
    again = usual.native(b.parameters(), **usual.options)
    again.load_state_dict(held)
    both(a, oa, b, again, square, steps=2)
    same(a, b)
    assert len(junk) == 64


def test_what_is_made_in_inference_mode_can_be_trained_afterwards(device, gradients):
    native, ours = (mlp().to(device) for _ in range(2))
    ours.load_state_dict(native.state_dict())
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (native, ours)]
    with torch.inference_mode():
        tr.accelerate(ours, optimizers[1], gradients=gradients)
        tr.regions(optimizers[1])
    for _ in range(3):
        for model, optimizer in zip((native, ours), optimizers, strict=True):
            square(model).backward()
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(native.parameters(), ours.parameters(), strict=True):
        assert not b.is_inference()
        torch.testing.assert_close(b, a)


def test_a_hook_that_leads_back_to_its_optimizer_is_collected(device, gradients):
    class Trainer:
        def __init__(self):
            self.model, self.scale = mlp().to(device), 2.0
            self.optimizer = torch.optim.Adam(self.model.parameters())
            tr.accelerate(self.model, self.optimizer, gradients=gradients)
            for p in self.model.parameters():
                p.register_hook(lambda grad: grad * self.scale)

    trainer = Trainer()
    for _ in range(2):
        square(trainer.model).backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    alive = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert alive() is None


def test_a_flag_that_has_no_truth_is_an_error_of_the_step(device, gradients):
    model = mlp().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    tr.accelerate(model, optimizer, gradients=gradients)
    before = values_of(model.parameters())
    optimizer.param_groups[0]["maximize"] = torch.tensor([True, False])
    square(model).backward()
    with pytest.raises(RuntimeError, match="Boolean value of Tensor with more than one value"):
        optimizer.step()
    assert equal(values_of(model.parameters()), before)


@each_usual
def test_swapped_tensors_train_as_native(usual, device, gradients):
    """Which torch refuses for a tensor with weak references."""
    a, oa, b, ob = usual_pair(mlp, usual, device, gradients=gradients)
    both(a, oa, b, ob, square, 2)
    for model, optimizer in ((a, oa), (b, ob)):
        optimizer.zero_grad()
        for p in model.parameters():
            torch.utils.swap_tensors(p, nn.Parameter(p.detach() * 1.5))
    both(a, oa, b, ob, square, 2)
    same(a, b)
    same_state(oa, ob)
