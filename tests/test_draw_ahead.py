# SPDX-License-Identifier: BSD-3-Clause
# A captured TrainStep(data=) draws each batch in the replay before it: its batches are those of
# eager steps, bit for bit, whatever happens in between. On a CPU, captures are those of
# replaying.py, where the draw comes before the update.

import copy
import warnings

import pytest
import replaying
import torch
from drawing import NEVER, Training, compare, dataset_of
from testing import DEVICES
from torch import nn

import torch_renaissance as tr
from torch_renaissance._ahead import Ahead
from torch_renaissance.data import (
    DeviceDataset,
    DeviceLoader,
    Normalize,
)

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def captures(monkeypatch, device):
    if device == "cpu":
        replaying.capture_steps(monkeypatch)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "TrainStep runs eagerly")
        yield


# -- the scenarios ---------------------------------------------------------------------------------


def another_epoch(t):
    for epoch, n in ((5, 10), (0, 3), (0, 9), (3, 7), (3, 1), (3, 2)):
        t.loader.epoch = epoch
        t.steps(n)


def load_state(t):
    t.steps(10)
    state = copy.deepcopy(t.loader.state_dict())
    t.steps(3)
    for other in (state, state, {**state, "batch": 0}, {**state, "seed": 8}, {**state, "batch": 4}):
        t.loader.load_state_dict(other)
        t.steps(5)


def exceptions(t):
    for n in (6, 1, 8, 2):
        t.steps(n)
        t.bad = True
        with warnings.catch_warnings(), pytest.raises(ZeroDivisionError):
            warnings.simplefilter("ignore")  # the second time, a capture has it first
            t.step()
        t.bad = False
    t.steps(3)


def eval_steps(t):
    for _ in range(3):
        t.steps(6)
        t.model.eval()
        t.steps(1)
        t.model.train()


def leftover_gradients(t):
    """To which an eager step adds."""
    for n in (6, 3):
        t.steps(n)
        t.model.scale.grad = torch.ones_like(t.model.scale)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            t.steps(1)
    t.steps(3)


def loops_beside(t):
    for _ in range(3):
        t.steps(5)
        for i, (x, _) in enumerate(t.loader):  # an epoch of its own, which counts
            assert len(x) and i < 7
            if i == 3:
                t.steps(1)


def changed_contents(t):
    t.steps(6)
    for _ in range(3):
        t.loader.dataset.labels.add_(1).remainder_(10)
        t.steps(2)
        t.loader.dataset.images[3:40].bitwise_not_()
        t.steps(1)
        with torch.inference_mode():
            t.loader.dataset.images.add_(1)
        t.steps(1)


def another_step(t):
    """Two TrainSteps take turns."""
    other = tr.TrainStep(
        lambda x, y: 2 * nn.functional.cross_entropy(t.model(x, y), y),
        t.optimizer,
        data=t.loader,
        warmup=t.step._warmup,
    )
    t.steps(6)
    t.steps(6, other)
    for i in range(8):
        t.steps(1 + i % 3, [None, other][i % 2])


def resets(t):
    for _ in range(3):
        t.steps(6)
        t.step.reset()


