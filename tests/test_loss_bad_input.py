# SPDX-License-Identifier: BSD-3-Clause
# Cross entropy of masked, ignored and broken rows, bad labels with and without the debug mode, and
# what its ops refuse.

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from losses import IGNORED, both, cuda, labels_for, on_devices, randn

import torch_renaissance as tr
from torch_renaissance._ops import ops

# -- Masked, ignored and broken rows ---------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(3, 4), (3, 400), (3, 4000), (3, 4, 5)], ids=str)
def test_all_rows_ignored(shape, label_smoothing, device):
    x = randn(*shape, device=device).requires_grad_()
    target = torch.full_like(labels_for(x), IGNORED)
    call = partial(tr.cross_entropy, x, target, label_smoothing=label_smoothing)
    mean = call()
    assert mean.isnan()
    assert not torch.autograd.grad(mean, x)[0].any()
    for reduction in ("sum", "none"):
        loss = call(reduction=reduction).sum()
        assert loss == 0
        assert not torch.autograd.grad(loss, x)[0].any()


@on_devices
@pytest.mark.parametrize("n_classes", [8, 100, 5000])
def test_masked_classes(n_classes, device):
    x = torch.full((3, n_classes), -math.inf, device=device)
    x[0, 4], x[1, :2], x[2, 1] = 1.0, 0.0, 3.0
    target = torch.tensor([4, 1, 0], device=device)
    loss, grad = both(tr.cross_entropy, x, target, reduction="none")
    expected = torch.tensor([0.0, math.log(2), math.inf], device=device)
    torch.testing.assert_close(loss, expected)
    native = both(F.cross_entropy, x, target, reduction="none")[1]
    torch.testing.assert_close(grad, native)
    assert grad.isfinite().all()
    smoothed = tr.cross_entropy(x, target, reduction="none", label_smoothing=0.1)
    assert smoothed.isinf().all()
    # A masked class that weighs nothing: 0 * inf, as in torch.
    weight = torch.ones(n_classes, device=device)
    weight[5] = 0
    options = {"weight": weight, "reduction": "none", "label_smoothing": 0.1}
    found, native = (f(x, target, **options) for f in (tr.cross_entropy, F.cross_entropy))
    assert torch.equal(found.isnan(), native.isnan()) and found.isnan().all()


@on_devices
@pytest.mark.parametrize("n_classes", [8, 100, 5000])
def test_broken_logits_spoil_their_row_only(n_classes, device):
    x = randn(5, n_classes, device=device)
    x[0] = -math.inf
    x[1, 3], x[2, 3], x[3, 0] = math.nan, math.inf, 1e38
    target = torch.zeros(5, dtype=torch.int64, device=device)
    options = {"reduction": "none"}
    for loss, grad in (both(f, x, target, **options) for f in (tr.cross_entropy, F.cross_entropy)):
        assert loss[:3].isnan().all() and loss[3:].isfinite().all()
        assert grad[:3].isnan().all() and grad[3:].isfinite().all()


@on_devices
def test_an_ignored_rows_logits_do_not_matter(device):
    x = randn(4, 5, device=device)
    x[1], x[2, 0] = -math.inf, math.nan
    target = torch.tensor([0, IGNORED, IGNORED, 1], device=device)
    loss, grad = both(tr.cross_entropy, x, target, label_smoothing=0.1)
    rows = [0, 3]
    expected = both(tr.cross_entropy, x[rows], target[rows], label_smoothing=0.1)
    torch.testing.assert_close(loss, expected[0])
    torch.testing.assert_close(grad[rows], expected[1])
    assert not grad[1:3].any()


@on_devices
def test_weights_of_nothing(device):
    """Mean over rows that weigh nothing is 0 / 0."""
    x, weight = randn(2, 3, device=device), torch.tensor([0.0, 1.0, 1.0], device=device)
    target = torch.zeros(2, dtype=torch.int64, device=device)
    found, native = (both(f, x, target, weight=weight) for f in (tr.cross_entropy, F.cross_entropy))
    for ours, theirs in zip(found, native, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan()) and ours.isnan().all()


BAD_LABELS = [5, -1, 2**40, -(2**62)]
BAD_SHAPES = [(4, 5), (2, 5, 2), (4, 50), (4, 2000), (1, 100, 4)]


@pytest.mark.parametrize("label", BAD_LABELS)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_bad_labels_are_refused_on_a_cpu(reduction, label):
    x, target = randn(4, 5), torch.tensor([0, IGNORED, label, 1])
    message = (
        rf"^cross_entropy: target {label} in row 2 is out of bounds: there are 5 classes, "
        "counted from 0, and ignore_index is -100$"
    )
    with pytest.raises(IndexError, match=message):
        tr.cross_entropy(x, target, reduction=reduction)
    with pytest.raises(IndexError, match=f"Target {label} is out of bounds"):
        F.cross_entropy(x, target, reduction=reduction)


@cuda
@pytest.mark.parametrize("label", BAD_LABELS)
@pytest.mark.parametrize("shape", BAD_SHAPES, ids=str)
def test_bad_labels_are_nan_on_a_gpu(shape, label):
    x = randn(*shape, device="cuda")
    target = labels_for(x, ignored=False)
    target.view(-1)[2] = label if label < 0 or label > 5 else shape[1]
    weight = torch.ones(shape[1], device="cuda")
    for options in ({}, {"weight": weight, "label_smoothing": 0.1}):
        loss, grad = both(tr.cross_entropy, x, target, **options)
        rows = grad.movedim(1, -1).reshape(-1, shape[1])
        assert loss.isnan()
        assert rows[2].isnan().all() and rows[[0, 1, 3]].isfinite().all()
        losses = tr.cross_entropy(x, target, reduction="none", **options).flatten()
        assert losses[2].isnan() and losses[[0, 1, 3]].isfinite().all()


