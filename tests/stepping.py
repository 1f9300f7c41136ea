# SPDX-License-Identifier: BSD-3-Clause
# What the tests of TrainStep share: the loop that it stands for, and `Twins`, which trains a model
# by that loop and its copy by a TrainStep.

import pytest
import torch
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

# So that no silent fall-back passes for a replay. (A colon would end the pattern.)
no_fallback = pytest.mark.filterwarnings(
    "error:TrainStep runs eagerly", "ignore:TrainStep runs eagerly. the parameters are on the CPU"
)
WARMUP = 3  # TrainStep's default


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
