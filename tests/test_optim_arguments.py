# SPDX-License-Identifier: BSD-3-Clause
# What tr.optim's constructors take: torch's arguments and defaults, or a module, whose biases and
# norm weights are then not decayed.

import copy
import pickle

import pytest
import torch
from testing import DEVICES, LM, OPTIMIZERS, USUAL, conv_bn, mlp, pair, same, square
from torch import nn

import torch_renaissance as tr


@pytest.mark.parametrize("row", OPTIMIZERS, ids=str)
def test_same_defaults_groups_and_printing(row):
    params = list(mlp().parameters())
    native, ours = row.native(params, **row.options), row.ours(params, **row.options)
    assert isinstance(ours, row.native) and type(ours) is row.ours
    assert ours.defaults == native.defaults
    assert ours.param_groups == native.param_groups
    assert repr(ours) == repr(native)


def test_arguments_by_position():
    params = list(mlp().parameters())
    for name, arguments in (
        ("SGD", (0.1, 0.9, 0.0, 0.2, True)),
        ("Adam", (0.1, (0.8, 0.9), 1e-6, 0.2, True)),
        ("AdamW", (0.1, (0.8, 0.9), 1e-6, 0.2, True)),
    ):
        native = getattr(torch.optim, name)(params, *arguments)
        assert getattr(tr.optim, name)(params, *arguments).defaults == native.defaults


def test_named_parameters_keep_their_names():
    model = mlp()
    for name in ("SGD", "Adam", "AdamW"):
        optimizer = getattr(tr.optim, name)(model.named_parameters(), lr=0.1)
        names = [key for key, _ in model.named_parameters()]
        assert optimizer.state_dict()["param_groups"][0]["param_names"] == names


class Scaled(nn.LayerNorm):
    """A norm layer of somebody's own."""


class Zoo(nn.Module):
    """Every sort of parameter, each named after what is right for it."""

    def __init__(self):
        super().__init__()
        self.decayed = nn.ModuleList(
            [
                nn.Linear(4, 4, bias=False),
                nn.Embedding(5, 4),
                nn.Conv2d(3, 4, 3, bias=False),
                nn.Conv1d(3, 3, 3, groups=3, bias=False),
                nn.ParameterList([torch.randn(2, 3), torch.randn(1, 1)]),
            ]
        )
        self.spared = nn.ModuleList(
            [
                nn.LayerNorm((3, 4)),
                Scaled((2, 2)),
                nn.GroupNorm(2, 4),
                nn.BatchNorm2d(3),
                nn.InstanceNorm1d(3, affine=True),
                nn.RMSNorm((2, 5)),
                nn.ParameterList([torch.randn(4), torch.randn(())]),
            ]
        )
        self.decayed[0].register_parameter("unused", None)


@pytest.mark.parametrize("usual", USUAL, ids=str)
def test_a_module_makes_two_groups(usual):
    model = Zoo()
    optimizer = usual.ours(model, **usual.options)
    weights, bias_like = optimizer.param_groups
    assert [id(p) for p in weights["params"]] == [id(p) for p in model.decayed.parameters()]
    assert [id(p) for p in bias_like["params"]] == [id(p) for p in model.spared.parameters()]
    assert weights["weight_decay"] == usual.options["weight_decay"]
    assert bias_like["weight_decay"] == 0
    for key in weights.keys() - {"params", "weight_decay"}:
        assert weights[key] == bias_like[key]


def test_a_module_with_ties_or_of_one_kind_only():
    model = LM()
    groups = tr.optim.AdamW(model).param_groups
    assert [p.shape for p in groups[0]["params"]] == [(7, 4), (4, 4)]
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters())) == 5
    optimizer = tr.optim.SGD(nn.LayerNorm(4), lr=0.1, weight_decay=0.5)
    trained = [group for group in optimizer.param_groups if group["params"]]
    assert [(len(g["params"]), g["weight_decay"]) for g in trained] == [(2, 0)]
    optimizer = tr.optim.SGD(nn.Linear(4, 4, bias=False), lr=0.1, weight_decay=0.5)
    trained = [group for group in optimizer.param_groups if group["params"]]
    assert [(len(g["params"]), g["weight_decay"]) for g in trained] == [(1, 0.5)]


@pytest.mark.parametrize("usual", USUAL, ids=str)
def test_a_module_without_parameters_is_an_empty_list(usual):
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        usual.ours(nn.ReLU())


def train_with_and_without_decay(a, oa, b, ob, loss):
    for model, optimizer in ((a, oa), (b, ob)):
        for _ in range(4):
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
    same(a, b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("usual", USUAL, ids=str)
def test_decay_bias_like_false_spares_biases_and_norms(usual, device):
    def image_loss(model):
        p = next(model.parameters())
        x = torch.linspace(-1, 1, 2 * 3 * 81, device=p.device, dtype=p.dtype).view(2, 3, 9, 9)
        return model(x).pow(2).mean()

    for make, loss in ((mlp, square), (conv_bn, image_loss)):

        def one_group(model):
            return usual.native(model.parameters(), **usual.options)

        a, _, b, ob = pair(make, one_group, device, decay_bias_like=False)
        native = usual.native(usual.ours(a).param_groups, **usual.options)
        decays = [usual.options["weight_decay"], 0.0]
        for group, decay in zip(native.param_groups, decays, strict=True):
            group.update({**usual.native([torch.zeros(1)], **usual.options).defaults})
            group["weight_decay"] = decay
        assert len(ob.param_groups) == 1
        assert ob.param_groups[0]["weight_decay"] == decays[0]
        train_with_and_without_decay(a, native, b, ob, loss)
        for copied in (copy.deepcopy((b, ob)), pickle.loads(pickle.dumps((b, ob)))):
            again, other = copy.deepcopy((a, native))
            train_with_and_without_decay(again, other, *copied, loss)
