# SPDX-License-Identifier: BSD-3-Clause
# TrainStep's accumulate=: sums over micro-batches, whose number, shapes and gradients may change,
# beside the loop by hand.

import copy
import gc
import warnings

import pytest
import torch
from stepping import (
    ADAMW,
    NESTEROV,
    NEVER,
    WARMUP,
    Twins,
    by_hand,
    classify_images,
    each_row,
    fit,
    images,
    mean_square,
    no_fallback,
    noise,
    on,
    vectors,
)
from testing import DEVICES, Two, close, conv_bn, equal, mlp, pair, same, same_state, values_of
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

import torch_renaissance as tr

pytestmark = [pytest.mark.parametrize("device", DEVICES), no_fallback]


def accumulating(loss_fn, optimizer):
    """By hand: the mean of `k` micro-batches, one call each."""
    count = 0

    def micro_batch(k, *batch):
        nonlocal count
        loss = loss_fn(*batch)
        (loss / k).backward()
        count += 1
        if count == k:
            optimizer.step()
            optimizer.zero_grad()
            count = 0
        return loss.detach()

    return micro_batch


class MicroTwins(Twins):
    """Twins whose steps are micro-batches; run([(k, *batch), ...])."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.native = accumulating(self.loss_fns[0], self.optimizers[0])
        step = self.step

        def micro_batch(k, *batch):
            if step.accumulate != k:
                step.accumulate = k
            return step(*batch)

        self.train_step, self.step = step, micro_batch

    def run(self, batches):
        for k, *batch in batches:
            expected, got = self.native(k, *batch), self.step(k, *batch)
            close(got, expected, f"call {len(self.replayed)}")
            assert all(p.grad is None for p in self.models[1].parameters())
            self.replayed.append(self.train_step.captured)


@each_row
@pytest.mark.parametrize("k", [1, 2, 4])
def test_micro_batches_equal_one_big_batch(k, row, device):
    a, oa, b, ob = pair(mlp, lambda m: row.native(m.parameters(), **row.options), device)
    step = tr.TrainStep(fit(b), ob, accumulate=k)
    big = by_hand(fit(a), oa)
    assert step.accumulate == k
    for i in range(8):
        x = noise(i, 8, 4, device=device)
        expected, losses = big(x), []
        before = values_of(b.parameters())
        for n, part in enumerate(x.chunk(k)):
            assert equal(b.parameters(), before)  # until the last one there is no update
            losses.append(step(part))
            assert step.captured == (device == "cuda" and i * k + n >= WARMUP)
            assert all(p.grad is None for p in b.parameters())
        assert not equal(b.parameters(), before)
        close(torch.stack(losses).mean(), expected)
    same(a, b)
    same_state(oa, ob)


@each_row
def test_the_number_of_micro_batches_may_change_between_updates(row, device):
    twins = MicroTwins(mlp, row, fit, device, accumulate=2)
    ks = [2] * 8 + [4] * 8 + [1] * 4 + [3] * 6 + [2] * 4 + [1] * 2
    twins.run([(k, *on(device, vectors(i))) for i, k in enumerate(ks)])
    twins.check_replays(*[True] * 12)
    twins.check()


def test_a_number_set_amid_micro_batches_counts_from_the_next_update_on(device):
    twins = MicroTwins(mlp, NESTEROV, fit, device, accumulate=2)
    step, xs = twins.train_step, [on(device, vectors(i)) for i in range(20)]
    twins.run([(2, *x) for x in xs[:7]])
    step.accumulate = 3
    assert step.accumulate == 3
    close(step(*xs[7]), twins.native(2, *xs[7]))  # the second of two
    twins.run([(3, *x) for x in xs[8:14]])
    twins.check_replays(*[True] * 5)
    twins.check()


def branches(model):
    return lambda x, keys: model(x, keys)


# A replay must mark the gradients that it makes, and no others: neither those of micro-batches that
# came before it when it was captured, nor those of the cycle before.
SEQUENCES = {
    "a then b": ["a", "b"] * 5 + ["a", "a", "b", "b", "a", "a", "b", "b", "b", "a"],
    "b is captured in the middle": ["ab", "b"] * 4 + ["b", "b"] * 3 + ["a", "a", "a", "b"],
    "a is new in the middle": ["b"] * 8 + ["b", "a"] * 4 + ["a", "a"] * 2 + ["b", "b"],
    "all, then one": ["ab"] * 8 + ["a"] * 6 + ["b"] * 6 + ["ab", "a"],
}


@each_row
@pytest.mark.parametrize("sequence", SEQUENCES.values(), ids=SEQUENCES)
def test_parameters_without_a_gradient_in_some_micro_batches(sequence, row, device):
    """Momentum and decay would move those that had none in a whole cycle."""
    twins = MicroTwins(Two, row, branches, device, accumulate=2)
    xs = [noise(i, 3, 4, device=device) for i in range(len(sequence))]
    twins.run([(2, x, tuple(keys)) for x, keys in zip(xs, sequence, strict=True)])
    twins.check_replays(True)
    twins.check()


@each_row
def test_another_shape_amid_micro_batches(row, device):
    """Eager and captured micro-batches add up."""
    twins = MicroTwins(mlp, row, fit, device, accumulate=3)
    sizes = [6] * 6 + [6, 2, 6] + [6, 6, 2] + [2, 6, 6] + [6, 9, 2] * 3
    batches = [(3, noise(i, size, 4, device=device)) for i, size in enumerate(sizes)]
    twins.run(batches[:9])
    twins.check_replays(True, True, True, True, False, True)
    twins.run(batches[9:])
    twins.check_replays(True, True, True)
    twins.check()


def test_batch_norm_sees_every_micro_batch(device):
    twins = MicroTwins(conv_bn, NESTEROV, classify_images, device, accumulate=2)
    twins.run([(2, *on(device, images(i))) for i in range(10)])
    assert twins.models[1][1].num_batches_tracked == 10
    twins.check_replays(*[True] * 7)
    twins.check()


def test_an_exception_amid_micro_batches_counts_for_nothing(device):
    def loss_of(model):
        def loss_fn(x):
            if len(x) == 3:
                raise ValueError("a bad batch")
            return model(x).pow(2).mean()

        return loss_fn

    twins = MicroTwins(mlp, ADAMW, loss_of, device, accumulate=2)
    for i in range(16):
        twins.run([(2, noise(i, 5, 4, device=device))])
        if i in (0, 4, 9):
            with warnings.catch_warnings(), pytest.raises(ValueError, match="a bad batch"):
                warnings.simplefilter("ignore")  # at the second one a capture is tried
                twins.train_step(noise(i, 3, 4, device=device))
    twins.check_replays(True, True, True)
    twins.check()


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("captured", [False, True])
def test_an_infinite_micro_batch_skips_the_update(captured, at, device):
    """In fp16; the next cycle starts from zero sums."""
    torch.manual_seed(0)
    model = mlp().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tr.accelerate(model, optimizer)
    step = tr.TrainStep(
        mean_square(model),
        optimizer,
        precision="fp16",
        accumulate=3,
        warmup=WARMUP if captured else NEVER,
    )
    optimizer.amp.load_state_dict({**optimizer.amp.state_dict(), "scale": 1024.0})
    xs = [noise(i, 5, 4, device=device, dtype=torch.float32) for i in range(24)]
    for i in range(2):
        for x in xs[3 * i : 3 * i + 3]:
            step(x)
    assert int(optimizer.skipped_steps) == 0
    before = values_of(model.parameters())
    state = pytree.tree_leaves(optimizer.state_dict()["state"])
    state = [x.clone() for x in state if isinstance(x, torch.Tensor)]
    for n, x in enumerate(xs[6:9]):
        bad = torch.full_like(x, torch.inf) if n == at else x
        step(bad)
        assert step.captured == (captured and device == "cuda")
    assert equal(model.parameters(), before)
    after = pytree.tree_leaves(optimizer.state_dict()["state"])
    assert equal([x for x in after if isinstance(x, torch.Tensor)], state)
    assert int(optimizer.skipped_steps) == 1
    assert optimizer.amp.get_scale() == 512.0
    for x in xs[9:12]:
        step(x)
    assert int(optimizer.skipped_steps) == 1
    assert not equal(model.parameters(), before)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("accumulate", [0, -1, 2.0, True, "2", None], ids=repr)
def test_what_accumulate_must_not_be(accumulate, device):
    twins = Twins(mlp, NESTEROV, fit, device, accumulate=2)
    with pytest.raises(ValueError, match=r"accumulate must be an int >= 1, got"):
        twins.step.accumulate = accumulate
    assert twins.step.accumulate == 2
    with pytest.raises(ValueError, match=r"accumulate must be an int >= 1, got"):
        tr.TrainStep(twins.loss_fns[1], twins.optimizers[1], accumulate=accumulate)


def accumulating_steps(device, count=1):
    model = mlp().to(device)
    model, optimizer = tr.accelerate(model, torch.optim.SGD(model.parameters(), 0.1))
    steps = [
        tr.TrainStep(lambda x: model(x).pow(2).mean(), optimizer, accumulate=2)
        for _ in range(count)
    ]
    return model, optimizer, steps


def test_cycles_of_two_steps_do_not_mix(device):
    """The sums are the optimizer's; in turn, whole cycles, both may use them."""
    x = torch.ones(3, 4, device=device)
    model, _, (first, second) = accumulating_steps(device, 2)
    for step in (first, second):
        for _ in range(4):
            step(x)
    first(x)
    before = values_of(model.parameters())
    with pytest.raises(RuntimeError, match="another TrainStep has summed 1 of 2 micro-batches on"):
        second(x)
    assert equal(values_of(model.parameters()), before)
    first(x)
    assert not equal(values_of(model.parameters()), before)
    second(x)
    del second, step  # and what it has begun
    gc.collect()
    first(x)


