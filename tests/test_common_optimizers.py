# SPDX-License-Identifier: BSD-3-Clause
# torch's own tables of optimizer inputs and errors, driven through ours: every valid input trains
# as torch's class does, every error has the same type and words.

import copy
import re
import warnings

import pytest
import torch
from testing import DEVICES, FP64, OPTIMIZERS, clones, mlp, parameters, train, worst
from torch import nn
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db

import torch_renaissance as tr

OURS = {row.native: row.ours for row in OPTIMIZERS}
INFOS = [info for info in optim_db if info.optim_cls in OURS]
each_info = pytest.mark.parametrize("info", INFOS, ids=lambda info: info.name)
each_device = pytest.mark.parametrize("device", DEVICES)


@each_device
@each_info
@pytest.mark.parametrize("implementation", [None, "foreach", "fused"])
@pytest.mark.parametrize("accelerated", [False, True], ids=["class", "accelerate"])
def test_valid_inputs_train_as_torchs(info, implementation, accelerated, device):
    inputs = info.optim_inputs_func(device=device, dtype=torch.float64)
    assert inputs
    for given in inputs:
        options = given.kwargs | ({implementation: True} if implementation else {})
        plain = implementation == "fused"
        native, ours = (parameters(device, torch.float64, plain=plain) for _ in "ab")
        try:
            torchs = info.optim_cls(native, **copy.deepcopy(options))
        except ValueError as error:  # foreach takes no tensor lr: neither do we
            with pytest.raises(ValueError, match=re.escape(str(error))):
                OURS[info.optim_cls](ours, **copy.deepcopy(options))
            continue
        if accelerated:
            optimizer = info.optim_cls(ours, **copy.deepcopy(options))
            tr.accelerate(nn.ParameterList(ours), optimizer)
        else:
            optimizer = OURS[info.optim_cls](ours, **copy.deepcopy(options))
        train(torchs, native, range(6), plain=plain)
        train(optimizer, ours, range(6), plain=plain)
        # capturable computes the bias correction in fp32, from the step counter's dtype
        assert worst(ours, native) <= (1e-6 if options.get("capturable") else FP64), given.desc


@each_device
@each_info
def test_differentiable_leaves_a_graph_as_torchs_does(info, device):
    results = []
    for make in (info.optim_cls, OURS[info.optim_cls]):
        start = torch.linspace(-1, 1, 6, dtype=torch.float64, device=device, requires_grad=True)
        p = start.clone()
        p.grad = (start * start).clone()
        optimizer = make([p], lr=0.1, weight_decay=0.1, differentiable=True, foreach=False)
        optimizer.step()
        (through,) = torch.autograd.grad(p.sum(), start)
        results.append((p.detach(), through))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def raised(call):
    """Type and words of what a call raises; a warning counts as an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            call()
        except Exception as error:
            return type(error), str(error)
    return None


def same_error(native, ours, params, kwargs, step=False):
    def call(make):
        def made():
            given, options = copy.deepcopy((params, kwargs))
            optimizer = make(given, **options)
            if step:
                for group in optimizer.param_groups:
                    for p in group["params"]:
                        p.grad = torch.ones_like(p)
                optimizer.step()

        return raised(made)

    expected = call(native)
    assert expected is not None
    assert call(ours) == expected
    return expected


@each_device
@each_info
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_error_inputs_raise_as_torchs(info, dtype, device):
    errors = info.optim_error_inputs_func(device=device, dtype=dtype)
    assert errors or info.name == "SGD"  # which has none on CUDA
    for error in errors:
        given = error.optimizer_error_input
        params = given.params
        if params is None:
            params = [nn.Parameter(torch.ones(2, 3, dtype=dtype, device=device))]
        step = error.error_on is OptimizerErrorEnum.STEP_ERROR
        kind, words = same_error(
            info.optim_cls, OURS[info.optim_cls], params, given.kwargs, step=step
        )
        assert issubclass(kind, error.error_type), given.desc
        assert re.search(error.error_regex, words), given.desc


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"lr": -1.0}),
        ("SGD", {"weight_decay": -1.0}),
        ("SGD", {"nesterov": True}),
        ("SGD", {"nesterov": True, "momentum": 0.9, "dampening": 0.1}),
        ("SGD", {"foreach": True, "fused": True}),
        ("SGD", {"fused": True, "differentiable": True}),
        ("SGD", {"betas": (0.9, 0.9)}),
        ("Adam", {"lr": -1.0}),
        ("Adam", {"eps": -1.0}),
        ("Adam", {"betas": (0.9, -0.1)}),
        ("Adam", {"momentum": 0.9}),
        ("AdamW", {"betas": (0.9, 1.0)}),
        ("AdamW", {"foreach": True, "fused": True}),
        ("AdamW", {"fused": True, "differentiable": True}),
        ("AdamW", {"decoupled_weight_decay": True}),
    ],
    ids=str,
)
def test_further_bad_options_raise_as_torchs(name, options):
    params = [torch.zeros(1, requires_grad=True)]
    same_error(getattr(torch.optim, name), getattr(tr.optim, name), params, options)


@pytest.mark.parametrize("row", OPTIMIZERS[::9], ids=str)
def test_bad_parameters_raise_as_torchs(row):
    leaf = torch.zeros(2, requires_grad=True)
    model = mlp()
    for params in (
        [],
        [1.0],
        [{"params": [leaf, "no tensor"]}],
        [{"params": {leaf}}],
        leaf,
        None,
        [("a", leaf), clones([leaf])[0]],
    ):
        same_error(row.native, row.ours, params, {})
    kind = raised(lambda: row.native([leaf * 2]))
    assert kind is not None and raised(lambda: row.ours([leaf * 2])) == kind
    optimizers = row.native(model.parameters()), row.ours(model.parameters())
    for group in ({"params": [leaf * 2]}, {"params": list(model.parameters())}, [leaf], {}):
        expected, got = (
            raised(lambda o=o, group=group: o.add_param_group(copy.copy(group))) for o in optimizers
        )
        assert expected is not None and got == expected
    assert len(optimizers[1].param_groups) == 1
