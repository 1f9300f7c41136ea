# SPDX-License-Identifier: BSD-3-Clause
# What the tests of steps that can't be captured share: a model that draws and keeps statistics, all
# that a step may change, TrainStep's warnings, and a `Bystander` that must live through it.

import gc
import random
import warnings

import pytest
import torch
from stepping import ADAMW, NESTEROV, WARMUP, Twins, mean_square, noises
from testing import pair
from torch import nn

only_cuda = pytest.mark.cuda
ON_THE_CPU = "TrainStep runs eagerly: the parameters are on the CPU, which has no graphs"


class Net(nn.Module):
    """Draws random numbers, keeps statistics, and counts its calls if it is to."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.drop(torch.tanh(self.norm(self.first(x)))))


def net_pair(device, row=ADAMW, make=Net):
    return pair(make, lambda m: row.native(m.parameters(), **row.options), device)


def seed(number=3):
    torch.manual_seed(number)
    random.seed(number)
    numpy = pytest.importorskip("numpy")
    numpy.random.seed(number)


def random_states(device):
    numpy = pytest.importorskip("numpy")
    keys, position = numpy.random.get_state()[1:3]
    states = [torch.get_rng_state(), torch.tensor(random.getstate()[1])]
    states += [torch.from_numpy(keys.astype("int64")), torch.tensor(position)]
    return states + ([torch.cuda.get_rng_state()] if device == "cuda" else [])


def bits(model, optimizer, device):
    """Everything that a step changes."""
    state = optimizer.state_dict()["state"]
    found = [*model.parameters(), *model.buffers()]
    found += [v for entries in state.values() for v in entries.values() if v is not None]
    return [t.detach().clone() for t in found] + random_states(device)


class Warned(list):
    """The warnings of TrainStep inside of a with block."""

    def __enter__(self):
        self._catch = warnings.catch_warnings(record=True)
        self._all = self._catch.__enter__()
        warnings.simplefilter("always")
        return self

    def __exit__(self, *error):
        self._catch.__exit__(*error)
        self += [w for w in self._all if "TrainStep" in str(w.message)]

    @property
    def texts(self):
        return [str(w.message) for w in self]


def capturing(x):
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


SYNC = "synchronizing CUDA operation|Cannot copy between CPU and CUDA tensors"


class Bystander:
    """Another model's captured step, which must live through whatever happens."""

    def __init__(self, device):
        self.device = device
        self.twins = Twins(Net, NESTEROV, mean_square, device)
        with Warned():
            self.twins.run(noises(WARMUP + 2, 6, 4, device=device))
        self.twins.check_replays(True, True)

    def check(self):
        """Its graph replays, random numbers are fresh, and new captures work."""
        self.twins.run(noises(3, 6, 4, device=self.device))
        self.twins.check_replays(True, True, True)
        self.twins.check()
        draws = [torch.rand(4, device=self.device) for _ in range(2)]
        assert not torch.equal(*draws)
        torch.manual_seed(0)
        first = torch.rand(4, device=self.device)
        torch.manual_seed(0)
        assert torch.equal(torch.rand(4, device=self.device), first)
        later = Twins(Net, ADAMW, mean_square, self.device)
        with Warned() as found:
            later.run(noises(WARMUP + 3, 6, 4, device=self.device))
        assert len(found) == (self.device != "cuda")
        later.check_replays(True, True, True)
        later.check()


def memory():
    """What is allocated and reserved, without what torch keeps for later."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


# torch keeps two numbers for a generator that has been captured; and small blocks live in segments
# of 2 MiB, of which a new one may be begun.
CRUMBS, SEGMENT = 4096, 2 << 20
