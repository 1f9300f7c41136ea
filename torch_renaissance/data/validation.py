# SPDX-License-Identifier: BSD-3-Clause
"""`CachedValidation`: batches that are read and preprocessed once, and kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ._copies import low
from .prefetch import device_of, floating, prefetch

_SPARE = 0.1  # of the device's memory, which is left to the program


class CachedValidation:
    """The batches of a loader, read once and kept: on the device if they fit, else in pinned
    memory, from where they are prefetched.

    The loader is run at the first iteration, as a whole and before the first batch is handed out.
    If it raises, nothing is kept, and the next iteration runs it anew. "They fit" means that a
    tenth of the device's memory stays free beside them and all that is in use or kept by torch's
    allocator at that time.

    Batches on the device are handed out as they are kept, so they must not be changed in place.

    Args:
        loader: any iterable of batches, whose tensors may lie in any pytree. Other things than
            tensors are kept as they are.
        transform: `transform(batch)` returns what to keep of a batch; called once for each, with
            what the loader yields. To run it on the GPU, let the loader be `prefetch(loader)`.
        device: by default the current GPU, or the CPU where there is none.
        dtype: for floating tensors, after `transform`.

    Attributes:
        loader, device, dtype: as given.

    Raises:
        TypeError, ValueError, RuntimeError: as `prefetch` does, or for a transform that isn't
            callable.
        RuntimeError: by an iteration that finds a batch changed in place. It says so until `clear`
            is called.
    """

    def __init__(
        self,
        loader: Iterable,
        *,
        transform: Callable | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        if not hasattr(type(loader), "__iter__") and not hasattr(type(loader), "__getitem__"):
            raise TypeError(
                "CachedValidation: loader must be an iterable of batches, got "
                f"{type(loader).__name__}"
            )
        if transform is not None and not callable(transform):
            raise TypeError(
                f"CachedValidation: transform must be callable, got {type(transform).__name__}"
            )
        self.loader, self._transform = loader, transform
        self.device = device_of("CachedValidation", device)
        self.dtype = floating("CachedValidation", dtype)
        self._kept: _Kept | None = None

    def __len__(self) -> int:
        """Batches; before the first iteration what the loader says."""
        return len(self.loader) if self._kept is None else len(self._kept.batches)

    @property
    def nbytes(self) -> int:
        """Of the tensors that are kept; 0 before the first iteration."""
        return 0 if self._kept is None else self._kept.nbytes

    @property
    def resident(self) -> bool:
        """Whether batches are kept on `device` itself; False before the first iteration."""
        return self._kept is not None and self._kept.resident

    def clear(self) -> None:
        """Lets the batches go; the next iteration runs the loader anew."""
        self._kept = None

    def __iter__(self) -> Iterator:
        if self._kept is None:
            self._kept = self._read()
        kept = self._kept
        if kept.resident:
            return _hand_out(kept, self.device)
        return iter(prefetch([batch.filled() for batch in kept.batches], device=self.device))

    def _read(self) -> _Kept:
        with torch.inference_mode(False), torch.no_grad():  # inference tensors have no versions
            kept = _Kept([], 0, True, None)
            budget = room(self.device)
            for batch in self.loader:
                if self._transform is not None:
                    batch = self._transform(batch)
                leaves, spec = pytree.tree_flatten(batch)
                kept.nbytes += sum(
                    t.numel() * low(t, self.dtype).itemsize for t in leaves if isinstance(t, Tensor)
                )
                if kept.resident and budget is not None and kept.nbytes > budget:
                    _move_to_the_host(kept)
                kept.batches.append(self._keep(leaves, spec, kept))
            if self.device.type == "cuda":
                # Whatever stream the batches are used on finds them there.
                kept.stream = torch.cuda.current_stream(self.device)
                kept.stream.synchronize()
        return kept

    def _keep(self, leaves: list, spec: pytree.TreeSpec, kept: _Kept) -> _Batch:
        if kept.resident:
            try:
                return _Batch([self._on_the_device(leaf) for leaf in leaves], spec)
            except torch.OutOfMemoryError:
                _move_to_the_host(kept)
        return _Batch([pinned_copy(leaf, self.dtype) for leaf in leaves], spec)

    def _on_the_device(self, leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        moved = leaf.to(low(leaf, self.dtype)).to(self.device)
        # The loader may fill its own tensor again.
        return (moved.clone() if moved is leaf else moved).detach()


@dataclass
class _Batch:
    leaves: list
    spec: pytree.TreeSpec

    def __post_init__(self):
        self._tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self._versions = [t._version for t in self._tensors]

    def filled(self) -> object:
        return pytree.tree_unflatten(self.leaves, self.spec)

    def check(self, index: int) -> None:
        for t, version in zip(self._tensors, self._versions, strict=True):
            if t._version != version:
                raise RuntimeError(
                    f"CachedValidation: a tensor of batch {index} ({t.dtype}, shape "
                    f"{list(t.shape)}) was changed in place, so the next evaluation would see "
                    "other data. Change a clone() instead, and call clear() to read the loader "
                    "again"
                )

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        for t in self._tensors:
            t.record_stream(stream)


@dataclass
class _Kept:
    batches: list[_Batch]
    nbytes: int
    resident: bool
    stream: torch.cuda.Stream | None  # in whose memory resident batches lie


def _hand_out(kept: _Kept, device: torch.device) -> Iterator:
    for index, batch in enumerate(kept.batches):
        batch.check(index)
        if kept.stream is not None:
            stream = torch.cuda.current_stream(device)
            if stream != kept.stream:
                batch.record_stream(stream)
        yield batch.filled()
        batch.check(index)


def room(device: torch.device) -> int | None:
    """Bytes of a GPU that may be taken for good; None where nothing limits it."""
    if device.type != "cuda":
        return None
    # What torch's allocator keeps is not counted as free: training wants it back.
    free, total = torch.cuda.mem_get_info(device)
    return free - int(_SPARE * total)


def _move_to_the_host(kept: _Kept) -> None:
    kept.resident = False
    for i, batch in enumerate(kept.batches):  # one after the other, each frees its memory
        kept.batches[i] = _Batch([pinned_copy(leaf, None) for leaf in batch.leaves], batch.spec)


def pinned_copy(leaf: object, dtype: torch.dtype | None) -> object:
    if not isinstance(leaf, Tensor):
        return leaf
    copy = torch.empty_like(leaf, dtype=low(leaf, dtype), device="cpu", pin_memory=True)
    return copy.copy_(leaf).detach()
