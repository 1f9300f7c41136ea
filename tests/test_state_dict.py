# SPDX-License-Identifier: BSD-3-Clause
# Checkpoints: load orders, torch's format both ways, sizes of files, copies, pickles, safetensors,
# and state that the user edits in place, replaces or deletes.

import copy
import io
import itertools
import pickle

import pytest
import torch
from testing import (
    DEVICES,
    GRADIENTS,
    LM,
    USUAL,
    Two,
    both,
    close,
    conv_bn,
    equal,
    mlp,
    pair,
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


def go(model, optimizer, steps, loss=square):
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()


@each_usual
@pytest.mark.parametrize("order", ["mo", "om", "before", "between"])
def test_order_of_loading_does_not_matter(usual, order, device, gradients):
    torch.manual_seed(0)
    a = mlp().to(device)
    oa = usual.native(a.parameters(), **usual.options)
    go(a, oa, 3)
    saved = copy.deepcopy({"m": a.state_dict(), "o": oa.state_dict()})
    go(a, oa, 3)
    b = mlp().to(device)
    ob = usual.native(b.parameters(), **usual.options)
    parts = {"m": b, "o": ob}
    if order in ("mo", "om"):
        tr.accelerate(b, ob, gradients=gradients)
        go(b, ob, 2)  # what lay in the regions is replaced
    for part in order if order in ("mo", "om") else "om":
        if order == "between" and part == "m":
            tr.accelerate(b, ob, gradients=gradients)
        parts[part].load_state_dict(copy.deepcopy(saved[part]))
    if order == "before":
        tr.accelerate(b, ob, gradients=gradients)
    go(b, ob, 3)
    same(a, b)
    same_state(oa, ob)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):  # state shows the live values
        for key, value in oa.state[p].items():
            close(ob.state[q][key].cpu(), value.cpu(), key)


@each_usual
def test_loading_copies(usual, device, gradients):
    """Natively the optimizer trains on in the loaded tensors, and so do two that loaded them."""
    a, oa, b, ob = usual_pair(mlp, usual, device, gradients=gradients)
    both(a, oa, b, ob, square, steps=3)
    saved = oa.state_dict()
    kept = copy.deepcopy(saved)
    other = copy.deepcopy(b)
    oo = usual.native(other.parameters(), **usual.options)
    tr.accelerate(other, oo, gradients=gradients)
    for model, optimizer in ((b, ob), (other, oo)):
        optimizer.load_state_dict(saved)
        go(model, optimizer, 2)
    same(b, other)
    for i, entries in kept["state"].items():
        for key, value in entries.items():
            assert torch.equal(saved["state"][i][key], value)


@each_usual
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"fused": True},
        {"foreach": False},
        pytest.param({"capturable": True}, marks=pytest.mark.cuda),
    ],
    ids=str,
)
def test_format_is_torchs(usual, flags, device, gradients):
    if "capturable" in flags and (device == "cpu" or usual.native is torch.optim.SGD):
        flags = {"foreach": True}  # SGD has no such flag, and a CPU no graphs

    def make_optimizer(model):
        groups = [{"params": m.named_parameters(), "lr": 0.03} for m in (model.a, model.b)]
        return usual.native(groups, **usual.options, **flags)

    a, oa, b, ob = pair(Two, make_optimizer, device, gradients=gradients)
    same_state(oa, ob)  # before the first step
    both(a, oa, b, ob, lambda m: m(x_of(device), "a"), steps=2)
    same_state(oa, ob)  # device and dtype of `step` included
    native, ours = oa.state_dict(), ob.state_dict()
    assert ours.keys() == native.keys()
    assert ours["param_groups"] == native["param_groups"]
    oa.load_state_dict(copy.deepcopy(ours))
    ob.load_state_dict(copy.deepcopy(native))
    both(a, oa, b, ob, lambda m: m(x_of(device), "ab"), steps=2)
    same(a, b)
    same_state(oa, ob)


@each_usual
def test_a_state_dict_is_alive_as_natively(usual, device, gradients):
    """Its moments are those of the optimizer, not copies; a deepcopy of it stands still."""
    _, _, b, ob = usual_pair(mlp, usual, device, gradients=gradients)
    go(b, ob, 2)
    held, kept = ob.state_dict()["state"], copy.deepcopy(ob.state_dict()["state"])
    entry = b.state_dict()["0.weight"]
    go(b, ob, 2)
    assert torch.equal(entry, b[0].weight)
    for i, p in enumerate(b.parameters()):
        for key in held[i].keys() - {"step"}:
            assert torch.equal(held[i][key], ob.state[p][key])
            assert not torch.equal(held[i][key], kept[i][key])
    entry.zero_()
    assert not b[0].weight.any()


def stored(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    return file


@each_usual
def test_files_are_no_larger_than_natives(usual, device, gradients):
    def make():
        return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 2))

    def loss(model):
        return model(torch.ones(2, 128, device=device)).pow(2).sum()

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
    x = torch.linspace(-1, 1, 486, device=device).view(2, 3, 9, 9)
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
    fresh = conv_bn().to(device)
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
    go(b, ob, 3, loss)
    same(a, b)
    same_state(oa, ob)


@each_usual
def test_state_edited_replaced_and_deleted(usual, device, gradients):
    a, oa, b, ob = usual_pair(mlp, usual, device, gradients=gradients)
    moment = "momentum_buffer" if usual.native is torch.optim.SGD else "exp_avg"

    def replace(model, optimizer):
        entries = optimizer.state[model[2].weight]
        entries[moment] = torch.full_like(model[2].weight, 0.25)

    def count(model, optimizer):
        for entries in optimizer.state.values():
            if "step" in entries:
                entries["step"] += 5
                entries["step"] = entries["step"] * 2

    def swap(model, optimizer):
        first, second = optimizer.state[model[0].bias], optimizer.state[model[2].weight]
        first[moment] = second[moment].flatten()

    edits = [
        lambda m, o: o.state[m[0].weight][moment].mul_(0.5),
        replace,
        count,
        swap,
        lambda m, o: o.state.pop(m[0].bias),
        lambda m, o: o.state[m[2].bias].clear(),
        lambda m, o: o.state.clear(),
        lambda m, o: setattr(o, "state", copy.copy(o.state)),
        lambda m, o: o.state.update({m[0].weight: copy.deepcopy(o.state[m[0].weight])}),
    ]
    for edit in edits:
        both(a, oa, b, ob, square, steps=2)
        for model, optimizer in ((a, oa), (b, ob)):
            edit(model, optimizer)
        both(a, oa, b, ob, square)
        same(a, b)
        same_state(oa, ob)


@each_usual
def test_loading_into_other_groups_raises_as_natively(usual, device, gradients):
    a, oa, b, ob = usual_pair(mlp, usual, device, gradients=gradients)
    both(a, oa, b, ob, square, steps=2)
    saved = copy.deepcopy(oa.state_dict())
    params = list(mlp().to(device).parameters())
    for groups in (params[:3], [{"params": params[:2]}, {"params": params[2:]}]):
        words = []
        for make in (usual.native, usual.ours):
            with pytest.raises(ValueError, match="loaded state dict") as error:
                make(copy.copy(groups), **usual.options).load_state_dict(saved)
            words.append(str(error.value))
        assert words[0] == words[1]
    missing = {"state": {0: saved["state"][0]}, "param_groups": saved["param_groups"]}
    for optimizer in (oa, ob):  # state of some parameters only: the others begin anew
        optimizer.load_state_dict(copy.deepcopy(missing))
    both(a, oa, b, ob, square, steps=2)
    same(a, b)
    same_state(oa, ob)
