# SPDX-License-Identifier: BSD-3-Clause
# The examples with real models as a user runs them, for a handful of steps on the CPU: the loss
# falls, the table tells, and bad input and missing packages are answered in a sentence.
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_renaissance as tr

pytest.importorskip("rich", reason="the examples draw with rich")
pytest.importorskip("torchvision", reason="one example takes its model from torchvision")

EXAMPLES = Path(__file__).parents[1] / "examples"
PACKAGE = Path(tr.__file__).parents[1]  # so that the child imports the same one
SHORT = {
    "resnet18": ["--epochs", "3", "--images", "24", "--batch", "8"],
    "gpt": ["--steps", "40", "--batch", "8", "--context", "16", "--width", "32", "--layers", "1"],
}


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name, *arguments, device="cpu", before=()):
    """As a user does; `before` are folders from which the child imports first."""
    path = [*map(str, before), str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"COLUMNS": "100", "PYTHONPATH": os.pathsep.join(path), "PYTHONUTF8": "1"}
    environment["OMP_NUM_THREADS"] = "1"  # steadier beside other processes
    return subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", "--device", device, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )


def in_process(name, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--device", "cpu", *SHORT[name], *arguments])
    monkeypatch.setenv("COLUMNS", "100")
    load(name).main()


def table_of(text):
    """What stands beside each row's name."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    return {cells[0]: cells[1] for cells in rows if len(cells) == 2}


def check(result, captured):
    assert result.returncode == 0, result.stderr
    # On a CPU there is one warning, which says that there are no graphs.
    assert result.stderr.count("Warning") == result.stderr.count("which has no graphs") <= 1
    rows = table_of(result.stdout)
    first, last = map(float, rows["loss of the first and the last step"].split(" → "))
    assert last < first, "the loss has to fall"
    assert rows["steps replayed as one CUDA graph"] == captured
    return rows, first


def test_resnet18_learns():
    result = run("resnet18", *SHORT["resnet18"])
    rows, first = check(result, captured="no")
    assert 1.8 < first < 3.5  # log 10 is what guessing gets
    assert "epoch 3/3" in result.stdout
    for which in ("last", "averaged"):
        assert 0 <= float(rows[f"accuracy of the {which} weights"].removesuffix("%")) <= 100


def test_gpt_learns_and_writes():
    result = run("gpt", *SHORT["gpt"])
    rows, first = check(result, captured="no")
    assert 4 < first < 6  # the logarithm of about a hundred letters is what guessing gets
    assert int(rows["letters a second, start-up included"].replace(",", "")) > 0
    written = result.stdout.partition("training")[2].partition("letters, cpu")[0]
    assert len(written) > 300


@pytest.mark.cuda
@pytest.mark.parametrize("name", SHORT)
def test_steps_are_captured_on_a_gpu(name):
    check(run(name, *SHORT[name], "--precision", "fp16", device="cuda"), captured="yes")


# --- their parts ----------------------------------------------------------------------------------


def test_gratings_are_reproducible_and_told_apart_by_class():
    gratings = load("resnet18").gratings
    images, labels = gratings(200, seed=1)
    assert images.shape == (200, 3, 32, 32) and images.dtype == torch.float32
    assert labels.bincount().shape == (10,) and labels.bincount().min() > 0
    again, other = gratings(200, seed=1), gratings(200, seed=2)
    assert torch.equal(images, again[0]) and torch.equal(labels, again[1])
    assert not torch.equal(images, other[0])
    red, _, blue = images.std((2, 3)).unbind(1)
    assert ((red > blue) == (labels >= 5)).all()  # warm and cold


def test_resnet18_has_the_stem_for_small_images():
    model = load("resnet18").make_model()
    assert model.maxpool(model.conv1(torch.zeros(2, 3, 32, 32))).shape == (2, 64, 32, 32)
    assert sum(p.numel() for p in model.parameters()) == 11_173_962


def test_accuracy_leaves_the_model_in_training_mode():
    accuracy = load("resnet18").accuracy
    model = torch.nn.Linear(4, 4)
    images, labels = torch.eye(4).repeat(100, 1), torch.arange(4).repeat(100)
    model.weight.data, model.bias.data = torch.eye(4), torch.zeros(4)
    assert accuracy(model, images, labels) == 1.0
    assert accuracy(model, images, (labels + 1) % 4) == 0.0
    assert model.training


def test_gpt_sees_no_later_letters():
    torch.manual_seed(0)
    model = load("gpt").GPT(letters=11, context=8, width=32, layers=2)
    tokens = torch.randint(11, (2, 8))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    logits, others = model(tokens), model(changed)
    assert logits.shape == (2, 8, 11)
    torch.testing.assert_close(logits[:, :5], others[:, :5])
    assert (logits[:, 5:] - others[:, 5:]).abs().amin((0, 2)).max() > 0
    torch.testing.assert_close(model(tokens[:, :3]), logits[:, :3])


def test_sources_are_the_projects():
    text = load("gpt").read_sources()
    assert (EXAMPLES / "gpt.py").read_text() in text
    assert (EXAMPLES.parent / "csrc" / "bindings.cpp").read_text() in text


# --- flags ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, option", [("resnet18", "ema_decay"), ("gpt", "max_grad_norm")])
@pytest.mark.parametrize(
    "arguments, precision, compile",
    [([], None, False), (["--precision", "bf16", "--compile"], "bf16", True)],
    ids=["default", "both"],
)
def test_flags_reach_the_step(name, option, arguments, precision, compile, monkeypatch):
    """Seen where the step is made, so that nothing is compiled or trained here."""
    given = {}

    class Made(Exception):
        pass

    def made(loss_fn, optimizer, **options):
        given.update(options)
        raise Made

    def accelerate(model, optimizer, **options):
        given.update(options)
        return model, optimizer

    monkeypatch.setattr(tr, "TrainStep", made)
    monkeypatch.setattr(tr, "accelerate", accelerate)
    with pytest.raises(Made):
        in_process(name, monkeypatch, *arguments)
    expected = {"ema_decay": 0.8, "max_grad_norm": 1.0}[option]
    assert given == {option: expected, "precision": precision, "compile": compile}


@pytest.mark.parametrize(
    "name, arguments, message",
    [
        ("resnet18", ["--epochs", "0"], "--epochs 0, --images 24, --batch 8, "),
        ("resnet18", ["--batch", "25"], "expected epochs >= 1, 2 <= batch <= images, 0 < lr < 1"),
        ("resnet18", ["--batch", "1"], "--batch 1, --lr 0.001, --ema 0.8: expected "),
        ("resnet18", ["--lr", "nan"], "--lr nan, --ema 0.8: expected "),
        ("resnet18", ["--ema", "1"], "--ema 1.0: expected "),
        ("gpt", ["--steps", "0"], "--steps 0, --batch 8, "),
        ("gpt", ["--width", "40"], "--width 40, --layers 1, --lr 0.006: expected sizes > 0, width"),
        ("gpt", ["--lr", "2"], "--lr 2.0: expected "),
        ("gpt", ["--context", "100000000"], "--context 100000000, "),
        ("gpt", ["--precision", "fp8"], "argument --precision: invalid choice: 'fp8'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments(name, arguments, message, monkeypatch, capsys):
    with pytest.raises(SystemExit) as leaving:
        in_process(name, monkeypatch, *arguments)
    assert leaving.value.code == 2
    out, err = capsys.readouterr()
    assert message in err and out == ""


@pytest.mark.parametrize("name", SHORT)
def test_no_gpu(name, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        in_process(name, monkeypatch, "--device", "cuda")
    assert "--device cuda: PyTorch finds no GPU here." in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, missing, message",
    [
        ("gpt", "rich", "`pip install rich`, or the project's `demo` extra."),
        ("resnet18", "rich", "rich is missing: `pip install rich torchvision`"),
        ("resnet18", "torchvision", "torchvision is missing: `pip install rich torchvision`"),
    ],
)
def test_missing_package(name, missing, message, tmp_path):
    text = f"raise ModuleNotFoundError('no {missing}', name='{missing}')"
    (tmp_path / f"{missing}.py").write_text(text)
    result = run(name, before=[tmp_path])
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr
