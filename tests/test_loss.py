# SPDX-License-Identifier: BSD-3-Clause
# Cross entropy beside torch's own and a float64 reference: values, layouts, masked and ignored
# rows, bad labels, autocast, graphs, what is left to torch, and the ops' refusals.
import copy
import io
import json
import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from testing import DEVICES, FP64, LOW_PRECISION, worst
from torch import nn
from torch.autograd import forward_ad
from torch.library import opcheck

import torch_renaissance as tr
from torch_renaissance._ops import ops

cuda = pytest.mark.cuda
on_devices = pytest.mark.parametrize("device", DEVICES)
DTYPES = [torch.float32, torch.float64, *LOW_PRECISION]
IGNORED = -100


def randn(*shape, device="cpu", dtype=torch.float32, seed=0):
    """Equal for every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def labels_for(x, ignored=True):
    """Random labels for the logits `x`; every seventh row is ignored."""
    n_classes = x.shape[0 if x.dim() == 1 else 1]
    shape = x.shape[2:] if x.dim() > 1 else ()
    shape = (x.shape[0], *shape) if x.dim() > 1 else ()
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(n_classes, shape, generator=generator)
    if ignored and labels.dim():
        labels.view(-1)[3::7] = IGNORED
    return labels.to(x.device)


def both(f, x, target, **options):
    """The loss and the logits' gradient, for a loss whose own gradient is random."""
    x = x.detach().requires_grad_()
    loss = f(x, target, **options)
    (grad,) = torch.autograd.grad(loss, x, randn(*loss.shape).to(loss))
    return loss.detach(), grad


def exact(x, target, weight=None, **options):
    """In float64, from the same values."""
    weight = weight.double() if weight is not None else None
    return both(F.cross_entropy, x.double(), target, weight=weight, **options)


def not_worse(ours, native, reference):
    """At most twice torch's error; below one rounding of the largest value no error is asked for.

    Where torch itself overflows, two roundings. In fp64 there is nothing better to compare with.
    """
    assert (ours.dtype, ours.shape) == (native.dtype, native.shape)
    if ours.dtype == torch.float64:
        assert worst([ours], [reference]) < FP64
        return
    rounding = torch.finfo(ours.dtype).eps * reference.abs().max()
    error, allowed = ((v.double() - reference).abs().max() for v in (ours, native))
    allowed = 2 * allowed if math.isfinite(allowed) else rounding
    assert error <= allowed + rounding, f"{error:.3e} against {allowed:.3e} + {rounding:.3e}"


# -- Values ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    name: str
    shape: tuple
    change: object = staticmethod(lambda x: x)  # of contiguous logits

    def __str__(self):
        return self.name

    def logits(self, device, dtype):
        return self.change(randn(*self.shape, device=device, dtype=dtype))


def channels_last(x):
    return x.to(memory_format=torch.channels_last)


def odd_start(x):
    """Rows that start at other addresses within 16 bytes than those of their gradient."""
    return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)


LAYOUTS = [
    Layout("one-row", (7,)),
    Layout("few", (200, 10)),
    Layout("few-32", (9, 32)),
    Layout("warp", (256, 1000)),
    Layout("warp-33", (9, 33)),
    Layout("block", (9, 1025)),
    Layout("vocabulary", (64, 50257)),
    Layout("odd-start", (6, 1500), odd_start),
    Layout("odd-start-few", (6, 21), odd_start),
    Layout("columns-of-a-slice", (33, 80), lambda x: x[:, 3:70]),
    Layout("transposed", (100, 40), torch.t),
    Layout("sequence", (3, 70, 33)),
    Layout("sequence-last", (3, 33, 70), lambda x: x.transpose(1, 2)),
    Layout("images", (3, 21, 5, 9)),
    Layout("images-channels-last", (3, 21, 5, 9), channels_last),
    Layout("images-cropped", (3, 21, 5, 9), lambda x: x[:, :, 1:-1, 2:-2]),
    Layout("images-other-order", (5, 3, 9, 21), lambda x: x.permute(1, 3, 0, 2)),
    Layout("one-image", (1, 5, 4, 3)),
    Layout("expanded", (1, 12), lambda x: x.expand(8, 12)),
    Layout("volumes", (2, 4, 3, 2, 5)),
]
OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"weighted": True},
    {"weighted": True, "label_smoothing": 0.1, "reduction": "sum"},
    {"label_smoothing": 1.0, "reduction": "none"},
    {"weighted": True, "label_smoothing": 0.3, "reduction": "none"},
]


