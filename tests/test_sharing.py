# SPDX-License-Identifier: BSD-3-Clause
# Memory that somebody else holds as well keeps its native meaning: views of the user's buffers,
# ties through `.data`, RNN weights, shared memory, `p.data` exchanged for something else.

import copy
import io
import warnings

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
    same,
    same_state,
    square,
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


class Viewed(nn.Module):
    """Parameters that are slices of one buffer, which their maker goes on using."""

    def __init__(self, slices, device):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.memory = torch.randn(40, generator=generator).to(device, torch.float64)
        self.slices = nn.ParameterList([self.memory[s] for s in slices])

    def forward(self, _=None):
        return sum((i + 1) * (p.pow(2) - p).sum() for i, p in enumerate(self.slices))


def trained_beside(usual, make, gradients, steps=4, between=None):
    """Train what `make` returns natively and accelerated, and give back both.

    foreach=False: one parameter after the other, as overlapping ones need (foreach would race).
    """
    runs = []
    for accelerated in (False, True):
        model = make()
        optimizer = usual.native(model.parameters(), **usual.options, foreach=False)
        if accelerated:
            tr.accelerate(model, optimizer, gradients=gradients)
        for step in range(steps):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            if between:
                between(model, step)
        runs.append((model, optimizer))
    return runs


@each_usual
@pytest.mark.parametrize(
    "slices",
    [
        [slice(0, 16), slice(16, 37)],
        [slice(3, 10)],
        [slice(0, 40, 2), slice(1, 40, 2)],
        [slice(0, 24), slice(12, 40)],
    ],
    ids=["whole", "part", "interleaved", "overlapping"],
)
def test_views_of_a_users_buffer(usual, slices, device, gradients):
    def scale_memory(model, step):
        if step == 1:
            model.memory.mul_(0.5)  # the parameters see it

    (a, oa), (b, ob) = trained_beside(
        usual, lambda: Viewed(slices, device), gradients, between=scale_memory
    )
    close(b.memory, a.memory)
    for p, s in zip(b.slices, slices, strict=True):
        assert p.data_ptr() == b.memory[s].data_ptr()
    same_state(oa, ob)
    assert str(tr.regions(ob))


@each_usual
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("part", [False, True], ids=["whole", "row"])
def test_ties_through_data(usual, when, part, device, gradients):
    def step(model, optimizer, keys):
        optimizer.zero_grad()
        model(x_of(device), keys).backward()
        optimizer.step()

    runs = []
    for accelerated in (False, True):
        torch.manual_seed(0)
        model = Two().to(device, torch.float64)
        optimizer = usual.native(model.parameters(), **usual.options, foreach=False)
        if accelerated and when == "after":
            tr.accelerate(model, optimizer, gradients=gradients)
        step(model, optimizer, "ab")
        model.b.weight.data = model.a.weight.data
        if part:
            model.b.bias.data = model.a.weight.data[1]
        if accelerated and when == "before":
            tr.accelerate(model, optimizer, gradients=gradients)
        for keys in ("ab", "a", "b", "ab"):
            step(model, optimizer, keys)
            assert torch.equal(model.a.weight, model.b.weight)
        runs.append((model, optimizer))
    (a, oa), (b, ob) = runs
    assert b.a.weight.data_ptr() == b.b.weight.data_ptr()
    same(a, b)
    same_state(oa, ob)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn = kind(4, 6, num_layers=2, bidirectional=True, batch_first=True)

    def __setstate__(self, state):  # a deepcopy's weights are apart; cuDNN wants them together
        super().__setstate__(state)
        self.rnn.flatten_parameters()

    def forward(self, x):
        return self.rnn(x)[0].pow(2).sum()


