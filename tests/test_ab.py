# SPDX-License-Identifier: BSD-3-Clause
# tr.ab_test: what is compared before anything is timed, what becomes a row instead of an end, how
# turns become ratios, and what the advice says of synthetic measurements.
import copy
import gc
import json
import math
import random
import re
import statistics
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_renaissance as tr
from torch_renaissance.ab import compare, machine, measure
from torch_renaissance.ab.advice import advise, why
from torch_renaissance.ab.check import Judge
from torch_renaissance.ab.first_steps import Trace, first_steps
from torch_renaissance.ab.measure import Times
from torch_renaissance.ab.report import AbResult, Row, table
from torch_renaissance.ab.setting import Setting, another_form, check_builds_alike
from torch_renaissance.ab.variants import COMPILED, VARIANTS, eager

CPU = torch.device("cpu")
DECAY, LR = 0.1, 1e-3
DTYPES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}


def make_model():
    return nn.Sequential(
        nn.Linear(12, 96), nn.ReLU(), nn.Linear(96, 16), nn.ReLU(), nn.Linear(16, 3)
    )


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)


def loss_fn(model, x, y):
    return F.cross_entropy(model(x), y)


def batch(step=0):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(32, 12, generator=generator), torch.randint(3, (32,), generator=generator)


def by_hand(change=lambda optimizer: None, precision="fp32", after=lambda model: None):
    """A variant of the user's own, whose optimizer is changed before the first step."""

    def make(make_model, make_optimizer, loss_fn):
        model = make_model()
        optimizer = make_optimizer(model)
        change(optimizer)
        dtype = DTYPES[precision]

        def step(*batch):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = loss_fn(model, *batch)
            loss.backward()
            optimizer.step()
            after(model)
            return loss

        return step

    return make


def decay_of(value):
    def change(optimizer):
        for group in optimizer.param_groups:
            group["weight_decay"] = value

    return change


def failing(error, first=0):
    """A variant whose step raises after `first` steps."""

    def make(*functions):
        step, calls = by_hand()(*functions), 0

        def fail(*batch):
            nonlocal calls
            calls += 1
            if calls > first:
                raise error
            return step(*batch)

        return fail

    return make


def run(variants, model=make_model, optimizer=make_optimizer, loss=loss_fn, data=batch, **options):
    # With so large a budget the number of steps compared doesn't depend on the machine.
    options = {"steps": 4, "progress": False, "budget": 5000.0, **options}
    return tr.ab_test(model, optimizer, loss, data, variants=variants, **options)


# --- the same, or not -----------------------------------------------------------------------------


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_right_variants_are_the_same_and_timed(precision, kind):
    optimizers = {
        "adamw": make_optimizer,
        "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3),
    }
    names = ["eager fused", "accelerate", "TrainStep"]
    result = run(
        [*names, {"mine": by_hand(precision=precision)}],
        optimizer=optimizers[kind],
        precision=precision,
    )
    assert [row.name for row in result.rows] == ["eager", *names, "mine"]
    for row in result.rows:
        assert row.status == "ok", row.reason
        assert len(row.losses) == result.check_steps >= 2
        assert row.losses[-1] < row.losses[0]
        assert row.wall.median > 0 and len(row.turns) == 4 and row.start_s >= 0
        assert row.loss_difference <= row.loss_allowed
        assert row.parameter_difference <= row.parameter_allowed
    assert "runs eagerly: the parameters are on the CPU" in result.row("TrainStep").reason
    assert result.device == "cpu" and result.parameters == 12 * 96 + 96 + 97 * 16 + 17 * 3
    with pytest.raises(KeyError, match="no variant 'other'"):
        result.row("other")


@pytest.mark.parametrize("wrong", [0.0, 0.5 * DECAY, 2 * DECAY])
def test_another_weight_decay_is_reported_and_not_timed(wrong):
    result = run([{"wrong": by_hand(decay_of(wrong)), "right": by_hand(decay_of(DECAY))}])
    row = result.row("wrong")
    assert row.status == "differs" and not row.measured
    assert row.reason.startswith("computes something else: ")
    assert "was expected" in row.reason
    assert result.row("right").status == "ok"
    text = str(result)
    assert re.search(r"^wrong +NO +differs", text, re.M)
    assert "wrong: computes something else" in text
    assert "Not considered, since it computes something else: wrong." in result.advice