def option_name(options):
    return "-".join(f"{k}={v}" for k, v in options.items()) or "plain"


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=option_name)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_as_exact_as_torch(layout, options, dtype, device):
    x = layout.logits(device, dtype)
    target = labels_for(x)
    options = dict(options)
    if options.pop("weighted", False):
        n_classes = x.shape[0 if x.dim() == 1 else 1]
        options["weight"] = randn(n_classes, device=device, dtype=dtype, seed=2).abs()
    found = both(tr.cross_entropy, x, target, **options)
    native = both(F.cross_entropy, x, target, **options)
    for values in zip(found, native, exact(x, target, **options), strict=True):
        not_worse(*values)
    ignored = target == IGNORED
    rows = found[1].unsqueeze(0) if x.dim() == 1 else found[1].movedim(1, -1)
    assert not rows[ignored.expand(rows.shape[:-1])].any()


@on_devices
@pytest.mark.parametrize("offset", [200.0, -3e4, 1e6])
def test_logits_far_from_zero(offset, device):
    """Everything is measured from the largest logit, also what label smoothing adds up."""
    x = (randn(16, 5000, device=device) + offset).float()
    options = {"label_smoothing": 0.1}
    target = labels_for(x)
    found, native = (both(f, x, target, **options) for f in (tr.cross_entropy, F.cross_entropy))
    for values in zip(found, native, exact(x, target, **options), strict=True):
        not_worse(*values)


@on_devices
def test_confident_rows(device):
    """A loss near zero, as that of a trained model, is as exact as torch's."""
    target = torch.arange(8, device=device)
    x = F.one_hot(target, 40).float() * torch.linspace(3, 30, 8, device=device)[:, None] + 100
    options = {"reduction": "none"}
    found, native = (both(f, x, target, **options) for f in (tr.cross_entropy, F.cross_entropy))
    for values in zip(found, native, exact(x, target, **options), strict=True):
        not_worse(*values)


@on_devices
def test_one_class(device):
    """The probability is 1, whatever the logit: what is left is rounding."""
    x, target = randn(5, 1, device=device), torch.zeros(5, dtype=torch.int64, device=device)
    loss, grad = both(tr.cross_entropy, x, target, label_smoothing=0.1, reduction="none")
    assert not loss.any()
    assert grad.abs().max() < 4 * torch.finfo(x.dtype).eps


@on_devices
def test_by_hand(device):
    x = torch.tensor([[0.0, 0.0], [0.0, math.log(3)], [5.0, 9.0]], device=device)
    target = torch.tensor([0, 1, IGNORED], device=device)
    weight = torch.tensor([1.0, 3.0], device=device)
    rows = tr.cross_entropy(x, target, weight, reduction="none")
    expected = torch.tensor([math.log(2), 3 * math.log(4 / 3), 0.0], device=device)
    torch.testing.assert_close(rows, expected)
    torch.testing.assert_close(tr.cross_entropy(x, target, weight), expected.sum() / 4)
    grad = both(partial(tr.cross_entropy, weight=weight, reduction="sum"), x, target)[1]
    scale = randn().item()
    expected = torch.tensor([[-0.5, 0.5], [0.75, -0.75], [0.0, 0.0]], device=device)
    torch.testing.assert_close(grad, scale * expected)


@on_devices
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_gradcheck(reduction, device):
    options = {"label_smoothing": 0.2, "reduction": reduction}
    weight = randn(5, device=device, dtype=torch.float64, seed=2).abs()
    for shape in ((4, 5), (2, 5, 3)):
        x = randn(*shape, device=device, dtype=torch.float64).requires_grad_()
        f = partial(tr.cross_entropy, target=labels_for(x), weight=weight, **options)
        assert torch.autograd.gradcheck(f, x)
        assert torch.autograd.gradgradcheck(f, x)


@on_devices
@pytest.mark.parametrize("ignore_index", [-1, 2, 10**12])
def test_any_ignore_index(ignore_index, device):
    """One that is a class leaves its rows out, and the class in the softmax."""
    x = randn(6, 5, device=device, dtype=torch.float64)
    target = torch.tensor([0, ignore_index, 2, 3, ignore_index, 4], device=device)
    found, native = (
        both(f, x, target, ignore_index=ignore_index, label_smoothing=0.1)
        for f in (tr.cross_entropy, F.cross_entropy)
    )
    assert worst(found, native) < FP64
    assert not found[1][1].any()


