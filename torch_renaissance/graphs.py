# SPDX-License-Identifier: BSD-3-Clause
"""Captures work in a CUDA graph so that a failure leaves no trace, and tells what failed where."""

from __future__ import annotations

import gc
import linecache
import random
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from ._ops import _C

_OWN = Path(__file__).resolve().parent
_TORCH = Path(torch.__file__).resolve().parent


class CaptureError(RuntimeError):
    """Why work can't be captured, with the line of the program where that is known."""


class RandomState:
    """The generators that a step may draw from on the host, and the device's."""

    def __init__(self, device: torch.device):
        self._device = device
        self._host = self._read()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @staticmethod
    def _read() -> tuple:
        numpy = sys.modules.get("numpy")
        state = numpy.random.get_state() if numpy else None
        return torch.get_rng_state(), random.getstate(), state

    def host_changed(self) -> str:
        """Which of the host's generators has been drawn from since, or ''."""
        before, now = self._host, self._read()
        if not torch.equal(before[0], now[0]):
            return "torch's CPU generator"
        if before[1] != now[1]:
            return "Python's random"
        if before[2] is not None and not all(
            (a == b) if not hasattr(a, "tobytes") else a.tobytes() == b.tobytes()
            for a, b in zip(before[2], now[2], strict=True)
        ):
            return "numpy.random"
        return ""

    def restore(self) -> None:
        torch.set_rng_state(self._host[0])
        random.setstate(self._host[1])
        if self._host[2] is not None:
            sys.modules["numpy"].random.set_state(self._host[2])
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


class Pool:
    """The memory that all graphs of one TrainStep share, and the streams they are captured on."""

    def __init__(self, device: torch.device):
        self.device = device
        self.handle = torch.cuda.graph_pool_handle()
        # Nodes keep the priority of their stream: the branch takes what the rest leaves it.
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._sides = [torch.cuda.Stream(device) for _ in range(2)]
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def bytes(self) -> int:
        """What the pool holds of the device's memory."""
        segments = torch.cuda.memory_snapshot()
        mine = [s for s in segments if tuple(s.get("segment_pool_id", ())) == tuple(self.handle)]
        return sum(s["total_size"] for s in mine)

    def capture(self, work: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, object]:
        """Captures what `work` puts on the device; returns the graph and what `work` returned.

        Raises:
            CaptureError: where it can't be captured: random states are then as before, and nothing
                of the attempt is left on streams and in memory.
        """
        randoms = RandomState(self.device)
        if not self._graphs:  # torch takes no pool again that its last graph has left
            self.handle = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        current = torch.cuda.current_stream(self.device)
        torch.cuda.synchronize(self.device)
        capture = 0
        try:
            with _no_garbage_collection(), torch.cuda.stream(self.stream), _no_host_syncs():
                graph.capture_begin(pool=self.handle, capture_error_mode="thread_local")
                capture = _C.current_capture()
                try:
                    value = work()
                except BaseException:
                    self._abandon(graph)
                    raise
                self._finish(graph)
            drawn = randoms.host_changed()
            if drawn:
                raise CaptureError(f"it draws from {drawn} on the host, once and for all replays")
            _C.settle_joins(capture)
            graph.instantiate()
        except BaseException as error:
            _C.forget_joins(capture)
            graph.reset()
            randoms.restore()
            torch.cuda.synchronize(self.device)
            if isinstance(error, CaptureError) or not isinstance(error, Exception):
                raise
            why = describe(error)
            # Its frames hold the autograd graph of the attempt, which must not outlive it.
            traceback.clear_frames(error.__traceback__)
            raise CaptureError(why) from None
        current.wait_stream(self.stream)
        self._graphs.add(graph)
        return graph, value

    @contextmanager
    def branch(self, number: int = 0) -> Iterator[Callable[..., None]]:
        """In a capture: a branch of the graph, beside what the block captures. What it yields puts
        work there, to begin after what was captured before, or, `first`, after what was captured
        before the block; what comes after the block waits for all of it. Branches within each other
        have other numbers, 0 or 1."""
        side, current = self._sides[number], torch.cuda.current_stream(self.device)
        entered = current.record_event()
        begun = False  # until then the side stream isn't part of the capture

        def put(work: Callable[[], None], first: bool = False) -> None:
            nonlocal begun
            side.wait_event(entered if first else current.record_event())
            begun = True
            with torch.cuda.stream(side):
                work()

        try:
            yield put
        except BaseException:
            with suppress(RuntimeError):  # what failed may have ended the capture
                if begun:
                    current.wait_stream(side)
            raise
        if begun:
            current.wait_stream(side)

    def release(self, graph: torch.cuda.CUDAGraph) -> None:
        """Frees what only this graph has of the pool."""
        self._graphs.discard(graph)
        graph.reset()

    def _finish(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except BaseException:
            self._clean_up()
            raise

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except Exception:  # what made the work fail has spoilt the capture too
            self._clean_up()

    def _clean_up(self) -> None:
        """torch leaves its allocator and its generator in the middle of a capture that failed. A
        small one that succeeds brings the generator out of it."""
        torch._C._cuda_endAllocateToPool(self.device.index, self.handle)
        torch._C._cuda_releasePool(self.device.index, self.handle)
        number = torch.zeros((), device=self.device)
        self.stream.wait_stream(torch.cuda.default_stream(self.device))
        repair = torch.cuda.CUDAGraph()
        repair.capture_begin(capture_error_mode="thread_local")
        number.add_(1)
        repair.capture_end()
        repair.reset()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Nothing of an earlier time may be freed while a capture is underway."""
    gc.collect()
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def _no_host_syncs() -> Iterator[None]:
    """Waiting for the device raises before it reaches the driver, where it would spoil the capture;
    and hooks on activations, which a replay would not run, raise too."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    register = torch.Tensor.register_hook

    def refuse(tensor, hook):
        raise CaptureError(f"a tensor gets a hook at {user_line(traceback.extract_stack())}")

    torch.Tensor.register_hook = refuse
    try:
        yield
    finally:
        torch.Tensor.register_hook = register
        torch.cuda.set_sync_debug_mode(mode)


def describe(error: BaseException) -> str:
    """An error in one line, with the line of the program that led to it."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    where = user_line(traceback.extract_tb(error.__traceback__))
    return f"{type(error).__name__}: {first}" + (f" ({where})" if where else "")


def user_line(stack: traceback.StackSummary) -> str:
    """The innermost line outside of torch and of this package: "file:line: code"."""
    for frame in reversed(stack):
        path = Path(frame.filename).resolve()
        if not path.is_relative_to(_OWN) and not path.is_relative_to(_TORCH):
            code = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
            return f"{frame.filename}:{frame.lineno}: {code}"
    return ""


def free_unused(device: torch.device) -> None:
    """Gives back the memory that released graphs have left."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()  # some were made inside of the captures
        torch.cuda.empty_cache()


def nodes(graph: torch.cuda.CUDAGraph) -> dict[str, int]:
    """Kernels by name, "memcpy", "memset" and "other", with how often each is in the graph."""
    return _C.graph_nodes(graph.raw_cuda_graph())
