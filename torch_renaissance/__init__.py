# SPDX-License-Identifier: BSD-3-Clause
"""Training steps bound by launches, host time and memory passes, made fast with native meaning."""

from . import amp, init, lr, optim
from ._ops import __version__, build_info
from ._seed import seed
from .accelerate import accelerate
from .ema import Ema
from .graphs import CaptureError
from .regions import Kind, Plane, Regions, regions
from .train_step import TrainStep

__all__ = [
    "CaptureError",
    "Ema",
    "Kind",
    "Plane",
    "Regions",
    "TrainStep",
    "__version__",
    "accelerate",
    "amp",
    "build_info",
    "init",
    "lr",
    "optim",
    "regions",
    "seed",
]