@on_devices
@pytest.mark.parametrize("shape", [(300, 7), (300, 50), (300, 2000), (9, 30, 40)], ids=str)
def test_bitwise_reproducible(shape, device):
    x = randn(*shape, device=device)
    target = labels_for(x)
    weight = randn(shape[1], device=device, seed=2).abs()
    options = {"weight": weight, "label_smoothing": 0.1}
    first, second = (both(tr.cross_entropy, x, target, **options) for _ in range(2))
    assert all(map(torch.equal, first, second))


@on_devices
@pytest.mark.parametrize("n_classes", [3, 40])
def test_more_rows_than_blocks(n_classes, device):
    """On a GPU a block then takes several rows."""
    rows = {"cpu": 50_000, "cuda": 2_200_000 if n_classes == 3 else 50_000}[device]
    x = randn(rows, n_classes, device=device)
    target = labels_for(x)
    found, native = (both(f, x, target) for f in (tr.cross_entropy, F.cross_entropy))
    for values in zip(found, native, exact(x, target), strict=True):
        not_worse(*values)


@cuda
@pytest.mark.slow
def test_more_than_2_to_the_31_logits():
    x = torch.empty(43_000, 50_257, dtype=torch.bfloat16, device="cuda").normal_()
    target = labels_for(x, ignored=False)
    options = {"reduction": "none"}
    x.requires_grad_()
    loss = tr.cross_entropy(x, target, **options)
    (grad,) = torch.autograd.grad(loss.sum(), x)
    last = x.detach()[-1:].clone().requires_grad_()
    alone = tr.cross_entropy(last, target[-1:], **options)
    near = {"rtol": 2**-7, "atol": 1e-8}  # alone, the row starts on another boundary
    torch.testing.assert_close(loss[-1:], alone, **near)
    torch.testing.assert_close(grad[-1:], torch.autograd.grad(alone.sum(), last)[0], **near)


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


# -- Precision -------------------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autocast(dtype, label_smoothing, device):
    """The loss is fp32, and as exact as torch's from fp32 copies; the gradient is the logits'."""
    x = randn(8, 300, device=device, dtype=dtype)
    target = labels_for(x)
    options = {"weight": randn(300, device=device, dtype=dtype, seed=2).abs()}
    options["label_smoothing"] = label_smoothing
    with torch.autocast(device, dtype=torch.bfloat16):
        found, native = (both(f, x, target, **options) for f in (tr.cross_entropy, F.cross_entropy))
        assert found[0].dtype == torch.promote_types(dtype, torch.float32)
    for values in zip(found, native, exact(x, target, **options), strict=True):
        not_worse(*values)


@on_devices
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_autocast_takes_weights_of_another_dtype(dtype, device):
    x = randn(8, 30, device=device, dtype=dtype)
    weight = randn(30, device=device, seed=2).abs()
    with torch.autocast(device, dtype=torch.bfloat16):
        found, native = (
            both(f, x, labels_for(x), weight=weight) for f in (tr.cross_entropy, F.cross_entropy)
        )
    exact = both(F.cross_entropy, x.double(), labels_for(x), weight=weight.double())
    for ours, torchs, true in zip(found, native, exact, strict=True):
        # On a GPU torch rounds the weights to the logits' dtype.
        errors = [(t.double() - true).abs().max() for t in (ours, torchs)]
        assert errors[0] <= 2 * errors[1] + 1e-6 * true.abs().max()


@on_devices
def test_a_scaled_loss(device):
    """As GradScaler does it: the gradient is computed in fp32 and rounded once."""
    x = randn(64, 500, device=device, dtype=torch.float16).requires_grad_()
    target = labels_for(x)
    with torch.autocast(device, dtype=torch.float16):
        loss = tr.cross_entropy(x, target)
    (grad,) = torch.autograd.grad(loss * 2.0**14, x)
    reference = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(F.cross_entropy(reference, target) * 2.0**14, reference)
    torch.testing.assert_close(grad.double(), expected, rtol=2**-10, atol=2**-24)


