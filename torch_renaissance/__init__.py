# SPDX-License-Identifier: BSD-3-Clause
"""Training steps bound by launches, host time and memory passes, made fast with native meaning."""

from . import amp, data, init, lr, optim
from ._debug import debug
from ._ops import __version__, build_info
from ._seed import seed
from .ab import ab_test
from .accelerate import accelerate
from .ema import Ema
from .evaluate import Evaluator, evaluate
from .graphs import CaptureError
from .loss import CrossEntropyLoss, cross_entropy
from .regions import Kind, Plane, Regions, regions
from .train_step import TrainStep

__all__ = [
    "CaptureError",
    "CrossEntropyLoss",
    "Ema",
    "Evaluator",
    "Kind",
    "Plane",
    "Regions",
    "TrainStep",
    "__version__",
    "ab_test",
    "accelerate",
    "amp",
    "build_info",
    "cross_entropy",
    "data",
    "debug",
    "evaluate",
    "init",
    "lr",
    "optim",
    "regions",
    "seed",
]
