# SPDX-License-Identifier: BSD-3-Clause
# A step that can't be captured, or that a capture changes, as verify=True finds: training goes on
# as in the native loop, one warning says why, strict raises, and nothing of the attempt is left.

import gc
import re
import weakref

import pytest
import torch
import torch.nn.functional as F
from failing import (
    CRUMBS,
    ON_THE_CPU,
    SEGMENT,
    Bystander,
    Net,
    Warned,
    bits,
    capturing,
    memory,
    net_pair,
    only_cuda,
    random_states,
    seed,
)
from stepping import (
    ADAMW,
    NESTEROV,
    WARMUP,
    Twins,
    agree,
    by_hand,
    each_row,
    mean_square,
    noise,
    noises,
)
from testing import DEVICES, close, equal, mlp, same, same_state
from torch.utils.data import DataLoader, TensorDataset
from uncapturable import (
    FILE,
    counts,
    counts_in_the_capture,
    each_captured_failure,
    each_failure,
    raises_at_the_call_of_the_capture,
    stores_an_activation,
)

import torch_renaissance as tr

pytestmark = pytest.mark.parametrize("device", DEVICES)


# -- failures --------------------------------------------------------------------------------------


def trained(step, device, batches):
    """Losses, from a fixed seed, and the random states afterwards."""
    seed()
    losses = torch.stack([step(*batch) for batch in batches])
    return losses, random_states(device)


@each_failure
def test_training_goes_on_as_native_and_one_warning_says_why(failure, device, capsys):
    bystander = Bystander(device)
    a, oa, b, ob = net_pair(device)
    batches = noises(14, 6, 4, device=device)
    loss_fns = [failure.loss_of(model) for model in (a, b)]
    if failure.loss_of is raises_at_the_call_of_the_capture:
        loss_fns[0] = mean_square(a)  # the native loop meets no capture
    expected, states = trained(by_hand(loss_fns[0], oa), device, batches)
    printed = capsys.readouterr().out
    step = tr.TrainStep(loss_fns[1], ob)
    with Warned() as found:
        losses, our_states = trained(step, device, batches)
    assert capsys.readouterr().out == printed
    close(losses, expected)
    same(a, b)
    same_state(oa, ob)
    assert equal(our_states, states)
    assert all(p.grad is None for p in b.parameters())
    if failure.loss_of in (counts, counts_in_the_capture):
        assert {k: v for k, v in vars(a).items() if isinstance(v, int)} == {
            k: v for k, v in vars(b).items() if isinstance(v, int)
        }
    assert not step.captured
    assert len(found) == 1, found.texts
    if device == "cuda":
        assert re.search(failure.reason, found.texts[0]), found.texts
        if failure.line:
            assert FILE in found.texts[0] and failure.line in found.texts[0]
        assert step.explain().graphs == []
    else:
        assert found.texts == [ON_THE_CPU]
    assert found[0].filename == __file__  # where the step was called
    assert len(step.explain().fallbacks) == 1
    bystander.check()


@only_cuda
@each_captured_failure
def test_strict_raises_and_nothing_has_changed(failure, device):
    if device != "cuda":
        pytest.skip("a CPU has no captures")
    bystander = Bystander(device)
    _, _, model, optimizer = net_pair(device)
    loss_fn = failure.loss_of(model)
    step = tr.TrainStep(loss_fn, optimizer, strict=True)
    seed()
    for batch in noises(WARMUP, 6, 4, device=device):
        step(*batch)
    before = bits(model, optimizer, device)
    attributes = {k: v for k, v in vars(model).items() if isinstance(v, int)}
    x = noise(50, 6, 4, device=device)
    for _ in range(2):
        with pytest.raises(tr.CaptureError, match=failure.reason):
            step(x)
        assert equal(bits(model, optimizer, device), before)
        assert {k: v for k, v in vars(model).items() if isinstance(v, int)} == attributes
        assert all(p.grad is None for p in model.parameters())
    bystander.check()


