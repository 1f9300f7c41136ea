# SPDX-License-Identifier: BSD-3-Clause
# The bars of bench_train_step.py.

import json
import math
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
pytest.importorskip("torchvision", reason="the models are torchvision's")
import tables
import train_step_report as report
from train_step_cases import CASES

# --- bars -----------------------------------------------------------------------------------------


def test_difference_of_losses():
    assert report.difference([1.0, 2.0], [1.0, 2.0]) == 0
    assert report.difference([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
    assert report.difference([1.0, math.nan], [1.0, 2.0]) == math.inf
    assert report.difference([1.0, 2.0], [1.0, math.inf]) == math.inf


def planted(**us):
    """A full-size fp16 record of a GPU in which the variants of every case take these times."""

    def row(time):
        base = {"losses": [1.0], "first_replay_s": 1.5, "peak_bytes": 100, "agrees": True}
        return base | {"us": {"median": time, "q1": time, "q3": time}}

    found = {name.replace("_", " "): row(time) for name, time in us.items()}
    return {
        "key": "cuda/fp16",
        "settings": {"device": "cuda", "precision": "fp16", "quick": False},
        "cases": {case: {"variants": json.loads(json.dumps(found))} for case in CASES},
        "chain": {},
    }


FAST = dict(eager=3000, compile=200, hand_graph=200, TrainStep=100, TrainStep_compile=90)
SLOW = dict(eager=300, compile=90, hand_graph=100, TrainStep=150, TrainStep_compile=100)


def holding(record):
    return {b["name"]: b["holds"] for b in report.evaluate_bars(record)}


def test_bars_that_hold():
    found = holding(planted(**FAST))
    assert all(found.values())
    assert set(found) >= {
        "mlp: TrainStep, µs",
        "mlp: TrainStep compile, µs",
        "mlp: eager / TrainStep",
        "mlp: hand graph / TrainStep",
        "mlp: hand graph / TrainStep compile",
        "mlp: TrainStep's first replay, s",
        "resnet18_cifar: eager / TrainStep compile",
        "resnet50: peak memory, TrainStep / eager",
        "resnet50: TrainStep's first replay, s",
        "resnet50_b256: compile / TrainStep compile",
        "vgg16_bn_b256: compile / TrainStep compile",
        "vit_b_16_b64: compile / TrainStep compile",
    }
    for case in CASES:
        assert f"{case}: hand graph / TrainStep" in found


def test_bars_that_do_not_hold():
    record = planted(**SLOW)
    for case in ("mlp", "resnet50"):
        record["cases"][case]["variants"]["TrainStep"] |= {"first_replay_s": 9, "peak_bytes": 111}
    assert not any(holding(record).values())


def test_bars_are_judged_at_their_bounds():
    record = planted(eager=3080, hand_graph=196, TrainStep=140)
    bars = {b["name"]: b for b in report.evaluate_bars(record)}

    def judged(name):
        return [bars[name][key] for key in ("bar", "reached", "holds")]

    assert judged("mlp: TrainStep, µs") == ["<= 140", 140, True]
    assert judged("mlp: eager / TrainStep") == [">= 22", 22, True]
    assert judged("mlp: hand graph / TrainStep") == [">= 1.4", 1.4, True]
    assert judged("resnet50: hand graph / TrainStep") == [">= 1", 1.4, True]


def test_what_was_not_run_is_left_out_and_what_failed_is_not_kept():
    assert holding(planted(eager=300, compile=90, hand_graph=100)) == {}
    record = planted(**FAST)
    record["cases"] = {"resnet50": record["cases"]["resnet50"]}
    found = record["cases"]["resnet50"]["variants"]
    found["TrainStep"] = {"failed": "RuntimeError: no"}
    found["hand graph"] = {"failed": "RuntimeError: no"}
    bars = {b["name"]: b for b in report.evaluate_bars(record)}
    assert bars["resnet50: eager / TrainStep"]["reached"] == "failed"
    assert not any(bar["holds"] for name, bar in bars.items() if "compile" not in name)
    assert bars["resnet50: compile / TrainStep compile"]["holds"]


def test_times_of_other_losses_or_without_a_replay_keep_no_promise():
    record = planted(**FAST)
    found = record["cases"]["mlp"]["variants"]
    found["TrainStep"]["first_replay_s"] = None
    found["TrainStep compile"]["agrees"] = False
    bars = {b["name"]: b for b in report.evaluate_bars(record)}
    assert bars["mlp: TrainStep's first replay, s"]["reached"] == "never"
    assert not bars["mlp: TrainStep's first replay, s"]["holds"]
    assert bars["mlp: TrainStep compile, µs"]["reached"] == "other losses"
    assert not bars["mlp: hand graph / TrainStep compile"]["holds"]
    assert bars["mlp: TrainStep, µs"]["holds"]


@pytest.mark.parametrize(
    "changed", [{"device": "cpu"}, {"precision": "bf16"}, {"quick": True}], ids=str
)
def test_bars_hold_only_for_what_they_were_set_for(changed):
    record = planted(**FAST)
    record["settings"] |= changed
    assert report.evaluate_bars(record) == []


@pytest.mark.parametrize("ours, holds", [(10, True), (60, False)])
def test_bars_of_the_chain(ours, holds):
    record = planted()
    times = {"stock": 100, "ours": ours, "stock + EMA": 120, "ours + EMA": ours}
    rows = {name: {"us": {"median": time}} for name, time in times.items()}
    record["cases"], record["chain"] = {}, {"resnet50": {"variants": rows}}
    found = holding(record)
    assert found == {
        "resnet50, chain: stock / ours": holds,
        "resnet50, chain: stock + EMA / ours + EMA": holds,
    }


def test_summary_shows_bars(capsys):
    record = planted(**SLOW)
    record["cases"] = {"mlp": record["cases"]["mlp"]}
    record["cases"]["mlp"]["variants"]["TrainStep"]["kernels"] = {"kernel": 61, "gpu_memcpy": 2}
    record["bars"] = report.evaluate_bars(record)
    report.print_summary(record)
    tables.print_bars(record["bars"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= tables.WIDTH
    shown = next(line for line in lines if "mlp: TrainStep, µs" in line)
    assert shown.split()[-4:] == ["<=", "140", "150", "NO"]
    row = next(line for line in lines if line.strip().startswith("mlp TrainStep "))
    assert row.split()[2:7] == ["2.00", "0.60", "0.67", "61", "2"]