def test_a_small_weight_decay_shows_in_the_drift_of_a_weight():
    """It changes so little that a distance can't be told from rounding."""
    lr, decay = 1e-3, 1e-4
    result = run(
        [{"none": by_hand(decay_of(0.0)), "right": by_hand()}],
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr, 0.9, weight_decay=decay),
        model=lambda: nn.Sequential(nn.Linear(12, 256), nn.ReLU(), nn.Linear(256, 3)),
    )
    row = result.row("none")
    assert row.status == "differs" and row.parameter_difference < row.parameter_allowed
    assert "0.weight is scaled by 1 +" in row.reason and "weight decay" in row.reason
    assert result.row("right").status == "ok"
    assert 0 < result.least_drift < 1e-6
    assert f"wrong by {result.least_drift:.1e} / lr or more" in " ".join(str(result).split())


WRONG = {
    "lr": lambda o: o.param_groups[0].update(lr=1.02 * LR),
    "beta": lambda o: o.param_groups[0].update(betas=(0.9, 0.99)),
    "no update": lambda o: o.param_groups[0].update(lr=0.0),
}


@pytest.mark.parametrize("change", WRONG)
def test_other_mistakes_of_an_update(change):
    row = run([{"wrong": by_hand(WRONG[change])}]).row("wrong")
    assert row.status == "differs" and row.parameter and not row.measured


def test_wrong_loss_and_wrong_buffers():
    def half(make_model, make_optimizer, loss_fn):
        step = by_hand()(make_model, make_optimizer, loss_fn)
        return lambda *batch: step(*batch) * 0.5

    row = run([{"half": half}]).row("half")
    assert row.status == "differs" and "the loss of step" in row.reason
    assert row.loss_difference > row.loss_allowed

    def with_norm():
        return nn.Sequential(nn.Linear(12, 3), nn.BatchNorm1d(3))

    def late(model):
        model[1].num_batches_tracked += 1

    result = run([{"late": by_hand(after=late), "right": by_hand()}], model=with_norm)
    assert "1.num_batches_tracked differs by integers" in result.row("late").reason
    assert result.row("right").status == "ok"
    json.loads(result.to_json())


def test_weights_of_its_own_are_another_training():
    def other_start(make_model, make_optimizer, loss_fn):
        def made():
            model = make_model()
            with torch.no_grad():
                model[0].weight[0, 0] += 1e-2
            return model

        return by_hand()(made, make_optimizer, loss_fn)

    assert run([{"other": other_start}]).row("other").status == "differs"


def test_a_loss_that_is_not_finite():
    def broken(after):
        def make(*functions):
            step, calls = by_hand()(*functions), 0

            def nan(*batch):
                nonlocal calls
                calls += 1
                return step(*batch) * (math.nan if calls > after else 1)

            return nan

        return make

    row = run([{"nan": broken(1)}]).row("nan")
    assert row.status == "differs" and "its loss is nan in step 1" in row.reason
    assert math.isnan(row.losses[1])
    result = run(["accelerate"], loss=lambda model, x, y: loss_fn(model, x, y) * math.inf)
    assert {row.status for row in result.rows} == {"unchecked"}
    assert "loss of native eager is inf in step 0" in result.advice
    assert result.advice.startswith("Nothing is recommended")
    assert math.isinf(result.rows[0].losses[0])

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    written = result.to_json()
    json.loads(written, parse_constant=refuse)
    assert AbResult.from_json(written).to_json() == written


def test_dropout_draws_the_same_numbers_in_eager_kernels():
    def dropping():
        return nn.Sequential(nn.Linear(12, 64), nn.Dropout(0.5), nn.Linear(64, 3))

    def other_numbers(make_model, make_optimizer, loss_fn):
        step = by_hand()(make_model, make_optimizer, loss_fn)

        def shifted(*batch):
            torch.rand(3)
            return step(*batch)

        return shifted

    mine = {"other": other_numbers, "same": by_hand(), "wrong": by_hand(WRONG["no update"])}
    result = run(["accelerate", "TrainStep", mine], model=dropping)
    for name in ("eager", "accelerate", "TrainStep", "same"):
        row = result.row(name)
        assert row.status == "ok" and "statistically" not in row.reason
    assert result.row("other").status == "ok"
    assert result.row("other").reason == "draws other random numbers; compared statistically"
    assert result.row("wrong").status == "differs"


def test_noise_is_that_of_changed_weights():
    """What is allowed is of the order of the precision, for each precision."""
    for precision, least, most in (("fp32", 1e-8, 1e-4), ("bf16", 1e-4, 0.5)):
        setting = Setting(make_model, make_optimizer, loss_fn, CPU, precision)
        eps = {"fp32": 1.2e-7, "bf16": 7.8e-3}[precision]
        _, reference = first_steps(eager, setting, [batch()], 4)
        shaken = Setting(make_model, make_optimizer, loss_fn, CPU, precision, 0, 1, eps)
        _, other = first_steps(eager, shaken, [batch()], 4)
        judge = Judge(reference, [other], [], eps)
        assert judge.judge(reference).status == judge.judge(reference, True).status == "ok"
        assert least < judge.judge(reference).loss_allowed < most
        for name, start in other.start.items():
            change = (start - reference.start[name]).abs()
            assert change.max() <= 2 * eps * reference.start[name].abs().max()
            assert change.max() > 0


def test_only_losses_where_the_model_is_unknown():
    def unseen(make_model, make_optimizer, loss_fn):
        torch.manual_seed(0)
        model = globals()["make_model"]()
        optimizer = globals()["make_optimizer"](model)

        def step(*batch):
            optimizer.zero_grad()
            loss = loss_fn(model, *batch)
            loss.backward()
            optimizer.step()
            return loss

        return step

    row = run([{"unseen": unseen}]).row("unseen")
    assert row.status == "ok" and "only losses are compared" in row.reason


# --- failures -------------------------------------------------------------------------------------


def test_failures_are_rows_with_their_first_line():
    def wont_build(*functions):
        raise RuntimeError("can't be built\nand much more")

    broken = {
        "building": wont_build,
        "first step": failing(ValueError("no such thing\nsecond line")),
        "timed step": failing(RuntimeError("later"), first=9),
        "silent": failing(RuntimeError()),
        "no step": lambda *functions: None,
    }
    result = run([broken, "accelerate"])
    reasons = {row.name: row.reason for row in result.rows if row.status == "failed"}
    assert reasons == {
        "building": "RuntimeError: can't be built",
        "first step": "ValueError: no such thing",
        "timed step": "RuntimeError: later",
        "silent": "RuntimeError",
        "no step": "TypeError: a variant must return a callable step, got NoneType",
    }
    assert result.row("accelerate").measured
    assert "first step: failed: ValueError: no such thing" in str(result)


def test_what_does_not_fit_alone_either_changes_nothing_for_the_others():
    error = torch.OutOfMemoryError("CUDA out of memory. Tried.\nDetails")
    result = run([{"mine": by_hand(), "memory": failing(error)}, "accelerate"])
    assert result.row("memory").status == "failed"
    assert result.row("memory").reason == "out of memory: CUDA out of memory. Tried."
    assert result.interleaved
    assert all(row.measured for row in result.rows if row.name != "memory")


def test_a_loss_function_that_fails_fails_everywhere():
    result = run(["accelerate"], loss=lambda model, x, y: model(x))
    assert {row.status for row in result.rows} == {"failed"}
    assert "reduce the loss with .mean()" in result.rows[0].reason
    assert result.advice.startswith("Nothing could be measured: eager failed: TypeError")
    assert "failed" in str(result) and AbResult.from_json(result.to_json()) == result


def test_without_eager_the_first_that_runs_is_the_reference(monkeypatch):
    def broken(setting):
        raise RuntimeError("not today")

    monkeypatch.setitem(VARIANTS, "eager", broken)
    result = run(["accelerate", {"mine": by_hand()}])
    assert result.row("eager").status == "failed"
    assert result.row("accelerate").reason == "the others are compared with it"
    assert result.row("mine").status == "ok"
    assert result.row("accelerate").ratio.median == 1


class Hungry:
    """A variant that fits into memory only where no other model is alive."""

    def __init__(self):
        self.refused = 0

    def __call__(self, make_model, make_optimizer, loss_fn):
        gc.collect()
        if any(type(o) is Counted for o in gc.get_objects()):
            self.refused += 1
            raise torch.OutOfMemoryError("there are others")
        return by_hand()(make_model, make_optimizer, loss_fn)