@only_cuda
@each_captured_failure
def test_a_failed_capture_leaves_no_memory_behind(failure, device):
    if device != "cuda":
        pytest.skip("a CPU has no captures")
    bystander = Bystander(device)
    _, _, model, optimizer = net_pair(device)

    def with_large_activations(loss_fn):
        def both(x):
            x.repeat(1 << 20, 2).mul(2).sum()  # 400 MB for the time of a step
            return loss_fn(x)

        return both

    step = tr.TrainStep(with_large_activations(failure.loss_of(model)), optimizer)
    x = noise(0, 6, 4, device=device)
    with Warned() as found:
        for _ in range(WARMUP):
            step(x)
        before = memory()
        assert not found
        step(x)
        after = memory()
    assert len(found) == 1
    assert after[0] <= before[0] + CRUMBS
    assert after[1] <= before[1] + SEGMENT
    bystander.check()


def test_what_changes_at_every_step_is_not_kept_alive(device):
    """Else the graphs of autograd behind stored activations would fill the memory."""
    alive = []

    def loss_of(model):
        loss_fn = stores_an_activation(model)

        def with_record(x):
            loss = loss_fn(x)
            alive.append(weakref.ref(model.out))
            return loss

        return with_record

    _, _, model, optimizer = net_pair(device)
    step = tr.TrainStep(loss_of(model), optimizer)
    with Warned() as found:
        for batch in noises(40, 6, 4, device=device):
            step(*batch)
    assert len(found) == 1
    gc.collect()
    assert sum(ref() is not None for ref in alive) <= 2


# -- verify ----------------------------------------------------------------------------------------


@each_row
@pytest.mark.parametrize("accumulate", [1, 2])
def test_verify_passes_a_good_model(accumulate, row, device):
    """With dropout and batch norm, and for a second shape as well."""
    a, oa, b, ob = net_pair(device, row)
    _, _, c, oc = net_pair(device, row)
    steps = [
        tr.TrainStep(mean_square(b), ob, verify=True, accumulate=accumulate),
        tr.TrainStep(mean_square(c), oc, warmup=10**9, accumulate=accumulate),
    ]
    if accumulate == 1:
        steps.append(by_hand(mean_square(a), oa))
    batches = noises(10, 6, 4, device=device) + noises(6, 3, 4, device=device)
    with Warned() as found:
        runs = [trained(step, device, batches) for step in steps]
    assert len(found) == 2 * (device != "cuda")
    assert steps[0].captured == (device == "cuda")
    assert len(steps[0].explain().graphs) == 2 * (device == "cuda")
    for losses, states in runs[1:]:
        close(runs[0][0], losses)
        assert equal(runs[0][1], states)
    same(c, b)
    same_state(oc, ob)
    assert b.norm.num_batches_tracked == 16


def keeps_a_mean(model):
    """A tensor of the closure that every step moves, as a memory bank or a carried state."""
    mean = {
        "of outputs": torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    }

    def loss_fn(x):
        out = model(x).mean()
        loss = (out - mean["of outputs"].clone()).pow(2)
        with torch.no_grad():
            mean["of outputs"].lerp_(out, 0.5)
        return loss, mean["of outputs"]

    return loss_fn


def changes_its_batch(model):
    return lambda x: model(x.mul_(0.5)).pow(2).mean()


@pytest.mark.parametrize("loss_of", [keeps_a_mean, changes_its_batch], ids=lambda f: f.__name__)
def test_verify_puts_back_what_its_step_changed(loss_of, device):
    """Also what is neither a module's nor the optimizer's: else it would change twice."""
    twins = Twins(Net, NESTEROV, loss_of, device, verify=True)
    with Warned() as found:
        for batch in noises(8, 6, 4, device=device):
            torch.manual_seed(len(twins.replayed))
            expected = twins.native(batch[0].clone())
            torch.manual_seed(len(twins.replayed))
            agree(twins.step(*batch), expected)
            twins.replayed.append(twins.step.captured)
    twins.check_replays(True, True, True, True)
    assert len(found) == (device != "cuda")
    twins.check()


def other_loss(model):
    return lambda x: model(x).pow(2).mean() * (2 if capturing(x) else 1)


def other_gradient(model):
    def loss_fn(x):
        loss = model(x).pow(2).mean()
        return loss + (loss - loss.detach()) if capturing(x) else loss

    return loss_fn


def other_buffer(model):
    def loss_fn(x):
        if capturing(x):
            model.norm.running_mean.add_(1)
        return model(x).pow(2).mean()

    return loss_fn


