# SPDX-License-Identifier: BSD-3-Clause
# `python -m torch_renaissance ab`: names of models and optimizers, files, exit states, and what is
# said about arguments that don't fit.
import argparse
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from torch_renaissance.__main__ import COMMANDS
from torch_renaissance.__main__ import main as command
from torch_renaissance.ab import VARIANTS, AbResult, Row, ab_test, cli, models
from torch_renaissance.ab.measure import Times
from torch_renaissance.ab.models import Options, optimizer_named, workload

ROOT = Path(__file__).resolve().parent.parent
OWN = """
import torch
from torch import nn

def small(batch):
    data = torch.randn(batch, 4), torch.randn(batch, 2)
    return (
        lambda: nn.Linear(4, 2),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, x, y: nn.functional.mse_loss(model(x), y),
        data,
    )

def wrong():
    return nn.Linear(4, 2), 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_models.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "own_models"
    sys.modules.pop("own_models", None)


def ab(*words):
    return command(["ab", "--device", "cpu", "--quiet", *words])


# --- the command ----------------------------------------------------------------------------------


def test_own_model_in_all_forms(own, tmp_path, capsys):
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "html", "png")}
    words = ["--json", files["json"], "--html", files["html"], "--plot", files["png"]]
    status = ab(
        *("--model", f"{own}:small", "--batch", "6", "--steps", "4"),
        *("--variants", "accelerate, TrainStep", *map(str, words)),
    )
    out, err = capsys.readouterr()
    assert status == 0 and err == ""
    assert out.startswith("own_models:small(batch=6): 10 parameters, fp32, on ")
    result = AbResult.from_json(files["json"].read_text())
    assert [row.name for row in result.rows] == ["eager", "accelerate", "TrainStep"]
    assert result.advice in json.loads(files["json"].read_text())["advice"]
    assert "<svg" in files["html"].read_text() and files["png"].stat().st_size > 1000


def test_as_a_program(own, tmp_path):
    words = ["--model", "own_models:small", "--device", "cpu", "--variants", "eager fused"]
    done = subprocess.run(
        [sys.executable, "-m", "torch_renaissance", "ab", *words, "--steps", "2"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(p for p in sys.path if p), "PATH": "/usr/bin:/bin"},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "eager fused" in done.stdout and "check: eager fused" in done.stderr


def test_mlp_by_name(capsys):
    assert ab("--model", "mlp", "--batch", "4", "--variants", "TrainStep", "--steps", "2") == 0
    assert "1,462,538 parameters" in capsys.readouterr().out


@pytest.mark.parametrize(
    "statuses, interrupted, expected",
    [
        (["ok", "ok", "failed"], False, 0),
        (["ok", "differs"], False, 1),
        (["failed", "failed"], False, 1),
        (["ok", "left out"], True, 130),
    ],
)
def test_exit_states(statuses, interrupted, expected, own, monkeypatch, capsys):
    times = Times(1.0, 1.0, 1.0, 2)
    rows = [
        Row(f"v{i}", s, wall=times, ratio=times) if s == "ok" else Row(f"v{i}", s, "why")
        for i, s in enumerate(statuses)
    ]
    result = AbResult("t", "cpu", "fp32", 1, rows=rows, interrupted=interrupted)
    monkeypatch.setattr(cli, "ab_test", lambda *args, **options: result)
    assert ab("--model", f"{own}:small") == expected
    assert capsys.readouterr().out == f"{result}\n"


def test_all_variants_by_one_word(own, monkeypatch):
    asked = {}

    def pretend(*args, **options):
        asked.update(options)
        return AbResult("t", "cpu", "fp32", 1)

    monkeypatch.setattr(cli, "ab_test", pretend)
    ab("--model", f"{own}:small", "--variants", "all", "--budget", "7", "--precision", "bf16")
    assert asked["variants"] == list(VARIANTS)
    assert (asked["budget"], asked["precision"], asked["device"]) == (7.0, "bf16", "cpu")
    ab("--model", f"{own}:small")
    assert asked["variants"] is None and asked["steps"] is None


@pytest.mark.parametrize(
    "words, message",
    [
        (["--model", "resnet5O"], "; did you mean resnet50 or "),
        (["--model", "mpl"], "module:function for your own; did you mean mlp?\n"),
        (
            ["--model", "mlp", "--optimizer", "adamv"],
            "no optimizer 'adamv' in torch.optim; did you",
        ),
        (["--model", "mlp", "--batch", "0"], "batch must be at least 1, got 0"),
        (["--model", "resnet18", "--image", "0"], "image must be at least 1, got 0"),
        (["--model", "gpt2", "--tokens", "5000"], "tokens must be at most 1024, got 5000"),
        (["--model", "mlp", "--variants", "TrainSteb"], "there is no variant 'TrainSteb'"),
        (["--model", "mlp", "--steps", "0"], "steps must be an int >= 1"),
        (["--model", "mlp", "--threads", "0"], "--threads must be at least 1, got 0"),
        (["--model", "mlp", "--seed", "-1"], "--seed must be at least 0, got -1"),
        (["--model", "mlp", "--json", "/no/such/place/x.json"], "no directory /no/such/place"),
        (["--model", "mlp", "--html", "/"], "/ is a directory; name a file"),
        (["--model", "mlp", "--device", "cuba"], "must be a CPU or a CUDA GPU, got 'cuba'"),
        (["--model", "no_such_module:f"], "no module 'no_such_module' to import"),
        (["--model", "own_models:smal"], "own_models has no function 'smal'; did you mean small"),
        (
            ["--model", "own_models:wrong"],
            "must return (make_model, make_optimizer, loss_fn, batch)",
        ),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_bad_arguments_are_sentences(words, message, own, capsys):
    if "resnet" in words[1]:
        pytest.importorskip("torchvision")
    assert ab(*words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("ab: ") and message in err
    assert err.count("\n") == 1


def test_errors_inside_of_the_users_module_are_not_hidden(own, tmp_path):
    (tmp_path / "broken_models.py").write_text("import a_module_that_is_missing\n")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_missing"):
        workload("broken_models:f")


def test_other_commands(monkeypatch, capsys):
    assert command(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(" ".join(words) in shown for words in COMMANDS)
    assert command([]) == 2
    assert command(["abb"]) == 2
    assert "there is no command 'abb'; did you mean 'ab'?" in capsys.readouterr().err
    assert command(["data", "shew"]) == 2
    assert "did you mean 'data show'?" in capsys.readouterr().err


def test_data_show_is_imported_when_called(monkeypatch):
    called = []
    stub = types.ModuleType("torch_renaissance.data.show")
    stub.add_arguments = lambda parser: parser.add_argument("path")
    stub.main = lambda args: called.append(args.path)
    package = types.ModuleType("torch_renaissance.data")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "torch_renaissance.data", package)
    monkeypatch.setitem(sys.modules, "torch_renaissance.data.show", stub)
    assert command(["data", "show", "here"]) == 0 and called == ["here"]


def test_arguments_have_help():
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    text = parser.format_help()
    for option in ("--model", "--optimizer", "--batch", "--precision", "--device", "--budget"):
        assert option in text


def test_the_package_stays_light():
    heavy = ("matplotlib", "torchvision", "timm", "rich", "torch._dynamo")
    script = (
        "import sys, torch; before = set(sys.modules); import torch_renaissance;"
        f"print([m for m in {heavy} if m in set(sys.modules) - before])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "resnet18", "googlenet"])
def test_models_by_name_take_a_step(name):
    if name != "mlp":
        pytest.importorskip("torchvision")
    found = workload(name, "sgd", Options(batch=2, image=64, channels_last=name == "resnet18"))
    model = found.make_model()
    batch = found.batch(0)
    loss = found.loss_fn(model, *batch)
    loss.backward()
    found.make_optimizer(model).step()
    assert loss.ndim == 0 and loss > 0
    again, other = found.batch(0), found.batch(1)
    assert torch.equal(batch[0], again[0]) and not torch.equal(batch[0], other[0])
    if name == "resnet18":
        assert batch[0].shape == (2, 3, 64, 64)
        assert batch[0].is_contiguous(memory_format=torch.channels_last)
        assert model.conv1.weight.is_contiguous(memory_format=torch.channels_last)


def test_gpt2_is_causal_and_of_its_size():
    model = models.GPT2(width=48, layers=2, heads=3).eval()
    tokens = torch.randint(models.VOCABULARY, (2, 7))
    changed = tokens.clone()
    changed[:, 5:] += 1
    changed %= models.VOCABULARY
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert before.shape == (2, 7, models.VOCABULARY)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-5)
    assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-3)
    with torch.device("meta"):
        assert sum(p.numel() for p in models.GPT2().parameters()) == 124_439_808
    found = workload("gpt2", "adamw", Options(batch=2, tokens=9))
    x, y = found.batch(0)
    assert x.shape == y.shape == (2, 9) and torch.equal(x[:, 1:], y[:, :-1])
    loss = found.loss_fn(model, x, y)
    assert loss.item() == pytest.approx(torch.tensor(models.VOCABULARY).log().item(), rel=0.05)


def test_optimizers_by_name():
    model = nn.Linear(2, 2)
    for name in ("sgd", "Adam", "ADAMW", "rmsprop", "Adagrad"):
        optimizer = optimizer_named(name)(model)
        assert type(optimizer).__name__.lower() == name.lower()
    with pytest.raises(ValueError, match="no optimizer 'optimizer'"):
        optimizer_named("optimizer")


def test_timm_where_it_is_installed(monkeypatch):
    built = nn.Linear(1, 1)
    built.default_cfg = {"input_size": (3, 40, 40)}
    timm = types.ModuleType("timm")
    timm.list_models = lambda: ["a_timm_model"]
    timm.create_model = lambda name, pretrained: built
    monkeypatch.setitem(sys.modules, "timm", timm)
    found = workload("a_timm_model", "sgd", Options(batch=2))
    assert found.make_model() is built
    assert found.batch(0)[0].shape == (2, 3, 40, 40)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match=r"'a_timm_model' \(.*timm not installed\)"):
        workload("a_timm_model")


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_mlp_with_all_variants_on_a_gpu(precision):
    found = workload("mlp", "adamw", Options(batch=200))
    result = ab_test(
        *found,
        variants=list(VARIANTS),
        precision=precision,
        device="cuda",
        budget=400.0,
        progress=False,
    )
    for row in result.rows:
        assert row.status == "ok" and row.measured, f"{row.name}: {row.reason}"
    assert result.row("TrainStep").ratio.median > 1.5
    assert result.advice.startswith("Use ") and "launch-bound" in result.advice


@pytest.mark.cuda
@pytest.mark.slow
def test_two_runs_have_the_same_ratios():
    found = workload("mlp", "adamw", Options(batch=200))
    names = ["eager fused", "hand graph", "TrainStep"]
    first, second = (
        ab_test(*found, variants=names, precision="fp16", device="cuda", progress=False)
        for _ in range(2)
    )
    # Of graphs, which the host's moods don't reach.
    ratios = [
        r.row("hand graph").wall.median / r.row("TrainStep").wall.median for r in (first, second)
    ]
    assert ratios[0] == pytest.approx(ratios[1], rel=0.05)