class Counted(nn.Sequential):
    pass


def test_where_memory_does_not_hold_all_they_are_timed_in_blocks():
    hungry = Hungry()

    def counted():
        return Counted(*make_model())

    result = run([{"hungry": hungry, "other": by_hand()}, "TrainStep"], model=counted)
    assert hungry.refused == 1, "once beside eager, never alone"
    assert not result.interleaved
    for row in result.rows:
        assert row.status == "ok" and len(row.turns) == 4, row.reason
    assert "Memory doesn't hold all variants at once" in str(result)


def test_blocks_end_when_it_is_late():
    """Of two blocks of five turns, two turns are had anyway."""
    closed = []

    def rebuild(name):
        return (lambda: None), lambda: closed.append(name)

    found = {}
    plan = measure.Plan(10, 0.0, {"a": 1.0, "b": 1.0}, late=lambda: True)
    measure.in_blocks(["a", "b"], rebuild, plan, CPU, found)
    assert [len(s.walls) for s in found.values()] == [2, 2] and closed == ["a", "b"]


def test_a_block_that_cannot_be_rebuilt_is_a_failure():
    found, closed = {}, []

    def rebuild(name):
        if name == "bad":
            raise RuntimeError("gone")
        return measure.Runner(lambda: None, [()]), lambda: closed.append(name)

    plan = measure.Plan(4, 0.01, {"bad": 1.0, "good": 1.0})
    measure.in_blocks(["bad", "good"], rebuild, plan, CPU, found)
    assert str(found["bad"].failed) == "gone" and found["bad"].walls == []
    assert len(found["good"].walls) == 4 and closed == ["good", "good"]


@pytest.mark.parametrize("when, measured", [(3, False), (9, True)])
def test_an_interrupt_leaves_what_was_measured(when, measured):
    result = run([{"mine": failing(KeyboardInterrupt(), first=when)}, "accelerate"])
    assert result.interrupted
    assert result.row("eager").measured == measured
    assert "Interrupted" in str(result)
    assert result.row("accelerate").status == ("ok" if measured else "left out")


# --- the budget -----------------------------------------------------------------------------------


def test_what_the_budget_has_no_room_for_is_left_out():
    result = run(None, budget=20.0)
    left = {row.name: row.reason for row in result.rows if row.status == "left out"}
    assert set(left) == {*COMPILED, "hand graph"}
    assert left["hand graph"] == "a CUDA graph needs a GPU"
    assert left["compile"].startswith("compiling may take ")
    assert "name the variant or raise the budget" in left["compile"]
    assert result.row("TrainStep").measured
    assert [row.name for row in result.rows] == list(VARIANTS)