def other_extra(model):
    return lambda x: (model(x).pow(2).mean(), x.sum() + (1 if capturing(x) else 0))


def not_finite(model):
    return lambda x: model(x).pow(2).mean() * (float("nan") if capturing(x) else 1)


DIFFERENT = {
    other_loss: "a replay differs from an eager step: the loss: apart by",
    other_gradient: "a replay differs from an eager step: (model|plane)",
    other_buffer: r"a replay differs from an eager step: model\.norm\.running_mean",
    other_extra: "a replay differs from an eager step: extra 0",
    not_finite: "a replay differs from an eager step: the loss: finite in one and not in the other",
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("loss_of", DIFFERENT, ids=lambda f: f.__name__)
def test_verify_finds_a_model_that_is_another_in_a_capture(loss_of, strict, device):
    if strict and device != "cuda":
        pytest.skip("a CPU has no captures")
    bystander = Bystander(device)
    twins = Twins(Net, NESTEROV, loss_of, device, verify=True, strict=strict)
    batches = noises(10, 6, 4, device=device)
    if strict:
        twins.run(batches[:WARMUP])
        for _ in range(2):
            before = bits(twins.models[1], twins.optimizers[1], device)
            with pytest.raises(tr.CaptureError, match=DIFFERENT[loss_of]):
                twins.step(*batches[WARMUP])
            assert equal(bits(twins.models[1], twins.optimizers[1], device), before)
    else:
        with Warned() as found:
            twins.run(batches)
        assert not any(twins.replayed)
        assert len(found) == 1
        if device == "cuda":
            assert re.search(DIFFERENT[loss_of], found.texts[0]), found.texts
            assert twins.step.explain().graphs == []
    twins.check()
    bystander.check()


def test_without_verify_the_same_model_trains_otherwise(device):
    """Else the test above might pass for the wrong reason."""
    twins = Twins(Net, NESTEROV, other_loss, device)
    batches = noises(WARMUP + 1, 6, 4, device=device)
    with Warned():
        twins.run(batches[:WARMUP])
        losses = []
        for step in (twins.native, twins.step):
            torch.manual_seed(0)
            losses.append(step(*batches[WARMUP]))
    assert twins.step.captured == (device == "cuda")
    close(losses[1], losses[0] * (2 if device == "cuda" else 1))


@each_captured_failure
def test_verify_and_a_step_that_cannot_be_captured(failure, device):
    """The eager step that was to be compared counts, once."""
    if failure.loss_of is raises_at_the_call_of_the_capture:
        pytest.skip("that call is the eager one here")
    a, oa, b, ob = net_pair(device)
    batches = noises(8, 6, 4, device=device)
    expected, states = trained(by_hand(failure.loss_of(a), oa), device, batches)
    step = tr.TrainStep(failure.loss_of(b), ob, verify=True)
    with Warned() as found:
        losses, our_states = trained(step, device, batches)
    assert len(found) == 1 and not step.captured
    close(losses, expected)
    assert equal(our_states, states)
    same(a, b)
    same_state(oa, ob)


# -- a loader at work ------------------------------------------------------------------------------


@only_cuda
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "non_blocking"])
def test_a_data_loader_that_pins_memory_meanwhile(blocking, device):
    """Its thread calls CUDA while the step is being captured."""
    if device != "cuda":
        pytest.skip("pinned memory is a GPU's")
    x = torch.stack([noise(i, 4) for i in range(240)])
    loader = DataLoader(
        TensorDataset(x, x.sum(1, keepdim=True)),
        batch_size=6,
        pin_memory=True,
        num_workers=2,
        persistent_workers=True,
    )

    def loss_of(model):
        def loss_fn(x, y):
            x = x.to(device, non_blocking=not blocking)
            return F.mse_loss(model(x), y.to(device, non_blocking=not blocking))

        return loss_fn

    twins = Twins(mlp, ADAMW, loss_of, device)
    with Warned() as found:
        for _ in range(2):
            for x, y in loader:
                assert x.is_pinned()
                twins.run([(x, y)])
    twins.check_replays(*[True] * (80 - WARMUP))
    assert not found
    twins.check()
