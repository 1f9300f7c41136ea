# SPDX-License-Identifier: BSD-3-Clause
# One added line changes no number: layouts, ties, normalisation, dropout, averaging, and layers
# of many kinds, beside native training.

import copy

import pytest
import torch
import torch.nn.functional as F
from testing import (
    DEVICES,
    GRADIENTS,
    LM,
    USUAL,
    both,
    close,
    conv_bn,
    equal,
    mlp,
    same,
    same_state,
    square,
    usual_pair,
    values_of,
)
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torch_renaissance as tr

pytestmark = [
    pytest.mark.parametrize("device", DEVICES),
    pytest.mark.parametrize("gradients", GRADIENTS),
]
each_usual = pytest.mark.parametrize("usual", USUAL, ids=str)


def batches(count, *shape, device):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(device).double() for _ in range(count)]


def test_accelerate_returns_the_same_objects_with_another_class(device, gradients):
    for name in ("SGD", "Adam", "AdamW"):
        model = mlp().to(device)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
        groups, lists = optimizer.param_groups, [g["params"] for g in optimizer.param_groups]
        kept, before = list(model.parameters()), values_of(model.parameters())
        returned = tr.accelerate(model, optimizer, gradients=gradients)
        assert returned[0] is model and returned[1] is optimizer
        assert type(optimizer) is getattr(tr.optim, name)
        assert isinstance(optimizer, getattr(torch.optim, name))
        assert optimizer.param_groups is groups and groups[0]["params"] is lists[0]
        assert all(p is q for p, q in zip(model.parameters(), kept, strict=True))
        assert equal(model.parameters(), before)
        assert all(p.is_leaf and p.requires_grad for p in model.parameters())
        assert str(tr.regions(optimizer)).strip()


@each_usual
def test_warm_up_leaves_no_traces(usual, device, gradients):
    a, oa, b, ob = usual_pair(conv_bn, usual, device, gradients=gradients)
    calls = []
    b[1].register_forward_hook(lambda *_: calls.append(1))
    cpu, gpu = torch.get_rng_state(), torch.cuda.get_rng_state() if device == "cuda" else None
    for i, x in enumerate(batches(6, 2, 3, 9, 9, device=device), 1):
        both(a, oa, b, ob, lambda model, x=x: model(x).pow(2).mean())
        assert int(b[1].num_batches_tracked) == len(calls) == i
        assert all(float(s.get("step", i)) == i for s in ob.state.values())
        same(a, b)
    assert torch.equal(torch.get_rng_state(), cpu)
    assert device == "cpu" or torch.equal(torch.cuda.get_rng_state(), gpu)


def channels_last():
    return conv_bn().to(memory_format=torch.channels_last)


