# SPDX-License-Identifier: BSD-3-Clause
# `python -m torch_renaissance ab --model module:function`: its title, what is said of a name that
# fits nothing, of exceptions in the user's code, and of optimizers and plots that can't be.
import sys

import pytest
import torch
from torch import nn

import torch_renaissance as tr
from torch_renaissance.__main__ import main as command
from torch_renaissance.ab import cli, models
from torch_renaissance.ab.draw import check_format
from torch_renaissance.ab.models import Options, title_of, workload

OWN = """\
import torch
from torch import nn

notfunc = 3

def parts(**changed):
    found = dict(
        make_model=lambda: nn.Linear(4, 2),
        make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=lambda model, x: model(x).sum(),
        batch=(torch.ones(3, 4),),
    )
    return tuple((found | changed).values())

def fail(error):
    raise error

def plain():
    return parts()

def both(batch, optimizer="x", other=1):
    return parts(batch=(torch.ones(batch, 4),))

def needs(a, batch):
    return parts()

def type_error():
    return parts(1, 2)

def runtime_error():
    fail(RuntimeError("no weights\\nmore"))

def in_torch():
    torch.ones(2) @ torch.ones(3)

def in_model():
    return parts(make_model=lambda: fail(KeyError("width")))

def in_optimizer():
    return parts(make_optimizer=lambda: None)

def in_batch():
    return parts(batch=lambda step: fail(OSError("no file")))

def lbfgs():
    return parts(make_optimizer=lambda model: torch.optim.LBFGS(model.parameters()))

def no_memory():
    return parts(make_model=lambda: fail(torch.OutOfMemoryError("full")))
"""


def line_of(text):
    return 1 + OWN[: OWN.index(text)].count("\n")


@pytest.fixture
def own(tmp_path, monkeypatch):
    path = tmp_path / "own_parts.py"
    path.write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield path
    for name in ("own_parts", "broken_parts"):
        sys.modules.pop(name, None)


@pytest.fixture
def unmeasured(monkeypatch):
    """Fails where a measurement begins."""

    def begun(*args, **options):
        raise AssertionError("the measurement began")

    monkeypatch.setattr(cli, "ab_test", begun)


def ab(*words):
    return command(["ab", "--device", "cpu", "--quiet", *words])


def said(capsys):
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("ab: ") and err.count("\n") == 1
    return err[4:-1]


# --- the title ------------------------------------------------------------------------------------


def test_the_title_says_what_was_called(own):
    options = Options(batch=6)
    assert title_of("own_parts:plain", "adamw", options) == "own_parts:plain()"
    title = title_of("own_parts:both", "sgd", options)
    assert title == "own_parts:both(batch=6, optimizer=sgd)"
    assert workload("own_parts:both", "sgd", options).batch[0].shape == (6, 4)
    assert title_of("mlp", "sgd", options) == "mlp, sgd, batch 6"


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, message",
    [
        ("own_parts:notfunc", "own_parts:notfunc must be a function, but is of type int, which"),
        ("own_parts:notfun", "own_parts has no function 'notfun'"),
        ("own_parts:plane", "own_parts has no function 'plane'; did you mean plain?"),
        (":f", "a model of your own is named as module:function, as in my_models:small, got ':f'"),
        ("own_parts:", "is named as module:function, as in my_models:small, got 'own_parts:'"),
        (".own_parts:f", "is named as module:function, as in my_models:small, got '.own_parts:f'"),
        ("no_such.module:f", "there is no module 'no_such.module' to import, of 'no_such.module:"),
        ("own_parts.more:f", "there is no module 'own_parts.more' to import"),
        ("own_parts:needs", "own_parts:needs has the parameters a without a default, but is given"),
    ],
)
def test_names_that_fit_nothing(name, message, own, unmeasured, capsys):
    assert ab("--model", name) == 2
    found = said(capsys)
    assert message in found and "?;" not in found
    assert "did you mean notfunc" not in found, "which is no function"


# --- exceptions of the user's code ----------------------------------------------------------------


