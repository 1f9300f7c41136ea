# SPDX-License-Identifier: BSD-3-Clause
# tr.Evaluator against the loop that it stands for: what it measures and leaves as it was.

import copy
import gc
import math
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from evaluators import (
    Net,
    agree,
    batches_of,
    by_hand,
    captured_evaluators,
    net,
    tr_evaluation,
)
from testing import DEVICES
from torch import nn

import torch_renaissance as tr

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture
def captures(monkeypatch, device):
    with captured_evaluators(monkeypatch, device):
        yield


# -- what is measured ------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(8,), (1, 1), (8, 8, 8, 3), (3, 8, 0, 8, 1)])
@pytest.mark.parametrize("topk", [(1, 5), (1,), (2, 3, 7), (5, 1), (9,)])
def test_loss_and_accuracy_are_the_loops(sizes, topk, device, captures):
    model, batches = net(device), batches_of(device, sizes)
    evaluator = tr.Evaluator(model, topk=topk)
    expected = by_hand(model, [b for b in batches if len(b[1])], topk=topk)
    for _ in range(3):
        agree(evaluator(batches), expected)
    assert list(expected.accuracy) == list(topk)


def test_fewer_classes_than_k(device):
    model = net(device, classes=3)
    found = tr.evaluate(model, batches_of(device, classes=3), topk=(1, 3, 5))
    assert found.top3 == found.top5 == 1.0 > found.top1


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precision_is_autocast(precision, device, captures):
    model, batches = net(device).float(), batches_of(device)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    evaluator = tr.Evaluator(model, precision=precision, topk=())
    for _ in range(3):
        with torch.autocast(device, dtype):
            expected = by_hand(model, batches, topk=())
        found = evaluator(batches)
        # the losses round alike; 16 bits apart from another order of a matmul's sums
        agree(found, expected, rtol=2 * torch.finfo(dtype).eps)
        with torch.no_grad():
            model.first.weight.mul_(3)  # casts must be of the weights as they are
            model.last.weight.mul_(3)
    assert not torch.is_autocast_enabled(device)
    with torch.autocast(device, dtype), pytest.raises(RuntimeError, match="its own autocast"):
        evaluator(batches)


def test_the_programs_own_autocast(device, captures):
    model, batches = net(device).float(), batches_of(device)
    evaluator = tr.Evaluator(model, topk=())
    for enabled in (False, True, True, False, True):
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            expected = by_hand(model, batches, topk=())
            found = evaluator(batches)
        agree(found, expected, rtol=1e-6 if not enabled else 2 * torch.finfo(torch.bfloat16).eps)
        with torch.no_grad():
            model.last.weight.mul_(2)


def test_dense_labels(device, captures):
    """(N, C, d) against (N, d), some of them ignored."""
    torch.manual_seed(0)
    model = nn.Conv1d(3, 6, 1).double().to(device)
    batches = [
        (torch.randn(4, 3, 5, dtype=torch.float64), torch.randint(6, (4, 5))) for _ in range(3)
    ]
    for _, y in batches:
        y[1, 2:] = -100
    x, y = torch.cat([b[0] for b in batches]).to(device), torch.cat([b[1] for b in batches])
    y, keep = y.to(device), (y != -100).to(device)
    with torch.no_grad():
        output = model(x)
        best = (output.argmax(1) == y) & keep
        expected = F.cross_entropy(output, y).item()
    evaluator = tr.Evaluator(model)
    for _ in range(2):
        found = evaluator([(a.to(device), b.to(device)) for a, b in batches])
        assert found.samples == int(keep.sum()) == 51
        assert found.top1 == int(best.sum()) / 51
        assert math.isclose(found.loss, expected, rel_tol=1e-9)


def test_a_batch_of_nothing_but_ignored_labels(device, captures):
    model, batches = net(device), batches_of(device)
    ignored = (batches[0][0], torch.full_like(batches[0][1], -100))
    evaluator = tr.Evaluator(model)
    for _ in range(2):
        agree(evaluator([batches[0], ignored, *batches[1:]]), by_hand(model, batches))


