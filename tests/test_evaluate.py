# SPDX-License-Identifier: BSD-3-Clause
# tr.Evaluator against the loop that it stands for. On a CPU, captures are those of replaying.py:
# they go stale as a CUDA graph does.

import copy
import functools
import gc
import importlib
import math
import pickle
import re
import sys
import warnings
import weakref

import pytest
import replaying
import torch
import torch.nn.functional as F
from testing import DEVICES
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.data import DataLoader, TensorDataset

import torch_renaissance as tr
from torch_renaissance import _measures, graphs

evaluating = importlib.import_module("torch_renaissance.evaluate")
pytestmark = pytest.mark.parametrize("device", DEVICES)
SCALE = 1.0


class Net(nn.Module):
    """With what behaves otherwise in eval mode, a number, a global and a buffer."""

    def __init__(self, classes=7):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.5)
        self.act, self.last = nn.Tanh(), nn.Linear(16, classes)
        self.factor = 1.0
        self.register_buffer("shift", torch.zeros(classes))

    def forward(self, x):
        hidden = self.drop(self.act(self.norm(self.first(x.to(self.first.weight.dtype)))))
        return self.last(hidden) * self.factor * SCALE + self.shift


def net(device, classes=7, seed=0):
    torch.manual_seed(seed)
    model = Net(classes)
    model(torch.randn(32, 4))  # statistics
    return model.to(device, torch.float64)


def batches_of(device, sizes=(8, 8, 8, 8, 3), classes=7, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(n, 4, generator=generator).to(device),
            torch.randint(classes, (n,), generator=generator).to(device),
        )
        for n in sizes
    ]


@torch.no_grad()
def by_hand(model, batches, loss_fn=F.cross_entropy, topk=(1, 5)):
    """The common recipe."""
    modes = {m: m.training for m in model.modules()}
    model.eval()
    loss, correct, samples = 0.0, dict.fromkeys(topk, 0), 0
    device = next(model.parameters()).device
    for *inputs, y in batches:
        output = model(*(x.to(device) for x in inputs))
        y = y.to(device)
        loss += loss_fn(output, y).item() * len(y)
        for k in topk:
            best = output.topk(min(k, output.shape[1]), 1).indices
            correct[k] += int((best == y.unsqueeze(1)).sum())
        samples += len(y)
    for m, mode in modes.items():
        m.training = mode
    return tr_evaluation(loss / samples, {k: c / samples for k, c in correct.items()}, samples)


def tr_evaluation(loss, accuracy, samples):
    return _measures.Evaluation(loss, accuracy, samples)


def agree(got, expected, rtol=1e-9):
    """fp64 rounds some hundred times at 1e-16; fp32 is compared with another bound."""
    assert math.isclose(got.loss, expected.loss, rel_tol=rtol), (got, expected)
    assert got.accuracy == expected.accuracy
    assert got.samples == expected.samples


@pytest.fixture
def captures(monkeypatch, device):
    """Makes an Evaluator of a CPU capture, by the stand-in; returns whether it did."""
    if device == "cpu":
        monkeypatch.setattr(tr.Evaluator, "_why_no_graphs", lambda self: "")
        monkeypatch.setattr(graphs, "Pool", replaying.Pool)
        monkeypatch.setattr(sys.modules[tr.Evaluator.__module__], "static_input", replaying.filled)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Evaluator runs eagerly")
        yield


def replays(evaluator):
    return sum(g.replays for g in evaluator._graphs)


# -- what is measured ------------------------------------------------------------------------------


def test_submitted_evaluations_are_of_the_weights_of_then(device, captures):
    model, batches = net(device), batches_of(device)
    evaluator, expected, submitted = tr.Evaluator(model), [], []
    for _ in range(4):  # eager, captured, replayed
        expected.append(by_hand(model, batches))
        submitted.append(evaluator.submit(batches))
        with torch.no_grad():
            model.last.weight.mul_(-1.5)
    for one, wanted in zip(reversed(submitted), reversed(expected), strict=True):
        agree(one.result(), wanted)
        assert one.done() and one.result() == one.result()
    assert len({e.loss for e in expected}) == 4


