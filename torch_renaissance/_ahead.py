# SPDX-License-Identifier: BSD-3-Clause
"""The batches of a captured step, each drawn by the replay before it, beside its other work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

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

    def __init__(self, data: DeviceLoader, size: int, pool: graphs.Pool):
        self._data, self._pool = data, pool
        self._buffer = data.buffer(size)

    @contextmanager
    def drawing(self) -> Iterator[tuple[Tensor, Tensor]]:
        """In a capture, around all of a step. Yields what a captured forward reads: tensors of its
        own, which it may ask for a gradient."""
        self._contents = self._data.contents()
        with self._pool.branch() as self._branch:
            yield self._buffer.x.detach(), self._buffer.y.detach()

    def draw(self) -> None:
        """In there, after forward. It may begin with the step, but its node comes after those of
        forward, and it has the lower priority: GEMMs that fill multiprocessors go ahead."""
        self._branch(lambda: self._data.draw_next(self._buffer), first=True)

    def finish(
        self, outputs: list[Tensor], copies, params: list[Tensor], written: Iterable[Tensor]
    ) -> Callable[[], None]:
        """In there, between backward and update: the next batch takes the place of this one. Has
        `copies` copy the `outputs` of the step; what it returns is to be called after the update.

        A loss that comes alone is copied on the branch too. It lies in memory of the graph, unless
        it is one of the tensors that the update has `written`. Extras may be any of them, and are
        copied after the update, as in an eager step.

        Raises:
            CaptureError: if the step changes the dataset, which the draw beside it reads.
        """
        if self._data.contents() > self._contents:
            raise graphs.CaptureError("loss_fn changes the dataset that data= draws from")
        batch = _memory((self._buffer.x, self._buffer.y))
        for p in params:
            if p.grad is not None and _memory((p.grad,)) & batch:
                p.grad = p.grad.clone()
        alone = len(outputs) == 1 and not _memory(outputs) & _memory(written)

        def aside() -> None:
            for i, t in enumerate(outputs):
                if _memory((t,)) & batch:
                    outputs[i] = t.clone()
            if alone:
                copies.add_results(outputs)
            self._buffer.advance()

        self._branch(aside)
        return (lambda: None) if alone else (lambda: copies.add_results(outputs))

    # -- around a replay -------------------------------------------------------------------------

    def fill(self) -> None:
        """Sees to it that the batch of the replay to come is there."""
        self._data.fill(self._buffer)

    def replayed(self) -> None:
        """Tells `data` what the replay has drawn."""
        self._data.drew_ahead(self._buffer)


def _memory(tensors: Iterable[Tensor]) -> set[int]:
    """Where the storages of `tensors` begin; views have that of their base."""
    strided = (t for t in tensors if t.layout == torch.strided)
    return {t.untyped_storage().data_ptr() for t in strided}