def test_an_update_that_fails_ends_its_cycle(device):
    x = [torch.full((3, 4), float(i), device=device) for i in range(1, 5)]
    model, optimizer, (step,) = accumulating_steps(device)
    weights = copy.deepcopy(model.state_dict())
    fails = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match="TrainStep runs eagerly"):
        step(x[0])
    with pytest.raises(ZeroDivisionError):
        step(x[1])
    fails.remove()
    assert equal(model.state_dict().values(), weights.values())
    step(x[2])
    assert equal(model.state_dict().values(), weights.values()), "a new cycle has begun"
    step(x[3])
    again, _, (other,) = accumulating_steps(device)
    again.load_state_dict(weights)
    for batch in x[2:]:
        other(batch)
    assert equal(values_of(model.parameters()), values_of(again.parameters()))


def test_inside_of_swapped_nothing_runs(device):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = tr.accelerate(model, optimizer, ema_decay=0.9)
    step = tr.TrainStep(lambda x: model(x).pow(2).mean(), optimizer, accumulate=2)
    x = torch.ones(3, 4, device=device)
    for _ in range(4):
        step(x)
    with tr.Ema(model, optimizer).swapped():
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(RuntimeError, match="hold their averages now; step outside of"):
            step(x)
        assert equal(model.state_dict().values(), before.values())
    step(x)


