# SPDX-License-Identifier: BSD-3-Clause
# What compile_loss hands to torch.compile, and that Inductor gets a user's options as ever.

import pytest
import torch
from compiled_ops import on_cpu
from compiling import rewritten

from torch_renaissance._compiled import compile_loss, gelu
from torch_renaissance._compiled.late import LatePass

PASS = "post_grad_custom_pre_pass"


def loss(x):
    return x.sum()


@pytest.fixture
def asked(monkeypatch):
    """The arguments of calls of torch.compile."""
    calls, compile = [], torch.compile

    def noted(function, **arguments):
        calls.append(arguments)
        return compile(function, **arguments)

    monkeypatch.setattr(torch, "compile", noted)
    return calls


def backend_of(arguments, asked):
    compile_loss(loss, arguments, own=True)
    return asked[-1]["backend"]


def config_of(arguments, asked):
    return backend_of(arguments, asked).get_compiler_config()


def some_backend(module, inputs):
    return module.forward


UNCHANGED = [
    {"backend": "eager"},
    {"backend": "aot_eager", "dynamic": True},
    {"backend": some_backend},
    {"options": {"guard_filter_fn": lambda guards: [True for _ in guards]}},
]
if hasattr(torch, "_TorchCompileAOTInductorWrapper"):  # not in torch 2.9
    UNCHANGED.append({"options": {"use_aoti": False}})


@pytest.mark.parametrize("arguments", UNCHANGED, ids=str)
def test_other_backends_are_left_alone(arguments, asked):
    compile_loss(loss, arguments, own=True)
    assert asked == [arguments]


@pytest.mark.parametrize("arguments", [{}, {"fullgraph": True}, {"mode": "default"}], ids=str)
def test_without_ops_of_ours_it_is_torch_compile(arguments, asked):
    compile_loss(loss, arguments, own=False)
    assert asked == [arguments]


def test_arguments_that_are_not_inductors(asked):
    given = {"fullgraph": True, "dynamic": False, "backend": "inductor", "mode": None}
    backend = backend_of(dict(given), asked)
    assert backend.compiler_name == "inductor"
    assert asked == [{"fullgraph": True, "dynamic": False, "backend": backend}]


def test_mode_and_options_are_inductors(asked):
    by_mode = config_of({"mode": "max-autotune-no-cudagraphs"}, asked)
    assert by_mode["max_autotune"] and not by_mode["triton.cudagraphs"]
    assert config_of({"options": {"epilogue-fusion": False}}, asked)["epilogue_fusion"] is False
    assert isinstance(by_mode[PASS], LatePass)


class Theirs(LatePass):
    pass


def test_a_pass_of_the_users_stays(asked):
    for name in (PASS, PASS.replace("_", "-")):
        assert type(config_of({"options": {name: Theirs()}}, asked)[PASS]) is Theirs
    with torch._inductor.config.patch({PASS: Theirs()}):
        assert type(config_of({}, asked)[PASS]) is Theirs


WRONG = [
    {"options": {"no_such_option": 1}},
    {"options": {"max_autotune": "yes"}},
    {"mode": "no such mode"},
    {"mode": "default", "options": {"max_autotune": True}},
    {"mode": "default", "options": {}},
    {"backend": "no such backend"},
    {"no_such_argument": 1},
]


@pytest.mark.parametrize("arguments", WRONG, ids=str)
def test_errors_are_torchs(arguments):
    with pytest.raises(Exception) as natively:
        torch.compile(loss, **arguments)
    with pytest.raises(type(natively.value)) as ours:
        compile_loss(loss, arguments, own=True)
    assert str(ours.value) == str(natively.value)


def test_a_filter_of_guards_is_asked():
    seen = []

    def keep(guards):
        seen.extend(guards)
        return [True for _ in guards]

    x = torch.ones(3, requires_grad=True)
    with on_cpu():
        compiled = compile_loss(loss, {"options": {"guard_filter_fn": keep}}, own=True)
        compiled(x).backward()
    assert seen and torch.equal(x.grad, torch.ones(3))


def test_a_graph_that_cannot_be_rewritten_stays_as_it_was(monkeypatch):
    def fails(graph):
        for node in list(graph.nodes):
            if node.op == "call_method":
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
        raise KeyError("example_value")

    monkeypatch.setattr(gelu, "rewrite", fails)
    torch._dynamo.reset()
    compiled, _ = rewritten(loss)
    x = torch.arange(6.0)
    with pytest.warns(UserWarning, match="failed: KeyError: 'example_value'"):
        assert compiled(x) == x.sum()