@pytest.mark.parametrize("index", [3, 255, -1])
def test_ignore_index_of_the_loss(index, device, captures):
    model, batches = net(device), batches_of(device)
    loss_fn = nn.CrossEntropyLoss(ignore_index=index)
    for _, y in batches:
        y[:2] = index
    kept = [(x[y != index], y[y != index]) for x, y in batches]
    kept = [(x, y) for x, y in kept if len(y)]
    evaluator = tr.Evaluator(model, loss_fn)
    for _ in range(3):
        agree(evaluator(batches), by_hand(model, kept))


def test_ignore_index_that_changes(device, captures):
    model, batches = net(device), batches_of(device)

    def loss_fn(output, y):
        return F.cross_entropy(output, y)

    evaluator = tr.Evaluator(model, loss_fn)
    for ignored in (None, 2, 4):
        if ignored is not None:
            loss_fn.ignore_index = ignored
        left = sum(int((y != (-100 if ignored is None else ignored)).sum()) for _, y in batches)
        for _ in range(2):
            assert evaluator(batches).samples == left


@pytest.mark.parametrize("label", [7, -1, 1 << 40])
def test_labels_that_are_no_class(label, device, captures):
    model, batches = net(device), batches_of(device)
    batches[3][1][2] = label
    # torch's loss stops the device, or raises itself on a CPU
    evaluator = tr.Evaluator(model, lambda output, y: output.mean())
    for _ in range(2):
        with pytest.raises(IndexError, match=r"1 of 35 labels are no class .* not in \[0, C\)"):
            evaluator(batches)
    assert model.training
    if device == "cuda":
        with pytest.raises(IndexError, match="1 of 35 labels"):
            tr.evaluate(model, batches)


def test_integers_that_need_not_be_labels(device, captures):
    """Of one output, as of a regression or a yes and no: 1 is no class of C = 1."""
    model, batches = net(device, classes=1), batches_of(device)

    def loss_fn(output, y):
        return F.mse_loss(output[:, 0], y.to(output.dtype))

    evaluator = tr.Evaluator(model, loss_fn, topk=())
    for _ in range(3):
        agree(evaluator(batches), by_hand(model, batches, loss_fn, topk=()))
    with pytest.raises(IndexError, match="labels are no class"):
        tr.evaluate(model, batches, loss_fn)
    loss_fn.ignore_index = -100
    with pytest.raises(IndexError, match="labels are no class"):
        tr.evaluate(model, batches, loss_fn, topk=())


def test_targets_that_are_no_labels(device, captures):
    model, mse = net(device, classes=2), nn.MSELoss()
    batches = [
        (x, torch.randn(len(x), 2, dtype=torch.float64, device=device))
        for x, _ in batches_of(device)
    ]
    evaluator = tr.Evaluator(model, mse, topk=())
    for _ in range(3):
        found = evaluator(batches)
        agree(found, by_hand(model, batches, mse, topk=()))
    assert str(found) == f"loss {found.loss:.4f}, 35 samples"
    with pytest.raises(ValueError, match=r"integer labels .*topk=\(\) measures the loss alone"):
        tr.evaluate(model, batches, mse)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 7)

    def forward(self, x, others):
        return self.inner(x + others["a"] * others["by"])


def test_several_and_nested_inputs(device, captures):
    model = TwoInputs().double().to(device)
    batches = [(x.double(), {"a": x.double(), "by": 2.0}, y) for x, y in batches_of(device)]
    plain = [(3 * x, y) for x, _, y in batches]
    evaluator = tr.Evaluator(model)
    for _ in range(2):
        agree(evaluator(batches), by_hand(model.inner, plain))
    assert evaluator.captured


def test_a_model_without_parameters(device):
    x = torch.eye(3)
    found = tr.evaluate(nn.Identity(), [(x, torch.tensor([0, 1, 0]))], topk=(1, 2))
    assert found.top1 == 2 / 3


def test_evaluation(device):
    found = tr_evaluation(0.25, {1: 0.5, 5: 1.0}, 12_345)
    assert (found.top1, found.top5) == (0.5, 1.0)
    assert str(found) == "loss 0.2500, top-1 50.00 %, top-5 100.00 %, 12,345 samples"
    for name in ("top3", "topmost", "nonsense"):
        with pytest.raises(AttributeError, match=f"no '{name}'; topk="):
            getattr(found, name)
    assert pickle.loads(pickle.dumps(found)) == copy.deepcopy(found) == found
    with pytest.raises(AttributeError):
        found.loss = 1.0


