# SPDX-License-Identifier: BSD-3-Clause
# tr.Ema's state_dict, saved, loaded and refused; and swapped(), which puts the averages into the
# model and back, and what must not happen meanwhile.

import copy
import io
from contextlib import nullcontext

import pytest
import torch
from averaging import Averaged, each_gradients, each_usual, everything
from testing import (
    DEVICES,
    LM,
    USUAL,
    Two,
    close,
    equal,
    mlp,
    same,
    same_state,
    square,
    values_of,
    x_of,
)

import torch_renaissance as tr

pytestmark = pytest.mark.parametrize("device", DEVICES)


# -- state_dict ------------------------------------------------------------------------------------


def test_a_decay_of_the_step_goes_on_where_it_was(device):
    """From a file, as a checkpoint is: else the first step after it would begin anew."""

    def decay(n):
        asked.append(n)
        return min(0.999, (1 + n) / (10 + n))

    def training():
        model = mlp().to(device)
        return tr.accelerate(model, torch.optim.SGD(model.parameters(), 0.1), ema_decay=decay)

    def steps(model, optimizer, count):
        for _ in range(count):
            square(model).backward()
            optimizer.step()
            optimizer.zero_grad()

    asked = []
    model, optimizer = training()
    steps(model, optimizer, 20)
    file = io.BytesIO()
    saved = model.state_dict(), optimizer.state_dict(), tr.Ema(model, optimizer).state_dict()
    torch.save(saved, file)
    file.seek(0)
    weights, state, averages = torch.load(file, weights_only=True)
    again, other = training()
    again.load_state_dict(weights)
    other.load_state_dict(state)
    tr.Ema(again, other).load_state_dict(averages)
    asked.clear()
    steps(again, other, 3)
    assert asked == [20, 21, 22]
    steps(model, optimizer, 3)
    ours, theirs = tr.Ema(again, other), tr.Ema(model, optimizer)
    assert ours.updates == theirs.updates == 23
    assert equal(ours.state_dict().values(), theirs.state_dict().values())


def test_averages_without_counts_are_loaded_all_the_same(device):
    t = Averaged(mlp, USUAL[0], device, 0.9)
    t.step(steps=3)
    plain = dict(t.ours.state_dict())
    t.ours.load_state_dict(plain)
    assert t.ours.updates == 3
    t.step()
    t.check()


@each_usual
def test_state_dict_loads_strictly_into_a_plain_model_and_stands_still(row, device):
    t = Averaged(LM, row, device, 0.9)
    t.step(lambda m: m(torch.arange(7, device=device)), steps=3)
    found = t.ours.state_dict()
    plain = LM().to(device, torch.float64)
    plain.load_state_dict(found, strict=True)
    same(t.native.module, plain)
    kept = {name: value.clone() for name, value in found.items()}
    live = {p.data_ptr() for p in t.b.parameters()}
    for value in found.values():
        assert not value.requires_grad and type(value) is torch.Tensor
        assert value.data_ptr() not in live
        assert value.untyped_storage().nbytes() == value.nbytes
    t.step(lambda m: m(torch.arange(7, device=device)), steps=2)
    assert equal(found.values(), kept.values())
    for value in found.values():
        value.zero_()
    t.check()
    file = io.BytesIO()
    torch.save(t.ours.state_dict(), file)
    file.seek(0)
    plain.load_state_dict(torch.load(file, weights_only=True))
    same(t.native.module, plain)


@each_usual
@each_gradients
def test_load_state_dict_goes_on_from_what_was_saved(row, gradients, device):
    t = Averaged(Two, row, device, 0.7, gradients=gradients)
    t.step(lambda m: m(x_of(device), "a"), steps=2)
    saved = t.ours.state_dict(), copy.deepcopy((t.b.state_dict(), t.ob.state_dict()))
    t.step(lambda m: m(x_of(device), "ab"), steps=3)
    want = t.ours.state_dict()
    for when in ("fresh", "stepped"):
        u = Averaged(Two, row, device, 0.7, gradients=gradients)
        if when == "stepped":
            u.step(lambda m: 3 * m(x_of(device), "ab"), steps=4)
        u.b.load_state_dict(saved[1][0])
        u.ob.load_state_dict(copy.deepcopy(saved[1][1]))
        weights = values_of(u.b.parameters())
        u.ours.load_state_dict(saved[0])
        assert equal(u.b.parameters(), weights)
        assert equal(u.ours.state_dict().values(), saved[0].values())
        for _ in range(3):
            u.ob.zero_grad()
            u.b(x_of(device), "ab").backward()
            u.ob.step()
        found = u.ours.state_dict()
        for name in want:
            close(found[name], want[name], f"{when} {name}")
    assert not equal(want.values(), saved[0].values())


@each_usual
def test_a_state_dict_that_does_not_fit_is_refused(row, device):
    t = Averaged(mlp, row, device, 0.7)
    t.step(steps=3)
    good = t.ours.state_dict()
    missing = {k: v for k, v in good.items() if k != "2.bias"}
    for bad, words in (
        (missing, r"2\.bias needs shape \[1\], got nothing; load what Ema\.state_dict\(\)"),
        (good | {"2.weight": torch.zeros(8, 1)}, r"2\.weight needs shape \[1, 8\], got \[8, 1\]"),
        (good | {"0.bias": torch.zeros(())}, r"0\.bias needs shape \[8\], got \[\]"),
        ({}, r"0\.weight needs shape \[8, 4\], got nothing"),
    ):
        bad = {k: v + 7 for k, v in bad.items()}
        before = everything(t.b, t.ob)
        with pytest.raises(RuntimeError, match=words):
            t.ours.load_state_dict(bad)
        assert equal(everything(t.b, t.ob), before) and t.ours.updates == 3
    t.step()
    t.check()


