# SPDX-License-Identifier: BSD-3-Clause
# The benchmarks' own logic: shapes, comparison, bars, tables. Nothing here asserts a time.
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import common
import comparison
import machine
import optim_report
import peers
import shapes
import tables
import timers
from planted_benchmark import Planted

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "case, tensors, parameters",
    [
        ("mnist_mlp", 8, 1_462_538),
        ("resnet50", 161, 25_557_032),
        ("vgg16_bn", 58, 138_365_992),
        ("vit_b_16", 152, 86_567_656),
        ("gpt2_124m", 148, 124_439_808),
        ("gpt2_774m", 436, 774_030_080),
        ("thousand", 1000, 2_048_000),
        ("cpu_25m", 160, 25_026_560),
        ("cpu_500x1000", 500, 500_000),
    ],
)
def test_shapes_have_the_models_counts(case, tensors, parameters):
    found = shapes.CASES[case]()
    assert len(found) == tensors
    assert shapes.parameters(found) == parameters


@pytest.mark.parametrize("case", ["resnet50", "vgg16_bn", "vit_b_16"])
def test_shapes_are_torchvisions(case):
    models = pytest.importorskip("torchvision.models")
    with torch.device("meta"):
        model = getattr(models, case)()
    assert shapes.CASES[case]() == [tuple(p.shape) for p in model.parameters()]


def test_groups_have_an_lr_each_and_hold_every_tensor_once():
    tensors = shapes.CASES["thousand"]()
    groups = shapes.split_into_groups("thousand", tensors, lr=1e-3)
    assert len(groups) == len({g["lr"] for g in groups}) == 50
    assert [t for g in groups for t in g["params"]] == tensors


def record(**ratios):
    return {"environment": {"gpu": None, "cpu": "a", "torch": "b"}, "ratios": ratios}


def test_comparison_takes_keys_of_both():
    changes = comparison.compare(record(a=2.0, gone=1.0), record(a=1.5, fresh=9.0))
    assert [(c.key, c.percent) for c in changes] == [("a", -25.0)]


@pytest.mark.parametrize("allowed, fails", [(None, False), (30.0, False), (10.0, True)])
def test_regression_is_a_fall_beyond_what_is_allowed(allowed, fails, capsys):
    old, new = record(a=2.0, b=1.0), record(a=1.6, b=3.0)
    assert comparison.report_comparison(old, new, allowed) is fails
    assert ("regression: a fell" in capsys.readouterr().out) is fails


def test_comparison_says_when_the_machine_differs(capsys):
    old = record(a=1.0)
    old["environment"]["cpu"] = "another"
    comparison.report_comparison(old, record(a=1.0), None)
    assert "note: cpu differs: another then, a now" in capsys.readouterr().out


def test_plain_table_is_aligned_and_narrow():
    text = tables.format_table("title", ["name", "µs"], [["a", "1.0"], ["long name", "100.0"]])
    lines = text.splitlines()
    assert lines[0] == "title"
    assert lines[4] == "a            1.0"
    wide = tables.format_table("t" * 200, ["x" * 80, "y" * 80], [["1", "2"]])
    assert max(map(len, wide.splitlines())) <= tables.WIDTH


@pytest.mark.parametrize("with_rich", [True, False])
def test_table_prints_with_and_without_rich(with_rich, monkeypatch, capsys):
    if with_rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich", None)
    tables.print_table("title", ["name", "µs"], [["row", "12"]])
    out = capsys.readouterr().out
    assert "title" in out and "row" in out
    assert max(map(len, out.splitlines())) <= tables.WIDTH


def test_environment_has_what_a_number_needs(tmp_path):
    found = machine.environment(CPU)
    wanted = {"gpu", "cpu", "cores", "threads", "torch", "cuda", "revision", "command", "date"}
    assert wanted <= found.keys()
    common.write_json(tmp_path / "new" / "record.json", found)
    assert json.loads((tmp_path / "new" / "record.json").read_text()) == found


def test_command_line_names_no_folder_outside_the_project():
    script = str(machine.ROOT / "benchmarks" / "bench_optim.py")
    found = machine.command_line([script, "--json", "/elsewhere/a.json", "--quick"])
    assert found == "python benchmarks/bench_optim.py --json a.json --quick"


def test_variants_take_turns():
    calls = []
    found = timers.interleave(["a", "b"], 3, lambda name: calls.append(name) or 1e-6)
    assert calls == ["a", "b"] * 3
    assert found["a"] == {"median": 1, "q1": 1, "q3": 1, "min": 1, "max": 1, "samples": 3}


def test_preparation_runs_before_each_single_step_and_keeps_out_of_b2b():
    calls = []
    steps = {
        "plain": timers.Timed(lambda: calls.append("plain")),
        "prepared": timers.Timed(lambda: calls.append("run"), lambda: calls.append("prepare")),
    }
    assert timers.time_single(steps, CPU, repeats=2)["single"].keys() == steps.keys()
    assert calls == ["plain", "prepare", "run"] * 2
    assert timers.time_b2b(steps, CPU, rounds=2, budget=0.0).keys() == {"plain"}