@pytest.mark.parametrize(
    "function, who, message, line",
    [
        ("type_error", "", "TypeError: parts() takes 0 positional arguments", "return parts(1, 2)"),
        ("runtime_error", "", "RuntimeError: no weights", "raise error"),
        ("in_torch", "", "RuntimeError: inconsistent tensor size", "torch.ones(2) @"),
        ("in_model", "make_model of ", "KeyError: 'width'", "raise error"),
        ("in_optimizer", "make_optimizer of ", "TypeError: in_optimizer.<locals>", "None)"),
        ("in_batch", "batch of ", "OSError: no file", "raise error"),
        ("no_memory", "make_model of ", "out of memory: full", "raise error"),
    ],
)
def test_what_the_users_code_raises_keeps_its_place(function, who, message, line, own, capsys):
    assert ab("--model", f"own_parts:{function}") == 2
    found = said(capsys)
    assert found.startswith(f"{who}own_parts:{function} raised {message}")
    assert found.endswith(f", at {own}:{line_of(line)}")


@pytest.mark.parametrize(
    "text, message, line",
    [
        ("\nimport a_module_that_is_missing\n", "ModuleNotFoundError: No module named 'a_mod", 2),
        ("x = 1\n\nx.y\n", "AttributeError: 'int' object has no attribute 'y'", 3),
        ("x = 1\ndef f(:\n", "SyntaxError: invalid syntax", 2),
        ("import os\nos.listdir('missing')\n", "FileNotFoundError: ", 2),
        ("import json\njson.loads('{')\n", "JSONDecodeError: ", 2),
    ],
)
def test_what_an_import_raises_keeps_its_place(text, message, line, own, capsys):
    path = own.parent / "broken_parts.py"
    path.write_text(text)
    assert ab("--model", "broken_parts:f") == 2
    found = said(capsys)
    assert found.startswith(f"importing broken_parts raised {message}")
    assert found.endswith(f", at {path}:{line}")


def test_exceptions_keep_their_type(own):
    """A variant that has no room is built again alone, which a wrapped exception would hide."""
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        workload("own_parts:no_memory").make_model()


def test_our_own_exceptions_are_not_hidden(own, monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("of the package itself")

    monkeypatch.setattr(cli, "ab_test", broken)
    with pytest.raises(RuntimeError, match="of the package itself"):
        ab("--model", "own_parts:plain")


# --- optimizers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, message",
    [
        ("lbfgs", "torch.optim.LBFGS can't train a model by name here: its step evaluates the "),
        ("Muon", "torch.optim.Muon can't train a model by name here: it takes matrices alone"),
        ("sparseadam", "torch.optim.SparseAdam can't train a model by name here: it takes sparse"),
    ],
)
def test_optimizers_that_fit_no_model_by_name(name, message, unmeasured, capsys):
    assert hasattr(torch.optim, "Muon"), "there since torch 2.9"
    assert ab("--model", "mlp", "--optimizer", name) == 2
    assert said(capsys).startswith(message)


def test_all_other_optimizers_take_a_step():
    model = models.mlp()
    names = [k for k, v in vars(torch.optim).items() if isinstance(v, type) and k != "Optimizer"]
    x, y = torch.ones(2, models.MLP[0]), torch.zeros(2, dtype=torch.long)
    models.classification_loss(model, x, y).backward()
    for name in {name.lower() for name in names} - set(models.UNFIT):
        before = [p.detach().clone() for p in model.parameters()]
        models.optimizer_named(name)(model).step()
        assert not all(map(torch.equal, before, model.parameters())), name


def test_an_optimizer_that_needs_a_closure_is_refused(own, capsys):
    assert ab("--model", "own_parts:lbfgs") == 2
    assert "make_optimizer returned LBFGS, whose step needs a closure" in said(capsys)
    with pytest.raises(TypeError, match="LBFGS, whose step needs a closure"):
        tr.ab_test(
            lambda: nn.Linear(4, 2),
            lambda model: torch.optim.LBFGS(model.parameters()),
            lambda model, x: model(x).sum(),
            (torch.ones(3, 4),),
            progress=False,
        )


# --- plots ----------------------------------------------------------------------------------------


def test_a_plot_that_cannot_be_written_ends_before_the_measurement(unmeasured, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert ab("--model", "mlp", "--plot", str(tmp_path / "x.xyz")) == 2
    found = said(capsys)
    assert found.startswith("matplotlib can't write .xyz, of x.xyz; it writes ")
    assert "png" in found and "svg" in found
    for name in ("x.png", "x.SVG", "x"):
        check_format(tmp_path / name)


def test_a_missing_matplotlib_ends_before_the_measurement(unmeasured, monkeypatch, capsys):
    for name in [n for n in sys.modules if n.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert ab("--model", "mlp", "--plot", "x.png") == 2
    assert "needs matplotlib: `pip install matplotlib`" in said(capsys)
