# SPDX-License-Identifier: BSD-3-Clause
"""`DeviceLoader`: batches of a resident dataset, shuffled and augmented where they lie."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .._ops import ops
from . import _loader_arguments as check
from ._buffer import Buffer
from ._program import Program, Transforms
from .dataset import DeviceDataset

_WHO = "DeviceLoader"


def _fixed(name: str) -> property:
    """An argument to be read only: a captured draw has it for good, and where a training stands is
    counted in it."""
    return property(lambda self: getattr(self, f"_{name}"), doc=f"`{name}` as it was given.")


class DeviceLoader:
    """Batches (x, y) of a `DeviceDataset`, each made by one kernel that picks the samples, augments
    them and copies their labels. The host does nothing but launch it, or not even that:
    `TrainStep(loss_fn, optimizer, data=loader)` has it in its graph.

    A loop over the loader is an epoch; loops and TrainStep count theirs together. The order of its
    samples is a function of `seed`, `epoch` and position, and what is drawn for a sample one of
    `seed`, `epoch` and the sample's index: neither depends on the device, on the batch size or on
    how many ranks share an epoch.

    Args:
        dataset: where its batches come from, and on which device they are. Its tensors are taken as
            they are now: contents may change, other tensors want another loader. A change through
            `.data`, which torch doesn't see, may miss a batch that TrainStep has drawn already.
        batch_size: samples of a batch, of each rank.
        shuffle: a new order in each epoch, else that of the dataset.
        drop_last: leave out a last batch that would be smaller.
        transforms: as `Program` takes them; x stays uint8 without a `ToFloat` or `Normalize`
            among them.
        channels_last: the memory format of x.
        seed: from -2**63 to 2**63 - 1.
        indices: the samples that take part, ints of shape (n,); by default all.
        rank, world_size: this process's share. `batch_size * world_size` consecutive samples of the
            common order make a batch of all ranks. Unless `drop_last`, the last one is filled up
            from the beginning of the order, as DistributedSampler does it, so that all ranks have
            as many.

    Raises:
        TypeError, ValueError: for arguments that don't fit, and where an epoch would have no batch.
    """

    dataset, device, transforms = map(_fixed, ("dataset", "device", "transforms"))
    batch_size, drop_last, shuffle = map(_fixed, ("batch_size", "drop_last", "shuffle"))
    seed, rank, world_size = map(_fixed, ("seed", "rank", "world_size"))

    def __init__(
        self,
        dataset: DeviceDataset,
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        transforms: Transforms = (),
        channels_last: bool = False,
        seed: int = 0,
        indices: Tensor | Sequence[int] | None = None,
        rank: int = 0,
        world_size: int = 1,
    ):
        if not isinstance(dataset, DeviceDataset):
            raise TypeError(
                f"{_WHO}: dataset must be a DeviceDataset, got {type(dataset).__name__}; "
                "DeviceDataset.from_dataset(...) makes one of any map-style dataset"
            )
        self._dataset, self._device = dataset, dataset.device
        # Held here, since a captured draw reads their memory whatever becomes of the dataset.
        self._images, self._labels = dataset.images, dataset.labels
        self._batch_size = check.count("batch_size", batch_size)
        self._world_size = check.count("world_size", world_size)
        self._rank = check.whole("rank", rank)
        if not 0 <= self._rank < self._world_size:
            raise ValueError(f"{_WHO}: rank must be from 0 to {self._world_size - 1}, got {rank}")
        self._seed = check.word("seed", seed)
        self._shuffle, self._drop_last = bool(shuffle), bool(drop_last)
        self._program = Program(transforms, *dataset.images.shape[1:], channels_last)
        self._transforms = self._program.transforms
        self._subset = None if indices is None else check.subset(indices, len(dataset), self.device)
        self._count = len(dataset) if self._subset is None else len(self._subset)
        of_all_ranks = self._batch_size * self._world_size
        left_over = 0 if drop_last else of_all_ranks - 1
        self._batches = (self._count + left_over) // of_all_ranks
        if self._batches == 0:
            raise ValueError(
                f"{_WHO}: {self._count} samples make no batch of {self.batch_size} on each of "
                f"{self.world_size} rank(s); set drop_last=False or a smaller batch_size"
            )
        self._epoch = 0
        # Of a training by TrainStep: where it stands. Its batches are numbered through all epochs,
        # leaving out a few where it goes on elsewhere, so that a number stands for one batch.
        self._running, self._batch, self._number = 0, len(self), 0
        self._cursor: Tensor | None = None
        self._stands: int | None = None  # the number of what the device would draw next
        tensors = self._images, self._labels
        self._seen = not any(t.is_inference() for t in tensors)  # whether changes of them are

    @property
    def epoch(self) -> int:
        """The epoch that begins next, from 0 to 2**24 - 1. Set it to begin another."""
        return self._epoch

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._epoch = check.epoch("epoch", value)
        self._batch = len(self)

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self._batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(x, y): fresh tensors on the device, x of shape (batch, channels, height, width)."""
        cursor = self._new_cursor()
        self._place(cursor, self._epoch, 0)
        self._epoch += 1
        for batch in range(len(self)):
            yield self._draw(cursor, self._size(batch))

    def __repr__(self) -> str:
        shape = " × ".join(map(str, self._program.shape))
        return f"{_WHO}({len(self)} batches of {self.batch_size} × {shape}, {self.dataset!r})"

    # -- for TrainStep, which goes from epoch to epoch by itself ---------------------------------

    def upcoming(self) -> int:
        """Samples of the next batch."""
        if self._batch == self._batches:
            self._running, self._batch = self._epoch, 0
            self._epoch += 1
            self._elsewhere()
        return self._size(self._batch)

    def draw(self, size: int) -> tuple[Tensor, Tensor]:
        """That batch, in fresh tensors."""
        self._go_there()
        self._stands = None  # until it has worked
        batch = self._draw(self.cursor, size)
        self._stands = self._number + 1
        return batch

    def buffer(self, size: int) -> Buffer:
        """Memory of a graph's own for batches of that size."""
        return Buffer(self._program, self._labels, size)

    def fill(self, buffer: Buffer) -> None:
        """Makes `buffer` have that batch, for which nothing is to be done where a replay has drawn
        it ahead."""
        if buffer.number == self._number and buffer.contents == self.contents():
            return
        self._go_there()
        self._stands = buffer.number = None
        self._draw_into(buffer.x, buffer.y)
        self._stands, buffer.number = self._number + 1, self._number

    def draw_next(self, buffer: Buffer) -> None:
        """Draws from where the device stands, whatever that is, beside the batch in `buffer`. To be
        captured: a replay goes on where the one before stopped."""
        self._draw_into(*buffer.next)

    def drew_ahead(self, buffer: Buffer) -> None:
        """A replay has used what `fill` saw to, and has put what `draw_next` drew in its place.
        Behind an epoch's last batch this is no batch; the next epoch begins elsewhere."""
        buffer.number, buffer.contents = self._number + 1, self.contents()
        self._stands += 1

    def contents(self) -> float:
        """Another number after every change of the dataset's contents that torch sees."""
        if not self._seen:
            return math.nan  # which equals nothing
        return self._images._version + self._labels._version

    def drawn(self, certain: bool) -> None:
        """It is used up. Not certain: nobody knows what the device has drawn."""
        self._batch += 1
        self._number += 1
        if not certain:
            self._elsewhere()

    @property
    def cursor(self) -> Tensor:
        """Where the device stands: int64 of shape (4,), which captured draws read and advance."""
        if self._cursor is None:
            self._cursor = self._new_cursor()
        return self._cursor

    def state_dict(self) -> dict[str, int]:
        """Where a training by TrainStep stands: seed, epoch, how many of its batches are used up,
        and the epoch that begins after it."""
        between = self._batch == len(self)
        epoch, batch = (self._epoch, 0) if between else (self._running, self._batch)
        return {"seed": self.seed, "epoch": epoch, "batch": batch, "next": self._epoch}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Goes on from there, with the same batches as long as the arguments are the same.

        Raises:
            KeyError: for a state without one of the numbers.
            TypeError, ValueError: for other numbers, and a batch that an epoch of this loader
                doesn't have. Nothing has changed then.
        """
        batch = check.whole("batch", state_dict["batch"])
        if not 0 <= batch < len(self):
            raise ValueError(
                f"{_WHO}: the state stands at batch {batch}, but an epoch has {len(self)} here; "
                "load it into a loader with the same batch_size and dataset"
            )
        epoch, following = (check.epoch(key, state_dict[key]) for key in ("epoch", "next"))
        self._seed = check.word("seed", state_dict["seed"])
        if batch == 0:
            self.epoch = epoch
        else:
            self._running, self._batch, self._epoch = epoch, batch, following
        self._elsewhere()

    # -- the op ----------------------------------------------------------------------------------

    def _size(self, batch: int) -> int:
        left = self._count - batch * self._batch_size * self._world_size
        return min(self._batch_size, -(-left // self._world_size))

    def _new_cursor(self) -> Tensor:
        with torch.inference_mode(False):  # whatever mode the next batch is asked for in
            return torch.zeros(4, dtype=torch.int64, device=self.device)

    def _place(self, cursor: Tensor, epoch: int, batch: int) -> None:
        ops.place_cursor_(cursor, self.seed, epoch, batch * self.batch_size)

    def _draw(self, cursor: Tensor, size: int) -> tuple[Tensor, Tensor]:
        return ops.draw_batch(*self._tensors(cursor), size, *self._numbers())

    def _draw_into(self, x: Tensor, y: Tensor) -> None:
        ops.draw_batch_(x, y, *self._tensors(self.cursor), *self._numbers())

    def _tensors(self, cursor: Tensor) -> tuple[Tensor | None, ...]:
        return self._images, self._labels, self._subset, cursor

    def _numbers(self) -> tuple:
        program = self._program
        return (
            self._count,
            self.shuffle,
            self.rank,
            self.world_size,
            program.ints,
            program.values,
        )

    # -- what has been drawn ahead ---------------------------------------------------------------

    def _elsewhere(self) -> None:
        """Nothing that was drawn, or would be drawn next, has the number of a batch to come: a
        replay is two ahead at most."""
        self._number += 2

    def _go_there(self) -> None:
        if self._stands != self._number:
            self._place(self.cursor, self._running, self._batch)
