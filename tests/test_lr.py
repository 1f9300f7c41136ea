# SPDX-License-Identifier: BSD-3-Clause
# tr.lr's schedules: each against torch's recursive scheduler of the same name, by batch and by
# epoch, with and without warm-up.

import copy
import dataclasses
import itertools
import math
import pickle
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler as S

import torch_renaissance as tr

lr = tr.lr


# -- values -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A schedule and torch's main part of it, for a T: the length of the main part if it has one.

    `ours` takes the total, warm-up included, then the settings that all schedules share; `native` a
    list of (scheduler, length), of which the last goes on."""

    name: str
    ours: object
    native: object
    end: float | None = None  # where it stays

    def __str__(self):
        return self.name


LR, T = 0.8, 13
ROWS = [
    Row(
        "Constant", lambda total, **k: lr.Constant(LR, **k), lambda o: [(S.ConstantLR(o, 1.0, 1),)]
    ),
    Row("Step", lambda total, **k: lr.Step(LR, 4, 0.5, **k), lambda o: [(S.StepLR(o, 4, 0.5),)]),
    Row(
        "MultiStep",
        lambda total, **k: lr.MultiStep(LR, [2, 3, 9], gamma=0.3, **k),
        lambda o: [(S.MultiStepLR(o, [2, 3, 9], 0.3),)],
    ),
    Row(
        "Exponential",
        lambda total, **k: lr.Exponential(LR, 0.9, **k),
        lambda o: [(S.ExponentialLR(o, 0.9),)],
    ),
    Row(
        "Polynomial",
        lambda total, **k: lr.Polynomial(LR, total, 1.5, **k),
        lambda o: [(S.PolynomialLR(o, T, 1.5),)],
        end=0.0,
    ),
    Row(
        "Cosine",
        lambda total, **k: lr.Cosine(LR, total, eta_min=0.03, **k),
        lambda o: [(S.CosineAnnealingLR(o, T, 0.03),)],
        end=0.03,
    ),
    Row(
        "CosineWarmRestarts",
        lambda total, **k: lr.CosineWarmRestarts(LR, 3, eta_min=0.03, **k),
        lambda o: [(S.CosineAnnealingWarmRestarts(o, 3, eta_min=0.03),)],
    ),
    Row(
        "CosineWarmRestarts-T_mult=2",
        lambda total, **k: lr.CosineWarmRestarts(LR, 2, 2, **k),
        lambda o: [(S.CosineAnnealingWarmRestarts(o, 2, T_mult=2),)],
    ),
    Row(
        "WSD",
        lambda total, **k: lr.WSD(LR, total, decay=5, eta_min=0.2, **k),
        lambda o: [(S.ConstantLR(o, 1.0, 1), T - 5), (S.LinearLR(o, 1.0, 0.25, 5),)],
        end=0.2,
    ),
]
each_row = pytest.mark.parametrize("row", ROWS, ids=str)
WARMUPS = [0, 1, 5]
FACTOR = 0.25  # torch's LinearLR can't begin at 0


def warmup(length):
    return {"warmup": length, "warmup_factor": FACTOR} if length else {}


def native_curve(row, length, n):
    """The lr of updates 0 to n - 1 under torch's scheduler, after a warm-up of `length`."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=LR)
    parts = row.native(optimizer)
    if length:
        parts = [(S.LinearLR(optimizer, FACTOR, 1.0, length), length), *parts]
    scheduler, milestones, at = parts[0][0], [], 0
    for part in parts[:-1]:
        at += part[1]
        milestones.append(at)
    if milestones:
        scheduler = S.SequentialLR(optimizer, [part[0] for part in parts], milestones)
    values = []
    for _ in range(n):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return values


def same_values(ours, native):
    torch.testing.assert_close(
        torch.tensor(ours, dtype=torch.float64),
        torch.tensor(native, dtype=torch.float64),
        rtol=1e-6,
        atol=1e-9,
    )


