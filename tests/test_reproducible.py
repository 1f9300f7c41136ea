# SPDX-License-Identifier: BSD-3-Clause
# Two runs from one seed are bitwise equal: the demo's network, smaller, trained twice; and tr.seed.

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from testing import DEVICES, USUAL, equal, values_of
from torch import nn

import torch_renaissance as tr

ROOT = Path(__file__).resolve().parent.parent
PIXELS, BATCH, STEPS = 49, 20, 30


def net(device):
    """The network of examples/mnist_mlp.py for images of 7 x 7, with dropout, which draws too."""
    model = nn.Sequential(
        *(nn.Linear(PIXELS, 64), nn.ReLU(), nn.Dropout(0.1)),
        *(nn.Linear(64, 32), nn.ReLU()),
        *(nn.Linear(32, 16), nn.ReLU()),
        nn.Linear(16, 10),
    ).to(device)
    return tr.init.Recipe(tr.init.kaiming_uniform(nonlinearity="relu")).initialize(model)


def data(device):
    """Images of ten classes, with noise that no network learns."""
    middles = torch.rand(10, PIXELS)
    labels = torch.randint(10, (BATCH * STEPS,))
    images = middles[labels] + 0.3 * torch.randn(len(labels), PIXELS)
    return images.to(device), labels.to(device)


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x), y, label_smoothing=0.1)


def eager(model, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def accelerated(**options):
    def prepare(model, optimizer):
        return eager(*tr.accelerate(model, optimizer, **options))

    return prepare


def train_step(model, optimizer):
    """On a GPU a captured one, from the fourth call on."""
    model, optimizer = tr.accelerate(model, optimizer)
    return tr.TrainStep(lambda x, y: loss_of(model, x, y), optimizer)


# Ways to make a step of a model and an optimizer.
WAYS = {
    "gather": accelerated(),
    "flat": accelerated(gradients="flat"),
    "train step": train_step,
}


def run(prepare, usual, device, seed=0):
    """Losses, weights and state after a training from one seed."""
    tr.seed(seed)
    model = net(device)
    images, labels = data(device)
    optimizer = usual.native(model.parameters(), **usual.options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    step, losses = prepare(model, optimizer), []
    for batch in torch.randperm(len(images)).to(device).split(BATCH):
        losses.append(step(images[batch], labels[batch]))
        scheduler.step()
    state = [t for entries in optimizer.state.values() for t in entries.values()]
    return [torch.stack(losses), *values_of(model.parameters()), *values_of(state)]


@pytest.mark.filterwarnings("ignore:TrainStep runs eagerly. the parameters are on the CPU")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("usual", USUAL, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_two_runs_are_bitwise_equal(way, usual, device):
    first, second = (run(WAYS[way], usual, device) for _ in range(2))
    assert equal(first, second)
    losses = first[0]
    assert losses[-5:].mean() < losses[:5].mean(), "it trains"
    other = run(WAYS[way], usual, device, seed=1)
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True) if a.ndim > 1)


@pytest.mark.parametrize("device", DEVICES)
def test_two_processes_are_bitwise_equal(device):
    """Whatever Python's hashes of strings, by which sets and dicts could be ordered."""
    script = (
        "import hashlib; from test_reproducible import *;"
        f"values = run(WAYS['gather'], USUAL[2], {device!r});"
        "raw = b''.join(v.cpu().numpy().tobytes() for v in values);"
        "print(hashlib.sha256(raw).hexdigest())"
    )
    digests = set()
    for hash_seed in "12":
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
        command = [sys.executable, "-c", script]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        digests.add(result.stdout)
    assert len(digests) == 1 and len(digests.pop().strip()) == 64


# -- tr.seed ---------------------------------------------------------------------------------------


def draws(device="cpu"):
    """One draw of each generator that tr.seed seeds."""
    by_init = tr.init.Recipe(tr.init.normal()).initialize(nn.Linear(2, 2)).weight.tolist()
    on_gpu = torch.rand(2, device=device).tolist()
    return random.random(), numpy.random.rand(), torch.rand(2).tolist(), on_gpu, by_init


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [0, 1, 2**32 - 1, numpy.int64(7)])
def test_seed_seeds_all_of_them(n, device):
    tr.seed(n)
    first = draws(device)
    assert all(a != b for a, b in zip(first[:4], draws(device)[:4], strict=True)), "they go on"
    tr.seed(n)
    assert draws(device) == first
    tr.seed(5)
    assert all(a != b for a, b in zip(first, draws(device), strict=True))


def test_seed_is_what_one_would_write_by_hand():
    tr.seed(3)
    ours = draws()
    random.seed(3)
    numpy.random.seed(3)
    torch.manual_seed(3)
    assert draws() == ours


def test_seed_returns_torchs_generator():
    assert tr.seed(9) is torch.default_generator
    assert torch.initial_seed() == 9


@pytest.mark.multigpu
def test_seed_reaches_every_gpu():
    values = []
    for _ in range(2):
        tr.seed(4)
        values.append([torch.rand(2, device=f"cuda:{i}").tolist() for i in (0, 1)])
    assert values[0] == values[1]


def test_seed_does_without_numpy(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpy")
    numpy.random.seed(1)
    expected = numpy.random.rand()
    numpy.random.seed(1)
    tr.seed(2)
    assert numpy.random.rand() == expected
    assert "numpy" not in sys.modules


@pytest.mark.parametrize(
    ("n", "error", "message"),
    [
        (1.0, TypeError, "seed: n must be an int, got 1.0 of type float"),
        ("1", TypeError, "seed: n must be an int, got '1' of type str"),
        (None, TypeError, "seed: n must be an int, got None"),
        (True, TypeError, "seed: n must be an int, got True of type bool"),
        (-1, ValueError, r"seed: n must be from 0 to 2\*\*32 - 1, got -1"),
        (2**32, ValueError, r"seed: n must be from 0 to 2\*\*32 - 1, got 4294967296"),
    ],
)
def test_bad_seeds_change_nothing(n, error, message):
    before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state()
    with pytest.raises(error, match=f"^{message}"):
        tr.seed(n)
    after = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state()
    assert before[:2] == after[:2] and torch.equal(before[2], after[2])
