# SPDX-License-Identifier: BSD-3-Clause
# GELU, patches and counters in Dynamo's graphs: which become ours, with the values and gradients of
# torch's. On a CPU. Batch norms and attention have files of their own.

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from compiled_ops import on_cpu
from compiling import Model, check, ours, random
from torch import nn

from torch_renaissance._compiled.gelu import linear_gelu
from torch_renaissance._ops import ops

# -- GELU after a Linear layer ---------------------------------------------------------------------

ROWS = random(6, 8)


def gelu_of_linear(m, x, **options):
    return F.gelu(m.linear(x), **options)


def with_linear(function=gelu_of_linear, outputs=12, **options):
    torch.manual_seed(0)
    return Model(function, linear=nn.Linear(8, outputs, **options))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("shape", [(8,), (1, 8), (6, 8), (2, 3, 8), (2, 2, 3, 8)], ids=str)
def test_gelu(shape, approximate, half):
    function = partial(gelu_of_linear, approximate=approximate)
    graph = check(with_linear(function), random(*shape, dtype=half), half=half)
    assert ours(graph) == {"linear_gelu": 1}


@pytest.mark.parametrize("form", ["none", "tanh"])
def test_which_form_of_gelu(form):
    """They are too close for 16 bits to tell."""
    weight = torch.ones(8, 8, dtype=torch.bfloat16, requires_grad=True)
    with on_cpu() as calls:
        linear_gelu(ROWS, weight, weight[0], form).sum().backward()
    forms = [calls[op][0][-1] for op in ("bias_gelu", "bias_gelu_backward")]
    assert forms == [form == "tanh"] * 2


GELUS = {
    "module": with_linear(lambda m, x: nn.GELU()(m.linear(x))),
    "module by tanh": with_linear(lambda m, x: nn.GELU("tanh")(m.linear(x))),
    "another layout": with_linear(lambda m, x: F.gelu(m.linear(x.view(2, 3, 8).transpose(0, 1)))),
    "no gradient of the input": with_linear(lambda m, x: F.gelu(m.linear(x.detach()))),
    "4096 channels": with_linear(outputs=4096),
}


@pytest.mark.parametrize("name", GELUS)
def test_gelu_of_more_kinds(name):
    assert ours(check(GELUS[name], ROWS)) == {"linear_gelu": 1}


def test_gelu_of_float32_rows_under_autocast():
    assert ours(check(with_linear(), ROWS.float())) == {"linear_gelu": 1}


def read_twice(m, x):
    y = m.linear(x)
    return F.gelu(y) + y


def in_float32(m, x):
    with torch.autocast("cpu", enabled=False):
        return gelu_of_linear(m, x.to(m.linear.weight.dtype))


def across_autocast(m, x):
    y = m.linear(x.to(m.linear.weight.dtype))
    with torch.autocast("cpu", enabled=False):
        return F.gelu(y)


def across_no_grad(m, x):
    with torch.no_grad():
        y = m.linear(x)
    return F.gelu(y) + x.sum()


TORCHS_GELUS = {
    "no bias": with_linear(bias=False),
    "6 channels": with_linear(outputs=6),
    "4100 channels": with_linear(outputs=4100),
    "read twice": with_linear(read_twice),
    "something between": with_linear(lambda m, x: F.gelu(m.linear(x) * 2)),
    "no layer": with_linear(lambda m, x: F.gelu(x)),
    "float32": with_linear(in_float32),
    "a row of biases": with_linear(
        lambda m, x: F.gelu(F.linear(x, m.linear.weight, m.linear.bias[None]))
    ),
    "a bias with gaps": with_linear(
        lambda m, x: F.gelu(F.linear(x, m.linear.weight, m.linear.weight[:, 0]))
    ),
    "autocast ends between": with_linear(across_autocast),
    "gradients begin between": with_linear(across_no_grad),
}


@pytest.mark.parametrize("name", TORCHS_GELUS)
def test_gelu_left_to_torch(name):
    assert not ours(check(TORCHS_GELUS[name], ROWS))


def test_gelu_of_nothing_is_left_to_torch():
    assert not ours(check(with_linear(), ROWS[:0]))


def test_gelu_of_an_input_that_changes_after_the_layer():
    def function(m, x):
        with torch.no_grad():  # else torch refuses
            y = x * 1
            hidden = m.linear(y)
            y.mul_(2)
            found = F.gelu(hidden)
        return found + x

    assert not ours(check(with_linear(function, 8), ROWS))