@each_usual
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_keep_their_flat_weights(usual, kind, device, gradients):
    a, oa, b, ob = usual_pair(lambda: Recurrent(kind), usual, device, gradients=gradients)
    x = torch.linspace(-1, 1, 40, device=device, dtype=torch.float64).view(2, 5, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "not part of single contiguous chunk of memory"
        both(a, oa, b, ob, lambda model: model(x), steps=2)
        for model in (a, b):
            model.rnn.flatten_parameters()
        both(a, oa, b, ob, lambda model: model(x), steps=2)
    same(a, b)
    same_state(oa, ob)


@each_usual
def test_ema_swapped_in_through_data(usual, device, gradients):
    a, oa, b, ob = usual_pair(mlp, usual, device, gradients=gradients)
    averages = [values_of(m.parameters()) for m in (a, b)]
    for step in range(4):
        both(a, oa, b, ob, square)
        for model, optimizer, average in ((a, oa, averages[0]), (b, ob, averages[1])):
            for p, e in zip(model.parameters(), average, strict=True):
                e.lerp_(p.detach(), 0.25)
            backup = [p.data for p in model.parameters()]
            kept = values_of(backup)
            for p, e in zip(model.parameters(), average, strict=True):
                p.data = e
            assert all(
                p.data_ptr() == e.data_ptr()
                for p, e in zip(model.parameters(), average, strict=True)
            )
            if step == 2:  # a step while they are swapped in trains the average
                optimizer.zero_grad()
                square(model).backward()
                optimizer.step()
            assert equal(model.parameters(), average)
            assert equal(backup, kept)  # and never the backup
            for p, value in zip(model.parameters(), backup, strict=True):
                p.data = value
    for p, q in zip(*averages, strict=True):
        close(q, p)
    same(a, b)
    same_state(oa, ob)


@each_usual
def test_two_parameters_exchange_their_data(usual, device, gradients):
    a, oa, b, ob = usual_pair(Two, usual, device, gradients=gradients)

    def loss(model):
        return model(x_of(device), "ab")

    both(a, oa, b, ob, loss, steps=2)
    for model in (a, b):
        model.a.weight.data, model.b.weight.data = model.b.weight.data, model.a.weight.data
    both(a, oa, b, ob, loss, steps=2)
    for model in (a, b):
        with torch.no_grad():
            model.a.weight.set_(torch.full_like(model.a.weight, 0.5))
    both(a, oa, b, ob, loss, steps=2)
    same(a, b)
    same_state(oa, ob)


@each_usual
def test_a_state_dict_held_before_goes_on_showing_the_weights(usual, device, gradients):
    torch.manual_seed(0)
    model = mlp().to(device, torch.float64)
    optimizer = usual.native(model.parameters(), **usual.options)
    held, view = model.state_dict(), model[0].weight.detach()[1]
    tr.accelerate(model, optimizer, gradients=gradients)
    for _ in range(2):
        optimizer.zero_grad()
        square(model).backward()
        optimizer.step()
        assert equal(held.values(), model.state_dict().values())
        assert torch.equal(view, model[0].weight[1])
    held["2.bias"].fill_(3.0)
    assert model[2].bias == 3.0


def second_handle(tensor):
    """Another mapping of the shared memory under a tensor, as another process would have it."""
    storage = tensor.untyped_storage()
    mapped = torch.UntypedStorage._new_shared_fd_cpu(*storage._share_fd_cpu_())
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(mapped, *place)


@each_usual
@pytest.mark.parametrize("when", ["before accelerate", "after accelerate", "after a step"])
@pytest.mark.parametrize("of", ["parameters", "state"])
def test_shared_memory_shows_the_steps_to_others(usual, of, when, device, gradients):
    torch.manual_seed(0)
    model = mlp()  # on the CPU in both runs: share_memory_() does nothing on CUDA
    optimizer = usual.native(model.parameters(), **usual.options)
    moment = "momentum_buffer" if usual.native is torch.optim.SGD else "exp_avg"

    def step():
        optimizer.zero_grad()
        square(model).backward()
        optimizer.step()

    def shared():
        if of == "parameters":
            return [p.data for p in model.parameters()]
        return [optimizer.state[p][moment] for p in model.parameters()]

    step()
    handles = []
    for now in ("before accelerate", "after accelerate", "after a step"):
        if now == "after accelerate":
            tr.accelerate(model, optimizer, gradients=gradients)
        if now == "after a step":
            step()
        if now == when:
            for tensor in shared():
                tensor.share_memory_()
            handles = [second_handle(tensor) for tensor in shared()]
    for _ in range(2):
        before = values_of(handles)
        step()
        assert equal(handles, shared()) and not equal(handles, before)
    assert all(tensor.is_shared() for tensor in shared())
    handles[1].fill_(0.25)
    assert (shared()[1] == 0.25).all()


@each_usual
def test_original_of_a_copied_module_is_left_alone(usual, device, gradients):
    torch.manual_seed(0)
    model = mlp().to(device, torch.float64)
    twin = copy.copy(model)  # shallow: the same parameters
    optimizer = usual.native(model.parameters(), **usual.options)
    tr.accelerate(model, optimizer, gradients=gradients)
    square(model).backward()
    optimizer.step()
    assert all(p is q for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert torch.equal(twin(x_of(device)), model(x_of(device)))


def test_a_saved_checkpoint_holds_no_weight(device, gradients):
    """torch keeps a storage's Python object alive once somebody asked for it."""
    model = mlp().to(device)
    torch.save(model.state_dict(), io.BytesIO())
    for p in model.parameters():
        p.untyped_storage().nbytes()
    _, optimizer = tr.accelerate(
        model, torch.optim.SGD(model.parameters(), 0.1), gradients=gradients
    )
    assert not tr.regions(optimizer).loose
    held = mlp().to(device)
    storages = [p.untyped_storage() for p in held.parameters()]
    _, optimizer = tr.accelerate(held, torch.optim.SGD(held.parameters(), 0.1), gradients=gradients)
    assert len(tr.regions(optimizer).loose) == len(storages)
