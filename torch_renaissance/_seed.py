# SPDX-License-Identifier: BSD-3-Clause
"""`seed`: one call for every random number generator that a training usually draws from."""

import random
import sys
from numbers import Integral

import torch


def seed(n: int) -> torch.Generator:
    """Seeds Python's `random`, NumPy's legacy generator (if NumPy has been imported) and torch's
    default generators on the CPU and all GPUs. `tr.init` takes its default seed from torch's.

    `torch.manual_seed(n)` is the part of this that concerns torch. Neither of them

    * makes operations deterministic: that is `torch.use_deterministic_algorithms` and
      `torch.backends.cudnn.benchmark`;
    * reaches generators of your own (`torch.Generator()`, `numpy.random.default_rng()`), other
      processes that run already, or Python's hashing of strings (`PYTHONHASHSEED`).

    A `DataLoader`'s workers are seeded by torch from its own generator, hence follow `n`.

    Args:
        n: from 0 to 2**32 - 1, which is what NumPy takes.

    Returns:
        torch's default CPU generator, as `torch.manual_seed` does.

    Raises:
        TypeError: where `n` is no integer.
        ValueError: where it is out of range. Nothing has been seeded then.
    """
    if not isinstance(n, Integral) or isinstance(n, bool):
        raise TypeError(f"seed: n must be an int, got {n!r} of type {type(n).__name__}")
    if not 0 <= n < 2**32:
        raise ValueError(f"seed: n must be from 0 to 2**32 - 1, got {n}")
    n = int(n)
    random.seed(n)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(n)
    return torch.manual_seed(n)
