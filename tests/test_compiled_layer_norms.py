# SPDX-License-Identifier: BSD-3-Clause
# Layer norms in Dynamo's graphs: which become ours, which take the sum before them and the bias of
# the branch it adds, with the values and gradients of torch's. On a CPU.

import pytest
import torch
import torch.nn.functional as F
from compiling import Model, check, ours, random
from torch import nn

from torch_renaissance._compiled import layer_norms

STREAM = random(3, 5, 16, dtype=torch.float32)
BRANCH = random(3, 5, 16, dtype=torch.float32, seed=2)


def model(function, channels=16, norm=None, **others):
    torch.manual_seed(0)
    modules = {"up": nn.Linear(channels, 8), "down": nn.Linear(8, channels)}
    modules |= {"norm": norm or nn.LayerNorm(channels), "out": nn.Linear(channels, 8), **others}
    whole = Model(function, **modules)
    for p in whole.parameters():
        if p.dim() == 1:
            nn.init.uniform_(p, 0.5, 1.5)
    return whole


def found(function, *inputs, **options):
    """For each norm of ours: "norm", with the "sum" before it, and with the "bias" of that."""
    half = options.pop("half", torch.bfloat16)
    graph = check(model(function, **options), *(inputs or (STREAM,)), half=half)
    words = []
    for node in graph.nodes:
        if node.target is layer_norms.layer_norm:
            words.append("norm")
        if node.target is layer_norms.add_layer_norm:
            words.append("sum" if node.args[2] is None else "sum bias")
    return words


def block(m, x):
    x = x + m.down(m.up(x))
    return x + m.down(F.relu(m.out(m.norm(x))))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_a_block(half):
    assert found(block, half=half) == ["sum bias"]


@pytest.mark.parametrize("shape", [(1, 1, 16), (1, 16), (7, 16), (2, 3, 5, 16)], ids=str)
def test_any_number_of_rows(shape):
    assert found(block, random(*shape, dtype=torch.float32)) == ["sum bias"]


@pytest.mark.parametrize("channels", [4, 132, 1024])
def test_widths(channels):
    x = random(2, 3, channels, dtype=torch.float32)
    assert found(block, x, channels=channels) == ["sum bias"]


def without_a_sum(m, x):
    return m.out(m.norm(x))


def branch_first(m, x):
    return m.out(m.norm(m.down(m.up(x)) + x))


def no_layer(m, x):
    return m.out(m.norm(x + m.down(m.up(x)).relu()))


def a_layer_read_twice(m, x):
    y = m.down(m.up(x))
    return m.out(m.norm(x + y)) * y.mean()


def no_bias(m, x):
    return m.out(m.norm(x + F.linear(m.up(x), m.down.weight)))


def drops_nothing(m, x):
    return m.out(m.norm(x + F.dropout(m.down(m.up(x)), 0.0)))


def not_in_training(m, x):
    return m.out(m.norm(x + F.dropout(m.down(m.up(x)), 0.5, False)))


def drops_everything(m, x):
    return m.out(m.norm(x + F.dropout(m.down(m.up(x)), 1.0)))


def the_sum_is_returned(m, x):
    y = x + m.down(m.up(x))
    return m.out(m.norm(y)).mean() + y


def two_norms_of_a_sum(m, x):
    y = x + m.down(m.up(x))
    return m.out(m.norm(y)) + m.out(F.layer_norm(y, (16,), m.norm.bias, m.norm.weight))


def through_views(m, x):
    y = m.norm(x + m.down(m.up(x)))
    return m.out(y.transpose(0, 1)[:, 0]) + m.out(y.flatten(0, 1)).mean()


def addmm(m, x):
    y = m.norm(x + m.down(m.up(x)))
    return torch.addmm(m.out.bias, y.view(-1, 16), m.out.weight.t())


@pytest.mark.parametrize(
    "function, norms",
    [
        (without_a_sum, ["norm"]),
        (branch_first, ["sum bias"]),
        (no_layer, ["sum"]),
        (a_layer_read_twice, ["sum"]),
        (no_bias, ["sum"]),
        (drops_nothing, ["sum bias"]),
        (not_in_training, ["sum bias"]),
        (drops_everything, ["sum"]),
        (the_sum_is_returned, ["sum bias"]),
        (two_norms_of_a_sum, ["sum bias", "norm"]),
        (through_views, ["sum bias"]),
        (addmm, ["sum bias"]),
    ],
)
def test_what_joins(function, norms):
    assert found(function) == norms


