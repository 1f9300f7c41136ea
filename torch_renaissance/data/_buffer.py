# SPDX-License-Identifier: BSD-3-Clause
"""The memory of a captured step's batches."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._program import Program


class Buffer:
    """Memory of one batch, for a graph that reads it and draws the next one beside it.

    Attributes:
        x, y: as `DeviceLoader.draw` returns them.
        next: the same, of the next batch.
        number: of the batch that x and y hold; None where unknown.
        contents: what the dataset had when it was drawn.
    """

    def __init__(self, program: Program, labels: Tensor, size: int):
        def batch() -> tuple[Tensor, Tensor]:
            x = torch.empty(
                (size, *program.shape),
                dtype=program.dtype,
                device=labels.device,
                memory_format=program.memory_format,
            )
            return x, labels.new_empty((size, *labels.shape[1:]))

        with torch.inference_mode(False):
            (self.x, self.y), self.next = batch(), batch()
        self.number: int | None = None
        self.contents = math.nan

    def advance(self) -> None:
        """The next batch takes the place of this one. To be captured."""
        for to, of in zip((self.x, self.y), self.next, strict=True):
            to.copy_(of)
