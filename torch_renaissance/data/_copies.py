# SPDX-License-Identifier: BSD-3-Clause
"""Copies of host batches to a GPU on a stream of their own, with the lifetimes that this needs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_ALIGNED = 64  # bytes: no two tensors of a staging buffer share a cache line


def low(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype that a tensor of a batch is to have."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


class _Slot:
    """Pinned memory for the host tensors of one batch, and the event after their copies."""

    def __init__(self):
        self.done = torch.cuda.Event()
        self.sources: list[Tensor] = []  # pinned by others; held until they have been read
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reuse(self) -> None:
        """Waits until the device has read what lies here."""
        self.done.synchronize()
        self.sources = []

    def stage(self, sources: list[Tensor], targets: list[Tensor]) -> list[Tensor]:
        """The sources as pinned tensors of the targets' dtypes and strides."""
        sizes = [-(-t.nbytes // _ALIGNED) * _ALIGNED for t in targets]
        if sum(sizes) > self._memory.numel():
            with torch.inference_mode(False):  # whatever mode the next batch is fetched in
                self._memory = pinned(sum(sizes))
        staged = []
        pieces = self._memory[: sum(sizes)].split(sizes)
        for piece, source, target in zip(pieces, sources, targets, strict=True):
            flat = piece[: target.nbytes].view(target.dtype)
            staged.append(flat.as_strided(target.size(), target.stride()).copy_(source))
        return staged


def pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


@dataclass
class Underway:
    """A batch whose copies have been put on the stream."""

    leaves: list
    spec: pytree.TreeSpec
    targets: list[Tensor]  # those leaves that the copies write
    consumer: torch.cuda.Stream  # whose memory they lie in
    done: torch.cuda.Event
    borrowed: bool  # a leaf is the loader's own tensor


class Copies:
    """Where batches go on their way to `device`.

    The tensors on the device are allocated on the consumer's stream, and a copy waits for what that
    stream was given before. So the memory of a used batch is used again in the order of the
    stream, without `record_stream`, and a host that runs ahead of the device piles up no batches.

    Args:
        depth: batches that may be underway at once.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype | None, stream: torch.cuda.Stream, depth: int
    ):
        self._device, self._dtype, self._stream = device, dtype, stream
        self._slots = [_Slot() for _ in range(depth + 1)]
        self._next = itertools.cycle(self._slots)
        self._last: _Slot | None = None

    def start(self, batch: object) -> Underway:
        """Puts the copies of a batch on the stream."""
        slot = self._last = next(self._next)
        slot.reuse()
        leaves, spec = pytree.tree_flatten(batch)
        places, borrowed = [], False
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            if _is_plain_on_the_host(leaf):
                places.append(i)
                continue
            leaves[i] = leaf.to(self._device, low(leaf, self._dtype))
            borrowed = borrowed or leaves[i] is leaf
        sources = [leaves[i] for i in places]
        targets = [
            torch.empty_like(s, dtype=low(s, self._dtype), device=self._device) for s in sources
        ]
        consumer = torch.cuda.current_stream(self._device)
        if targets:
            self._put(slot, sources, targets, consumer)
        for i, target in zip(places, targets, strict=True):
            leaves[i] = target
        return Underway(leaves, spec, targets, consumer, slot.done, borrowed)

    def _put(self, slot: _Slot, sources: list, targets: list, consumer: torch.cuda.Stream) -> None:
        pairs = list(zip(sources, targets, strict=True))
        direct = [(s, t) for s, t in pairs if _is_ready(s, t)]
        others = [(s, t) for s, t in pairs if not _is_ready(s, t)]
        staged = slot.stage([s for s, _ in others], [t for _, t in others])
        slot.sources = [s for s, _ in direct]
        free = consumer.record_event()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(free)
            for source, target in direct:
                target.copy_(source, non_blocking=True)
            for source, (_, target) in zip(staged, others, strict=True):
                target.copy_(source, non_blocking=True)
            slot.done.record(self._stream)

    def finish(self, underway: Underway) -> object:
        """The batch, for what is launched on the current stream from now on."""
        consumer = torch.cuda.current_stream(self._device)
        if underway.targets:
            consumer.wait_event(underway.done)
        if consumer != underway.consumer:
            for target in underway.targets:
                target.record_stream(consumer)
        return pytree.tree_unflatten(underway.leaves, underway.spec)

    def settle(self) -> None:
        """Waits until pinned memory of the loader's own has been read."""
        if self._last is not None and self._last.sources:
            self._last.done.synchronize()

    def abandon(self, batches: Iterable[Underway]) -> None:
        """Of batches that nobody will use: nobody else gets their memory while it is written."""
        for underway in batches:
            for target in underway.targets:
                target.record_stream(self._stream)
            if underway.targets and not is_capturing(self._device):
                underway.done.synchronize()


def is_capturing(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _is_plain_on_the_host(leaf: Tensor) -> bool:
    """Whether its elements are all there is to it. Others go by `Tensor.to`, which waits."""
    return (
        type(leaf) is Tensor
        and leaf.device.type == "cpu"
        and leaf.layout == torch.strided
        and not (leaf.requires_grad or leaf.is_quantized or leaf.is_conj() or leaf.is_neg())
    )


def _is_ready(source: Tensor, target: Tensor) -> bool:
    """Whether the device can read it where and as it lies."""
    same = source.dtype == target.dtype and source.stride() == target.stride()
    return same and source.is_pinned()
