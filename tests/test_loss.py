# SPDX-License-Identifier: BSD-3-Clause
# Cross entropy beside torch's own and a float64 reference: values of every layout, dtype and
# option, autocast, memory, and the benchmark.

import json
import math
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from losses import IGNORED, LAYOUTS, both, cuda, labels_for, on_devices, randn
from testing import FP64, LOW_PRECISION, worst

import torch_renaissance as tr

DTYPES = [torch.float32, torch.float64, *LOW_PRECISION]


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
