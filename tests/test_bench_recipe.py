# SPDX-License-Identifier: BSD-3-Clause
# The recipe's benchmark: its arguments, its bars, and a run. Nothing asserts a time.
import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
pytest.importorskip("rich", reason="the recipe draws with rich")
pytest.importorskip("torchvision", reason="the native side uses torchvision")

import bench_recipe
import mnist_recipe
from bench_recipe import Recipe


def test_defaults_are_what_the_bars_are_for():
    args = Recipe().parse(["--device", "cuda"])
    assert (args.seeds, args.epochs, args.precision, args.compile) == (5, 100, "fp16", True)
    quick = Recipe().parse(["--device", "cpu", "--quick"])
    assert (quick.seeds, quick.epochs, quick.precision, quick.compile) == (1, 3, None, False)
    assert [len(part) for part in quick.sets] == [8000, 2000]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--seeds", "0"], "--seeds and --epochs must be at least 1"),
        (["--epochs", "0"], "--seeds and --epochs must be at least 1"),
        (["--native-epochs", "-1"], "the others at least 0"),
        (["--data", "/nowhere"], "/nowhere"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as leaving:
        Recipe().parse(["--device", "cpu", *arguments])
    assert leaving.value.code == 2
    assert message in capsys.readouterr().err


def run(speed, accuracy):
    return {"accuracy": [0.5, accuracy], "epochs_per_second": speed}


def record(images=60_000, trainings=5, **settings):
    speeds, accuracies = (41.0, 50.0, 30.0, 42.0, 40.5), (0.995, 0.993, 0.994, 0.9935, 0.9945)
    ours = [run(*one) for one in zip(speeds, accuracies, strict=True)]
    taken = {"images": images, "ours": ours[:trainings], "native": [run(0.5, 0.9)]}
    settings = {"device": "cuda", "epochs": 100} | settings
    return {"cases": {"mnist": taken}, "settings": settings}


def test_bars():
    found = {b["name"]: (b["reached"], b["holds"]) for b in Recipe().bars(record())}
    assert found == {
        "recipe: epochs a second": (41.0, True),
        "recipe: accuracy in the last epoch, mean": (0.994, False),
        "recipe: ours / native, epochs a second": (82.0, True),
    }
    alone = record()
    alone["cases"]["mnist"]["native"] = []
    assert len(Recipe().bars(alone)) == 2


@pytest.mark.parametrize(
    "other", [{"images": 8000}, {"device": "cpu"}, {"epochs": 3}, {"trainings": 4}]
)
def test_no_bars_where_they_were_not_set(other):
    assert Recipe().bars(record(**other)) == []


@pytest.mark.filterwarnings("ignore:TrainStep runs eagerly")
def test_a_run(tmp_path, monkeypatch, capsys):
    whole = mnist_recipe.read_sets(None)
    parts = [s.images[:n] for s, n in zip(whole, (400, 100), strict=True)]
    labels = [s.labels[:n] for s, n in zip(whole, (400, 100), strict=True)]
    small = [
        mnist_recipe.data.DeviceDataset(x, y, num_classes=10)
        for x, y in zip(parts, labels, strict=True)
    ]
    monkeypatch.setattr(mnist_recipe, "read_sets", lambda folder: small)
    path = tmp_path / "recipe.json"
    options = ["--seeds", "2", "--epochs", "3", "--native-epochs", "2", "--workers", "0"]
    command = ["--device", "cpu", "--quick", *options, "--json", str(path)]
    assert Recipe().main(command) == 0
    found = json.loads(path.read_text())
    taken = found["cases"]["mnist"]
    assert taken["images"] == 400
    assert [len(r["accuracy"]) for r in taken["ours"] + taken["native"]] == [3, 3, 2]
    assert [r["seed"] for r in taken["ours"]] == [0, 1]
    assert bench_recipe.times_native(taken) > 0
    assert list(found["ratios"]) == ["cpu/fp32/recipe/native over ours"]
    assert "ours, seed 1" in capsys.readouterr().out
