# SPDX-License-Identifier: BSD-3-Clause
"""The batches of a captured step, each drawn by the replay before it, beside its other work."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from . import graphs
from .data.loader import DeviceLoader


class Ahead:
    """Draws from `data` into memory that one graph reads.

    The batch of a step is there when its replay begins. The replay draws the next one on a branch
    of its own, beside forward and backward, and puts it in the batch's place beside the update: by
    then only what `loss_fn` returned and gradients may still be in that memory. So drawing takes
    next to no time.
    """

    def __init__(self, data: DeviceLoader, size: int):
        self._data = data
        self._buffer = data.buffer(size)

    def begin(self, beside: Callable[..., None]) -> tuple[Tensor, Tensor]:
        """In a capture, before all else of a step; `beside` puts work on the branch. Returns what a
        captured forward reads: tensors of its own, which it may ask for a gradient."""
        self._beside, self._contents = beside, self._data.contents()
        return self._buffer.x.detach(), self._buffer.y.detach()

    def draw(self) -> None:
        """In there, after forward. It may begin with the step, but its node comes after those of
        forward, and it has the lower priority: GEMMs that fill multiprocessors go ahead."""
        self._beside(lambda: self._data.draw_next(self._buffer), first=True)

    def advance(self, outputs: list[Tensor], params: list[Tensor]) -> None:
        """In there, between backward and update: the next batch takes the place of this one, which
        `outputs` of the step and gradients leave.

        Raises:
            CaptureError: if the step changes the dataset, which the draw beside it reads.
        """
        if self._data.contents() > self._contents:
            raise graphs.CaptureError("loss_fn changes the dataset that data= draws from")
        batch = memory((self._buffer.x, self._buffer.y))
        for p in params:
            if p.grad is not None and memory((p.grad,)) & batch:
                p.grad = p.grad.clone()

        def aside() -> None:
            for i, t in enumerate(outputs):
                if memory((t,)) & batch:
                    outputs[i] = t.clone()
            self._buffer.advance()

        self._beside(aside)

    # -- around a replay -------------------------------------------------------------------------

    def fill(self) -> None:
        """Sees to it that the batch of the replay to come is there."""
        self._data.fill(self._buffer)

    def replayed(self) -> None:
        """Tells `data` what the replay has drawn."""
        self._data.drew_ahead(self._buffer)


def memory(tensors: Iterable[Tensor]) -> set[int]:
    """Where the storages of `tensors` begin; views have that of their base."""
    strided = (t for t in tensors if t.layout == torch.strided)
    return {t.untyped_storage().data_ptr() for t in strided}