def test_a_slow_model_gets_few_steps_and_ends_in_time():
    class Slow(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(12, 3)

        def forward(self, x):
            torch.sum(torch.rand(1))  # a step that draws
            end = time_now() + 0.1
            while time_now() < end:
                pass
            return self.linear(x)

    result = run(None, model=Slow, budget=1.0, steps=None)
    assert result.check_steps == 2
    assert result.row("eager").measured
    assert any("its first steps may take" in row.reason for row in result.rows)
    assert result.seconds < 6


def time_now():
    return measure.time.perf_counter()


def test_asked_for_is_run_whatever_the_budget():
    result = run(["hand graph", "accelerate"], budget=0.001)
    assert result.row("hand graph").reason == "RuntimeError: a CUDA graph needs a GPU"
    assert result.row("accelerate").measured


@pytest.mark.slow
def test_compiled_variants_on_a_cpu():
    result = run(["compile", "TrainStep compile"])
    for row in result.rows:
        assert row.status == "ok" and row.measured, row.reason
    assert result.row("compile").start_s > result.row("eager").start_s


# --- timing ---------------------------------------------------------------------------------------


def test_turns_alternate_and_batches_go_round():
    calls, found = [], {}

    def step_of(name):
        return measure.Runner(lambda number: calls.append((name, number)), [(0,), (1,), (2,)])

    plan = measure.Plan(3, 1.0, {"a": 0.5, "b": 0.3})
    ticks = []
    measure.interleave({"a": step_of("a"), "b": step_of("b")}, plan, CPU, found, ticks.append)
    assert "".join(name for name, _ in calls) == "aabbb" * 3
    assert [number for name, number in calls if name == "a"] == [0, 1, 2, 0, 1, 2]
    assert ticks == ["a", "b"] * 3
    assert found["a"].steps == 2 and len(found["b"].walls) == 3


def test_a_late_measurement_has_two_rounds():
    found = {}
    plan = measure.Plan(9, 1.0, {"a": 0.5}, late=lambda: True)
    measure.interleave({"a": measure.Runner(lambda: None, [()])}, plan, CPU, found)
    assert len(found["a"].walls) == measure.LEAST_ROUNDS == 2
    assert gc.isenabled()


def test_ratios_are_taken_turn_by_turn():
    """A machine that slows down for some turns changes no ratio."""
    mood = [1, 1, 5, 5, 2, 1]
    times, halves = compare.ratios([3.0 * m for m in mood], [1.0 * m for m in mood])
    assert times == Times(3.0, 3.0, 3.0, 6) and halves == [3.0, 3.0]
    row = Row("x", halves=[2.0, 2.1])
    assert row.repeat_percent == pytest.approx(100 * (1 - 2.0 / 2.1))
    assert compare.ratios([1.0], [1.0]) == (Times(1.0, 1.0, 1.0, 1), [])


def test_times():
    numbers = random.Random(0)
    values = [numbers.random() for _ in range(9)]
    times = Times.of(values, 10)
    assert times.median == pytest.approx(10 * statistics.median(values))
    assert times.q1 < times.median < times.q3 and times.samples == 9
    assert times.spread == pytest.approx((times.q3 - times.q1) / 2)
    assert Times.of([]) is None and Times.of([2.0]) == Times(2.0, 2.0, 2.0, 1)


def test_random_numbers_and_switches_are_the_programs_own_afterwards():
    numpy = pytest.importorskip("numpy")
    tr.seed(3)
    expected = torch.rand(2), random.random(), numpy.random.rand()
    tr.seed(3)
    run(["TrainStep"])
    found = torch.rand(2), random.random(), numpy.random.rand()
    assert torch.equal(expected[0], found[0]) and expected[1:] == found[1:]


def test_the_same_seed_gives_the_same_losses():
    first, second, other = (run([], seed=seed, steps=1).rows[0].losses for seed in (0, 0, 1))
    assert first == second != other


def test_batches_in_all_their_forms():
    x, y = batch()
    nested = ({"x": x, "y": y}, 2.0)
    result = run(
        ["TrainStep"], loss=lambda m, d, scale: (scale * loss_fn(m, d["x"], d["y"]), d), data=nested
    )
    assert [row.status for row in result.rows] == ["ok", "ok"]
    seen = []
    run([], data=lambda step: (seen.append(step), batch(step))[1])
    assert seen == [0, 1, 2, 3]


# --- arguments ------------------------------------------------------------------------------------

MODEL = make_model()
BAD = [
    (dict(make_model=MODEL), TypeError, "must be a function that builds a module"),
    (dict(make_model=lambda: MODEL), ValueError, "returned the same parameters twice"),
    (dict(make_model=lambda: nn.Sequential(MODEL)), ValueError, "copy.deepcopy"),
    (dict(make_model=lambda: 3), TypeError, "must return an nn.Module, got int"),
    (dict(make_optimizer=None), TypeError, "make_optimizer must be callable, got NoneType"),
    (dict(make_optimizer=lambda m: m), TypeError, "torch.optim.Optimizer, got Sequential"),
    (dict(make_optimizer=lambda m: tr.optim.SGD(m, lr=0.1)), TypeError, "one of torch.optim's"),
    (dict(loss_fn=1.0), TypeError, "loss_fn must be callable, got float"),
    (dict(batch=torch.ones(3)), TypeError, "batch must be a tuple"),
    (dict(batch=lambda step: [step]), TypeError, "or return one, got list"),
    (dict(steps=0), ValueError, "steps must be an int >= 1 or None, got 0"),
    (dict(steps=True), ValueError, "steps must be an int"),
    (dict(precision="int8"), ValueError, r"one of \['fp32', 'fp16', 'bf16'\], got 'int8'"),
    (dict(budget=-1), ValueError, "budget must be a number of seconds > 0, got -1"),
    (dict(device="meta"), ValueError, "must be a CPU or a CUDA GPU, got 'meta'"),
    (dict(device="cuba"), ValueError, "must be a CPU or a CUDA GPU, got 'cuba'"),
    (dict(device="cuda:99"), ValueError, "there is no GPU for device 'cuda:99'"),
    (dict(variants=["eagre"]), ValueError, "there is no variant 'eagre'; there are eager, eager f"),
    (dict(variants={"eager": by_hand()}), ValueError, "'eager' can't name a variant"),
    (dict(variants=[{"x": 3}]), TypeError, "'x' must be a callable .* got int"),
]


@pytest.mark.parametrize("bad, kind, message", BAD, ids=[m[:40] for _, _, m in BAD])
def test_bad_arguments(bad, kind, message):
    good = dict(
        make_model=make_model, make_optimizer=make_optimizer, loss_fn=loss_fn, batch=batch()
    )
    with pytest.raises(kind, match=message) as caught:
        tr.ab_test(**good | {"progress": False} | bad)
    assert str(caught.value).startswith("ab_test: ")


def test_models_that_are_not_the_same_from_one_seed():
    counter = iter(range(99))

    def moody():
        model = make_model()
        model[2].bias.data.fill_(next(counter))
        return model

    setting = Setting(moody, make_optimizer, loss_fn, CPU)
    with pytest.raises(ValueError, match=r"another 2\.bias the second time"):
        check_builds_alike(setting)
    used = make_optimizer(make_model())
    loss_fn(make_model(), *batch()).backward()
    used.state[torch.ones(1)] = {"step": 1}
    with pytest.raises(ValueError, match="has taken steps"):
        check_builds_alike(Setting(make_model, lambda m: used, loss_fn, CPU))


def test_an_optimizer_in_another_form():
    model = make_model()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if p.ndim < 2], "lr": 0.7},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.5, betas=(0.8, 0.9), foreach=True)
    fused = another_form(optimizer, fused=True)
    assert type(fused) is torch.optim.AdamW and fused.defaults["fused"]
    for old, new in zip(optimizer.param_groups, fused.param_groups, strict=True):
        assert new["fused"] and not new["foreach"]
        for name in ("lr", "betas", "weight_decay", "eps", "params"):
            assert new[name] == old[name] if name != "params" else new[name] is not None
    with pytest.raises(TypeError, match="Rprop has no argument fused"):
        another_form(torch.optim.Rprop(model.parameters()), fused=True)


