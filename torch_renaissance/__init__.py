# SPDX-License-Identifier: BSD-3-Clause
"""Training steps bound by launches, host time and memory passes, made fast with native meaning."""

from . import optim
from ._ops import __version__, build_info
from .accelerate import accelerate
from .regions import Kind, Plane, Regions, regions

__all__ = [
    "Kind",
    "Plane",
    "Regions",
    "__version__",
    "accelerate",
    "build_info",
    "optim",
    "regions",
]
