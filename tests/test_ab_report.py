# SPDX-License-Identifier: BSD-3-Clause
# How tr.ab_test's turns become ratios, what its result says as text, JSON, page and plot, and what
# it advises of synthetic measurements.

import copy
import gc
import json
import random
import re
import statistics
import sys

import pytest
import torch
from comparing import CPU, batch, by_hand, decay_of, failing, loss_fn, run

import torch_renaissance as tr
from torch_renaissance.ab import compare, machine, measure
from torch_renaissance.ab.advice import advise, why
from torch_renaissance.ab.first_steps import Trace
from torch_renaissance.ab.measure import Times
from torch_renaissance.ab.report import AbResult, Row, table

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
    assert text.startswith("No gain can be told from this run: accelerate is 1.25 ± 0.50 times as ")
    assert "as eager, within the spread. Keep eager; more steps, a larger budget or a " in text


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
