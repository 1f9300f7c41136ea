# SPDX-License-Identifier: BSD-3-Clause
# Self-attention in Dynamo's graphs: which calls become ours, with the values, gradients and strides
# of torch's. On a CPU.

import pytest
import torch
import torch.nn.functional as F
from compiling import Model, check, ours, random
from torch import nn

X, Z = random(6, 3, 16), random(5, 3, 16, seed=2)
STATIC = random(12, 5, 4, seed=3)
MASK = torch.ones(6, 6).triu(1).bool()


def attend(m, x):
    return m.attention(x, x, x, need_weights=False)[0]


def model(function=attend, **options):
    torch.manual_seed(0)
    whole = Model(function, attention=nn.MultiheadAttention(16, 4, **options))
    for name, p in whole.named_parameters():
        if "bias" in name:
            nn.init.uniform_(p, -1, 1)
    return whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_ours(bias, dtype):
    assert ours(check(model(bias=bias), X.to(dtype))) == {"self_attention": 1}


@pytest.mark.parametrize("bias", [False, True])
def test_batch_first(bias):
    """Whose result's strides depend on what reads it."""
    whole = model(lambda m, x: attend(m, x).contiguous(), bias=bias, batch_first=True)
    assert ours(check(whole, X)) == {"self_attention": 1}


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_both_16_bit_types(half):
    assert ours(check(model(), X.to(half), half=half)) == {"self_attention": 1}


@pytest.mark.parametrize("shape", [(1, 3, 16), (6, 1, 16), (1, 1, 16)], ids=str)
def test_one_of_something(shape):
    assert ours(check(model(), random(*shape))) == {"self_attention": 1}


def test_no_dropout_in_evaluation():
    assert ours(check(model(dropout=0.5).eval(), X)) == {"self_attention": 1}


def test_dropout_in_training():
    """A number is dropped for certain, or a value twice as large: only the mean is known."""
    x = torch.zeros(64, 1, 16, dtype=torch.bfloat16)
    found = {}

    def function(m, x):
        found["y"] = y = attend(m, x)
        return y * 0

    whole = model(function, dropout=0.5)
    nn.init.eye_(whole.attention.out_proj.weight)
    assert ours(check(whole, x)) == {"self_attention": 1}
    y = found["y"].float() - whole.attention.out_proj.bias
    values = whole.attention.in_proj_bias[32:].detach()
    assert 0.5 < (y / values).std() * 8 < 2  # of a mean of 64 numbers that are 0 or 2


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_in_torchs_layer(norm_first, batch_first, activation):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, activation, 1e-5, batch_first, norm_first)
    found = ours(check(Model(lambda m, x: m.layer(x), layer=layer), X))
    assert found["self_attention"] == 1 and found["linear_gelu"] == (activation == "gelu")


# -- Left to torch ---------------------------------------------------------------------------------


def with_weights(m, x):
    y, weights = m.attention(x, x, x)
    return y + weights.sum()


def with_two_tensors(m, x):
    return m.attention(x, x * 1, x, need_weights=False)[0]


def with_mask(m, x, **options):
    return m.attention(x, x, x, need_weights=False, attn_mask=MASK, **options)[0]


def with_padding(m, x):
    padding = torch.zeros(3, 6).bool()
    padding[0, 4:] = True
    return m.attention(x, x, x, need_weights=False, key_padding_mask=padding)[0]


def with_a_narrower_key(m, x):
    return m.attention(x, x[..., :8], x, need_weights=False)[0]


def with_one_sequence(m, x):
    return attend(m, x[:, 0])


def with_static_values(m, x):
    a, static = m.attention, STATIC.to(x.dtype)
    packed = (a.in_proj_weight, a.in_proj_bias, None, None, False, 0.0)
    packed += (a.out_proj.weight, a.out_proj.bias)
    return F.multi_head_attention_forward(
        x, x, x, 16, 4, *packed, need_weights=False, static_k=static, static_v=static
    )[0]


LEFT = {
    "weights": model(with_weights),
    "two tensors": model(with_two_tensors),
    "a mask": model(with_mask),
    "causal": model(lambda m, x: with_mask(m, x, is_causal=True)),
    "padding": model(with_padding),
    "a narrower key": model(with_a_narrower_key, kdim=8),
    "one sequence": model(with_one_sequence),
    "static values": model(with_static_values),
    "zeros": model(add_zero_attn=True),
    "biases of keys and values": model(add_bias_kv=True),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_to_torch(name):
    assert not ours(check(LEFT[name], X))


@pytest.mark.parametrize("batch_first", [False, True])
def test_attention_to_another_sequence(batch_first):
    whole = model(lambda m, x, z: m.attention(x, z, z, need_weights=False)[0])
    assert not ours(check(whole, X, Z))


def test_float32_is_left_to_torch():
    def function(m, x):
        with torch.autocast("cpu", enabled=False):
            return attend(m, x.to(m.attention.in_proj_weight.dtype))

    assert not ours(check(model(function), X))