@cuda
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_memory(dtype, autocast):
    """Nothing of the logits' size but their gradient; torch has at least two more."""
    x = torch.empty(2048, 50257, dtype=dtype, device="cuda").normal_().requires_grad_()
    target = labels_for(x)
    peaks = []
    for f in (tr.cross_entropy, F.cross_entropy):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", dtype=dtype, enabled=autocast):
            f(x, target).backward()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        x.grad = None
    size = x.numel() * x.element_size()
    assert peaks[0] <= 1.01 * size
    assert peaks[0] <= peaks[1] / 2


# -- Graphs and compilers --------------------------------------------------------------------------


def captured(x, target, **options):
    """A graph of forward and backward, and the loss and gradient that it writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.autograd.grad(tr.cross_entropy(x, target, **options), x)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = tr.cross_entropy(x, target, **options)
        (grad,) = torch.autograd.grad(loss, x)
    return graph, loss, grad


@cuda
@pytest.mark.parametrize("shape", [(200, 10), (256, 1000), (300, 5000), (4, 100, 77)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_graph_replays_see_new_values(shape, dtype):
    x = randn(*shape, device="cuda", dtype=dtype).requires_grad_()
    target = labels_for(x)
    options = {"weight": randn(shape[1], device="cuda", dtype=dtype, seed=2).abs()}
    options["label_smoothing"] = 0.1
    graph, loss, grad = captured(x, target, **options)
    for seed in range(3, 8):
        with torch.no_grad():
            x.copy_(randn(*shape, seed=seed))
            target.copy_(target.roll(1))
        graph.replay()
        eager = tr.cross_entropy(x, target, **options)
        assert torch.equal(loss, eager)
        assert torch.equal(grad, torch.autograd.grad(eager, x)[0])


@cuda
def test_streams_and_graphs_at_the_same_time():
    """Each launch that may overlap with another has a ticket of its own."""
    problems = []
    for seed in range(4):
        x = randn(40_000, 40, device="cuda", seed=seed).requires_grad_()
        target = labels_for(x)
        problems.append((x, target, tr.cross_entropy(x, target).detach().clone()))
    graphs = [captured(x, target) for x, target, _ in problems[:2]]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    for _ in range(50):
        losses = []
        for i, (stream, (x, target, _)) in enumerate(zip(streams, problems, strict=True)):
            with torch.cuda.stream(stream):
                if i < len(graphs):
                    graphs[i][0].replay()
                    losses.append(graphs[i][1])
                else:
                    losses.append(tr.cross_entropy(x, target))
        torch.cuda.synchronize()
        for loss, (_, _, expected) in zip(losses, problems, strict=True):
            assert torch.equal(loss, expected)


@on_devices
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_into_one_graph(dynamic, device):
    seen = []

    def backend(module, inputs):
        seen.extend(node.target for node in module.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)

    def f(x, target):
        return tr.cross_entropy(x.sin(), target, label_smoothing=0.1)

    torch._dynamo.reset()
    compiled = torch.compile(f, backend=backend, fullgraph=True, dynamic=dynamic)
    for rows in (6, 5, 4):
        x = randn(rows, 5, device=device, dtype=torch.float64)
        assert worst(both(compiled, x, labels_for(x)), both(f, x, labels_for(x))) < FP64
    assert ops.cross_entropy.default in seen


@on_devices
def test_compiles_under_autocast(device):
    x = randn(6, 5, device=device, dtype=torch.bfloat16)
    compiled = torch.compile(tr.cross_entropy, backend="aot_eager", fullgraph=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        found, eager = (both(f, x, labels_for(x)) for f in (compiled, tr.cross_entropy))
    assert found[0].dtype == torch.float32
    assert all(map(torch.equal, found, eager))


@on_devices
def test_compiled_autograd(device):
    x = randn(6, 5, device=device).requires_grad_()
    target = labels_for(x)
    (eager,) = torch.autograd.grad(tr.cross_entropy(x, target), x)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        tr.cross_entropy(x, target).backward()
    torch.testing.assert_close(x.grad, eager)


@on_devices
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_opcheck(dtype, grad, device):
    x = randn(6, 5, device=device, dtype=dtype).requires_grad_(grad)
    target, weight = labels_for(x), randn(5, device=device, seed=2).abs()
    opcheck(ops.cross_entropy.default, (x, target, weight.to(dtype), 1, IGNORED, 0.1))
    opcheck(ops.cross_entropy.default, (x, target, None, 0, IGNORED, 0.0))
    forward = (x, target, weight, 2, IGNORED, 0.1, torch.float32)
    opcheck(ops.cross_entropy_forward.default, forward)


@on_devices
@pytest.mark.parametrize("layout", LAYOUTS[:4] + LAYOUTS[-9:], ids=str)
def test_opcheck_backward(layout, device):
    x = layout.logits(device, torch.float32)
    arguments = (x, labels_for(x), None, 1, IGNORED, 0.1)
    loss, saved = ops.cross_entropy_forward.default(*arguments, torch.float32)
    opcheck(ops.cross_entropy_backward.default, (loss, *arguments[:3], saved, *arguments[3:]))


def test_opcheck_set_debug():
    opcheck(ops.set_debug.default, (False,))


# -- What is left to torch -------------------------------------------------------------------------


class Subclass(torch.Tensor):
    pass


X = randn(6, 5)
T = labels_for(X)


def with_grad(t):
    return t.clone().requires_grad_()


LEFT_TO_TORCH = {
    "soft targets": lambda f: f(X, X.softmax(1), label_smoothing=0.1),
    "soft target of one row": lambda f: f(X[0], X[0].softmax(0)),
    "uint8 labels": lambda f: f(X, T.clamp(min=0).byte()),
    "int32 labels": lambda f: f(X, T.int()),
    "int32 logits": lambda f: f(X.int(), T),
    "complex logits": lambda f: f(X.cfloat(), T),
    "sparse logits": lambda f: f(X.to_sparse(), T),
    "meta": lambda f: f(X.to("meta"), T.to("meta")).device.type,
    "a device each": lambda f: f(X, T.to("meta")),
    "no rows": lambda f: f(X[:0], T[:0]),
    "no rows, not reduced": lambda f: f(X[:0], T[:0], reduction="none"),
    "no positions": lambda f: f(X[..., None][..., :0], T[:, None][:, :0]),
    "no classes": lambda f: f(X[:, :0], T),
    "too few labels": lambda f: f(X, T[:4]),
    "labels with a dimension too many": lambda f: f(X, T[:, None]),
    "a scalar": lambda f: f(X[0, 0], T[0]),
    "logits of one row, label with a dimension": lambda f: f(X[0], T[:1]),
    "too few weights": lambda f: f(X, T, X[0, :4]),
    "weights of another dtype": lambda f: f(X, T, X[0].double()),
    "weights with a gradient": lambda f: f(with_grad(X), T, with_grad(X[0])),
    "label_smoothing above 1": lambda f: f(X, T, label_smoothing=1.5),
    "label_smoothing below 0": lambda f: f(X, T, label_smoothing=-0.5),
    "label_smoothing of NaN": lambda f: f(X, T, label_smoothing=math.nan),
    "no such reduction": lambda f: f(X, T, reduction="max"),
    "a reduction that is no string": lambda f: f(X, T, reduction=[]),
    "logits that are no tensor": lambda f: f([1.0], T),
    "labels that are no tensor": lambda f: f(X, 1),
    "weights that are no tensor": lambda f: f(X, T, [1.0] * 5),
    "subclass": lambda f: type(f(X.as_subclass(Subclass), T)),
    "torch.func.grad": lambda f: torch.func.grad(lambda x: f(x, T))(X),
    "torch.func.vmap": lambda f: torch.vmap(partial(f, reduction="sum"))(X, T),
    "torch.func.hessian": lambda f: torch.func.hessian(lambda x: f(x, T))(X),
    "forward mode": lambda f: torch.func.jvp(lambda x: f(x, T), (X,), (X,)),
}


def outcome(call, f):
    try:
        return call(f)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.filterwarnings("ignore")  # of torch's own, about vmap and int labels
@pytest.mark.parametrize("case", LEFT_TO_TORCH)
def test_left_to_torch(case):
    """The same values, to the bit, or the same error."""
    found, native = (outcome(LEFT_TO_TORCH[case], f) for f in (tr.cross_entropy, F.cross_entropy))
    if isinstance(native, torch.Tensor):
        torch.testing.assert_close(found, native, rtol=0, atol=0, equal_nan=True)
    else:
        assert found == native


@on_devices
def test_dual_numbers(device):
    x = randn(6, 5, device=device)
    tangents = []
    for f in (tr.cross_entropy, F.cross_entropy):
        with forward_ad.dual_level():
            loss = f(forward_ad.make_dual(x, x.cos()), labels_for(x))
            tangents.append(forward_ad.unpack_dual(loss).tangent)
    assert torch.equal(*tangents)


@on_devices
def test_second_derivative(device):
    x = randn(6, 5, device=device, dtype=torch.float64).requires_grad_()
    target, weight = labels_for(x), randn(5, device=device, dtype=torch.float64, seed=2).abs()
    found = []
    for f in (tr.cross_entropy, F.cross_entropy):
        loss = f(x.tanh(), target, weight, label_smoothing=0.1)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        found.append([grad, *torch.autograd.grad(grad.pow(2).sum(), x)])
    assert worst(*found) < FP64


@on_devices
def test_second_derivative_under_autocast(device):
    x = randn(6, 5, device=device, dtype=torch.bfloat16).requires_grad_()
    found = []
    for f in (tr.cross_entropy, F.cross_entropy):
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = f(x, labels_for(x))
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        found.append([grad, *torch.autograd.grad(grad.float().pow(2).sum(), x)])
    torch.testing.assert_close(*found)


@on_devices
def test_gradients_are_the_callers(device):
    """The logits stay as they are, a graph may be walked twice, and no gradient is made up."""
    x = randn(6, 5, device=device).requires_grad_()
    before = x.detach().clone()
    loss = tr.cross_entropy(x, labels_for(x))
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()
    assert torch.equal(x, before)
    with torch.no_grad():
        assert not tr.cross_entropy(x, labels_for(x)).requires_grad
    with torch.inference_mode():
        assert torch.equal(tr.cross_entropy(x, labels_for(x)), loss)
    x.data.add_(1)  # unseen by autograd, as natively
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- Arguments and the module ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, reduction",
    [
        ({"size_average": False}, "sum"),
        ({"size_average": True}, "mean"),
        ({"reduce": False}, "none"),
        ({"reduce": True}, "mean"),
    ],
)
def test_deprecated_arguments(options, reduction):
    with pytest.warns(UserWarning, match="size_average and reduce args will be deprecated"):
        found = tr.cross_entropy(X, T, **options)
    assert torch.equal(found, tr.cross_entropy(X, T, reduction=reduction))
    with pytest.warns(UserWarning, match="size_average and reduce args will be deprecated"):
        module = tr.CrossEntropyLoss(**options)
    assert torch.equal(found, module(X, T))


def test_arguments_by_position():
    weight = X[0].abs()
    arguments = (weight, None, 2, None, "sum", 0.1)
    found, native = (f(X, T.clamp(0), *arguments) for f in (tr.cross_entropy, F.cross_entropy))
    torch.testing.assert_close(found, native)


@on_devices
def test_module(device):
    weight = randn(5, seed=2).abs()
    options = {"ignore_index": 1, "reduction": "sum", "label_smoothing": 0.1}
    module, native = (
        kind(weight, **options).to(device) for kind in (tr.CrossEntropyLoss, nn.CrossEntropyLoss)
    )
    assert isinstance(module, nn.CrossEntropyLoss)
    assert repr(module) == repr(native)
    assert module.weight.device.type == device
    assert module.state_dict().keys() == native.state_dict().keys()
    x, target = X.to(device), T.clamp(0).to(device)
    loss = module(x, target)
    torch.testing.assert_close(loss, native(x, target))
    assert torch.equal(loss, tr.cross_entropy(x, target, module.weight, **options))
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert torch.equal(other(x, target), loss)


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


# -- The benchmark ---------------------------------------------------------------------------------


def test_benchmark_runs_agrees_and_compares(tmp_path):
    sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    import bench_loss

    old, new = tmp_path / "old.json", tmp_path / "new.json"
    key = "cpu/float32/4x6/plain/b2b"
    old.write_text(json.dumps({"environment": {}, "ratios": {key: 1e9}}))
    args = ["--device", "cpu", "--quick", "--shapes", "4x6,2x6x3", "--dtypes", "float32"]
    args += ["--json", str(new), "--compare", str(old)]
    assert bench_loss.Losses().main(args) == 0
    assert bench_loss.Losses().main([*args, "--fail-if-regression", "50"]) == 1
    record = json.loads(new.read_text())
    assert key in record["ratios"]
    assert all(case["check"]["agrees"] for case in record["cases"].values())
