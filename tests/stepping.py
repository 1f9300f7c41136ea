# SPDX-License-Identifier: BSD-3-Clause
# What the tests of TrainStep share: batches, the loop that it stands for, and `Twins`, which
# trains a model by that loop and its copy by a TrainStep.

import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from testing import Optimizer, bounds, pair, same, same_state
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import torch_renaissance as tr

NESTEROV = Optimizer(
    torch.optim.SGD,
    tr.optim.SGD,
    {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
)
ADAMW = Optimizer(torch.optim.AdamW, tr.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1})
BOTH = [NESTEROV, ADAMW]
each_row = pytest.mark.parametrize("row", BOTH, ids=lambda row: row.native.__name__)

# So that no silent fall-back passes for a replay. (A colon would end the pattern.)
no_fallback = pytest.mark.filterwarnings(
    "error:TrainStep runs eagerly", "ignore:TrainStep runs eagerly. the parameters are on the CPU"
)
WARMUP = 3  # TrainStep's default
NEVER = 10**9  # a warm-up that doesn't end


def noise(seed, *shape, device="cpu", dtype=torch.float64):
    """The same values on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def noises(n, *shape, device, first=0, **options):
    """`n` batches of one tensor each."""
    return [(noise(first + i, *shape, device=device, **options),) for i in range(n)]


def mean_square(model):
    """A loss function of `model` for inputs of any dtype."""
    dtype = next(model.parameters()).dtype
    return lambda x: model(x.to(dtype)).pow(2).mean()


def fit(model):
    return lambda x: F.mse_loss(model(x), x.sum(1, keepdim=True).sin())


def classify_images(model):
    return lambda x, y: F.cross_entropy(model(x).mean((2, 3)), y)


def vectors(i):
    return (noise(i, 16, 4),)


def images(i):
    return noise(i, 6, 3, 8, 8), noise(i, 6).gt(0).long()


def on(device, batch):
    """Moved as it is, with its strides."""
    return pytree.tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, batch)


def by_hand(loss_fn, optimizer):
    """The loop that TrainStep stands for."""

    def step(*batch):
        returned = loss_fn(*batch)
        loss = returned[0] if isinstance(returned, tuple) else returned
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, returned)

    return step


def agree(got, expected, what="", **tolerances):
    """Equal structure, equal Python values, close tensors without history."""
    ours, spec = pytree.tree_flatten(got)
    native, expected_spec = pytree.tree_flatten(expected)
    assert spec == expected_spec, what
    for x, y in zip(ours, native, strict=True):
        assert type(x) is type(y), what
        if isinstance(x, Tensor):
            assert not x.requires_grad and x.grad_fn is None, what
            options = tolerances or bounds(y)
            torch.testing.assert_close(
                x, y, **options, equal_nan=True, msg=lambda m: f"{what}: {m}"
            )
        else:
            assert x == y, what


class Twins:
    """Two models of equal weights: one is trained by hand, the other by `self.step`.

    `loss_of(model)` makes the loss function of each; `params_of(model)` is what its optimizer gets.
    Before every step the seed is set, so that both draw alike.
    """

    def __init__(
        self,
        make,
        row,
        loss_of,
        device,
        dtype=torch.float64,
        params_of=nn.Module.parameters,
        **options,
    ):
        a, oa, b, ob = pair(make, lambda m: row.native(params_of(m), **row.options), device, dtype)
        self.models, self.optimizers = (a, b), (oa, ob)
        self.loss_fns = [loss_of(model) for model in self.models]
        self.native = by_hand(self.loss_fns[0], oa)
        self.step = tr.TrainStep(self.loss_fns[1], ob, **options)
        self.device = device
        self.replayed = []  # of every call, whether it was a replay

    def __iter__(self):
        return iter(zip(self.models, self.optimizers, strict=True))

    def run(self, batches, **tolerances):
        """Both take a step with every batch; returns what TrainStep did."""
        results = []
        for batch in batches:
            what = f"call {len(self.replayed)}"
            torch.manual_seed(len(self.replayed))
            expected = self.native(*batch)
            torch.manual_seed(len(self.replayed))
            results.append(self.step(*batch))
            agree(results[-1], expected, what, **tolerances)
            assert all(p.grad is None for p in self.models[1].parameters()), what
            self.replayed.append(self.step.captured)
        return results

    def check_replays(self, *expected):
        """Whether the last calls were replays; on a CPU none is."""
        on_gpu = torch.device(self.device).type == "cuda"
        assert self.replayed[-len(expected) :] == [on_gpu and e for e in expected], self.replayed

    def check(self):
        """Equal models, and equal state of their optimizers."""
        same(*self.models)
        same_state(*self.optimizers)


def captured_twins(make, row, loss_of, device, batches, **options):
    """Twins with a graph that has been replayed."""
    twins = Twins(make, row, loss_of, device, **options)
    twins.run(batches[: WARMUP + 3])
    twins.check_replays(*[False] * WARMUP, True, True, True)
    return twins


def graphs(twins):
    return len(twins.step.explain().graphs)


@contextmanager
def fallbacks(device):
    """Collects the warnings of falling back; of the CPU's there may be one."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        messages = []
        yield messages
    messages += [str(w.message) for w in found if "runs eagerly" in str(w.message)]
    if device != "cuda":
        assert all("are on the CPU" in m for m in messages) and len(messages) <= 1
        messages.clear()