def test_two_float32_tensors():
    assert found(lambda m, x, z: m.out(m.norm(x + z)), STREAM, BRANCH) == ["norm"]


def test_one_row_for_all():
    assert found(lambda m, x: m.out(m.norm(x + m.down(m.up(x[:1]))))) == ["norm"]


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("blocks", [1, 3])
def test_torchs_encoder(blocks, batch_first):
    """Its stream's strides follow attention's transposed output where the batch comes first."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        16, 4, 32, 0.0, "gelu", batch_first=batch_first, norm_first=True
    )
    encoder = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
    graph = check(model(lambda m, x: m.encoder(x), encoder=encoder), STREAM)
    called = ours(graph)
    assert called["layer_norm"] == 1 and called["add_layer_norm"] == 2 * blocks - 1
    assert called["self_attention"] == called["linear_gelu"] == blocks


# -- Left to torch ---------------------------------------------------------------------------------


def read_in_float32(m, x):
    y = m.norm(x)
    return m.out(y).mean() + y


def afterwards(m, x):  # as in a stream that is normalised itself
    y = m.norm(x + m.down(m.up(x)))
    return y + m.down(m.up(y))


def in_16_bits_already(m, x):
    return m.out(m.norm(m.down(m.up(x))))


def without_autocast(m, x):
    y = m.norm(x)
    with torch.autocast("cpu", enabled=False):
        return m.out(y)


def by_name(m, x):
    return F.linear(input=m.norm(x), weight=m.out.weight, bias=m.out.bias)


def as_a_weight(m, x):
    return F.linear(x, m.norm(x).flatten(0, 1)[:8])


def viewed_as_a_dtype(m, x):
    y = m.norm(x)
    return m.out(y.view(y.dtype))


@pytest.mark.parametrize(
    "function",
    [
        read_in_float32,
        afterwards,
        in_16_bits_already,
        without_autocast,
        by_name,
        as_a_weight,
        viewed_as_a_dtype,
    ],
)
def test_what_reads_it(function):
    assert "norm" not in found(function)


NORMS = {
    "no weights": nn.LayerNorm(16, elementwise_affine=False),
    "no bias": nn.LayerNorm(16, bias=False),
    "two dimensions": nn.LayerNorm((5, 16)),
}


@pytest.mark.parametrize("name", NORMS)
def test_other_norms(name):
    assert found(without_a_sum, norm=NORMS[name]) == []


@pytest.mark.parametrize("channels", [6, 1028])
def test_other_widths(channels):
    x = random(2, 3, channels, dtype=torch.float32)
    assert found(without_a_sum, x, channels=channels) == []


# -- What lies between -----------------------------------------------------------------------------


def the_sum_changes(m, x):
    y = x + m.down(m.up(x))
    y += 1
    return m.out(m.norm(y))


def the_sum_changes_later(m, x):
    with torch.no_grad():  # else torch refuses
        y = x + m.down(m.up(x))
        z = m.out(m.norm(y))
        y.mul_(2)
    return y + z.mean() + x


def gradients_end(m, x):
    y = x + m.down(m.up(x))
    with torch.no_grad():
        z = m.out(m.norm(y))
    return y + z.mean()


def gradients_begin(m, x):
    with torch.no_grad():
        y = x + m.down(m.up(x))
    return m.out(m.norm(y)) + x.mean()


@pytest.mark.parametrize(
    "function", [the_sum_changes, the_sum_changes_later, gradients_end, gradients_begin]
)
def test_a_sum_apart(function):
    assert found(function) == ["norm"]


def the_layer_has_no_gradients(m, x):
    with torch.no_grad():
        y = m.down(m.up(x))
    return m.out(m.norm(x + y))


def test_a_bias_without_gradients():
    assert found(the_layer_has_no_gradients) == ["sum"]


def test_a_sum_whose_strides_are_asked_for():
    """Whose view would fail for other strides."""

    def function(m, x):
        y = x.transpose(0, 1) + m.down(m.up(x)).transpose(0, 1)
        return m.out(m.norm(y)).mean() + y.transpose(0, 1).view(-1)

    assert found(function) == ["norm"]
