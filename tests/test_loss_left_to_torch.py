# SPDX-License-Identifier: BSD-3-Clause
# Cross entropy as a drop-in for torch's: what is left to torch, gradients of gradients, arguments,
# and the module.

import copy
import io
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from losses import labels_for, on_devices, randn
from testing import FP64, worst
from torch import nn
from torch.autograd import forward_ad

import torch_renaissance as tr

# -- What is left to torch -------------------------------------------------------------------------

X = randn(6, 5)
T = labels_for(X)


class Subclass(torch.Tensor):
    pass


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
