# SPDX-License-Identifier: BSD-3-Clause
# What becomes a row of tr.ab_test instead of an end: failures, memory that doesn't suffice, a
# budget that is spent; and the arguments that are refused.

import gc

import pytest
import torch
from comparing import CPU, LR, batch, by_hand, failing, loss_fn, make_model, make_optimizer, run
from torch import nn

import torch_renaissance as tr
from torch_renaissance.ab import measure
from torch_renaissance.ab.report import AbResult
from torch_renaissance.ab.setting import Setting, another_form, check_builds_alike
from torch_renaissance.ab.variants import COMPILED, VARIANTS

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
