# SPDX-License-Identifier: BSD-3-Clause
"""Whether a variant computes what native eager PyTorch computes, decided before it is timed.

**How much may two right variants differ?** As much as native eager differs from itself when every
weight is changed by at most one rounding of the precision in use, which samples how strongly this
model and this optimizer amplify rounding. For each parameter or buffer p, `d(p)` is the L2 distance
of what the first steps left, in the variant and in native eager. Allowed is

    d(p) <= FACTOR * max(noise(p), typical * |change(p)|)
            + FLOOR * steps * eps * (|p| + |change(p)|)

with `noise(p)` the largest of the changed runs' distances, `typical` the median over all p of
noise(p) / |change(p)|, and `eps` of p's dtype: the roundings of the update itself.

A wrong weight decay is a small change of every element in one direction, and would hide in that
distance. It shows in the drift, d along p itself relative to |p|, where rounding averages out; for
weights of 1024 elements and more

    drift(p) <= FACTOR * max(drift of the runs, coherent * noise(p) / |p|) + steps * eps / 2

with `coherent` the share of the noise that is drift, in the worst tenth of the weights, and twice
what a factor such as 1 - lr * weight_decay may be wrong by once it is rounded.

The losses of the first steps are held against the noise of the losses in the same way. One or two
changed runs may be lucky: Adam turns the sign of a gradient that is nothing but rounding into a
whole step, and what such a step does to a loss may be next to nothing in one run. So a variant is
said to differ only where it does so from what NOISE_RUNS changed runs leave open. The style is
that of flash-attention's tests, where an error may be a small multiple of PyTorch's own at the same
precision.

A step that draws random numbers (dropout) draws the same ones in every variant of the same kernels.
Inductor has generators of its own; so have users' variants, perhaps. Where these differ by more
than rounding they are compared statistically: losses, and how much each parameter changed, with
what these differ by in native eager under other random numbers. Such a row says so; a small mistake
would not be seen there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from .distance import Apart, Noise, Reference
from .first_steps import Trace
from .setting import DTYPES, Setting

NOISE_RUNS = 4  # before a variant is said to differ; where none does there are one or two
FACTOR = 8.0
FLOOR = 4.0
TF32 = 2.0**-10

OK, DIFFERS, UNCHECKED = "ok", "differs", "unchecked"
_WRONG = "computes something else"
_STATISTICAL = "draws other random numbers; compared statistically"


@dataclass
class Verdict:
    """Differences of parameters are relative to what the first steps changed in them."""

    status: str
    sentence: str = ""
    parameter: str = ""  # the one that comes nearest to, or farthest beyond, what is allowed
    parameter_difference: float | None = None
    parameter_allowed: float | None = None
    loss_difference: float | None = None
    loss_allowed: float | None = None

    def wrong(self, sentence: str) -> None:
        self.status, self.sentence = DIFFERS, f"{_WRONG}: {sentence}"


def rounding_of(setting: Setting, model: nn.Module) -> float:
    """The relative spacing of the numbers in which a step computes, TF32 included."""
    dtype = DTYPES[setting.precision]
    found = [torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point()]
    found += [torch.finfo(dtype).eps] if dtype is not None else []
    convolves = any(isinstance(m, (nn.modules.conv._ConvNd, nn.RNNBase)) for m in model.modules())
    if setting.device.type == "cuda" and _tf32(convolves):
        found.append(TF32)
    return max(found, default=torch.finfo(torch.float32).eps)


def _tf32(convolves: bool) -> bool:
    try:
        of_conv = convolves and torch.backends.cudnn.allow_tf32
        return of_conv or torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:  # torch refuses to tell where the newer switches were used
        return True


class Judge:
    """Holds native eager's first steps, and what they differ by from themselves: with changed
    weights (`noise`), and with other random numbers (`others`, may be empty)."""

    def __init__(self, reference: Trace, noise: list[Trace], others: list[Trace], rounding: float):
        self.trace, self.rounding = reference, rounding
        self._reference = Reference(reference)
        self._noise = Noise(self._reference, noise, same_numbers=True)
        self._others = Noise(self._reference, others, same_numbers=False) if others else None

    def judge(self, trace: Trace, draws_its_own: bool = False) -> Verdict:
        """Up to rounding; failing that, where a variant may draw random numbers of its own and
        there are others to compare with, up to what these do."""
        verdict = self._judge(trace, self._noise)
        if verdict.status == DIFFERS and draws_its_own and self._others is not None:
            verdict = self._judge(trace, self._others)
            verdict.sentence = verdict.sentence or _STATISTICAL
        return verdict

    @property
    def runs(self) -> int:
        """Of native eager with changed weights."""
        return self._noise.runs

    def add(self, noise: Trace) -> None:
        """One more of them."""
        self._noise.add(noise)

    @property
    def least_drift(self) -> float | None:
        """The smallest wrong scaling of a weight in one step that would be seen; with decoupled
        weight decay that is lr times what the decay is wrong by."""
        found = [
            self._allowed_drift(name, self._noise) / len(self.trace.losses)
            for name in self.trace.end
            if self._reference.drifts(name)
        ]
        return min(found, default=None)

    def _judge(self, trace: Trace, noise: Noise) -> Verdict:
        mine = self.trace.losses
        for i, (loss, theirs) in enumerate(zip(mine, trace.losses, strict=True)):
            if not math.isfinite(loss):
                return Verdict(
                    UNCHECKED, f"can't be checked: the loss of native eager is {loss} in step {i}"
                )
            if not math.isfinite(theirs):
                verdict = Verdict(OK)
                verdict.wrong(f"its loss is {theirs} in step {i} instead of {loss:.6g}")
                return verdict
        verdict = Verdict(OK)
        self._judge_losses(trace, noise, verdict)
        if trace.end:
            self._judge_parameters(trace, noise, verdict)
        elif verdict.status == OK:
            verdict.sentence = "only losses are compared, since it didn't call make_model"
        return verdict

    def _judge_losses(self, trace: Trace, noise: Noise, verdict: Verdict) -> None:
        mine = self.trace.losses
        verdict.loss_difference = self._reference.loss_distance(trace)
        verdict.loss_allowed = FACTOR * (noise.loss + self.rounding * max(map(abs, mine)))
        if verdict.loss_difference > verdict.loss_allowed:
            i = max(range(len(mine)), key=lambda i: abs(trace.losses[i] - mine[i]))
            verdict.wrong(
                f"the loss of step {i} is {trace.losses[i]:.6g} instead of {mine[i]:.6g}, where a "
                f"difference of at most {verdict.loss_allowed:.1e} was expected"
            )

    def _judge_parameters(self, trace: Trace, noise: Noise, verdict: Verdict) -> None:
        apart, steps = self._reference.apart(trace), len(trace.losses)
        foreign = set(apart) ^ set(self._reference.changes)
        if foreign:
            verdict.wrong(f"it has other parameters or buffers ({min(foreign)})")
            return
        excess = {n: _excess(noise.of(a), self._allowed(n, noise)) for n, a in apart.items()}
        if not excess:
            return
        worst = max(excess, key=excess.get)
        distance, scale = noise.of(apart[worst]), self._scale(worst)
        verdict.parameter = worst
        verdict.parameter_allowed = self._allowed(worst, noise) / scale
        if math.isfinite(distance):
            verdict.parameter_difference = distance / scale
        if excess[worst] > 1:
            by = f"{distance / scale:.1e}" if math.isfinite(distance) else "integers"
            verdict.wrong(
                f"{worst} differs by {by} of what {steps} steps changed in it, where at most "
                f"{verdict.parameter_allowed:.1e} was expected"
            )
        else:
            self._judge_drifts(apart, noise, verdict)

    def _judge_drifts(self, apart: dict[str, Apart], noise: Noise, verdict: Verdict) -> None:
        names = [n for n in apart if self._reference.drifts(n)]
        allowed = {n: self._allowed_drift(n, noise) for n in names}
        worst = max(names, key=lambda n: abs(apart[n].drift) / allowed[n], default=None)
        if worst is not None and abs(apart[worst].drift) > allowed[worst]:
            verdict.wrong(
                f"{worst} is scaled by 1 {apart[worst].drift:+.1e} after {len(self.trace.losses)} "
                f"steps, where at most {allowed[worst]:.1e} was expected, as by another weight "
                "decay"
            )

    # -- what is allowed -------------------------------------------------------------------------

    def _by_noise(self, name: str, noise: Noise) -> float:
        change = self._reference.changes[name]
        return max(noise.distances.get(name, 0.0), noise.typical * change)

    def _allowed(self, name: str, noise: Noise) -> float:
        dtype = self.trace.end[name].dtype
        if not (dtype.is_floating_point or dtype.is_complex):
            return 0.0
        floor = FLOOR * len(self.trace.losses) * torch.finfo(dtype).eps
        size = self._reference.sizes[name] + self._reference.changes[name]
        return FACTOR * self._by_noise(name, noise) + floor * size

    def _allowed_drift(self, name: str, noise: Noise) -> float:
        by_noise = noise.coherent * self._by_noise(name, noise) / self._reference.sizes[name]
        floor = len(self.trace.losses) * torch.finfo(self.trace.end[name].dtype).eps / 2
        return FACTOR * max(noise.drifts.get(name, 0.0), by_noise) + floor

    def _scale(self, name: str) -> float:
        return self._reference.changes[name] or self._reference.sizes[name] or 1.0


def _excess(distance: float, allowed: float) -> float:
    if distance == 0:
        return 0.0
    return distance / allowed if allowed > 0 and math.isfinite(distance) else math.inf
