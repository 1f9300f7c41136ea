# SPDX-License-Identifier: BSD-3-Clause
# The kind of every parameter, by its module and shape; and a block is sorted by kinds.

import pytest
import torch
from testing import DEVICES
from torch import nn

import torch_renaissance as tr
from torch_renaissance import Kind
from torch_renaissance.regions import classify

each_device = pytest.mark.parametrize("device", DEVICES)


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.table = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(2, 3))
        self.stem, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.conv, self.up = nn.Conv1d(4, 4, 1, bias=False), nn.ConvTranspose2d(4, 4, 2)
        self.instance = nn.InstanceNorm2d(4, affine=True)
        self.layer, self.group = nn.LayerNorm([2, 4]), nn.GroupNorm(2, 4)
        self.rms = nn.RMSNorm(4)
        self.embedding, self.bag = nn.Embedding(5, 4), nn.EmbeddingBag(5, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.cross = nn.MultiheadAttention(4, 2, kdim=3, vdim=3, bias=False)
        self.linear, self.bilinear = nn.Linear(4, 4), nn.Bilinear(2, 2, 4, bias=False)
        self.prelu, self.rnn = nn.PReLU(), nn.GRU(4, 4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embedding.weight  # tied


KINDS = {
    "scale": Kind.BIAS,
    "table": Kind.OTHER_WEIGHT,
    "stem.weight": Kind.FIRST_CONV,
    "stem.bias": Kind.BIAS,
    "bn.weight": Kind.NORM_WEIGHT,
    "bn.bias": Kind.NORM_BIAS,
    "conv.weight": Kind.DEEP_CONV,
    "up.weight": Kind.DEEP_CONV,
    "up.bias": Kind.BIAS,
    "instance.weight": Kind.NORM_WEIGHT,
    "instance.bias": Kind.NORM_BIAS,
    "layer.weight": Kind.NORM_WEIGHT,
    "layer.bias": Kind.NORM_BIAS,
    "group.weight": Kind.NORM_WEIGHT,
    "group.bias": Kind.NORM_BIAS,
    "rms.weight": Kind.NORM_WEIGHT,
    "embedding.weight": Kind.EMBEDDING,
    "bag.weight": Kind.EMBEDDING,
    "attention.in_proj_weight": Kind.LINEAR_WEIGHT,
    "attention.in_proj_bias": Kind.BIAS,
    "attention.out_proj.weight": Kind.LINEAR_WEIGHT,
    "attention.out_proj.bias": Kind.BIAS,
    "cross.q_proj_weight": Kind.LINEAR_WEIGHT,
    "cross.k_proj_weight": Kind.LINEAR_WEIGHT,
    "cross.v_proj_weight": Kind.LINEAR_WEIGHT,
    "cross.out_proj.weight": Kind.LINEAR_WEIGHT,
    "linear.weight": Kind.LINEAR_WEIGHT,
    "linear.bias": Kind.BIAS,
    "bilinear.weight": Kind.LINEAR_WEIGHT,
    "prelu.weight": Kind.BIAS,
    "rnn.weight_ih_l0": Kind.OTHER_WEIGHT,
    "rnn.weight_hh_l0": Kind.OTHER_WEIGHT,
    "rnn.bias_ih_l0": Kind.BIAS,
    "rnn.bias_hh_l0": Kind.BIAS,
    "head.bias": Kind.BIAS,
}


def test_kind_of_every_parameter():
    model = Everything()
    found = classify(model)
    assert dict(found.values()) == KINDS
    assert {p: name for p, (name, _) in found.items()} == {
        p: n for n, p in model.named_parameters()
    }


def test_kinds_of_a_model_that_is_one_layer():
    convs = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1)))
    assert list(classify(nn.Linear(2, 2)).values()) == [
        ("weight", Kind.LINEAR_WEIGHT),
        ("bias", Kind.BIAS),
    ]
    assert [kind for _, kind in classify(convs).values() if kind > Kind.BIAS] == [
        Kind.LINEAR_WEIGHT,
        Kind.FIRST_CONV,
        Kind.DEEP_CONV,
    ]


def test_which_kinds_are_bias_like():
    assert [kind for kind in Kind if kind.bias_like] == [
        Kind.NORM_BIAS,
        Kind.NORM_WEIGHT,
        Kind.BIAS,
    ]


@each_device
def test_kinds_sort_a_block(device):
    model = Everything().to(device)
    for p in model.rnn.parameters():
        p.requires_grad_(False)  # cuDNN keeps them where they are
    optimizer = torch.optim.AdamW(model.parameters())
    tr.accelerate(model, optimizer)
    (block,) = tr.regions(optimizer).blocks
    names = [s.name for s in block.slots]
    expected = {name: kind for name, kind in KINDS.items() if not name.startswith("rnn.")}
    assert names == sorted(expected, key=expected.get)  # a stable sort: by kind, then as listed
    assert [s.kind for s in block.slots] == [expected[name] for name in names]
    addresses = [s.param.data_ptr() for s in block.slots]
    assert addresses == sorted(addresses)