def test_other_optimizers_leave_ours_as_failed_rows():
    result = run(
        ["eager fused", "accelerate", {"mine": by_hand()}],
        optimizer=lambda m: torch.optim.RMSprop(m.parameters(), lr=LR),
    )
    assert "RMSprop is not supported" in result.row("accelerate").reason
    assert "RMSprop has no argument fused" in result.row("eager fused").reason
    assert result.row("mine").measured


# --- what comes out -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result():
    long = "a variant whose name is much longer than any table has room for, and still goes on"
    return run(
        [
            "TrainStep",
            {
                long: by_hand(),
                "wrong <b>": by_hand(decay_of(0)),
                "broken": failing(ValueError("x" * 500)),
            },
        ],
        title="a title that is long enough to be cut " * 4,
    )


def test_json_round_trip(result):
    record = json.loads(result.to_json())
    assert record["advice"] == result.advice
    assert record["repeat_percent"] == result.repeat_percent is not None
    assert record["environment"]["torch"] == torch.__version__
    assert len(record["rows"][0]["halves"]) == 2
    again = AbResult.from_json(result.to_json())
    assert again == result and str(again) == str(result)


def test_the_text_fits_100_columns(result):
    wide = copy.deepcopy(result)
    for row in wide.rows:
        row.peak_bytes, row.start_s = 2**37, 999.9
        row.wall = row.device = row.host = Times(1.2e6, 1e6, 2e6, 9)
        row.ratio = Times(12.34, 10.0, 12.0, 9)
    wide.device = "cuda"
    for found in (result, wide):
        lines = str(found).splitlines()
        assert max(map(len, lines)) <= 100
        assert any(line.startswith("a variant whose nam…") for line in lines)
    assert "131,072" in table(wide) and "peak MiB" in table(wide)
    assert "peak MiB" not in table(result)