# -- Patches ---------------------------------------------------------------------------------------

IMAGES = random(2, 3, 8, 12, dtype=torch.float32)


def with_conv(kernel=4, stride=None, function=lambda m, x: m.conv(x), inputs=3, **options):
    torch.manual_seed(0)
    conv = nn.Conv2d(inputs, 12, kernel, kernel if stride is None else stride, **options)
    return Model(function, conv=conv)


PATCHES = {
    "bias": (with_conv(), IMAGES),
    "no bias": (with_conv(bias=False), IMAGES),
    "16 bits": (with_conv(), IMAGES.bfloat16()),
    "oblong": (with_conv((2, 3)), IMAGES),
    "one row": (with_conv((1, 4)), IMAGES),
    "the whole image": (with_conv((8, 12)), IMAGES),
    "one channel": (with_conv(inputs=1), IMAGES[:, :1]),
    "another layout": (with_conv(), IMAGES.transpose(2, 3)),
    "a part": (with_conv(function=lambda m, x: m.conv(x[..., 4:])), IMAGES),
    "flattened at once": (with_conv(function=lambda m, x: m.conv(x).flatten(2)), IMAGES),
}


@pytest.mark.parametrize("name", PATCHES)
def test_patches(name):
    assert ours(check(*PATCHES[name])) == {"patch_embedding": 1}


def with_a_part_of_weights(m, x):
    return F.conv2d(x, m.conv.weight[:, :, :2, :2], m.conv.bias, 2)


def with_rows_of_weights():
    whole = with_conv()
    whole.conv.to(memory_format=torch.channels_last)
    return whole


OTHERS = {
    "padding": (with_conv(padding=1), IMAGES),
    "padding by name": (with_conv(padding="valid"), IMAGES),
    "overlapping": (with_conv(stride=2), IMAGES),
    "overlapping in one direction": (with_conv(stride=(4, 2)), IMAGES),
    "groups": (with_conv(groups=3), IMAGES),
    "weights with gaps": (with_conv(function=with_a_part_of_weights), IMAGES),
    "dilation": (with_conv(2, dilation=2), IMAGES),
    "a rest": (with_conv(), random(2, 3, 9, 12, dtype=torch.float32)),
    "single pixels": (with_conv(1), IMAGES),
    "8 channels": (with_conv(inputs=8), random(2, 8, 8, 12, dtype=torch.float32)),
    "one image": (with_conv(), IMAGES[0]),
    "channels last": (with_conv(), random(2, 3, 8, 12, channels_last=True)),
    "channels of weights last": (with_rows_of_weights(), IMAGES),
    "a stride by name": (
        with_conv(function=lambda m, x: F.conv2d(x, m.conv.weight, m.conv.bias, stride=4)),
        IMAGES,
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_convolutions_are_torchs(name):
    assert not ours(check(*OTHERS[name]))


# -- Counters of batches ---------------------------------------------------------------------------


class Counters(nn.Module):
    """Counts by these numbers, and scales its input by a function of itself."""

    def __init__(self, numbers, function=lambda m: 2):
        super().__init__()
        self.numbers, self.function = numbers, function
        for i in range(len(numbers)):
            self.register_buffer(f"count_{i}", torch.tensor(i))

    def forward(self, x):
        for counter, number in zip(self.buffers(), self.numbers, strict=True):
            counter.add_(number)
        return x * self.function(self)


COUNTERS = {
    "one": (Counters([1]), [], 1),
    "two": (Counters([1, 1]), [2], 0),
    "several": (Counters([1] * 5), [5], 0),
    "one by another number": (Counters([1, 1, 5]), [2], 1),
    "one is read": (Counters([1] * 3, lambda m: m.count_1 + 1), [2], 1),
    "one counts twice": (Counters([1] * 4, lambda m: m.count_1.add_(1) * 0 + 2), [3], 2),
}


@pytest.mark.parametrize("name", COUNTERS)
def test_counters(name):
    """How many one kernel moves on, and how many kernels move on one alone."""
    whole, joined, alone = COUNTERS[name]
    nodes = check(whole, ROWS).nodes
    assert [len(n.args[0]) for n in nodes if n.target is ops.count_batches_.default] == joined
    assert len([n for n in nodes if n.target == "add_"]) == alone


def test_counters_in_a_functional_graph():
    assert ours(check(Counters([1] * 3), ROWS, backend="aot_eager")) == {"count_batches_": 1}