def test_submitting_waits_for_nothing(device):
    if device == "cpu":
        pytest.skip("a CPU has done what it was given")
    evaluator, batches = tr.Evaluator(net(device)), batches_of(device)
    for _ in range(3):
        expected = evaluator(batches)
    torch.cuda._sleep(int(2e9))  # a second
    submitted = evaluator.submit(batches)
    assert not submitted.done()
    assert submitted.result() == expected and submitted.done()


def test_evaluations_submitted_on_other_streams(device):
    if device == "cpu":
        pytest.skip("a CPU has no streams")
    evaluator, batches = tr.Evaluator(net(device)), batches_of(device)
    expected, submitted = evaluator(batches), []
    for _ in range(8):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(2e6))
            submitted.append(evaluator.submit(batches))
    assert [s.result() for s in submitted] == [expected] * 8


def test_what_is_wrong_is_raised_by_the_result(device):
    (x, y), *rest = batches_of(device)
    evaluator = tr.Evaluator(net(device), lambda output, y: output.mean())
    bad = evaluator.submit([(x, torch.full_like(y, 7)), *rest])
    nothing = evaluator.submit([])
    good = evaluator.submit([(x, y), *rest])
    for _ in range(2):
        with pytest.raises(IndexError, match="8 of 35 labels are no class"):
            bad.result()
        with pytest.raises(ValueError, match="no samples"):
            nothing.result()
    assert good.result() == evaluator([(x, y), *rest])
    with pytest.raises(TypeError, match="batch 0 is a int,"):
        evaluator.submit([1])


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


# -- captures --------------------------------------------------------------------------------------


def test_the_second_batch_of_a_shape_is_captured_and_the_rest_replayed(device, captures):
    model, batches = net(device), batches_of(device)  # 8, 8, 8, 8, 3
    evaluator, expected = tr.Evaluator(model), by_hand(model, batches)
    agree(evaluator(batches), expected)
    assert replays(evaluator) == 3 and not evaluator.captured  # the last one is new
    agree(evaluator(batches), expected)
    assert replays(evaluator) == 8 and evaluator.captured and len(evaluator._graphs) == 2
    calls = []
    model.forward = functools.partial(lambda f, x: (calls.append(1), f(x))[1], model.forward)
    model.__dict__.pop("forward")
    agree(evaluator(batches), expected)
    assert replays(evaluator) == 13 and not calls


def set_scale(value):
    def change(model):
        globals()["SCALE"] = value

    return change


@torch.no_grad()
def in_place(model):
    for p in model.parameters():
        p.mul_(1.5)
    model.norm.running_mean.add_(0.3)
    model.shift[0] = 0.7


def replace_data(model):
    model.first.weight.data = model.first.weight.data * -2


def swap_module(model):
    model.act = nn.ReLU()


def swap_parameter(model):
    model.last.weight = nn.Parameter(-model.last.weight.detach())


def assign(model):
    state = {k: v * -2 if v.is_floating_point() else v for k, v in model.state_dict().items()}
    state["norm.running_var"] = state["norm.running_var"].abs()
    model.load_state_dict(state, assign=True)


def load(model):
    state = model.state_dict()
    # On a CPU a number, and what writes one means a new graph: kernels get numbers by value.
    del state["norm.num_batches_tracked"]
    for key, value in state.items():
        state[key] = value * 2
    model.load_state_dict(state, strict=False)


def float_and_back(model):
    for p in model.parameters():
        p.data = (p.data * 1.1).float().double()


def new_buffer(model):
    model.shift = model.shift - torch.arange(7.0, device=model.shift.device)


def new_forward(model):
    model.act.forward = torch.relu


