# SPDX-License-Identifier: BSD-3-Clause
# A captured TrainStep(data=) after something failed: an interrupted replay, a failed capture, one
# that differs. No batch is lost or seen twice.

import warnings

import pytest
import replaying
import torch
from drawing import NEVER, Training, compare
from testing import DEVICES
from torch import nn

import torch_renaissance as tr
from torch_renaissance import graphs
from torch_renaissance._ahead import Ahead

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def captures(monkeypatch, device):
    if device == "cpu":
        replaying.capture_steps(monkeypatch)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "TrainStep runs eagerly")
        yield


def test_a_replay_that_is_interrupted(device, monkeypatch):
    """Nobody knows then what the device has drawn; the batch counts as used."""
    t, eager = Training(device), Training(device, warmup=NEVER)
    t.steps(5)
    with monkeypatch.context() as patches:

        def interrupted(self):
            raise KeyboardInterrupt

        patches.setattr(Ahead, "replayed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            t.step()
    t.steps(12)
    eager.steps(18)
    del eager.seen[5]
    assert t.step.captured
    for got, expected in zip(t.seen, eager.seen, strict=True):
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.mark.parametrize("fails", [1, 2])
def test_a_failed_capture_leaves_no_trace(fails, device, monkeypatch):
    attempt = graphs.Pool.capture
    left = [fails]

    def capture(self, work):
        if not left[0]:
            return attempt(self, work)
        left[0] -= 1
        attempt(self, lambda: (work(), {}["nothing"]))

    monkeypatch.setattr(graphs.Pool, "capture", capture)

    def scenario(t):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for mode in (nn.Module.train, nn.Module.eval, lambda m: m.last.train()):
                mode(t.model)
                t.steps(10)

    compare(device, scenario, least=4)
    assert left == [0]


def test_a_step_that_changes_the_dataset_stays_eager(device):
    """A replay draws the next batch beside what would change it."""

    def training(**options):
        t = Training(device, **options)
        t.extras = lambda x, y, logits: t.loader.dataset.labels.add_(1).remainder_(10)[:3]
        return t

    t, eager = training(), training(warmup=NEVER)
    with pytest.warns(UserWarning, match="loss_fn changes the dataset that data= draws from"):
        t.steps(8)
    eager.steps(8)
    assert not t.replays and len({tuple(seen[1].tolist()) for seen in t.seen}) > 1
    for got, expected in zip(t.seen, eager.seen, strict=True):
        assert all(map(torch.equal, got[:2] + got[-1:], expected[:2] + expected[-1:]))


def test_a_failed_update_in_a_capture(device, monkeypatch):
    """While the draw is on its branch."""
    from torch_renaissance._eager import Eager

    update, left = Eager._update, [1]

    def failing(self, prepared):
        if prepared and left[0]:
            left[0] -= 1
            raise graphs.CaptureError("the update fails")
        return update(self, prepared)

    monkeypatch.setattr(Eager, "_update", failing)

    def scenario(t):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            t.steps(8)
        t.model.eval()
        t.steps(10)

    t = compare(device, scenario, least=4)
    assert left == [0] and any("the update fails" in why for why in t.step._fallbacks)


@pytest.mark.parametrize("strict", [False, True])
def test_a_replay_that_differs(strict, device, monkeypatch):
    """verify= lets training go on from the eager step, or from before it."""
    t, eager = Training(device, verify=True, strict=strict), Training(device, warmup=NEVER)
    replay = Ahead.replayed

    def spoil(self):
        replay(self)
        t.model.last.weight.data.add_(1)

    monkeypatch.setattr(Ahead, "replayed", spoil)
    t.steps(3)
    eager.steps(3)
    if strict:
        with pytest.raises(tr.CaptureError, match="a replay differs from an eager step"):
            t.step()
        before = [p.clone() for p in eager.model.parameters()]
        for a, b in zip(t.model.parameters(), before, strict=True):
            torch.testing.assert_close(a, b)
    else:
        with pytest.warns(UserWarning, match="a replay differs from an eager step"):
            t.steps(1)
        eager.steps(1)
        t.step(), eager.step()
    state = t.loader.state_dict()
    assert state["batch"] == (4 if strict else 5)
    eager.loader.load_state_dict(state)
    monkeypatch.undo()
    wanted, labels = eager.loader.draw(eager.loader.upcoming())
    x, y = t.loader.draw(t.loader.upcoming())
    assert torch.equal(x, wanted) and torch.equal(y, labels)