EPOCHS = lambda t: t.steps(3 * len(t.loader) + 2)  # noqa: E731
SCENARIOS = {
    "epochs": (EPOCHS, {}),
    "no smaller batch": (EPOCHS, {"n": 48}),
    "drop_last": (EPOCHS, {"data": {"drop_last": True}}),
    "one batch": (EPOCHS, {"n": 8}),
    "in order": (EPOCHS, {"data": {"shuffle": False}}),
    "of 2 ranks": (EPOCHS, {"data": {"rank": 1, "world_size": 2}}),
    "some samples": (EPOCHS, {"data": {"indices": list(range(3, 50, 2))}}),
    "micro-batches": (lambda t: t.steps(22), {"accumulate": 2}),
    "verified": (EPOCHS, {"verify": True}),
    "bf16": (EPOCHS, {"precision": "bf16", "atol": 2e-2}),
    "another epoch": (another_epoch, {}),
    "load_state_dict": (load_state, {}),
    "exceptions": (exceptions, {}),
    "eval": (eval_steps, {}),
    "gradients left over": (leftover_gradients, {}),
    "loops": (loops_beside, {}),
    "changed contents": (changed_contents, {}),
    "another step": (another_step, {}),
    "reset": (resets, {}),
}
EXTRAS = {
    "no extras": None,
    "the batch": lambda x, y, logits: (x, y),
    "views of it": lambda x, y, logits: {"x": x[2:, :, ::2].mT, "y": y[:1], "f": x.flatten(1)},
    "others": lambda x, y, logits: (logits, 3.0),
    "many": lambda x, y, logits: [logits, *x.unbind(2), *y.view(-1, 2).unbind(1), *x.unbind(3)],
}


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("extras", ["no extras", "the batch"])
def test_a_replay_sees_the_batch_of_an_eager_step(name, extras, device):
    scenario, options = SCENARIOS[name]
    compare(device, scenario, extras=EXTRAS[extras], **options)


@pytest.mark.parametrize("extras", EXTRAS)
def test_extras_are_those_of_the_step(extras, device):
    t = compare(device, EPOCHS, extras=EXTRAS[extras], least=15)
    for x, y, _, *rest in t.seen if extras == "the batch" else ():
        assert torch.equal(rest[0], x) and torch.equal(rest[1], y)


def test_a_loss_that_the_update_writes(device):
    """It is copied after the update, as in an eager step."""

    def run(warmup):
        t = Training(device, warmup=warmup)
        step = tr.TrainStep(
            lambda x, y: t.model.scale[3], t.optimizer, data=t.loader, warmup=warmup
        )
        return [float(step()) for _ in range(8)] + [step.captured]

    *captured, replayed = run(2)
    *eager, _ = run(NEVER)
    assert replayed and captured == pytest.approx(eager) and len(set(eager)) == 8


def test_a_gradient_that_lies_in_the_batch(device):
    """A backward may give away what it saved."""

    class Dot(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight, x):
            ctx.save_for_backward(x)
            return (weight * x).sum()

        @staticmethod
        def backward(ctx, grad):
            return ctx.saved_tensors[0].view(-1), None

    def run(warmup):
        t = Training(device, warmup=warmup)
        weight = nn.Parameter(torch.zeros(8 * 64, device=device))
        optimizer = tr.optim.SGD([weight], lr=1.0)
        step = tr.TrainStep(
            lambda x, y: Dot.apply(weight, x.view(-1)), optimizer, data=t.loader, warmup=warmup
        )
        for _ in range(6):
            step()
        return weight.detach().clone(), step.captured

    (captured, replayed), (eager, _) = run(2), run(NEVER)
    assert replayed and torch.equal(captured, eager) and eager.any()


def test_gradients_and_outputs_leave_the_batch_before_the_draw(device):
    """As the next batch finds them, without a capture."""
    t = Training(device)
    size = t.loader.upcoming()
    ahead = Ahead(t.loader, size)
    ahead.fill()
    with replaying.Pool(device).branch() as beside:
        x, y = ahead.begin(beside)
        ahead.draw()
        p = nn.Parameter(torch.zeros_like(x).view(-1))
        p.grad = x.view(-1)
        outputs, values = [torch.zeros((), device=device), x[1:], y], [x.clone(), y.clone()]
        ahead.advance(outputs, [p])
        assert torch.equal(p.grad, values[0].view(-1))
        assert torch.equal(outputs[1], values[0][1:]) and torch.equal(outputs[2], values[1])
    assert not torch.equal(x, values[0]), "the next one took its place"


def spy(monkeypatch):
    """What a loader launches."""
    calls = []
    for name in ("_place", "_draw_into", "draw"):
        method = getattr(DeviceLoader, name)

        def spied(*args, name=name, method=method):
            calls.append(name)
            return method(*args)

        monkeypatch.setattr(DeviceLoader, name, spied)
    return calls


