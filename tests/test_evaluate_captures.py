# SPDX-License-Identifier: BSD-3-Clause
# tr.Evaluator: what it captures and when, that no replay is stale, and what stays eager.

import copy
import functools
import gc
import math
import re
import warnings
import weakref

import evaluators
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
    replays,
)
from testing import DEVICES
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import torch_renaissance as tr

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture
def captures(monkeypatch, device):
    with captured_evaluators(monkeypatch, device):
        yield


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


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_scripted_module_is_evaluated_eagerly(device, captures):
    model, batches = torch.jit.script(nn.Linear(4, 3).to(device).double()), batches_of(device)
    batches = [(x.flatten(1)[:, :4].double(), y % 3) for x, y in batches]
    evaluator, expected = tr.Evaluator(model), by_hand(model, batches)
    with pytest.warns(UserWarning, match="model is a torch.jit.ScriptModule"):
        agree(evaluator(batches), expected)
    assert replays(evaluator) == 0


def set_scale(value):
    def change(model):
        evaluators.SCALE = value

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
    monkeypatch.setattr(evaluators, "SCALE", 1.0)
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
        (Failing, "ZeroDivisionError: only in captures .*test_evaluate_captures.py"),
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
