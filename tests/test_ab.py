# SPDX-License-Identifier: BSD-3-Clause
# tr.ab_test compares before it times: what is the same training and what is not, by losses, weights
# and buffers; and what a GPU adds.

import json
import math
import re
from dataclasses import replace

import pytest
import torch
from comparing import (
    CPU,
    DECAY,
    DTYPES,
    LR,
    batch,
    by_hand,
    decay_of,
    loss_fn,
    make_model,
    make_optimizer,
    run,
)
from torch import nn

from torch_renaissance.ab.check import NOISE_RUNS, Judge
from torch_renaissance.ab.compare import Comparison
from torch_renaissance.ab.distance import Noise, Reference
from torch_renaissance.ab.first_steps import first_steps
from torch_renaissance.ab.report import AbResult
from torch_renaissance.ab.setting import Setting, shake
from torch_renaissance.ab.variants import VARIANTS, eager

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


def with_a_bias_before_its_norm():
    """Whose gradient is zero but for rounding, which Adam makes whole steps of."""
    return nn.Sequential(nn.Linear(12, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3))


@pytest.mark.parametrize("lucky", [0, 1, 2])
def test_a_variant_differs_only_from_what_several_changed_runs_leave_open(lucky, monkeypatch):
    """The first changed runs come out as if nothing had been changed; what follows tells that
    another rounding is no mistake, and that another weight decay is one all the same."""
    again, asked = Comparison._again, []

    def some_are_lucky(self, name, jitter=0, stream=0):
        asked.append((name, jitter))
        return again(self, name, 0 if jitter <= lucky else jitter, stream)

    def rounded_otherwise(make_model, make_optimizer, loss_fn):
        def made():
            model = make_model()
            shake(model, torch.finfo(torch.float32).eps, 99)
            return model

        return by_hand()(made, make_optimizer, loss_fn)

    monkeypatch.setattr(Comparison, "_again", some_are_lucky)
    variants = {"rounded": rounded_otherwise, "right": by_hand(), "wrong": by_hand(decay_of(0.0))}
    result = run([variants], model=with_a_bias_before_its_norm)
    found = {name: result.row(name).status for name in variants}
    assert found == {"rounded": "ok", "right": "ok", "wrong": "differs"}
    assert "was expected" in result.row("wrong").reason
    assert asked == [("eager", i + 1) for i in range(NOISE_RUNS)]


def test_changed_runs_are_no_more_than_two_where_nothing_differs(monkeypatch):
    again, asked = Comparison._again, []
    monkeypatch.setattr(
        Comparison, "_again", lambda self, *a, **k: asked.append(k) or again(self, *a, **k)
    )
    run(["accelerate", {"right": by_hand()}])
    assert asked == [{"jitter": 1}, {"jitter": 2}]


def test_noise_of_several_runs_is_the_largest():
    setting = Setting(make_model, make_optimizer, loss_fn, CPU, rounding=1.2e-7)
    traces = [first_steps(eager, replace(setting, jitter=i), [batch()], 3)[1] for i in range(4)]
    reference = Reference(traces[0])
    apart = [reference.apart(trace, shaken=True) for trace in traces[1:]]
    grown = Noise(reference, traces[1:2], same_numbers=True)
    assert grown.runs == 1
    for trace in traces[2:]:
        grown.add(trace)
    assert grown.runs == 3
    for name in traces[0].end:
        assert grown.distances[name] == max(a[name].distance for a in apart)
        assert grown.drifts[name] == max(abs(a[name].drift) for a in apart)
    assert grown.loss == max(map(reference.loss_distance, traces[1:]))
    once = Noise(reference, traces[1:], same_numbers=True)
    assert (grown.typical, grown.coherent) == (once.typical, once.coherent) and grown.typical > 0


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