def test_steps_in_a_row_draw_nothing_besides(device, monkeypatch):
    """Not before the graph; only where an epoch begins, and where its last batch is smaller."""
    t, calls = Training(device), spy(monkeypatch)
    t.steps(14)  # two epochs: graphs for both sizes
    calls.clear()
    t.steps(6)
    assert calls == ["_place", "_draw_into"]
    t.steps(1)
    assert calls == ["_place", "_draw_into"] * 2
    t.steps(14)
    assert calls == ["_place", "_draw_into"] * 6 and t.step.captured


def test_eager_steps_place_the_cursor_once_an_epoch(device, monkeypatch):
    t, calls = Training(device, warmup=NEVER), spy(monkeypatch)
    t.steps(14)
    assert calls == ["draw", "_place", *["draw"] * 6] * 2


def test_a_dataset_of_inference_tensors(device):
    """Their changes can't be seen, so nothing that was drawn ahead is trusted."""

    def scenario(t):
        with torch.inference_mode():
            t.loader.dataset.images.add_(1)
        t.steps(7)
        for _ in range(3):
            with torch.inference_mode():
                t.loader.dataset.images.bitwise_not_()
            t.steps(1)

    with torch.inference_mode():
        data = dataset_of(40, device)
    assert data.images.is_inference()

    class Inference(Training):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            with torch.inference_mode():
                data = dataset_of(40, device)
            self.loader = DeviceLoader(data, 8, transforms=self.loader.transforms)
            self.step = tr.TrainStep(self.loss, self.optimizer, data=self.loader, **options)

    trainings = Inference(device, warmup=2), Inference(device, warmup=NEVER)
    for t in trainings:
        scenario(t)
    assert trainings[0].replays
    for got, expected in zip(trainings[0].seen, trainings[1].seen, strict=True):
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_memory_goes_with_the_graphs(device):
    import weakref

    t = Training(device)
    t.steps(6)
    memory = weakref.ref(t.step._graphs[0].ahead._buffer)
    t.step.reset()
    assert memory() is None


def test_a_buffer_is_what_a_draw_returns(device):
    for options in ({}, {"channels_last": True}, {"transforms": ()}):
        images = torch.zeros(9, 3, 6, 5, dtype=torch.uint8)
        data = DeviceDataset(images, torch.zeros(9, 2, 3, dtype=torch.int16), device=device)
        loader = DeviceLoader(data, 4, **{"transforms": [Normalize(0.5, 0.5)], **options})
        with torch.inference_mode():
            buffer = loader.buffer(loader.upcoming())
        x, y = loader.draw(loader.upcoming())
        for ours, drawn in ((buffer.x, x), (buffer.y, y)):
            assert (ours.shape, ours.dtype, ours.device) == (drawn.shape, drawn.dtype, drawn.device)
            assert ours.stride() == drawn.stride() and not ours.is_inference()


@pytest.mark.parametrize("extras", ["no extras", "the batch"])
def test_many_replays(extras, device):
    """So many and large ones on a GPU that a race between branches would show."""
    steps, options = (1000, {"n": 20_000, "batch_size": 512}) if device == "cuda" else (30, {})
    options |= {"extras": EXTRAS[extras]}
    captured, eager = Training(device, **options), Training(device, **options, warmup=NEVER)
    for t in (captured, eager):
        for _ in range(steps):
            t.step()
            x, y = t.model.x.double(), t.model.y.double()
            t.seen.append(torch.stack([x.sum(), (x * x.roll(1, 0)).sum(), (y * y.roll(1)).sum()]))
    assert captured.step.captured
    assert torch.equal(torch.stack(captured.seen), torch.stack(eager.seen))


def test_a_graph_draws_once(device):
    t = Training(device)
    t.steps(6)
    graph = t.step._graphs[0]
    if device == "cuda":
        names = [name for name, count in graph.nodes.items() for _ in range(count)]
    else:
        names = [str(func) for func, *_ in graph.graph._calls]
    draws = "augment" if device == "cuda" else "draw_batch"
    assert sum(draws in name for name in names) == 1
    assert not any("place_cursor" in name for name in names)