def permuted():
    """Dense weights in an order of their own, one of them transposed after it was made."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    model[0].weight = nn.Parameter(torch.randn(4, 6).t())
    return model


def channels_last_3d():
    return nn.Sequential(nn.Conv3d(3, 4, 2), nn.Conv3d(4, 2, 1)).to(
        memory_format=torch.channels_last_3d
    )


@each_usual
@pytest.mark.parametrize(
    ("make", "shape"),
    [(channels_last, (2, 3, 9, 9)), (channels_last_3d, (2, 3, 4, 4, 4)), (permuted, (2, 4))],
    ids=["channels_last", "channels_last_3d", "permuted"],
)
def test_layouts_stay(usual, make, shape, device, gradients):
    a, oa, b, ob = usual_pair(make, usual, device, gradients=gradients)
    strides = [p.stride() for p in a.parameters()]
    assert [p.stride() for p in b.parameters()] == strides
    for x in batches(4, *shape, device=device):
        if len(shape) == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        both(a, oa, b, ob, lambda model, x=x: model(x).pow(2).mean())
    assert [p.stride() for p in b.parameters()] == strides
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert q.grad.stride() == p.grad.stride()
    same(a, b)
    same_state(oa, ob)
    converted = copy.deepcopy(b).to(memory_format=torch.contiguous_format)
    assert equal(converted.parameters(), b.parameters())
    if len(shape) > 2:
        for model in (a, b):  # converted while it is accelerated
            model.to(memory_format=torch.contiguous_format)
        for x in batches(3, *shape, device=device):
            both(a, oa, b, ob, lambda model, x=x: model(x).pow(2).mean())
        assert b[0].weight.is_contiguous()
        same(a, b)


@each_usual
def test_tied_weights_are_one_parameter(usual, device, gradients):
    a, oa, b, ob = usual_pair(LM, usual, device, gradients=gradients)
    tokens = torch.arange(7, device=device)
    both(a, oa, b, ob, lambda model: model(tokens), steps=3)
    assert b.head.weight is b.emb.weight
    assert len(list(b.parameters())) == len(ob.state) == 5
    assert float(ob.state[b.emb.weight].get("step", 3)) == 3
    same(a, b)
    same_state(oa, ob)
    b.load_state_dict(a.state_dict())
    assert b.head.weight is b.emb.weight
    copied = copy.deepcopy(b)
    assert copied.head.weight is copied.emb.weight is not b.emb.weight
    both(a, oa, b, ob, lambda model: model(tokens))
    same(a, b)


@pytest.mark.parametrize("use_buffers", [False, True])
def test_averaged_model(use_buffers, device, gradients):
    a, oa, b, ob = usual_pair(conv_bn, USUAL[0], device, gradients=gradients)
    averages = [
        AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=use_buffers)
        for m in (a, b)
    ]
    reference = None
    for x in batches(5, 2, 3, 9, 9, device=device):
        both(a, oa, b, ob, lambda model, x=x: model(x).pow(2).mean())
        for model, average in zip((a, b), averages, strict=True):
            average.update_parameters(model)
        weight = b[0].weight.detach()
        reference = weight.clone() if reference is None else 0.9 * reference + 0.1 * weight
    close(averages[1].module[0].weight.detach(), reference)
    same(*averages)
    assert averages[1].module[1].num_batches_tracked.dtype == torch.int64
    assert not torch.equal(averages[1].module[0].weight, b[0].weight)
    plain = conv_bn().to(device)
    plain.load_state_dict(averages[1].module.state_dict())
    same(a, b)


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(64, 64, bias=False), nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.linear(x))


def test_dropout_draws_a_new_mask_each_step_from_the_users_seed(device, gradients):
    def masks(seed):
        _, _, b, ob = usual_pair(Dropped, USUAL[0], device, gradients=gradients)
        ob.param_groups[0]["lr"] = 0.0
        torch.manual_seed(seed)
        kept, ones = [], torch.ones(1, 64, device=device, dtype=torch.float64)
        for _ in range(6):
            ob.zero_grad()
            y = b(ones)
            y.sum().backward()
            ob.step()
            mask = (y.detach() != 0).flatten()
            assert torch.equal(b.linear.weight.grad.abs().sum(1) != 0, mask)
            kept.append(mask)
        b.eval()
        assert b(ones).ne(0).all()
        return torch.stack(kept)

    first = masks(7)
    assert len({tuple(row.tolist()) for row in first}) == 6
    assert torch.equal(first, masks(7)) and not torch.equal(first, masks(8))
    assert 0.4 < first.float().mean() < 0.6


@each_usual
def test_normalised_and_parametrized_weights(usual, device, gradients):
    def make():
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))
        nn.utils.parametrizations.weight_norm(model[0])
        nn.utils.parametrizations.spectral_norm(model[3])
        return model

    a, oa, b, ob = usual_pair(make, usual, device, gradients=gradients)
    both(a, oa, b, ob, square, steps=5)
    same(a, b)
    same_state(oa, ob)


class Encoder(nn.Module):
    """Attention, convolution over time and a recurrent layer, over a batch of two."""

    def __init__(self):
        super().__init__()
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.rnn = nn.GRU(8, 6, batch_first=True)

    def forward(self, x):
        x = self.conv(self.attention(x).transpose(1, 2)).transpose(1, 2)
        return F.mse_loss(self.rnn(x)[0], x[..., :6].detach())


@each_usual
def test_layers_of_many_kinds(usual, device, gradients):
    a, oa, b, ob = usual_pair(Encoder, usual, device, gradients=gradients)
    # the key's bias has no gradient but rounding, of which Adam would make whole steps
    for optimizer in (oa, ob):
        if "eps" in optimizer.param_groups[0]:
            optimizer.param_groups[0]["eps"] = 1e-3
    for x in batches(5, 2, 5, 8, device=device):
        both(a, oa, b, ob, lambda model, x=x: model(x))
    same(a, b)
