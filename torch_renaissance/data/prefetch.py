# SPDX-License-Identifier: BSD-3-Clause
"""`prefetch`: a loader whose next batches are copied to the GPU while one is used."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from ._copies import Copies, is_capturing, low


def prefetch(
    loader: Iterable,
    depth: int = 2,
    *,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
) -> Prefetched:
    """The batches of `loader` on `device`; on a GPU the next ones are copied while one is used.

    Copies run on a stream of their own, from pinned memory: tensors that aren't pinned are put into
    a staging buffer first, which is used again once the device has read it. A batch is right for
    everything that is launched on the stream that is current when it is asked for. All of this
    happens inside of `next()`; there is no thread, so nothing of it gets in the way of a CUDA
    graph that the program captures between two batches.

    Args:
        loader: any iterable of batches, such as a DataLoader: tensors in any pytree (tuples, lists,
            dicts, ...). What isn't a tensor is passed on. Tensors on `device` are passed on too,
            and such a batch is handed out before the loader is asked for another, since loaders may
            fill the same tensors again. A DataLoader is taken to make new ones for each batch.
        depth: batches on the device at a time, the one in use included, so that `depth - 1` are
            fetched ahead; at least 1. Ignored where `device` is the CPU.
        device: by default the current GPU, or the CPU where there is none.
        dtype: for floating tensors, which are converted on the host before the copy, so that fewer
            bytes travel.

    Returns:
        An iterable that may be iterated again as often as `loader` may; `len()` and other
        attributes are the loader's, which itself is `.loader` (for `.loader.sampler.set_epoch`).

    Raises:
        TypeError: for a loader that can't be iterated, or a dtype that isn't one.
        ValueError: for a depth below 1, a dtype that isn't floating, a device that is no CPU or
            GPU.
        RuntimeError: for a GPU that isn't there; and by `next()` inside of a capture, whose replays
            would all see the batch that was there once.
        What the loader raises, after the batches before it.
    """
    return Prefetched(loader, depth, device, dtype)


class Prefetched:
    """What `prefetch` returns."""

    def __init__(self, loader: Iterable, depth: int, device, dtype: torch.dtype | None):
        if not hasattr(type(loader), "__iter__") and not hasattr(type(loader), "__getitem__"):
            raise TypeError(
                f"prefetch: loader must be an iterable of batches, got {type(loader).__name__}"
            )
        if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
            raise ValueError(f"prefetch: depth must be an int >= 1, got {depth!r}")
        self.loader, self.depth = loader, depth
        self.device, self.dtype = device_of("prefetch", device), floating("prefetch", dtype)
        self._stream: torch.cuda.Stream | None = None  # one, since each has memory of its own

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> object:
        if name.startswith("_") or name == "loader":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator:
        if self.device.type != "cuda":
            return self._on_the_host()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        copies = Copies(self.device, self.dtype, self._stream, self.depth)
        return _Guarded(self._ahead(copies), self.device)

    def _on_the_host(self) -> Iterator:
        for batch in self.loader:
            yield pytree.tree_map_only(
                Tensor, lambda t: t.to(self.device, low(t, self.dtype)), batch
            )

    def _ahead(self, copies: Copies) -> Iterator:
        # Those keep their values while the next batch is made.
        keeps = isinstance(self.loader, (list, tuple, DataLoader))
        waiting: deque = deque()
        source, ended, error = iter(self.loader), False, None
        try:
            while True:
                while not ended and len(waiting) < self.depth:
                    if waiting and waiting[-1].borrowed:
                        break
                    try:
                        if not keeps:
                            copies.settle()
                        waiting.append(copies.start(next(source)))
                    except StopIteration:
                        ended = True
                    except Exception as e:
                        ended, error = True, e
                if not waiting:
                    break
                yield copies.finish(waiting.popleft())
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame
            copies.abandon(waiting)


class _Guarded:
    """Refuses batches inside of a capture: a stream that captures can't wait for the copies, and
    replays wouldn't. A generator that raised would be at its end; this one goes on."""

    def __init__(self, batches: Iterator, device: torch.device):
        self._batches, self._device = batches, device

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> object:
        if is_capturing(self._device):
            raise RuntimeError(
                "prefetch: a batch was asked for while a CUDA graph is being captured; its replays "
                "would see that one batch for ever. Get it before the capture, and copy the next "
                "ones into its memory"
            )
        return next(self._batches)


def device_of(who: str, device: torch.device | str | int | None) -> torch.device:
    """With its index, by default the current GPU's."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{who}: device must be a CPU or a CUDA GPU, got {device}")
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index if device.index is not None or not count else torch.cuda.current_device()
    if index is None or index >= count:
        raise RuntimeError(f"{who}: device is {device}, but torch sees {count} usable GPUs here")
    return torch.device("cuda", index)


def floating(who: str, dtype: torch.dtype | None) -> torch.dtype | None:
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"{who}: dtype must be a torch.dtype, got {dtype!r}")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(
            f"{who}: dtype must be a floating-point dtype such as torch.float16, got {dtype}"
        )
    return dtype
