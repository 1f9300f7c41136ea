# SPDX-License-Identifier: BSD-3-Clause
# The sweep over batch sizes: its arguments, where a gain ends, and a run. Nothing asserts a time.
import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
pytest.importorskip("torchvision", reason="the models are torchvision's")

import bench_sweep
import tables
from bench_sweep import Sweep


def test_defaults():
    args = Sweep().parse(["--device", "cuda"])
    assert args.precision == "fp16"
    assert args.models == list(bench_sweep.BATCHES)
    assert args.cases[0] == "mlp/8" and "resnet18_cifar/2048" in args.cases
    assert args.variants == ["eager fused", "hand graph", "TrainStep"]
    quick = Sweep().parse(["--quick", "--device", "cpu"])
    assert quick.cases == ["mlp/4", "mlp/16", "gpt_small/4", "gpt_small/16"]
    assert quick.budget < args.budget


def test_models_and_batches_are_taken_in_order():
    args = Sweep().parse(["--models", "resnet50,mlp", "--batches", "64,8,64", "--compile"])
    assert args.cases == ["resnet50/8", "resnet50/64", "mlp/8", "mlp/64"]
    assert args.variants[-1] == "TrainStep compile"


def test_models_may_have_batches_of_their_own():
    args = Sweep().parse(["--models", "mlp:256/32/32, gpt_small:4,resnet50", "--batches", "16,8"])
    assert args.models == ["mlp", "gpt_small", "resnet50"]
    assert args.cases == ["mlp/32", "mlp/256", "gpt_small/4", "resnet50/8", "resnet50/16"]
    args = Sweep().parse(["--models", "gpt_small:4,mlp", "--quick"])
    assert args.cases == ["gpt_small/4", "mlp/4", "mlp/16"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--models", "lenet"], "there is no lenet; expected some of mlp, "),
        (["--batches", "8,many"], "--batches 8,many: expected whole numbers, as in 8,64,512"),
        (["--batches", "0,8"], "--batches 0,8: a batch must be at least 1, got 0"),
        (["--models", "mlp:8/many"], "--models mlp:8/many: expected whole numbers, as in 8/64/512"),
        (["--models", "mlp:"], "--models mlp:: expected whole numbers, as in 8/64/512"),
        (["--models", "mlp:8/0"], "--models mlp:8/0: a batch must be at least 1, got 0"),
        (["--models", "mlp:8,64"], "there is no 64; expected some of mlp, "),
        (["--models", "lenet:8"], "there is no lenet; expected some of mlp, "),
        (["--models", "mlp:8,mlp:64"], "mlp is named twice; write mlp:8/64/512"),
        (["--budget", "-1"], "--budget -1.0: must be more than 0 seconds"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as leaving:
        Sweep().parse(arguments)
    assert leaving.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    "gains, ends, words",
    [
        ({8: 3.0, 16: 1.1, 32: 1.09}, 16, "no gain beyond batch 16"),
        ({32: 1.2, 8: 1.0, 16: 1.0}, None, "gains at the largest batch"),
        ({8: 1.2, 16: 1.0, 32: 1.15, 64: 1.0}, 32, "no gain beyond batch 32"),
        ({8: 1.05, 16: 0.9}, 0, "no gain at any batch"),
    ],
)
def test_where_a_gain_ends(gains, ends, words):
    assert bench_sweep.gain_ends(gains) == ends
    assert bench_sweep.ending(ends) == words


def planted(batch, eager, graph, ours):
    times = {"eager fused": eager, "hand graph": graph, "TrainStep": ours}
    rows = {name: {"us": {"median": time}} for name, time in times.items() if time}
    return {"model": "mlp", "batch": batch, "variants": rows}


def test_gain_is_split_between_the_graph_and_the_rest():
    sizes = [planted(8, 1000, 100, 50), planted(512, 400, 390, 380), planted(64, 900, None, 90)]
    found = bench_sweep.fades({"cases": {str(i): size for i, size in enumerate(sizes)}})
    assert found == {
        "mlp": {
            "graph": {"gains": {8: 10.0, 512: 1.026}, "ends": 8},
            "fused step, 16-bit weights": {"gains": {8: 2.0, 512: 1.026}, "ends": 8},
            "together": {"gains": {8: 20.0, 512: 1.053, 64: 10.0}, "ends": 64},
        }
    }


@pytest.mark.filterwarnings("ignore:TrainStep runs eagerly")
def test_quick_run_on_a_cpu(tmp_path, capsys):
    path, threads = tmp_path / "record.json", torch.get_num_threads()
    args = ["--device", "cpu", "--quick", "--threads", "1", "--budget", "0.01", "--repeat", "2"]
    try:
        status = Sweep().main([*args, "--batches", "3", "--json", str(path)])
    finally:
        torch.set_num_threads(threads)
    assert status == 0
    record = json.loads(path.read_text())
    assert list(record["cases"]) == ["mlp/3", "gpt_small/3"]
    for case, taken in record["cases"].items():
        batch = int(case.split("/")[1])
        assert taken["inputs"][0] == taken["batch"] == batch
        found = taken["variants"]
        assert found["hand graph"] == {"failed": "RuntimeError: a CUDA graph needs a GPU"}
        ours = found["TrainStep"]
        assert ours["agrees"] and taken["compared_with"] == "eager fused"
        speed = 1e6 * batch / ours["us"]["median"]
        assert ours["samples_per_s"] == pytest.approx(speed, rel=1e-3)
        assert f"cpu/fp32/{case}/eager fused over TrainStep" in record["ratios"]
    assert record["fades"].keys() == {"mlp", "gpt_small"}
    assert [len(ratios) for ratios in record["repeat"]["ratios"]] == [2, 2]
    out = capsys.readouterr().out
    assert "where each part's gain falls below 1.1" in out
    assert max(map(len, out.splitlines())) <= tables.WIDTH


@pytest.mark.cuda
def test_all_variants_run_on_a_gpu(tmp_path):
    path = tmp_path / "record.json"
    assert Sweep().main(["--device", "cuda", "--quick", "--json", str(path)]) == 0
    for taken in json.loads(path.read_text())["cases"].values():
        assert all(row["agrees"] and row["us"] for row in taken["variants"].values())
