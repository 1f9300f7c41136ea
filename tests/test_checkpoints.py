# SPDX-License-Identifier: BSD-3-Clause
# Files and copies: torch.save is no larger than natively, safetensors takes them, only true ties
# share storage, and deep copies and pickles train on alone.

import copy
import gc
import io
import itertools
import pickle
import weakref

import pytest
import torch
from testing import (
    DEVICES,
    GRADIENTS,
    LM,
    USUAL,
    both,
    conv_bn,
    equal,
    mlp,
    same,
    same_state,
    usual_pair,
    values_of,
)
from torch import nn

import torch_renaissance as tr

pytestmark = [
    pytest.mark.parametrize("device", DEVICES),
    pytest.mark.parametrize("gradients", GRADIENTS),
]
each_usual = pytest.mark.parametrize("usual", USUAL, ids=str)


def stored(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    return file


@each_usual
def test_files_are_no_larger_than_natives(usual, device, gradients):
    def make():
        return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 2))

    def loss(model):
        return model(torch.ones(2, 128, device=device, dtype=torch.float64)).pow(2).sum()

    a, oa, b, ob = usual_pair(make, usual, device, gradients=gradients)
    both(a, oa, b, ob, loss)
    for get in (
        lambda m, o: m[2].state_dict(),
        lambda m, o: m[2],
        lambda m, o: m[2].weight,
        lambda m, o: m[2].weight.data,
        lambda m, o: m.state_dict(),
        lambda m, o: o.state_dict(),
        lambda m, o: list(o.state.values())[-1],
        lambda m, o: m[2].weight.grad,
        lambda m, o: copy.deepcopy(m[2]),
        lambda m, o: copy.deepcopy(m[2].weight),
    ):
        assert stored(get(b, ob)).tell() <= 1.1 * stored(get(a, oa)).tell() + 512
    for thing in (b.state_dict(), ob.state_dict()):
        file = stored(thing)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        state = loaded.get("state", {0: loaded})
        for value in (value for entries in state.values() for value in entries.values()):
            assert value.untyped_storage().nbytes() == value.nbytes


@pytest.mark.parametrize("make", [mlp, conv_bn, LM])
def test_only_true_ties_share_storage(make, device, gradients):
    a, _, b, _ = usual_pair(make, USUAL[2], device, gradients=gradients)

    def by_storage(model):
        groups = {}
        for name, value in model.state_dict().items():
            groups.setdefault(value.untyped_storage().data_ptr(), []).append(name)
        return sorted(groups.values())

    assert by_storage(b) == by_storage(a)
    spans = sorted((p.data_ptr(), p.data_ptr() + p.nbytes) for p in b.parameters())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for p in b.parameters():
        assert p.storage_offset() == 0 and p.untyped_storage().nbytes() == p.nbytes


def test_safetensors_takes_them(device, gradients, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    a, oa, b, ob = usual_pair(conv_bn, USUAL[2], device, gradients=gradients)
    x = torch.linspace(-1, 1, 486, device=device, dtype=torch.float64).view(2, 3, 9, 9)
    both(a, oa, b, ob, lambda m: m(x).pow(2).mean(), steps=2)
    state = ob.state_dict()["state"]
    moments = {f"{i}.{k}": v for i, entries in state.items() for k, v in entries.items()}
    for name, values in (("model", b.state_dict()), ("optimizer", moments)):
        safetensors.save_file(values, tmp_path / name)
        loaded = safetensors.load_file(tmp_path / name)
        assert loaded.keys() == values.keys()
        for key, value in values.items():
            assert torch.equal(loaded[key], value.cpu())
    safetensors.save_model(b, tmp_path / "whole")
    fresh = conv_bn().to(device, torch.float64)
    safetensors.load_model(fresh, tmp_path / "whole")
    same(a, fresh)


def by_torch(things):
    file = stored(things)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = [copy.deepcopy, lambda things: pickle.loads(pickle.dumps(things)), by_torch]


@each_usual
@pytest.mark.parametrize("copied", COPIES, ids=["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("steps", [0, 2])
def test_copies_train_on_alone(usual, copied, steps, device, gradients):
    a, oa, b, ob = usual_pair(LM, usual, device, gradients=gradients)

    def loss(model):
        return model(torch.arange(7, device=device))

    both(a, oa, b, ob, loss, steps=steps)
    model, optimizer = copied((b, ob))
    assert type(optimizer) is type(ob)
    groups = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(p is q for p, q in zip(groups, model.parameters(), strict=True))
    before = values_of(b.parameters())
    both(a, oa, model, optimizer, loss, steps=3)
    same(a, model)
    same_state(oa, optimizer)
    assert equal(b.parameters(), before)  # the original stands still
    for _ in range(3):
        ob.zero_grad()
        loss(b).backward()
        ob.step()
    same(a, b)
    same_state(oa, ob)


@each_usual
def test_a_saved_optimizer_holds_its_own_parameters_only(usual, device, gradients):
    """Not those of the model that no group has, nor does it keep them alive."""

    def make():
        return nn.Sequential(nn.Linear(4, 256), nn.Linear(256, 256), nn.Linear(256, 2))

    model = make().to(device)
    native = usual.native(model[2].parameters(), **usual.options)
    size = stored(native).tell()
    optimizer = usual.native(model[2].parameters(), **usual.options)
    tr.accelerate(model, optimizer, gradients=gradients)
    assert stored(optimizer).tell() <= size + 1024
    optimizer.add_param_group({"params": list(model[1].parameters())})
    assert set(tr.regions(optimizer).loose) <= {"1.weight", "1.bias", "2.weight", "2.bias"}
    assert {s.name for s in tr.regions(optimizer).slots} == {
        "1.weight",
        "1.bias",
        "2.weight",
        "2.bias",
    }
    gone = weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("copied", COPIES, ids=["deepcopy", "pickle", "torch.save"])
def test_copies_know_the_names_and_kinds_of_their_parameters(copied, device, gradients):
    model = conv_bn().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tr.accelerate(model, optimizer, gradients=gradients, decay_bias_like=False)
    _, other = copied((model, optimizer))
    found = [[(s.name, s.kind, s.decays) for s in tr.regions(o).slots] for o in (optimizer, other)]
    assert found[0] == found[1] and ("1.weight", tr.Kind.NORM_WEIGHT, False) in found[0]
