# SPDX-License-Identifier: BSD-3-Clause
# A batch norm in Dynamo's graphs that takes over a sum, a ReLU or a convolution's bias is computed
# elsewhere: only where that gives the same values, running statistics and gradients. On a CPU.

import pytest
import torch
import torch.nn.functional as F
from compiling import check, ours, random
from joining import R, X, joined, model
from torch import nn

each_backend = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


@each_backend
def test_a_norm_called_twice(backend):
    """The second call may be moved down to the sum, the first may not be moved past the second."""
    graph = check(model(lambda m, x, r: F.relu(m.norm(x) + m.norm(r))), X, R, backend=backend)
    assert joined(graph) == ["", "residual relu"]


@each_backend
def test_running_statistics_that_are_read_in_between(backend):
    def function(m, x, r):
        y = m.norm(x)
        scale = m.norm.running_mean + 1
        return (y + r) * scale.view(-1, 1, 1)

    assert joined(check(model(function), X, R, backend=backend)) == [""]


def test_parameters_that_share_memory():
    """As those of one region do: what reads another one in between doesn't matter."""

    def function(m, x, r):
        (a, b, c, d), n, o = m.region.split(8), m.norm, m.aside
        y = F.batch_norm(x, n.running_mean, n.running_var, a, b, True)
        return F.relu(y + F.batch_norm(r, o.running_mean, o.running_var, c, d, True))

    whole = model(function, aside=nn.BatchNorm2d(8))
    whole.region = nn.Parameter(torch.linspace(0.5, 1.5, 32))
    assert joined(check(whole, X, R)) == ["", "residual relu"]


def test_running_statistics_that_are_read_through_a_view():
    def function(m, x, r):
        view = m.norm.running_mean.view(2, 4)
        y = m.norm(x)
        scale = view.sum() + 1
        return (y + r) * scale

    assert joined(check(model(function), X, R)) == [""]


WITHOUT_GRADIENTS = {
    "convolution": "residual relu",
    "norm": "",
    "sum": "bias",
    "relu": "residual bias",
}


@pytest.mark.parametrize("off", WITHOUT_GRADIENTS)
def test_gradients_are_off_where_they_were(off):
    def function(m, x, r):
        with torch.set_grad_enabled(off != "convolution"):
            y = m.conv(x)
        with torch.set_grad_enabled(off != "norm"):
            y = m.norm(y)
        with torch.set_grad_enabled(off != "sum"):
            y = y + r
        with torch.set_grad_enabled(off != "relu"):
            y = F.relu(y)
        return y + r

    graph = check(model(function, conv=nn.Conv2d(8, 8, 1)), X, R)
    assert joined(graph) == [WITHOUT_GRADIENTS[off]]


def test_an_input_that_changes_in_between_through_a_view():
    def function(m, x, r):
        x = x.detach() * 1
        view = x.permute(0, 2, 3, 1)
        with torch.no_grad():
            y = m.norm(x)
            view.mul_(2)
            y = y + r
        return y + r

    assert joined(check(model(function), X, R)) == [""]


# -- The bias of a convolution ---------------------------------------------------------------------


def with_conv(conv, function=lambda m, x: m.norm(m.conv(x)), norm=None):
    whole = model(function, norm, conv=conv).to(memory_format=torch.channels_last)
    nn.init.uniform_(conv.bias, 2.0, 3.0)  # a running mean without it would be far off
    return whole


@pytest.mark.parametrize("options", [{}, {"padding": "same"}, {"padding": 1}], ids=str)
def test_a_bias_is_left_to_the_running_mean(options):
    graph = check(with_conv(nn.Conv2d(8, 8, 3, **options)), X)
    assert joined(graph) == ["bias"]
    (conv,) = [node for node in graph.nodes if node.target is torch.conv2d]
    assert conv.args[2] is None


def test_a_bias_of_three_dimensions():
    whole = model(lambda m, x: m.norm(m.conv(x)), nn.BatchNorm3d(8), conv=nn.Conv3d(8, 8, 1))
    x = random(2, 8, 2, 3, 4, channels_last=True)
    assert joined(check(whole.to(memory_format=torch.channels_last_3d), x)) == ["bias"]


def test_a_bias_and_no_running_statistics():
    norm = nn.BatchNorm2d(8, track_running_stats=False)
    assert joined(check(with_conv(nn.Conv2d(8, 8, 1), norm=norm), X)) == ["bias"]


def two_readers(m, x):
    y = m.conv(x)
    return m.norm(y) * y.mean()


KEPT = {
    "two readers": with_conv(nn.Conv2d(8, 8, 1), two_readers),
    "transposed": with_conv(nn.ConvTranspose2d(8, 8, 1)),
    "something between": with_conv(nn.Conv2d(8, 8, 1), lambda m, x: m.norm(m.conv(x) * 2)),
    "by name": with_conv(
        nn.Conv2d(8, 8, 1), lambda m, x: m.norm(F.conv2d(x, m.conv.weight, bias=m.conv.bias))
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_bias_that_stays(name):
    assert joined(check(KEPT[name], X)) == [""]


def test_a_bias_before_a_norm_of_torchs():
    graph = check(with_conv(nn.Conv2d(8, 8, 1), norm=nn.BatchNorm2d(8).eval()), X)
    assert not ours(graph)
    assert all(node.args[2] is not None for node in graph.nodes if node.target is torch.conv2d)