def test_the_page_is_self_contained(result, tmp_path):
    path = tmp_path / "result.html"
    result.to_html(path)
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"https?:|src=|href=|url\(|@import|<script|<link", text)
    assert text.count("<svg") == 3 and text.count("<rect") == 3
    assert "wrong &lt;b&gt;" in text and "<b>" not in text
    assert result.advice.split(":")[0] in text


def test_the_page_of_nothing(tmp_path):
    empty = run(["accelerate"], loss=lambda model, x, y: model(x))
    empty.to_html(tmp_path / "empty.html")
    text = (tmp_path / "empty.html").read_text(encoding="utf-8")
    assert "Nothing was measured." in text and "<svg" not in text


def test_plot(result, tmp_path):
    pytest.importorskip("matplotlib")
    result.plot(tmp_path / "ratios.png")
    assert (tmp_path / "ratios.png").read_bytes()[:4] == b"\x89PNG"


def test_plot_without_matplotlib(result, tmp_path, monkeypatch):
    for name in [n for n in sys.modules if n.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="needs matplotlib: `pip install matplotlib`"):
        result.plot(tmp_path / "ratios.png")
    assert not (tmp_path / "ratios.png").exists()


def test_a_busy_machine_is_mentioned(monkeypatch):
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 4)
    assert "load average was 99.0 on 4 cores" in str(run([], steps=1))
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (3.9, 0.0, 0.0))
    result = run(["accelerate"])
    assert "load average" not in str(result)
    assert f"differ by at most {result.repeat_percent:.1f} %" in " ".join(str(result).split())


def test_progress_names_each_variant(capfd):
    run(["accelerate"], progress=True)
    found = capfd.readouterr()
    assert found.out == ""
    assert "check: accelerate" in found.err and "time: eager" in found.err
    run(["accelerate"])
    assert capfd.readouterr().err == ""


# --- advice ---------------------------------------------------------------------------------------


def measured(name, wall, device=None, host=None, ratio=None, spread=0.01, status="ok"):
    def times(value):
        return value and Times(value, value * (1 - spread), value * (1 + spread), 9)

    return Row(
        name, status, wall=times(wall), device=times(device), host=times(host), ratio=times(ratio)
    )


def synthetic(device, **walls):
    """Rows from name=(wall, device, host) in µs, or (wall, spread) on a CPU."""
    base = next(iter(walls.values()))[0]
    rows = []
    for key, (wall, *rest) in walls.items():
        name = key.replace("_", " ")
        if device == "cuda":
            rows.append(measured(name, wall, *rest, ratio=base / wall))
        else:
            rows.append(measured(name, wall, ratio=base / wall, spread=rest[0] if rest else 0.01))
    return AbResult("synthetic", device, "fp32", 1, rows=rows)


def test_advice_launch_bound():
    result = synthetic(
        "cuda", eager=(3000, 2990, 2900), hand_graph=(300, 300, 20), TrainStep=(150, 150, 10)
    )
    assert result.advice.startswith("Use TrainStep: TrainStep is 20.00 ± 0.20 times as fast as")
    assert "launch-bound" in result.advice and "partly" not in result.advice
    assert "busy for 0.3 ms (hand graph); host/device is 9.7" in result.advice


def test_advice_partly_launch_bound():
    result = synthetic("cuda", eager=(1150, 1100, 900), TrainStep=(1000, 1000, 10))
    assert "partly launch-bound" in result.advice


def test_advice_memory_bound():
    result = synthetic(
        "cuda", eager=(1000, 1000, 300), hand_graph=(980, 980, 20), TrainStep=(800, 800, 9)
    )
    assert "memory-bound" in result.advice and "TrainStep 1.23 times as fast as" in result.advice


def test_advice_compute_bound_has_little_to_gain():
    result = synthetic(
        "cuda", eager=(1000, 1000, 300), hand_graph=(990, 990, 20), TrainStep=(970, 970, 9)
    )
    assert result.advice.startswith("There is little to gain here: TrainStep is 1.03 ± 0.01 times")
    assert "Keep eager." in result.advice and "compute-bound" in result.advice


def test_advice_without_a_graph_says_what_is_not_known():
    result = synthetic("cuda", eager=(1000, 1000, 900), compile=(700, 700, 300))
    assert result.advice.startswith("Use compile: ")
    assert "no graph could be measured" in result.advice and "bound" not in result.advice