def test_a_long_sum_loses_nothing(device):
    """In fp32 a loss of 1e8 would swallow the others."""
    target = torch.zeros(1, dtype=torch.int64, device=device)
    model = nn.Linear(1, 1, bias=False).to(device).requires_grad_(False)
    model.weight.fill_(1)
    batches = [(torch.full((1, 1), v, device=device), target) for v in (1e8, *[0.25] * 100)]
    found = tr.evaluate(model, batches, lambda output, y: output.mean())
    assert found.loss == (1e8 + 25) / 101


# -- what is left as it was ------------------------------------------------------------------------


class Frozen(Net):
    """Keeps its norm in eval mode, and counts how often its mode is set."""

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self


class Merging(nn.Linear):
    """As adapters are: other weights in eval mode, which `train` takes back."""

    merged = False

    def train(self, mode=True):
        if mode == self.merged:
            with torch.no_grad():
                self.weight.mul_(2.0 if not mode else 0.5)
            self.merged = not mode
        return super().train(mode)


@pytest.mark.parametrize("fails", [False, True])
def test_modes_are_restored_one_by_one(fails, device):
    model = Frozen().double().to(device)
    model.add_module("extra", Merging(2, 2))
    weight = model.extra.weight.clone()
    model.train()
    model.drop.eval()
    model.act.eval()
    before = {m: m.training for m in model.modules()}
    assert set(before.values()) == {True, False}
    seen = []

    def loss_fn(output, y):
        seen.append({m.training for m in model.modules()} | {model.extra.merged})
        if fails:
            raise KeyError("loss")
        return F.cross_entropy(output, y)

    for _ in range(2):
        if fails:
            with pytest.raises(KeyError, match="loss"):
                tr.evaluate(model, batches_of(device), loss_fn)
        else:
            tr.evaluate(model, batches_of(device), loss_fn)
        assert {m: m.training for m in model.modules()} == before
        assert torch.equal(model.extra.weight, weight) and not model.extra.merged
    assert seen and all(s == {False, True} for s in seen)


def test_nothing_has_a_gradient_and_buffers_stay(device, captures):
    model, batches = net(device), batches_of(device)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    evaluator, states = tr.Evaluator(model), torch.get_rng_state()
    for _ in range(2):
        evaluator(batches)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), states) and torch.is_grad_enabled()


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_in_any_grad_mode(mode, device, captures):
    model, batches = net(device), batches_of(device)
    evaluator, expected = tr.Evaluator(model), by_hand(model, batches)
    with mode():
        agree(evaluator(batches), expected)
        agree(evaluator([(x.clone(), y.clone()) for x, y in batches]), expected)
    agree(evaluator(batches), expected)
    assert evaluator.captured


def test_evaluate_keeps_nothing(device, captures):
    model = net(device)
    tr.evaluate(model, batches_of(device))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_reset_lets_the_model_go_and_begins_anew(device, captures):
    model, batches = net(device), batches_of(device, (8,) * 3)
    evaluator = tr.Evaluator(model)
    for _ in range(2):
        agree(evaluator(batches), by_hand(model, batches))
        assert evaluator.captured and len(evaluator._graphs) == 1
        evaluator.reset()
        assert not evaluator._graphs and not evaluator.captured
    model.first = nn.Linear(4, 16).double().to(device)
    agree(evaluator(batches), by_hand(model, batches))


@pytest.mark.cuda
def test_explain_and_memory(device):
    if device != "cuda":
        pytest.skip("a CPU has no graphs")
    model = nn.Sequential(nn.Linear(4, 4096), nn.ReLU(), nn.Linear(4096, 7)).cuda()
    batches = [(x.float(), y) for x, y in batches_of(device, (4096,) * 3)]
    tr.evaluate(model, batches)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    evaluator = tr.Evaluator(model)
    evaluator(batches)
    found = evaluator.explain()
    assert found.state == "captured" and found.replays == 2 and found.nodes > 3
    assert found.pool_bytes > 4096 * 4096 * 4
    evaluator.reset()
    assert torch.cuda.memory_allocated() <= before