# -- swapped ---------------------------------------------------------------------------------------


@each_usual
@each_gradients
def test_swapped_exchanges_the_values_and_puts_them_back(row, gradients, device):
    t = Averaged(LM, row, device, 0.9, gradients=gradients)
    tokens = torch.arange(7, device=device)
    t.step(lambda m: m(tokens), steps=3)
    weights, averages = values_of(t.b.parameters()), t.ours.state_dict()
    places = [p.data_ptr() for p in t.b.parameters()]
    with t.ours.swapped() as model:
        assert model is t.b
        assert equal(t.b.state_dict().values(), averages.values())
        assert equal(t.ours.state_dict().values(), averages.values())
        assert [p.data_ptr() for p in t.b.parameters()] == places
        with torch.no_grad():  # evaluation sees the averages
            close(t.b(tokens), t.native.module(tokens))
            assert not torch.allclose(t.b(tokens), t.a(tokens), rtol=1e-6)
        assert t.b.head.weight is t.b.emb.weight
    assert equal(t.b.parameters(), weights)
    assert equal(t.ours.state_dict().values(), averages.values())
    assert [p.data_ptr() for p in t.b.parameters()] == places
    t.step(lambda m: m(tokens), steps=2)
    t.check()
    same_state(t.oa, t.ob)


@each_usual
def test_swapped_puts_everything_back_after_an_error(row, device):
    t = Averaged(mlp, row, device, 0.9)
    t.step(steps=3)
    before = everything(t.b, t.ob)
    with pytest.raises(KeyError, match="by the program"):
        with t.ours.swapped():
            raise KeyError("by the program")
    assert equal(everything(t.b, t.ob), before)
    t.step()
    t.check()


@each_usual
def test_swapped_twice_is_refused(row, device):
    t = Averaged(mlp, row, device, 0.9)
    t.step(steps=3)
    before = everything(t.b, t.ob)
    for again in (t.ours, tr.Ema(t.b, t.ob)):
        with t.ours.swapped():
            averages = values_of(t.b.parameters())
            with pytest.raises(RuntimeError, match="averages are in the model already"):
                with again.swapped():
                    raise AssertionError("entered")
            assert equal(t.b.parameters(), averages)
        assert equal(everything(t.b, t.ob), before)


@each_usual
@each_gradients
def test_a_step_while_swapped_is_refused(row, gradients, device):
    t = Averaged(mlp, row, device, 0.9, gradients=gradients)
    t.step(steps=3)
    before = everything(t.b, t.ob)

    def closure():
        t.ob.zero_grad()
        loss = square(t.b)
        loss.backward()
        return loss

    with t.ours.swapped():
        inside = everything(t.b, t.ob)
        for arguments in ((), (closure,)):
            closure()
            with pytest.raises(RuntimeError, match=r"hold their averages now; step outside of"):
                t.ob.step(*arguments)
            assert equal(everything(t.b, t.ob), inside)
        step = tr.TrainStep(lambda: square(t.b), t.ob)
        t.ob.zero_grad()
        with pytest.warns(UserWarning) if device == "cpu" else nullcontext():
            with pytest.raises(RuntimeError, match=r"hold their averages now; step outside of"):
                step()
        assert equal(everything(t.b, t.ob), inside)
    assert equal(everything(t.b, t.ob), before) and t.ours.updates == 3
    t.step()
    t.check()


@each_usual
def test_loading_averages_while_swapped_leaves_the_weights_alone(row, device):
    """They are in the averages' place then; either it is refused or done right."""
    t = Averaged(mlp, row, device, 0.9)
    t.step(steps=3)
    weights, averages = values_of(t.b.parameters()), t.ours.state_dict()
    other = {name: value + 1 for name, value in averages.items()}
    try:
        with t.ours.swapped():
            t.ours.load_state_dict(other)
        expected = other
    except RuntimeError as error:
        assert "swapped" in str(error)
        expected = averages
    assert equal(t.b.parameters(), weights)
    assert equal(t.ours.state_dict().values(), expected.values())


@each_usual
def test_copies_made_while_swapped_keep_weights_and_averages_apart(row, device):
    """Either refused, or the copy has them as its original."""
    t = Averaged(mlp, row, device, 0.9)
    t.step(steps=3)
    averages = t.ours.state_dict()
    try:
        with t.ours.swapped():
            c, oc = copy.deepcopy((t.b, t.ob))
    except RuntimeError as error:
        assert "swapped" in str(error)
        return
    assert equal(c.parameters(), averages.values())  # the model is as it was copied
    ema = tr.Ema(c, oc)
    assert equal(ema.state_dict().values(), averages.values())
    with pytest.raises(RuntimeError, match="averages"):
        oc.step()


@each_usual
def test_accelerating_while_swapped_is_refused(row, device):
    t = Averaged(mlp, row, device, 0.9)
    t.step(steps=3)
    before = everything(t.b, t.ob)
    with t.ours.swapped():
        with pytest.raises(RuntimeError, match="swapped"):
            tr.accelerate(t.b, t.ob, ema_decay=0.9)
    assert equal(everything(t.b, t.ob), before)
    t.step()
    t.check()


@each_usual
def test_before_the_first_step_the_averages_are_the_weights(row, device):
    t = Averaged(mlp, row, device, 0.9)
    weights = values_of(t.b.parameters())
    assert t.ours.updates == 0
    assert equal(t.ours.state_dict().values(), weights)
    with t.ours.swapped():
        assert equal(t.b.parameters(), weights)
    assert equal(t.b.parameters(), weights)
    t.step()
    t.check()