def test_advice_on_a_cpu():
    text = synthetic("cpu", eager=(1000,), accelerate=(990, 0.03)).advice
    assert "little to gain" in text and "within the spread" in text and "On a CPU" in text
    assert synthetic("cpu", eager=(1000,), accelerate=(500,)).advice.startswith("Use accelerate:")
    text = synthetic("cpu", eager=(1000,), accelerate=(800, 0.4)).advice
    assert text.startswith("No gain can be told from the spread here: accelerate is 1.25 ± 0.50 ")
    assert "within the spread. Keep eager, or measure again on a quieter machine." in text


def test_advice_prefers_the_simpler_of_equals():
    result = synthetic(
        "cuda",
        eager=(3000, 2990, 2900),
        hand_graph=(151, 151, 20),
        TrainStep_compile=(150, 150, 10),
        TrainStep=(151, 151, 10),
    )
    assert result.advice.startswith("Use TrainStep: ")
    assert "TrainStep compile is no faster beyond the spread" in result.advice


@pytest.mark.parametrize("status", ["differs", "unchecked"])
def test_advice_never_recommends_what_is_not_known_to_be_the_same(status):
    result = synthetic("cpu", eager=(1000,), accelerate=(990,), TrainStep=(1,))
    result.rows[2].status = status
    assert result.advice.startswith("There is little to gain here: accelerate")
    assert ("Not considered" in result.advice) == (status == "differs")


def test_advice_of_nothing():
    empty = AbResult("t", "cpu", "fp32", 1)
    assert advise(empty) == "Nothing could be measured: there were no variants."
    assert why(empty) == ""
    assert "interruption" in advise(AbResult("t", "cpu", "fp32", 1, interrupted=True))
    alone = synthetic("cpu", eager=(1000,))
    assert alone.advice == "Only eager was measured; there is nothing to compare it with."


def test_start_time_is_what_steady_steps_leave():
    trace = Trace(seconds=[5.0, 1.0, 1.0, 1.0], build_s=2.0)
    assert trace.step_s == 1.0 and trace.start_s == 6.0
    assert Trace(seconds=[1.0], build_s=0.0).start_s == 0.0


# --- on a GPU -------------------------------------------------------------------------------------


def on_gpu(variants, **options):
    x, y = (t.cuda() for t in batch())
    return run(variants, data=(x, y), **options)


@pytest.mark.cuda
@pytest.mark.parametrize("precision", DTYPES)
def test_graphs_on_a_gpu(precision):
    names = ["eager fused", "hand graph", "accelerate", "TrainStep"]
    result = on_gpu(names, precision=precision)
    assert result.check_steps >= 6, "a graph has been replayed"
    for row in result.rows:
        assert row.status == "ok" and row.measured, f"{row.name}: {row.reason}"
        assert row.device.median > 0 and row.host.median > 0 and row.peak_bytes > 0
    assert "host/device is" in result.advice or "busy for" in result.advice
    assert result.environment["gpu"] == torch.cuda.get_device_name()


@pytest.mark.cuda
@pytest.mark.slow
def test_all_variants_on_a_gpu():
    result = on_gpu(list(VARIANTS), budget=600.0)
    for row in result.rows:
        assert row.status == "ok" and row.measured, f"{row.name}: {row.reason}"


@pytest.mark.cuda
def test_dropout_in_graphs_draws_what_eager_draws():
    def dropping():
        return nn.Sequential(nn.Linear(12, 64), nn.Dropout(0.5), nn.Linear(64, 3))

    result = on_gpu(["hand graph", "TrainStep"], model=dropping)
    for row in result.rows:
        assert row.status == "ok" and "statistically" not in row.reason, row.reason


@pytest.mark.cuda
def test_wrong_decay_on_a_gpu():
    result = on_gpu([{"wrong": by_hand(decay_of(0.0)), "right": by_hand()}, "TrainStep"])
    assert result.row("wrong").status == "differs"
    assert result.row("right").status == result.row("TrainStep").status == "ok"


@pytest.mark.cuda
def test_what_cannot_be_captured_is_a_row():
    def waiting(model, x, y):
        loss = loss_fn(model, x, y)
        return loss if float(loss) > -1 else -loss

    result = on_gpu(["hand graph", "TrainStep"], loss=waiting)
    assert result.row("eager").measured
    assert result.row("hand graph").status == result.row("TrainStep").status == "failed"
    assert "CaptureError" in result.row("TrainStep").reason
