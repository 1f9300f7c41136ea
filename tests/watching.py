# SPDX-License-Identifier: BSD-3-Clause
# What the tests of _C.Watch share: a module with all kinds of attributes, watches of modules and
# dicts, and what is asked of them.

import pytest
import torch
from testing import DEVICES
from torch import nn

from torch_renaissance._ops import _C

each_device = pytest.mark.parametrize("device", DEVICES)

NAN = float("nan")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 4)
        self.act = nn.ReLU()
        self.drop = nn.Dropout(0.5)
        self.bn = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.ones(2, 3))
        self.sizes = [1, 2.0, "x"]
        self.rates = {"a": 0.5, "b": 1}
        self.blocks = [object(), object()]
        self.seen = {1, 2}
        self.scale = 2.0
        self.pair = (1, (2.0, "x"))
        self.extra = torch.zeros(5, device="cpu")


def watch_of(module, name="net"):
    """All that a module's forward may read of it and its submodules."""
    watch = _C.Watch()
    for path, m in module.named_modules(prefix=name):
        watch.add_dict(m.__dict__, path)
        for part in ("_parameters", "_buffers", "_modules"):
            watch.add_dict(getattr(m, part), f"{path}.{part}")
    return watch


def dict_watch(d, name="d", **options):
    watch = _C.Watch()
    watch.add_dict(d, name, **options)
    return watch


def assert_unchanged(watch):
    assert watch.check()
    assert watch.difference() is None


def assert_changed(watch, text):
    assert watch.difference() == text
    assert not watch.check()
    assert not watch.check(), "seeing a change once is no reason to forget it"


class Mine(torch.Tensor):
    pass