def planted(ratio: float, key: str = "cuda/adamw/float32") -> dict:
    peaks = {"gather": {"first_step": 9, "later_step": 9}}
    peaks["fused"] = {"first_step": 10, "later_step": 8}
    return {
        "key": key,
        "settings": {"device": key.split("/")[0], "threads": 2},
        "ratios": {f"{key}/resnet50/b2b/gather": ratio, f"{key}/cpu_25m/b2b/gather": ratio},
        "cases": {
            "resnet50": {
                "parameters": 25_557_032,
                "padding_fraction": 0.002,
                "memory": {"all": peaks},
                "launches": {"gather": {"kernel": 1}},
            },
            "gpt2_124m": {"parameters": 124_439_808, "percent_of_copy": {"gather": 91.0}},
        },
    }


def test_bars_are_judged_on_what_was_measured():
    found = {b["name"]: b["holds"] for b in optim_report.evaluate_bars(planted(2.9))}
    assert found == {
        "resnet50: fused / ours, b2b": True,
        "gpt2_124m: % of copy bandwidth, gather": False,
        "resnet50: peak memory, ours / fused, all, first step": True,
        "resnet50: peak memory, ours / fused, all, later step": False,
        "resnet50: padding of regions": True,
        "resnet50: kernels of one step": True,
    }


def test_bars_hold_only_where_they_were_set():
    assert optim_report.evaluate_bars(planted(9.0, "cuda/sgd/float32")) == []
    names = [b["name"] for b in optim_report.evaluate_bars(planted(0.9, "cpu/adamw/float32"))]
    assert names[0] == "cpu_25m: fused / ours, b2b"


def test_bars_of_lars():
    key = "cuda/lars/float32"
    lars = {
        "key": key,
        "reference": "for-loop",
        "settings": {"device": "cuda"},
        "ratios": {f"{key}/resnet50/graph/gather": 19.0},
        "cases": {
            "resnet50": {"launches": {"gather": {"kernel": 3}}},
            "gpt2_124m": {"percent_of_copy": {"gather": 81.0}},
        },
    }
    assert {b["name"]: b["holds"] for b in optim_report.evaluate_bars(lars)} == {
        "resnet50: for-loop / ours, graph": False,
        "resnet50: kernels of one step": True,
        "gpt2_124m: % of copy bandwidth, gather": True,
    }


def test_main_repeats_and_keeps_what_did_not_fail(tmp_path, capsys):
    path = tmp_path / "record.json"
    args = ["--device", "cpu", "--json", str(path)]
    assert Planted().main([*args, "--repeat", "2"]) == 1
    found = json.loads(path.read_text())
    assert found["ratios"] == {"2.0,2.1": 2.0, "4.0,4.0": 4.0}
    assert found["failed"] == {"bad": "ValueError: no such problem"}
    repeat = found["repeat"]
    assert repeat["ratios"] == [found["ratios"], {"2.0,2.1": 2.1, "4.0,4.0": 4.0}]
    assert repeat["largest_difference_percent"] == 5.0
    assert "Ratios of its runs differ by 5.0 % at most." in capsys.readouterr().out
    assert Planted().main(args) == 1
    assert "repeat" not in json.loads(path.read_text())


