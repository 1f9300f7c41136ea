# SPDX-License-Identifier: BSD-3-Clause
# examples/mnist_recipe.py on a few hundred digits: that both backends train, and what they leave.
import importlib.util
import json
import struct
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import torch_renaissance as tr
from torch_renaissance.data import DeviceDataset

EXAMPLES = Path(__file__).parents[1] / "examples"
pytest.importorskip("rich", reason="the recipe draws with rich")
pytest.importorskip("torchvision", reason="the native side uses torchvision")


def recipe():
    sys.path.insert(0, str(EXAMPLES))
    try:
        spec = importlib.util.spec_from_file_location("mnist_recipe", EXAMPLES / "mnist_recipe.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["mnist_recipe"] = module  # where dataclasses look
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(EXAMPLES))
        sys.modules.pop("mnist_recipe", None)


def idx(values):
    head = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
    return head + values.numpy().tobytes()


@pytest.fixture
def folder(tmp_path):
    digits = DeviceDataset.from_mnist(EXAMPLES / "data", train=False)
    for prefix, part in (("train", slice(0, 600)), ("t10k", slice(600, 900))):
        images, labels = digits.images[part, 0], digits.labels[part].to(torch.uint8)
        (tmp_path / f"{prefix}-images-idx3-ubyte").write_bytes(idx(images))
        (tmp_path / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(labels))
    return tmp_path


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["mnist_recipe.py", *map(str, arguments)])
    recipe().main()


@pytest.mark.filterwarnings("ignore:TrainStep runs eagerly")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_both_backends_learn(device, folder, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="for the plot")
    json_path, plot = folder / "recipe.json", folder / "curves.png"
    options = ("--device", device, "--batch", 50, "--workers", 0, "--no-compile")
    files = ("--data", folder, "--json", json_path, "--plot", plot)
    run(monkeypatch, "--backend", "both", "--epochs", 6, "--native-epochs", 6, *options, *files)
    text = capsys.readouterr().out
    assert "ours: " in text and "times native's epochs/s" in text
    record = json.loads(json_path.read_text())
    ours, native = record["runs"]
    assert (ours["backend"], native["backend"]) == ("ours", "native")
    for one in record["runs"]:
        assert len(one["seconds"]) == len(one["loss"]) == len(one["accuracy"]) == 6
        assert one["loss"][-1] < one["loss"][0]
        assert one["accuracy"][-1] > 0.5 and one["epochs_per_second"] > 0
    # The same recipe: the two come to about the same after as many epochs.
    assert abs(ours["accuracy"][-1] - native["accuracy"][-1]) < 0.2
    assert plot.read_bytes()[:4] == b"\x89PNG"


def test_equal_seeds_give_equal_runs(folder, monkeypatch):
    pytest.importorskip("torchvision")
    paths = [folder / f"{i}.json" for i in range(2)]
    for path in paths:
        options = ("--device", "cpu", "--epochs", 1, "--batch", 100, "--data", folder)
        with pytest.warns(UserWarning, match="runs eagerly"):
            run(monkeypatch, *options, "--json", path)
    first, second = (json.loads(path.read_text())["runs"][0] for path in paths)
    assert first["loss"] == second["loss"] and first["accuracy"] == second["accuracy"]


@pytest.mark.filterwarnings("ignore:TrainStep runs eagerly")
def test_on_a_cpu_each_epoch_is_read_before_the_next(folder, monkeypatch):
    """So that each has its own seconds; a GPU's are read later, and it works in order."""
    module = recipe()
    sets = [DeviceDataset.from_mnist(folder, train=part) for part in (True, False)]
    args = SimpleNamespace(device="cpu", precision=None, batch=100, compile=False, sets=sets)
    steps, seen, call = [], [], tr.TrainStep.__call__

    def counted(self, *batch):
        steps.append(batch)
        return call(self, *batch)

    monkeypatch.setattr(tr.TrainStep, "__call__", counted)
    run = module.train_ours(args, 0, 3, lambda run: seen.append((len(run.loss), len(steps))))
    assert seen == [(1, 6), (2, 12), (3, 18)] and len(run.accuracy) == 3


class Stop(Exception):
    pass


def test_the_recipe_is_the_one_it_is_named_after(folder, monkeypatch):
    """784-1024-512-256-10, Kaiming uniform by fan-in, zero biases that don't decay, five epochs of
    warm-up, then a cosine by epoch down to 1e-6."""
    module, seen = recipe(), {}

    def step(loss_fn, optimizer, **options):
        seen.update(options, optimizer=optimizer)
        raise Stop

    monkeypatch.setattr(tr, "TrainStep", step)
    sets = [DeviceDataset.from_mnist(folder, train=part) for part in (True, False)]
    args = SimpleNamespace(device="cpu", precision="fp16", batch=200, compile=False, sets=sets)
    with pytest.raises(Stop):
        module.train_ours(args, 0, 100, lambda run: None)
    decayed, others = seen["optimizer"].param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (1e-4, 0)
    assert [tuple(w.shape) for w in decayed["params"]] == [
        *((1024, 784), (512, 1024), (256, 512), (10, 256))
    ]
    for weight in decayed["params"]:
        bound = (6 / weight.shape[1]) ** 0.5
        assert 0.99 * bound < weight.abs().max() <= bound
    assert all(bias.count_nonzero() == 0 for bias in others["params"])
    transforms = seen["data"].transforms
    assert [type(t).__name__ for t in transforms] == [
        *("Pad", "RandomCrop", "RandomRotation", "RandomScale", "RandomErasing", "Normalize"),
        "ToFloat",
    ]
    assert transforms[2].degrees == (-20, 20) and transforms[3].scale == (0.8, 1.2)
    assert transforms[4].p == 0.5 and transforms[6].dtype == torch.float16
    schedule = module.schedule(steps_per_epoch=3, epochs=100)
    by_epoch = [schedule(3 * epoch) for epoch in range(100)]
    assert by_epoch[:6] == pytest.approx([1e-3 * (i + 1) / 6 for i in range(6)])
    assert by_epoch[99] == pytest.approx(1e-6) and schedule(299) == by_epoch[99]
    assert all(a > b for a, b in pairwise(by_epoch[5:]))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--epochs", 0), "must be at least 1"),
        (("--data", "nowhere"), "nowhere"),
        (("--batch", -1), "must be at least 1"),
        (("--seed", -1), "--seed must not be negative, got -1"),
        (("--json", "nowhere/x.json"), "nowhere/x.json: there is no folder"),
        (("--plot", "nowhere/x.png"), "nowhere/x.png: there is no folder"),
        (("--plot", "x.xyz"), "x.xyz must end with .png"),
    ],
)
def test_bad_arguments(arguments, message, monkeypatch, capsys):
    """Each before anything is trained."""
    monkeypatch.setattr(tr, "TrainStep", None)
    with pytest.raises(SystemExit):
        run(monkeypatch, "--device", "cpu", *arguments)
    assert message in capsys.readouterr().err
