# SPDX-License-Identifier: BSD-3-Clause
# What the tests of tr.init share: devices, dtypes and the op's distributions to run over, a tensor
# that the op has filled, recipes, and values compared by name.

import pytest
import torch
from testing import DEVICES

from torch_renaissance import init
from torch_renaissance._ops import ops

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
each_device = pytest.mark.parametrize("device", DEVICES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# The op's distributions, each with parameters that no other has.
DRAWS = [("uniform", -0.3, 0.7), ("normal", 0.25, 1.5), ("trunc_normal", -0.25, 0.5)]
each_draw = pytest.mark.parametrize("draw", DRAWS, ids=lambda d: d[0])


def filled(shape, draw=DRAWS[1], seed=0, stream=0, dtype=torch.float64, device="cpu"):
    out = torch.full(shape, 7.0, dtype=dtype, device=device)
    ops.fill_random_(out, seed, stream, *draw)
    return out


def same_values(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


RECIPE = init.Recipe(init.kaiming_normal(nonlinearity="relu"))
ZERO_GAMMA = init.Recipe(init.kaiming_normal(mode="fan_out", nonlinearity="relu"), zero_gamma=True)