# name -> the change, and whether the graph stays
CHANGES = {
    "values in place": (in_place, True),
    "load_state_dict": (load, True),
    "load_state_dict(assign=True)": (assign, False),
    "p.data": (replace_data, False),
    "float and back": (float_and_back, False),
    "a module": (swap_module, False),
    "a parameter": (swap_parameter, False),
    "a buffer": (new_buffer, False),
    "a module's number": (lambda m: setattr(m, "factor", -1.0), False),
    "a global of forward": (set_scale(-0.5), False),
    "a module's forward": (new_forward, False),
    "eps of a norm": (lambda m: setattr(m.norm, "eps", 2.0), False),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_replay_is_never_stale(change, device, captures, monkeypatch):
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    change, stays = change
    model, batches = net(device), batches_of(device, (8,) * 5)
    evaluator = tr.Evaluator(model)
    for _ in range(2):
        agree(evaluator(batches), by_hand(model, batches))
    before, count = by_hand(model, batches), replays(evaluator)
    change(model)
    after = by_hand(model, batches)
    assert not math.isclose(after.loss, before.loss, rel_tol=1e-6)
    for _ in range(3):
        agree(evaluator(batches), after)
    if stays:
        assert replays(evaluator) == count + 15 and len(evaluator._graphs) == 1
    else:
        assert evaluator._graphs[0].replays == 14, "eager once, then replayed"


def test_the_stand_in_goes_stale_where_nobody_looks(device, captures, monkeypatch):
    """So that the test above can fail."""
    model, batches = net(device), batches_of(device, (8,) * 5)
    evaluator = tr.Evaluator(model)
    before = evaluator(batches)
    captured = evaluator._graphs[0]
    monkeypatch.setattr(evaluator._graphs[0], "key", type("Any", (), {"fits": lambda *a: True})())
    monkeypatch.setattr(evaluator, "_drop_stale", lambda: None)
    held = model.first.weight.data  # its memory must not go to others
    replace_data(model)
    agree(evaluator(batches), before)
    assert not math.isclose(by_hand(model, batches).loss, before.loss, rel_tol=1e-6)
    assert captured.replays == 9 and held is not None


def test_numbers_of_the_loss_function(device, captures):
    model, batches, factor = net(device), batches_of(device), 1.0

    def loss_fn(output, y):
        return F.cross_entropy(output, y) * factor

    evaluator = tr.Evaluator(model, loss_fn)
    expected = by_hand(model, batches)
    for _ in range(2):
        agree(evaluator(batches), expected)
    factor = 3.0
    assert math.isclose(evaluator(batches).loss, 3 * expected.loss)


def test_averages_that_are_swapped_in(device, captures):
    """In place, so the same graph evaluates them."""
    model = net(device)
    model, optimizer = tr.accelerate(
        model, torch.optim.SGD(model.parameters(), lr=0.5), ema_decay=0.5
    )
    ema, batches, evaluator = tr.Ema(model, optimizer), batches_of(device), tr.Evaluator(model)
    for x, y in batches:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for _ in range(2):
        own = evaluator(batches)
        agree(own, by_hand(model, batches))
        with ema.swapped():
            average = evaluator(batches)
            agree(average, by_hand(model, batches))
        assert own.loss != average.loss
    assert len(evaluator._graphs) == 2 and replays(evaluator) == 3 + 5 * 3


def test_a_training_beside_it(device, captures):
    model, batches = net(device), batches_of(device)
    model, optimizer = tr.accelerate(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step = tr.TrainStep(lambda x, y: F.cross_entropy(model(x), y), optimizer)
    evaluator, losses = tr.Evaluator(model), []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TrainStep runs eagerly: the parameters are on the CPU")
        for _ in range(4):
            for x, y in batches[:4]:
                step(x, y)
            agree(evaluator(batches), by_hand(model, batches))
            losses.append(evaluator(batches).loss)
            assert all(m.training for m in model.modules())
    assert len(set(losses)) == 4 and len(evaluator._graphs) == 2


def test_max_graphs_and_room_for_others(device, captures):
    model = net(device)
    evaluator = tr.Evaluator(model, max_graphs=1)
    a, b = batches_of(device, (8,) * 4), batches_of(device, (6,) * 4)
    agree(evaluator(a), by_hand(model, a))
    with pytest.warns(UserWarning, match=r"all 1 graphs \(max_graphs\) are in use"):
        warnings.simplefilter("always")
        agree(evaluator(b), by_hand(model, b))
    assert len(evaluator._graphs) == 1 and not evaluator.captured
    agree(evaluator(b), by_hand(model, b))
    assert len(evaluator._graphs) == 1 and evaluator.captured


def test_graphs_of_a_state_that_is_gone_are_dropped(device, captures):
    model, batches = net(device), batches_of(device, (8,) * 3)
    evaluator = tr.Evaluator(model)
    evaluator(batches)
    gone = weakref.ref(model.act)
    swap_module(model)
    for _ in range(3):
        agree(evaluator(batches), by_hand(model, batches))
    gc.collect()
    assert gone() is None and len(evaluator._graphs) == 1


# -- eager where it must be ------------------------------------------------------------------------


class Warned:
    def __enter__(self):
        self._catch = warnings.catch_warnings(record=True)
        self._all = self._catch.__enter__()
        warnings.simplefilter("always")
        return self

    def __exit__(self, *error):
        self._catch.__exit__(*error)
        found = [w for w in self._all if "Evaluator" in str(w.message)]
        self.texts, self.files = [str(w.message) for w in found], [w.filename for w in found]


@pytest.mark.parametrize("pre", [False, True])
def test_hooks_run(pre, device, captures):
    model, batches, calls = net(device), batches_of(device), []
    evaluator = tr.Evaluator(model)
    evaluator(batches)
    register = model.last.register_forward_pre_hook if pre else model.last.register_forward_hook
    handle = register(lambda *args: calls.append(1))
    with Warned() as warned:
        for k in (1, 2):
            agree(evaluator(batches), by_hand(model, batches))
            assert len(calls) == 10 * k  # by_hand runs them as well
    assert len(warned.texts) == 1 and warned.files == [__file__]
    assert "model.last (Linear) has a hook in _forward" in warned.texts[0]
    handle.remove()
    agree(evaluator(batches), by_hand(model, batches))
    assert len(calls) == 20 and replays(evaluator) > 3


def test_hooks_of_all_modules_run(device, captures):
    model, batches, calls = net(device), batches_of(device), []
    evaluator = tr.Evaluator(model)
    evaluator(batches)
    handle = register_module_forward_hook(lambda *args: calls.append(1))
    try:
        with Warned() as warned:
            evaluator(batches)
    finally:
        handle.remove()
    assert len(calls) >= 5 * 6 and "_global_forward_hooks has hooks" in warned.texts[0]


def test_hooks_on_gradients_do_not_matter(device, captures):
    model, batches = net(device), batches_of(device)
    model.last.register_full_backward_hook(lambda *args: None)
    model.last.weight.register_hook(lambda grad: grad)
    evaluator = tr.Evaluator(model)
    evaluator(batches)
    assert replays(evaluator) == 3


class Failing(Net):
    def forward(self, x):
        output = super().forward(x)
        capturing = torch.utils._python_dispatch._get_current_dispatch_mode() is not None
        if capturing or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            raise ZeroDivisionError("only in captures")
        return output


class Counting(Net):
    def forward(self, x):
        self.factor += 1.0
        return super().forward(x)


class CountingCaptures(Failing):
    def forward(self, x):
        try:
            return super().forward(x)
        except ZeroDivisionError:
            self.factor += 1.0
            return Net.forward(self, x)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Failing, "ZeroDivisionError: only in captures .*test_evaluate.py"),
        (Counting, "it changes at every step: .*'factor' was"),
        (CountingCaptures, "running it changes Python's state: .*'factor' was 1.0, is 2.0"),
    ],
)
def test_what_cannot_be_captured_runs_eagerly_with_one_warning(kind, reason, device, captures):
    torch.manual_seed(0)
    model = kind().double().to(device)
    native, batches = copy.deepcopy(model), batches_of(device, (8,) * 12)
    evaluator = tr.Evaluator(model)
    with Warned() as warned:
        for _ in range(2):
            agree(evaluator(batches), by_hand(native, batches))
    assert len(warned.texts) == 1 and re.search(reason, warned.texts[0]), warned.texts
    assert warned.files == [__file__]
    assert model.factor == native.factor and not evaluator._graphs and not evaluator.captured


