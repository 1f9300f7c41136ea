# SPDX-License-Identifier: BSD-3-Clause
# Within a step with precision= on a GPU, autocast's cross entropy is tr.cross_entropy: to torch's
# numbers, there alone, in what is checkpointed as well, and with torch's way to fail.

import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from autocasting import DTYPES, each_precision, eager_on_a_cpu
from testing import DEVICES
from torch import nn
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torch_renaissance as tr
from torch_renaissance._ops import ops
from torch_renaissance._precision import own_kernels

on_devices = pytest.mark.parametrize("device", DEVICES)
on_a_gpu = pytest.mark.parametrize("device", DEVICES[1:])
pytestmark = eager_on_a_cpu

OURS, TORCHS = "torch_renaissance::cross_entropy_forward", "aten::_log_softmax"


class Names(TorchDispatchMode):
    """Of the operations that are called while this is on."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.add(func._schema.name)
        return func(*args, **(kwargs or {}))

    def loss(self):
        """Which of the two computed the loss."""
        return self.found & {OURS, TORCHS}


def batch(device):
    torch.manual_seed(0)
    return torch.randn(12, 6, device=device), torch.arange(12, device=device) % 5


# -- In the place of torch's -----------------------------------------------------------------------

WEIGHT = (0.5, 1.0, 2.0, 0.0, 1.0)
CRITERIA = {
    "mean": F.cross_entropy,
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.1),
    "weighted sum": lambda x, y: (
        F.cross_entropy(x, y, torch.tensor(WEIGHT).to(x), reduction="sum") / 12
    ),
    "ignored": lambda x, y: F.cross_entropy(x, y, ignore_index=3),
    "of rows": lambda x, y: F.cross_entropy(x, y, reduction="none").mean(),
    "checkpointed": lambda x, y: checkpoint(F.cross_entropy, x, y, use_reentrant=False),
    "checkpointed, reentrant": lambda x, y: checkpoint(F.cross_entropy, x, y, use_reentrant=True),
}


def loss_and_gradient(criterion, x, labels, dtype):
    x = x.clone().requires_grad_()
    with torch.autocast(x.device.type, dtype):
        loss = criterion(x, labels)
    loss.backward()
    return loss.detach(), x.grad


@on_a_gpu
@each_precision
@pytest.mark.parametrize("name", CRITERIA)
def test_as_exact_as_torchs(name, precision, device):
    x, labels = batch(device)
    logits = x[:, :5].to(DTYPES[precision])
    arguments = labels, DTYPES[precision]
    natively = loss_and_gradient(CRITERIA[name], logits, *arguments)
    with own_kernels():
        ours = loss_and_gradient(CRITERIA[name], logits, *arguments)
    exact = loss_and_gradient(CRITERIA[name], logits.double(), *arguments)
    assert ours[0].dtype == torch.float32 and ours[1].dtype == logits.dtype
    for found, native, wanted in zip(ours, natively, exact, strict=True):
        assert found.dtype == native.dtype
        bound = (native - wanted).norm() + 1e-6 * wanted.norm()
        assert (found - wanted).norm() <= bound


def soft_labels(x, labels):
    return F.cross_entropy(x, F.one_hot(labels, 5).to(x))


def in_float32(x, labels):
    with torch.autocast(x.device.type, enabled=False):
        return F.cross_entropy(x.float(), labels)


def per_sample(x, labels):
    return torch.vmap(F.cross_entropy)(x, labels).mean()


@on_a_gpu
@pytest.mark.parametrize("criterion", [soft_labels, in_float32, per_sample])
def test_what_is_left_to_torch(criterion, device):
    x, labels = batch(device)
    arguments = criterion, x[:, :5].bfloat16(), labels, torch.bfloat16
    expected = loss_and_gradient(*arguments)
    with own_kernels(), Names() as names:
        found = loss_and_gradient(*arguments)
    assert names.loss() == {TORCHS}
    assert all(map(torch.equal, found, expected))


@on_a_gpu
def test_what_is_compiled_is_torchs(device):
    x, labels = batch(device)
    x = x[:, :5].bfloat16()
    backend = AotEagerAndRecordGraphs()
    compiled = torch.compile(F.cross_entropy, backend=backend)
    expected = loss_and_gradient(F.cross_entropy, x, labels, torch.bfloat16)
    with own_kernels():
        found = loss_and_gradient(compiled, x, labels, torch.bfloat16)
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.001)
    (graph,) = backend.fw_graphs
    called = {str(node.target) for node in graph.graph.nodes}
    assert "aten._log_softmax.default" in called
    assert not any(name.startswith("torch_renaissance") for name in called)


@on_a_gpu
def test_afterwards_it_is_torchs_again(device):
    x, labels = batch(device)
    with pytest.raises(KeyError, match="on purpose"), own_kernels():
        with own_kernels():
            pass
        with torch.autocast(device, torch.bfloat16), Names() as inside:
            F.cross_entropy(x, labels)
        raise KeyError("on purpose")
    with torch.autocast(device, torch.bfloat16), Names() as outside:
        F.cross_entropy(x, labels)
    assert inside.loss() == {OURS} and outside.loss() == {TORCHS}


def test_on_a_cpu_it_is_torchs():
    x, labels = batch("cpu")
    with own_kernels(), torch.autocast("cpu", torch.bfloat16), Names() as names:
        F.cross_entropy(x, labels)
    assert names.loss() == {TORCHS}


def test_opcheck_count_autocast_steps():
    torch.library.opcheck(ops.count_autocast_steps.default, (0,))


# -- In a step -------------------------------------------------------------------------------------


def train(device, precision, criterion, observed=True, **options):
    """Six steps' losses, the names of what the loss_fn called, and the step."""
    x, labels = batch(device)
    model = nn.Linear(6, 5).to(device)
    _, optimizer = tr.accelerate(model, torch.optim.SGD(model.parameters(), lr=0.1))
    names = Names()

    def loss_fn(x, labels):
        logits = model(x)
        with names if observed else nullcontext():
            return criterion(logits, labels)

    step = tr.TrainStep(loss_fn, optimizer, precision=precision, **options)
    if precision == "fp16":
        optimizer.amp.load_state_dict(optimizer.amp.state_dict() | {"scale": 1024.0})  # skips none
    return [step(x, labels).item() for _ in range(6)], names, step


