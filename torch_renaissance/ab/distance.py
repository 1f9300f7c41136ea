# SPDX-License-Identifier: BSD-3-Clause
"""How far apart two trainings of the same few steps are, tensor by tensor."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

from .first_steps import Trace

MANY = 1024  # elements from which on a drift is told from chance


@dataclass(frozen=True)
class Apart:
    """Of one tensor: the L2 distance (inf for integers that aren't equal), by how much it lies
    further out along its own direction at the start, relative to its norm, and what the norms of
    the two changes differ by."""

    distance: float
    drift: float = 0.0
    growth: float = 0.0


class Reference:
    """What the others are held against: the first steps of one run."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self.sizes = {n: norm(_double(t)) for n, t in trace.start.items()}
        self.changes = {n: norm(_double(t) - _double(trace.start[n])) for n, t in trace.end.items()}

    def apart(self, trace: Trace, shaken: bool = False) -> dict[str, Apart]:
        """Of each tensor after a run; of what it changed where it started from other weights."""
        return {name: self._apart(name, trace, shaken) for name in trace.end}

    def loss_distance(self, trace: Trace) -> float:
        pairs = zip(trace.losses, self.trace.losses, strict=True)
        return max((abs(a - b) for a, b in pairs), default=0.0)

    def drifts(self, name: str) -> bool:
        """Whether a drift of it is looked at. Elsewhere roundings of equal numbers add up."""
        start = self.trace.start[name]
        return start.ndim >= 2 and start.numel() >= MANY and self.sizes[name] > 0

    def _apart(self, name: str, trace: Trace, shaken: bool) -> Apart:
        mine, theirs = self.trace.end.get(name), trace.end[name]
        if mine is None or mine.shape != theirs.shape:
            return Apart(math.inf)
        if not (mine.is_floating_point() or mine.is_complex()):
            return Apart(0.0 if torch.equal(mine, theirs) else math.inf)
        difference, start = _double(theirs) - _double(mine), _double(self.trace.start[name])
        change = _double(theirs) - (_double(trace.start[name]) if shaken else start)
        if shaken:
            difference = difference - (_double(trace.start[name]) - start)
        drift = 0.0
        if self.drifts(name):
            inner = torch.vdot(start.flatten(), difference.flatten()).real
            drift = float(inner) / self.sizes[name] ** 2
        return Apart(norm(difference), drift, abs(norm(change) - self.changes[name]))


class Noise:
    """What runs that are as right as the reference differ by from it.

    `typical` is the median over all tensors of distance over change, `coherent` a high quantile of
    how much of a distance is drift: a tensor may be lucky in all runs, all tensors can't. Where
    the runs drew other random numbers, distances say nothing, and growth takes their place.
    """

    def __init__(self, reference: Reference, traces: list[Trace], same_numbers: bool):
        self._reference, self.same_numbers = reference, same_numbers
        self.runs, self.loss = 0, 0.0
        self.distances: dict[str, float] = {}
        self.drifts: dict[str, float] = {}
        self.typical = self.coherent = 0.0
        for trace in traces:
            self.add(trace)

    def add(self, trace: Trace) -> None:
        """Takes one more run into account; it isn't kept."""
        reference, found = self._reference, self._reference.apart(trace, self.same_numbers)
        for n in reference.changes:
            self.distances[n] = max(self.distances.get(n, 0.0), self.of(found[n]))
            self.drifts[n] = max(self.drifts.get(n, 0.0), abs(found[n].drift))
        self.loss = max(self.loss, reference.loss_distance(trace))
        self.runs += 1
        shares = [
            self.distances[n] / change
            for n, change in reference.changes.items()
            if change > 0 and math.isfinite(self.distances[n])
        ]
        self.typical = statistics.median(shares) if shares else 0.0
        shares = sorted(
            drift * reference.sizes[n] / self.distances[n]
            for n, drift in self.drifts.items()
            if reference.drifts(n) and 0 < self.distances[n] < math.inf
        )
        self.coherent = shares[int(0.9 * len(shares))] if shares else 0.0

    def of(self, apart: Apart) -> float:
        """The distance that counts."""
        same = self.same_numbers or not math.isfinite(apart.distance)
        return apart.distance if same else apart.growth


def norm(a: Tensor) -> float:
    return float(torch.linalg.vector_norm(a)) if a.numel() else 0.0


def _double(a: Tensor) -> Tensor:
    return a.to(torch.complex128 if a.is_complex() else torch.float64)
