# SPDX-License-Identifier: BSD-3-Clause
# The optimizer's state: load orders, torch's format both ways, checkpoints of old torch, and state
# that the user edits in place, replaces or deletes.

import copy
import io

import pytest
import torch
from testing import (
    DEVICES,
    GRADIENTS,
    USUAL,
    Two,
    both,
    close,
    mlp,
    pair,
    same,
    same_state,
    square,
    usual_pair,
    x_of,
)

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


def through_a_file(objects):
    file = io.BytesIO()
    torch.save(objects, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@each_usual
@pytest.mark.parametrize("order", ["mo", "om", "before", "between"])
def test_order_of_loading_does_not_matter(usual, order, device, gradients):
    torch.manual_seed(0)
    a = mlp().to(device, torch.float64)
    oa = usual.native(a.parameters(), **usual.options)
    go(a, oa, 3)
    saved = copy.deepcopy({"m": a.state_dict(), "o": oa.state_dict()})
    go(a, oa, 3)
    b = mlp().to(device, torch.float64)
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

    # torch's capturable form corrects the bias in fp32
    dtype = torch.float32 if "capturable" in flags else torch.float64
    a, oa, b, ob = pair(Two, make_optimizer, device, dtype, gradients=gradients)
    same_state(oa, ob)  # before the first step
    both(a, oa, b, ob, lambda m: m(x_of(device, dtype), "a"), steps=2)
    same_state(oa, ob)  # device and dtype of `step` included
    native, ours = oa.state_dict(), ob.state_dict()
    assert ours.keys() == native.keys()
    assert ours["param_groups"] == native["param_groups"]
    oa.load_state_dict(copy.deepcopy(ours))
    ob.load_state_dict(copy.deepcopy(native))
    both(a, oa, b, ob, lambda m: m(x_of(device, dtype), "ab"), steps=2)
    same(a, b)
    same_state(oa, ob)


@each_usual
@pytest.mark.parametrize("travel", [copy.deepcopy, through_a_file], ids=lambda f: f.__name__)
def test_what_travels_after_a_load_has_no_more_than_was_loaded(usual, travel, device, gradients):
    """Of a state that was saved when only a part of the model had taken a step, or none."""
    a, oa, b, ob = usual_pair(Two, usual, device, gradients=gradients)
    saved = [(oa.state_dict(), ob.state_dict())]
    both(a, oa, b, ob, lambda m: m(x_of(device), "a"), steps=2)
    saved += [copy.deepcopy((oa.state_dict(), ob.state_dict()))]
    both(a, oa, b, ob, lambda m: m(x_of(device), "ab"), steps=2)
    for native, ours in reversed(saved):
        oa.load_state_dict(native)
        ob.load_state_dict(ours)
        assert len(oa.state) == len(ob.state)
        (a, oa), (b, ob) = travel((a, oa)), travel((b, ob))
        same_state(oa, ob)
        assert len(oa.state) == len(ob.state)
        both(a, oa, b, ob, lambda m: m(x_of(device), "a"), steps=1)
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
        first[moment] = second[moment].flatten().clone().clone()

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


@each_usual
def test_checkpoints_of_old_torch_and_entries_of_the_users(usual, device, gradients):
    """Steps as numbers, a momentum that is None, state that no optimizer knows of."""
    a, oa, b, ob = usual_pair(mlp, usual, device, gradients=gradients)
    both(a, oa, b, ob, square, steps=2)
    saved = copy.deepcopy(oa.state_dict())
    for i, entries in saved["state"].items():
        entries["mine"] = torch.arange(3.0)
        if "step" in entries:
            entries["step"] = 7 + i
        elif i == 1:
            entries["momentum_buffer"] = None
    saved["state"]["everybody's"] = {"x": 1}
    for optimizer in (oa, ob):
        optimizer.load_state_dict(copy.deepcopy(saved))
    both(a, oa, b, ob, square, steps=2)
    same(a, b)
    native, ours = oa.state_dict()["state"], ob.state_dict()["state"]
    assert {k: v.keys() for k, v in ours.items()} == {k: v.keys() for k, v in native.items()}
    assert torch.equal(ours[0]["mine"], native[0]["mine"])


@each_usual
def test_state_of_another_dtype_is_cast_as_natively(usual, device, gradients):
    a, oa, b, ob = usual_pair(mlp, usual, device, dtype=torch.float32, gradients=gradients)
    both(a, oa, b, ob, square, steps=2)
    saved = copy.deepcopy(oa.state_dict())
    for entries in saved["state"].values():
        for key in entries.keys() - {"step"}:
            entries[key] = entries[key].double()
    for optimizer in (oa, ob):
        optimizer.load_state_dict(copy.deepcopy(saved))
    both(a, oa, b, ob, square, steps=2)
    same(a, b)
    same_state(oa, ob)


@each_usual
@pytest.mark.parametrize("flag", ["foreach", "fused"])
def test_step_has_the_dtype_that_torchs_has(flag, usual, device, gradients):
    torch.set_default_dtype(torch.float64)
    try:
        a, oa, b, ob = pair(
            mlp,
            lambda m: usual.native(m.parameters(), **usual.options, **{flag: True}),
            device,
            torch.float32,
            gradients=gradients,
        )
        both(a, oa, b, ob, square)
        same_state(oa, ob)
        oa.load_state_dict(copy.deepcopy(ob.state_dict()))
        ob.load_state_dict(copy.deepcopy(oa.state_dict()))
        both(a, oa, b, ob, square, 2)
        same_state(oa, ob)
        same(a, b)
    finally:
        torch.set_default_dtype(torch.float32)