def test_a_cpu_is_eager_and_silent(device):
    model, batches = net("cpu"), batches_of("cpu")
    evaluator = tr.Evaluator(model)
    with Warned() as warned:
        agree(evaluator(batches), by_hand(model, batches))
    assert warned.texts == [] and not evaluator.captured
    assert evaluator.explain().fallbacks == {"the model is on the CPU, which has no graphs": 5}


# -- loaders ---------------------------------------------------------------------------------------


class Static:
    """Batches in the same memory again and again, as a loader on a device may have it."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        memory = {}
        for x, y in self.batches:
            static = memory.setdefault(len(y), (x.clone(), y.clone()))
            static[0].copy_(x)
            static[1].copy_(y)
            yield static


def loader_of(kind, batches, device):
    host = [(x.cpu(), y.cpu()) for x, y in batches]
    x, y = (torch.cat(parts) for parts in zip(*host, strict=True))
    pin = device == "cuda"
    return {
        "list": lambda: batches,
        "list on the host": lambda: host,
        "DataLoader": lambda: DataLoader(TensorDataset(x, y), 8, pin_memory=pin, num_workers=2),
        "unpinned DataLoader": lambda: DataLoader(TensorDataset(x, y), 8),
        "prefetch": lambda: tr.data.prefetch(DataLoader(TensorDataset(x, y), 8), device=device),
        "CachedValidation": lambda: tr.data.CachedValidation(
            DataLoader(TensorDataset(x, y), 8), device=device
        ),
        "static": lambda: Static(batches),
        "static on the host": lambda: Static(host),
        "lists": lambda: [list(batch) for batch in host],
    }[kind]()


@pytest.mark.parametrize(
    "kind",
    [
        *("list", "list on the host", "DataLoader", "unpinned DataLoader", "prefetch"),
        *("CachedValidation", "static", "static on the host", "lists"),
    ],
)
def test_loaders(kind, device, captures):
    model, batches = net(device), batches_of(device, (8,) * 6 + (5,))
    expected, evaluator = by_hand(model, batches), tr.Evaluator(model)
    loader = loader_of(kind, batches, device)
    for _ in range(3):
        agree(evaluator(loader), expected)
    assert replays(evaluator) == 5 + 7 + 7 and evaluator.captured
    with torch.no_grad():
        model.last.bias.add_(torch.arange(7.0, device=device))
    agree(evaluator(loader), by_hand(model, batches))


def test_an_error_of_the_loader(device, captures):
    model, batches = net(device), batches_of(device)

    def loader():
        yield from batches[:3]
        raise OSError("disk")

    evaluator = tr.Evaluator(model)
    with pytest.raises(OSError, match="disk"):
        evaluator(loader())
    assert replays(evaluator) == 2 and model.training
    agree(evaluator(batches), by_hand(model, batches))  # the sums begin anew


# -- refusals --------------------------------------------------------------------------------------

X, Y = torch.randn(4, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (X, TypeError, "batch 1 is a Tensor, but must be (input, target)"),
        ({"x": X, "y": Y}, TypeError, "batch 1 is a dict, but must be (input, target)"),
        ([X], TypeError, "batch 1 is a list of length 1, but must be"),
        ((X, None), TypeError, "must end with a tensor of targets, got NoneType"),
        ((X, Y[0]), TypeError, "got a tensor without dimensions"),
        ((X, Y[:2]), ValueError, "accuracy needs scores (N, C, ...) and integer labels (N, ...)"),
        ((X, Y.double()), ValueError, "torch.float64 [4, 7] and torch.float64 [4]"),
        ((X, Y.bool()), ValueError, "torch.float64 [4, 7] and torch.bool [4]"),
    ],
)
def test_bad_batches(batch, error, message, device):
    model = net(device)
    with pytest.raises(error, match=re.escape(message)):
        tr.evaluate(model, [(X, Y), batch])
    assert all(m.training for m in model.modules())


@pytest.mark.parametrize("loader", [[], [(X[:0], Y[:0])], [(X, torch.full_like(Y, -100))]])
def test_no_samples(loader, device):
    with pytest.raises(ValueError, match="there are no samples; the loader is empty or all"):
        tr.evaluate(net(device), loader)


def test_outputs_and_losses_that_do_not_fit(device):
    model = net(device)
    with pytest.raises(ValueError, match=r"a tensor of one element, got shape \[4\]"):
        tr.evaluate(model, [(X, Y)], nn.CrossEntropyLoss(reduction="none"))
    with pytest.raises(ValueError, match="a tensor of one element, got float"):
        tr.evaluate(model, [(X, Y)], lambda output, y: 0.5)
    model.forward = lambda x: {"logits": x}
    with pytest.raises(TypeError, match="the model must return a tensor, got dict"):
        tr.evaluate(model, [(X, Y)])


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((len,), {}, TypeError, "model must be an nn.Module, got builtin_function_or_method"),
        ((nn.ReLU(), 3), {}, TypeError, "loss_fn must be callable, got int"),
        ((nn.ReLU(), nn.MSELoss(reduction="sum")), {}, ValueError, "got one with reduction='sum'"),
        ((nn.ReLU(),), {"precision": "tf32"}, ValueError, "one of ['fp16', 'bf16'] or None"),
        ((nn.ReLU(),), {"topk": 5}, TypeError, "topk must be a tuple of ints, such as (1, 5)"),
        ((nn.ReLU(),), {"topk": (1, 0)}, ValueError, "every k of topk must be an int >= 1, got 0"),
        ((nn.ReLU(),), {"topk": (5, 5)}, ValueError, "topk has a number twice: (5, 5)"),
        ((nn.ReLU(),), {"max_graphs": 0}, ValueError, "max_graphs must be an int >= 1, got 0"),
        ((nn.ReLU(),), {"max_graphs": True}, ValueError, "must be an int >= 1, got True"),
    ],
)
def test_bad_arguments(arguments, options, error, message, device):
    with pytest.raises(error, match=re.escape(message)):
        tr.Evaluator(*arguments, **options)


def test_loader_that_is_none(device):
    model = net(device)
    with pytest.raises(TypeError, match="loader must be an iterable of batches, got int"):
        tr.evaluate(model, 3)
    assert model.training


def test_an_evaluation_inside_of_itself(device):
    evaluator = tr.Evaluator(net(device))

    def loader():
        yield X, Y
        evaluator([(X, Y)])

    with pytest.raises(RuntimeError, match="it is evaluating already"):
        evaluator(loader())
    assert evaluator([(X, Y)]).samples == 4


# -- on a GPU --------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.filterwarnings("error:Evaluator runs eagerly")
def test_only_the_result_waits(device):
    """By an event, which isn't among what torch warns of."""
    if device != "cuda":
        pytest.skip("a CPU is never waited for")
    model, batches = net(device), batches_of(device)
    evaluator = tr.Evaluator(model)
    host = [tuple(t.cpu().pin_memory() for t in batch) for batch in batches]
    for _ in range(2):
        evaluator(batches)
    for loader in (batches, host):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                evaluator(loader)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert not [w for w in found if "synchronizing CUDA operation" in str(w.message)]


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