@pytest.mark.parametrize("what", ["accumulate", "scaler", "fp16"])
def test_a_replaced_step_that_would_not_be_called_is_refused(what, device):
    model = mlp().to(device)
    model, optimizer = tr.accelerate(model, torch.optim.SGD(model.parameters(), 0.1))
    options = {
        "accumulate": {"accumulate": 2},
        "scaler": {"scaler": torch.amp.GradScaler(device)},
        "fp16": {"precision": "fp16"},
    }[what]
    step = tr.TrainStep(lambda x: model(x).pow(2).mean(), optimizer, **options)
    optimizer.step = lambda *_: None
    before = values_of(model.parameters())
    why = "accumulate=2" if what == "accumulate" else "a loss scale"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TrainStep runs eagerly: the optimizer's step was")
        with pytest.raises(RuntimeError, match=f"replaced, which a step with {why} doesn't call"):
            step(torch.ones(3, 4, device=device))
        assert equal(values_of(model.parameters()), before)
        del optimizer.step
        step(torch.ones(3, 4, device=device))


@each_row
@pytest.mark.parametrize("which", ["pre", "post", "global"])
def test_step_hooks_find_the_mean_of_the_gradients_and_may_change_it(which, row, device):
    twins = MicroTwins(mlp, row, fit, device, accumulate=2)
    twins.run([(2, *on(device, vectors(i))) for i in range(6)])
    seen = {id(optimizer): [] for optimizer in twins.optimizers}

    def hook(optimizer, *_):
        for group in optimizer.param_groups:
            for p in group["params"]:
                seen[id(optimizer)].append(p.grad.clone())
                p.grad.mul_(0.5)

    if which == "global":
        handles = [register_optimizer_step_pre_hook(hook)]
    else:
        handles = [getattr(o, f"register_step_{which}_hook")(hook) for o in twins.optimizers]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "TrainStep runs eagerly")
            twins.run([(2, *on(device, vectors(i))) for i in range(6, 10)])
    finally:
        for handle in handles:
            handle.remove()
    twins.run([(2, *on(device, vectors(i))) for i in range(10, 16)])
    native, ours = seen.values()
    assert len(ours) == len(native) == 8
    for x, y in zip(ours, native, strict=True):
        close(x, y)
    twins.check()


@each_row
@pytest.mark.parametrize("before", [{7}, {8}, {6, 9}, set(range(15))], ids=str)
def test_zero_grad_drops_what_was_summed(before, row, device):
    """And nothing else: the micro-batches are counted on, as by a loop."""
    twins = MicroTwins(mlp, row, fit, device, accumulate=3)
    for i in range(15):
        if i in before:
            for optimizer in twins.optimizers:
                optimizer.zero_grad()
        twins.run([(3, *on(device, vectors(i)))])
    twins.check()


def test_zero_grad_ends_the_cycle_of_another_step(device):
    model, optimizer, (first, second) = accumulating_steps(device, 2)
    x = [torch.full((3, 4), float(i), device=device) for i in range(1, 5)]
    weights = copy.deepcopy(model.state_dict())
    first(x[0])
    optimizer.zero_grad()
    second(x[1])
    with pytest.raises(RuntimeError, match="another TrainStep has summed 1 of 2"):
        first(x[0])
    second(x[2])
    first(x[3])  # of its own cycle the first one: what it had begun is gone
    again, _, (other,) = accumulating_steps(device)
    again.load_state_dict(weights)
    for batch in x[1:3]:
        other(batch)
    assert equal(values_of(model.parameters()), values_of(again.parameters()))


def test_a_plain_step_amid_micro_batches_leaves_the_sums_alone(device):
    model, optimizer, (first,) = accumulating_steps(device)
    plain = tr.TrainStep(lambda x: model(x).pow(2).mean(), optimizer)
    x = torch.ones(3, 4, device=device)
    for _ in range(8):  # eager ones and replays alike
        first(x)
        plain(x)
        before = values_of(model.parameters())
        first(x)
        assert not equal(values_of(model.parameters()), before)