@each_row
@pytest.mark.parametrize("length", WARMUPS)
def test_by_batch_as_torch(row, length):
    total = length + T
    schedule = row.ours(total, **warmup(length))
    # Past the end torch's cosine rises again.
    n = total + 1 if row.end is not None else total + 40
    same_values([schedule(step) for step in range(n)], native_curve(row, length, n))
    assert schedule(length) == LR
    if row.end is not None:
        assert schedule.total_steps == total
        assert {schedule(step) for step in (total, total + 1, 10**9)} == {row.end}


@each_row
@pytest.mark.parametrize("length", WARMUPS)
def test_by_epoch_as_torch_stepped_once_an_epoch(row, length):
    """With an end it has T + 1 epochs after the warm-up, of which the last trains with the end."""
    per_epoch, total = 7, length + T + 1
    schedule = row.ours(total, steps_per_epoch=per_epoch, by="epoch", **warmup(length))
    n = total if row.end is not None else total + 40
    native = native_curve(row, length, n)
    same_values([schedule(epoch * per_epoch) for epoch in range(n)], native)
    for step in range(n * per_epoch):
        assert schedule(step) == schedule(step // per_epoch * per_epoch)
    if row.end is not None:
        assert schedule.total_steps == total * per_epoch
        epochs = (total - 1, total, total + 1, 10**6)
        assert {schedule(epoch * per_epoch) for epoch in epochs} == {row.end}


@pytest.mark.parametrize("length", WARMUPS)
@pytest.mark.parametrize(
    "kind, epochs, steps",
    [
        (lr.Constant, {}, {}),
        (lr.Step, {"step_size": 4}, {"step_size": 28}),
        (lr.MultiStep, {"milestones": [2, 3, 9]}, {"milestones": [14, 21, 63]}),
        (lr.Exponential, {"gamma": 0.9}, {"gamma": 0.9 ** (1 / 7)}),
        (lr.Polynomial, {"total": 18}, {"total": 126}),
        (lr.Cosine, {"total": 18}, {"total": 126}),
        (lr.CosineWarmRestarts, {"T_0": 2}, {"T_0": 14}),
        (lr.CosineWarmRestarts, {"T_0": 2, "cycles": 3}, {"T_0": 14, "cycles": 3}),
        (lr.WSD, {"total": 18, "decay": 5}, {"total": 126, "decay": 35}),
    ],
)
def test_by_batch_lengths_in_epochs_are_so_many_steps(kind, epochs, steps, length):
    in_epochs = kind(LR, **epochs, steps_per_epoch=7, **warmup(length))
    in_steps = kind(LR, **steps, **warmup(7 * length))
    assert in_epochs.total_steps == in_steps.total_steps
    same_values([in_epochs(step) for step in range(200)], [in_steps(step) for step in range(200)])


@pytest.mark.parametrize("name", ["warmup_lr", "warmup_factor", None])
@pytest.mark.parametrize("steps_per_epoch", [None, 4])
def test_warmup_goes_linearly_from_its_start_to_the_lr(name, steps_per_epoch):
    start = {"warmup_lr": 0.3, "warmup_factor": 0.3 / LR, None: 0.0}[name]
    settings = {name: start} if name else {}
    schedule = lr.Constant(LR, warmup_steps=6, steps_per_epoch=steps_per_epoch, **settings)
    first = 0.3 if name else 0.0
    wanted = [first + (LR - first) * min(step, 6) / 6 for step in range(9)]
    torch.testing.assert_close([schedule(step) for step in range(9)], wanted, rtol=1e-15, atol=0)
    assert schedule(0) == pytest.approx(first, rel=1e-15) and schedule(6) == LR


def test_warmup_in_steps_before_a_schedule_in_epochs():
    schedule = lr.Cosine(1.0, 3, eta_min=0.1, steps_per_epoch=10, warmup_steps=4)
    reference = lr.Cosine(1.0, 30, eta_min=0.1, warmup=4)
    assert [schedule(step) for step in range(40)] == [reference(step) for step in range(40)]
    restarts = lr.CosineWarmRestarts(1.0, 1, 2, 3, steps_per_epoch=10, warmup_steps=4)
    assert restarts.total_steps == 4 + 70
    assert [restarts(s) for s in (4, 14, 34)] == [1.0] * 3  # each begins a cycle
    assert restarts(13) > 0 and restarts(74) == restarts(75) == 0


def test_the_case_of_warmup_and_cosine_in_closed_form():
    def cosine(t):
        return 0.1 + 0.9 * (1 + math.cos(math.pi * t / 20)) / 2

    schedule = lr.Cosine(1.0, 25, eta_min=0.1, warmup=5, warmup_factor=0.2)
    values = [schedule(t) for t in range(26)]
    wanted = [0.2 + 0.8 * t / 5 if t < 5 else cosine(t - 5) for t in range(26)]
    torch.testing.assert_close(values, wanted, rtol=1e-14, atol=0)
    assert max(values) == values[5] == 1.0 and values[25] == 0.1


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_polynomial_ends_at_eta_min(power):
    schedule = lr.Polynomial(1.0, 10, power, eta_min=0.2)
    wanted = [0.2 + 0.8 * (1 - t / 10) ** power for t in range(11)]
    torch.testing.assert_close([schedule(t) for t in range(11)], wanted, rtol=1e-14, atol=0)
    assert schedule(0) == 1.0 and schedule(10) == schedule(11) == 0.2


@pytest.mark.parametrize("by", ["batch", "epoch"])
@pytest.mark.parametrize("T_mult, cycles, length", [(1, 3, 12), (2, 3, 28), (3, 1, 4)])
def test_warm_restarts_that_end_after_some_cycles(T_mult, cycles, length, by):
    settings = {"eta_min": 0.1, "warmup": 2, "steps_per_epoch": 5, "by": by}
    forever = lr.CosineWarmRestarts(1.0, 4, T_mult, **settings)
    schedule = lr.CosineWarmRestarts(1.0, 4, T_mult, cycles, **settings)
    assert forever.total_steps is None and schedule.total_steps == (2 + length) * 5
    end = schedule.total_steps - (5 if by == "epoch" else 0)
    assert [schedule(s) for s in range(end)] == [forever(s) for s in range(end)]
    assert {schedule(s) for s in range(end, end + 200)} == {0.1}
    assert schedule(end - 1) > 0.1


def test_wsd_has_as_many_epochs_of_decay_as_it_says():
    schedule = lr.WSD(1.0, 10, decay=4, warmup=3, steps_per_epoch=2, by="epoch")
    values = [schedule(2 * epoch) for epoch in range(12)]
    wanted = [0, 1 / 3, 2 / 3, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0, 0]
    assert values == pytest.approx(wanted, rel=1e-15)


def test_exponential_growth_past_the_largest_float_is_inf_as_torchs():
    schedule = lr.Exponential(1.0, 10.0)
    assert schedule(300) == pytest.approx(1e300) and schedule(400) == math.inf


def test_values_are_floats_whatever_the_settings_are():
    for schedule in (
        lr.Constant(1),
        lr.Step(1, 2, gamma=1),
        lr.Cosine(1, 4, eta_min=1),
        lr.CosineWarmRestarts(1, 2, cycles=1, eta_min=0),
        lr.WSD(1, 4, 2, warmup=1, warmup_lr=0),
    ):
        assert all(type(schedule(step)) is float for step in range(6))


# -- purity -------------------------------------------------------------------------------------


@each_row
def test_a_resumed_run_sees_the_same_values(row):
    settings = {"steps_per_epoch": 3, **warmup(2)}
    values = [row.ours(2 + T, **settings)(step) for step in range(60)]
    schedule = row.ours(2 + T, **settings)
    assert [schedule(step) for step in reversed(range(60))] == values[::-1]
    for other in (copy.deepcopy(schedule), pickle.loads(pickle.dumps(schedule))):
        assert other == schedule and hash(other) == hash(schedule)
        assert [other(step) for step in range(60)] == values
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.lr = 1.0


def test_milestones_are_the_schedules_own():
    milestones = [2, 4]
    schedule = lr.MultiStep(1.0, milestones)
    milestones[0] = 3
    assert schedule(2) == 0.1


lengths, rates = st.integers(1, 30), st.floats(1e-6, 10.0)
shares = st.floats(0.0, 1.0)


@st.composite
def schedules(draw):
    """Any schedule that goes down; and the lr at the start of its warm-up."""
    by = draw(st.sampled_from(["steps", "batch", "epoch"]))
    settings = {"by": "batch"} if by == "steps" else {"by": by, "steps_per_epoch": draw(lengths)}
    rate, length = draw(rates), draw(st.integers(0, 20))
    start = rate
    if length:
        start = draw(shares) * rate
        settings["warmup"] = length
        settings |= draw(
            st.sampled_from([{"warmup_lr": start}, {"warmup_factor": min(1.0, start / rate)}])
        )
    total = length + draw(lengths) + (by == "epoch")
    eta_min = {"eta_min": draw(shares) * rate}
    gamma, steps = draw(shares), draw(lengths)
    milestones = sorted(draw(st.sets(lengths, max_size=4)))
    most = total - length - (by == "epoch")
    schedule = draw(
        st.sampled_from(
            [
                lambda: lr.Constant(rate, **settings),
                lambda: lr.Step(rate, steps, gamma, **settings),
                lambda: lr.MultiStep(rate, milestones, gamma, **settings),
                lambda: lr.Exponential(rate, gamma, **settings),
                lambda: lr.Polynomial(rate, total, 0.1 + 3 * gamma, **eta_min, **settings),
                lambda: lr.Cosine(rate, total, **eta_min, **settings),
                lambda: lr.CosineWarmRestarts(rate, steps, 1 + steps % 3, **eta_min, **settings),
                lambda: lr.CosineWarmRestarts(rate, steps, 2, 2, **eta_min, **settings),
                lambda: lr.WSD(rate, total, min(steps, most), **eta_min, **settings),
            ]
        )
    )()
    return schedule, start


SLACK = 1e-12  # roundings of a few operations, relative to the lr


@given(schedules())
def test_properties(drawn):
    schedule, start = drawn
    unit, slack = schedule.steps_per_epoch or 1, SLACK * schedule.lr
    warm = schedule.warmup * unit
    values = [schedule(step) for step in range(warm + 40 * unit)]
    rising = values[: warm + 1]
    assert rising[0] == pytest.approx(start, rel=1e-9, abs=slack)
    assert all(a <= b + slack for a, b in itertools.pairwise(rising))
    assert rising[-1] == schedule.lr
    floor = getattr(schedule, "eta_min", 0.0)
    assert all(floor - slack <= value <= schedule.lr + slack for value in values[warm:])
    if not isinstance(schedule, lr.CosineWarmRestarts):
        falling = values[warm:]
        assert all(a + slack >= b for a, b in itertools.pairwise(falling))
    if schedule.by == "epoch":
        assert all(value == values[i // unit * unit] for i, value in enumerate(values))
    if schedule.total_steps is not None:
        last = schedule.total_steps - (unit if schedule.by == "epoch" else 0)
        assert {schedule(last), schedule(last + 1), schedule(last + 10**7)} == {floor}


@given(st.integers(0, 10**15), st.integers(1, 5), st.integers(1, 10**6))
def test_warm_restarts_far_out(step, T_mult, T_0):
    """Found by adding cycle to cycle in whole numbers, where a logarithm would round."""
    begin, cycle = 0, T_0
    if T_mult == 1:
        begin = step - step % T_0
    while begin + cycle <= step:
        begin, cycle = begin + cycle, cycle * T_mult
    wanted = (1 + math.cos(math.pi * (step - begin) / cycle)) / 2
    assert lr.CosineWarmRestarts(1.0, T_0, T_mult)(step) == pytest.approx(wanted, abs=1e-15)
