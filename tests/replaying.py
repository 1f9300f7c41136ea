# SPDX-License-Identifier: BSD-3-Clause
# A stand-in for CUDA graphs on a CPU, with their way of being wrong: a replay repeats the captured
# operations on the memory of that time, whatever Python's objects have become since.

from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import torch_renaissance as tr
from torch_renaissance import graphs
from torch_renaissance._captured import static_input
from torch_renaissance._eager import Eager
from torch_renaissance._ops import _C
from torch_renaissance.data import DeviceLoader


class _Recording(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls, self.held = [], []
        self.made = {}  # id of a tensor -> call and place in its outputs
        self.outside = {}  # id of a tensor -> alias of its memory, values before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        flat, spec = pytree.tree_flatten((args, kwargs or {}))
        refs = [self._ref(x) for x in flat]
        returned = func(*args, **(kwargs or {}))
        for place, out in enumerate(pytree.tree_leaves(returned)):
            if isinstance(out, torch.Tensor) and id(out) not in self.outside:
                self.made.setdefault(id(out), (len(self.calls), place))
                self.held.append(out)
        self.calls.append((func, refs, spec))
        return returned

    def add(self, func, *tensors):
        """What the dispatcher doesn't see: a replay calls it with what `tensors` are then."""
        flat, spec = pytree.tree_flatten((tensors, {}))
        self.calls.append((func, [self._ref(x) for x in flat], spec))

    def _ref(self, x):
        if not isinstance(x, torch.Tensor):
            return lambda results: x
        if id(x) in self.made:
            call, place = self.made[id(x)]
            return lambda results: results[call][place]
        if id(x) not in self.outside:
            self.held.append(x)
            self.outside[id(x)] = (x.detach(), x.detach().clone())
        alias = self.outside[id(x)][0]
        return lambda results: alias

    def put_back(self):
        for alias, value in self.outside.values():
            alias.copy_(value)


def filled(leaf, device):
    """As `static_input`, with the batch's values, which a recording works on."""
    static = static_input(leaf, device)
    return static if static is None else static.copy_(leaf)


class Graph:
    def __init__(self, recording):
        self._calls = recording.calls

    def raw_cuda_graph_exec(self):
        return 0

    @torch.no_grad()
    def replay(self):
        results = []
        for func, refs, spec in self._calls:
            args, kwargs = pytree.tree_unflatten([ref(results) for ref in refs], spec)
            results.append(pytree.tree_leaves(func(*args, **kwargs)))


class Pool:
    """As `graphs.Pool`."""

    recording = None  # while there is one

    def __init__(self, device):
        self.released = 0

    def bytes(self):
        return 0

    def capture(self, work):
        recording = Pool.recording = _Recording()
        try:
            with recording:
                value = work()
        except graphs.CaptureError:
            raise
        except Exception as error:
            raise graphs.CaptureError(graphs.describe(error)) from None
        finally:
            recording.put_back()
            Pool.recording = None
        return Graph(recording), value

    @contextmanager
    def branch(self, number=0):
        """Of all orders that branches may run in, the one that a mistake doesn't survive."""
        yield lambda work, first=False: work()

    def release(self, graph):
        graph._calls = SimpleNamespace(__iter__=None)  # a replay would fail
        self.released += 1


# -- training steps --------------------------------------------------------------------------------


class Copies:
    """As `_C.GraphCopies`; results are overwritten by the next replay."""

    def __init__(self, inputs):
        self._inputs, self._results = inputs, []

    def add_results(self, results):
        for result in results:
            with _disable_current_modes():
                self._results.append(torch.empty_like(result))
            self._results[-1].copy_(result)

    def prepare(self, exec, batch):
        for to, leaf in zip(self._inputs, batch, strict=True):
            if to is not None:
                to.copy_(leaf)
        return list(self._results)


def _update(self, prepared, eagerly=Eager._update):
    """As `Eager._update`, whose kernels the dispatcher doesn't see."""
    if not prepared:
        return eagerly(self, prepared)
    params = [p for p in self._params() if p.grad is not None]

    @torch.enable_grad()
    def update(*grads):
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad.to(p.dtype)  # 16-bit ones are only taken in forward and backward
        if self.accumulates:
            self.optimizer._accumulate()
        else:
            self.optimizer._train_step(self.scale_parts())
        self._forget_gradients(params)

    Pool.recording.add(update, *[p.grad for p in params])


def _zeros(self, size, empty=DeviceLoader.buffer):
    """As `DeviceLoader.buffer`: a recording works on what it holds."""
    found = empty(self, size)
    found.x.zero_()
    found.y.zero_()
    return found


def capture_steps(monkeypatch):
    """Makes a TrainStep on a CPU capture, by the stand-in."""
    monkeypatch.setattr(tr.TrainStep, "_why_not", lambda self: "")
    monkeypatch.setattr(graphs, "Pool", Pool)
    monkeypatch.setattr(_C, "GraphCopies", Copies)
    monkeypatch.setattr(Eager, "_update", _update)
    monkeypatch.setattr(DeviceLoader, "buffer", _zeros)
