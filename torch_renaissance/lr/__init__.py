# SPDX-License-Identifier: BSD-3-Clause
"""Learning-rate schedules: pure functions from the number of updates done to the next one's lr.

    schedule = tr.lr.Cosine(0.1, total=90, steps_per_epoch=len(loader), warmup=5)
    schedule(0), schedule(12_345)         # no state, so a resumed run sees the same values
    scheduler = schedule.attach(optimizer)
    ...
    optimizer.step()
    scheduler.step()

`Schedule` says what all of them share: units, warm-up, by batch or by epoch.
"""

from ._annealing import WSD, Cosine, CosineWarmRestarts, Polynomial
from ._factors import Constant, Exponential, MultiStep, Step
from ._handle import Handle
from ._schedule import Schedule

__all__ = [
    "WSD",
    "Constant",
    "Cosine",
    "CosineWarmRestarts",
    "Exponential",
    "Handle",
    "MultiStep",
    "Polynomial",
    "Schedule",
    "Step",
]