def test_main_takes_medians_of_processes(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    args = ["--device", "cpu", "--json", str(path)]
    assert Planted().main([*args, "--processes", "3"]) == 1
    found = json.loads(path.read_text())
    assert found["ratios"] == {"2.0,2.1": 2.1, "4.0,4.0": 4.0} and "repeat" not in found
    assert found["failed"] == {"bad": "ValueError: no such problem"}
    assert found["settings"]["processes"] == 3

    measured = iter([3.0, 5.0, 3.2, 5.1, 3.1])  # after the first 2.0, the runs in turn

    def once_more(self, argv):
        record = self.whole_record()
        record["cases"]["2.0,2.1"] = {"ratio": next(measured)}
        record["ratios"] = self.ratios_of("2.0,2.1", record)
        return record

    monkeypatch.setattr(Planted, "once_more", once_more)
    assert Planted().main([*args, "--processes", "3", "--repeat", "2"]) == 1
    repeat = json.loads(path.read_text())["repeat"]
    assert [ratios["2.0,2.1"] for ratios in repeat["ratios"]] == [5.0, 3.1]


def test_the_middle_of_what_processes_measured():
    def taken(median, name, agrees):
        us = {"median": median, "q1": median - 1, "samples": 5}
        return {"us": us, "name": name, "agrees": agrees, "losses": [median]}

    found = comparison.middle(
        [taken(3.0, "a", True), taken(9.0, "b", False), taken(4.0, "c", True)]
    )
    assert found == {
        "us": {"median": 4.0, "q1": 3.0, "samples": 15},
        "name": "a",
        "agrees": True,
        "losses": [3.0],
    }


def test_a_run_that_leaves_no_record_is_told(monkeypatch):
    ended = SimpleNamespace(returncode=3)
    monkeypatch.setattr(common.subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(RuntimeError, match=r"planted_benchmark\.py --device cpu .* ended with 3"):
        Planted().main(["--device", "cpu", "--repeat", "2"])


def test_main_tells_success_and_disagreement(monkeypatch):
    def complete(self, args, parser):
        args.cases = ["1,1"]

    monkeypatch.setattr(Planted, "complete", complete)
    assert Planted().main(["--device", "cpu"]) == 0
    monkeypatch.setattr(Planted, "agrees", lambda self, record: False)
    assert Planted().main(["--device", "cpu"]) == 1


def test_main_begins_no_case_after_the_limit(tmp_path):
    path = tmp_path / "record.json"
    assert Planted().main(["--device", "cpu", "--limit", "1e-9", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["left_out"] == ["2.0,2.1", "bad", "4.0,4.0"] and found["cases"] == {}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--fail-if-regression", "5"], "--fail-if-regression needs --compare OLD.json"),
        (["--repeat", "0"], "--repeat 0: must be at least 1"),
        (["--processes", "0"], "--processes 0: must be at least 1"),
        (["--limit", "0"], "--limit 0.0: must be more than 0 seconds"),
    ],
)
def test_wrong_common_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as leaving:
        Planted().parse(arguments)
    assert leaving.value.code == 2 and message in capsys.readouterr().err


def test_repeated_runs_are_compared_where_all_have_a_ratio():
    runs = [{"a": 1.0, "b": 2.0}, {"a": 1.1, "c": 3.0}]
    assert comparison.differences(runs) == {"a": 10.0}
    empty = comparison.repeated([{"ratios": {}, "failed": {}, "cases": {}}] * 2)
    assert empty["largest_difference_percent"] is None


def test_what_the_device_sets_is_told_from_what_the_host_does():
    def variant(us, host):
        return {"us": {"median": us}, "host_us": {"median": host}}

    variants = {"eager": variant(90, 80), "graph": variant(30, 10), "ours": variant(10, 4)}
    variants |= {"failed": {"failed": "no"}, "cpu": {"us": {"median": 5}}}

    def run(*ratios):
        names = ["eager over ours", "graph over ours", "cpu over ours"]
        found = dict(zip([f"k/mlp/{n}" for n in names], ratios, strict=True))
        found["k/augment/graph/copy over ours"] = ratios[-1]
        cases = {"mlp": {"variants": variants}, "augment": {}}
        return {"key": "k", "cases": cases, "ratios": found, "failed": {}}

    record, again = run(9.0, 3.0, 0.5), run(12.0, 3.06, 0.5)
    keys = {"k/mlp/graph over ours", "k/augment/graph/copy over ours"}
    assert comparison.of_the_device(record) == keys
    record["repeat"] = comparison.repeated([record, again])
    assert record["repeat"]["largest_difference_percent"] == 33.33
    assert record["repeat"]["largest_difference_percent_of_the_device"] == 2.0
    expected = "differ by 33.3 % at most, those of times that the GPU sets by 2.0 %."
    assert comparison.how_far(record).endswith(expected)
    assert comparison.how_far(run(9.0, 3.0, 0.5)) == ""


def test_peers_are_compared_where_installed_and_on_a_gpu(monkeypatch):
    monkeypatch.setattr(peers, "INSTALLED", ("apex",))
    assert peers.peers_of("adamw", on_gpu=True) == ("apex",)
    assert peers.peers_of("adamw", on_gpu=False) == peers.peers_of("sgd", on_gpu=True) == ()


def test_peers_take_torchs_arguments(monkeypatch):
    def fused_adam(groups, **options):
        return groups, options

    module = SimpleNamespace(FusedAdam=fused_adam)
    monkeypatch.setattr(peers, "import_module", lambda name: module)
    options = {"lr": 1e-3, "weight_decay": 0.1, "capturable": True}
    assert peers.make("apex", "adam", [], options) == ([], options | {"adam_w_mode": False})


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    yield ["--threads", "1"]
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "optimizer, allowed, status", [("adamw", [], 0), ("sgd", ["50"], 1), ("lars", [], 0)]
)
def test_benchmark_runs_agrees_and_compares(
    optimizer, allowed, status, one_thread, tmp_path, monkeypatch
):
    import bench_optim

    key = f"cpu/{optimizer}/float32/tiny/b2b/gather"
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    common.write_json(old, record(**{key: 1e9}))  # so any time is a regression
    monkeypatch.setitem(shapes.CASES, "tiny", lambda: [(8, 4), (8,), (3, 8), (3,)])
    args = ["--device", "cpu", "--quick", "--cases", "tiny", "--optimizer", optimizer, *one_thread]
    args += ["--json", str(new), "--compare", str(old)]
    args += ["--fail-if-regression", *allowed] if allowed else []
    assert bench_optim.OptimizerSteps().main(args) == status
    found = json.loads(new.read_text())
    assert key in found["ratios"]
    assert all(found["cases"]["tiny"]["check"]["agrees"].values())
