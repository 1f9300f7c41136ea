# SPDX-License-Identifier: BSD-3-Clause
# Evaluator.submit: evaluations that training need not wait for.

import warnings

import pytest
import torch
from evaluators import agree, batches_of, by_hand, captured_evaluators, net
from testing import DEVICES

import torch_renaissance as tr

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture
def captures(monkeypatch, device):
    with captured_evaluators(monkeypatch, device):
        yield


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