@cuda
def test_debug_mode_names_the_bad_label():
    x, target = randn(4, 5, device="cuda"), torch.tensor([0, 1, 7, IGNORED], device="cuda")
    message = r"^cross_entropy: target 7 in row 2 is out of bounds: there are 5 classes"
    with tr.debug(True), pytest.raises(IndexError, match=message):
        tr.cross_entropy(x, target)
    assert tr.cross_entropy(x, target).isnan()
    with tr.debug():
        assert tr.cross_entropy(x[:2], target[:2]).isfinite()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # nothing can be checked here
            loss = tr.cross_entropy(x, target)
    graph.replay()
    assert loss.isnan()


def test_debug_mode_is_left_as_it_was():
    with tr.debug(True):
        with tr.debug(False):
            assert ops.set_debug.default(False) is False
        assert ops.set_debug.default(True) is True
    assert ops.set_debug.default(False) is False
    tr.debug(True)
    tr.debug(False)
    assert ops.set_debug.default(False) is False


@pytest.mark.parametrize("mode", [1, None, "on"])
def test_debug_mode_is_a_bool(mode):
    with pytest.raises(TypeError, match=f"^debug: mode must be a bool, got {mode!r}$"):
        tr.debug(mode)
    assert ops.set_debug.default(False) is False


# -- The ops' own refusals -------------------------------------------------------------------------

HERE = "(cpu|cuda:0)"
FORWARD_REFUSALS = [
    ("input", lambda x: x.int(), "dtype Int is not supported"),
    ("input", lambda x: x[0, 0], "input must have a dimension of classes, got a scalar"),
    (
        "target",
        lambda t: t[:4],
        r"target has shape \[4\], expected \[6\] for input of shape \[6, 5\]",
    ),
    ("target", lambda t: t.int(), f"target is Int on {HERE}, expected Long on {HERE}"),
    ("target", lambda t: t.to("meta"), f"target is on meta, expected {HERE}, as input"),
    (
        "weight",
        lambda w: w[:4],
        rf"weight must be Float of shape \[5\] on {HERE}, got Float of shape \[4\] on {HERE}",
    ),
    ("weight", lambda w: w.half(), r"weight must be Float .* got Half of shape \[5\]"),
    ("reduction", lambda r: 3, r"reduction must be 0 \(none\), 1 \(mean\) or 2 \(sum\), got 3"),
    ("label_smoothing", lambda s: 1.5, "label_smoothing must be from 0 to 1, got 1.5"),
    ("label_smoothing", lambda s: math.nan, "label_smoothing must be from 0 to 1, got nan"),
    (
        "loss_dtype",
        lambda d: torch.float16,
        "loss_dtype must be Float or that of input, Float, got Half",
    ),
]
BACKWARD_REFUSALS = [
    *(refusal for refusal in FORWARD_REFUSALS if refusal[0] != "loss_dtype"),
    (
        "grad_loss",
        lambda g: g.half(),
        rf"grad_loss is Half of shape \[\] on {HERE}, expected Float or Float of shape \[\]",
    ),
    ("grad_loss", lambda g: g.expand(6), r"grad_loss is Float of shape \[6\]"),
    (
        "saved",
        lambda s: s[:-1],
        r"saved must be what forward returned, contiguous Float of shape \[7, 2\] .*"
        r"got Float of shape \[6, 2\]",
    ),
    ("saved", lambda s: s.double(), "got Double"),
]


def op_arguments(device):
    x = randn(6, 5, device=device)
    weight = randn(5, device=device, seed=2).abs()
    common = {"reduction": 1, "ignore_index": IGNORED, "label_smoothing": 0.1}
    forward = {"input": x, "target": labels_for(x), "weight": weight, **common}
    loss, saved = ops.cross_entropy_forward.default(*forward.values(), torch.float32)
    backward = {"grad_loss": loss, **dict(list(forward.items())[:3]), "saved": saved, **common}
    return {**forward, "loss_dtype": torch.float32}, backward


@on_devices
@pytest.mark.parametrize("argument, change, message", FORWARD_REFUSALS)
def test_forward_refusals(argument, change, message, device):
    arguments = op_arguments(device)[0]
    arguments[argument] = change(arguments[argument])
    with pytest.raises(RuntimeError, match=f"cross_entropy_forward: {message}"):
        ops.cross_entropy_forward.default(*arguments.values())


@on_devices
@pytest.mark.parametrize("argument, change, message", BACKWARD_REFUSALS)
def test_backward_refusals(argument, change, message, device):
    arguments = op_arguments(device)[1]
    arguments[argument] = change(arguments[argument])
    with pytest.raises(RuntimeError, match=f"cross_entropy_backward: .*{message}"):
        ops.cross_entropy_backward.default(*arguments.values())


@on_devices
def test_ops_with_nothing_to_do(device):
    """The function leaves these to torch; the ops alone give what torch does."""
    x, target = randn(0, 5, device=device), torch.empty(0, dtype=torch.int64, device=device)
    for reduction, expected in ((1, math.nan), (2, 0.0)):
        arguments = (x, target, None, reduction, IGNORED, 0.0)
        loss, saved = ops.cross_entropy_forward.default(*arguments, torch.float32)
        torch.testing.assert_close(loss.item(), expected, equal_nan=True)
        grad = ops.cross_entropy_backward.default(loss, *arguments[:3], saved, *arguments[3:])
        assert grad.shape == x.shape