def by_hand(device, dtype, criterion):
    x, labels = batch(device)
    model = nn.Linear(6, 5).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        with torch.autocast(device, dtype):
            loss = criterion(model(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@on_devices
@each_precision
@pytest.mark.parametrize("name", CRITERIA)
def test_training(name, precision, device):
    expected = by_hand(device, DTYPES[precision], CRITERIA[name])
    losses, names, _ = train(device, precision, CRITERIA[name])
    torch.testing.assert_close(losses, expected, rtol=0.01, atol=0.0)
    assert names.loss() == ({OURS} if device == "cuda" else {TORCHS})


@on_devices
def test_without_a_precision_it_is_torchs(device):
    def criterion(x, labels):
        with torch.autocast(x.device.type, torch.bfloat16):
            return F.cross_entropy(x, labels)

    assert train(device, None, criterion)[1].loss() == {TORCHS}


@pytest.mark.cuda
@pytest.mark.parametrize("compiles", [False, True])
def test_captured_kernels(compiles):
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    step = train("cuda", "fp16", criterion, observed=False, strict=True, compile=compiles)[2]
    (graph,) = step.explain().graphs
    kernels = graph["kernels"]
    ours = [n for name, n in kernels.items() if "cross_entropy" in name]
    torchs = [name for name in kernels if "softmax" in name and not name.startswith("triton")]
    assert ours == ([] if compiles else [1, 1]) and torchs == []


BAD_LABEL = """
import torch, torch_renaissance as tr
model = torch.nn.Linear(6, 5).cuda()
_, optimizer = tr.accelerate(model, torch.optim.SGD(model.parameters(), lr=0.1))
loss_fn = lambda x, y: torch.nn.functional.cross_entropy(model(x), y)
step = tr.TrainStep(loss_fn, optimizer, precision="bf16", strict=True, warmup=2)
x, labels = torch.randn(12, 6, device="cuda"), torch.arange(12, device="cuda") % 5
for _ in range(calls):
    step(x, labels).item()
print("so far")
print(step(x, labels + 4).item())
"""


@pytest.mark.cuda
@pytest.mark.parametrize("calls", [0, 4], ids=["in an eager step", "in a replay"])
def test_a_label_out_of_bounds_on_a_gpu(calls):
    program = f"calls = {calls}\n{BAD_LABEL}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode != 0 and done.stdout.strip() == "so far"
    assert "device-side assert" in done.stderr and "n_classes" in done.stderr + done.stdout
