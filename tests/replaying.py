# SPDX-License-Identifier: BSD-3-Clause
# A stand-in for CUDA graphs on a CPU, with their way of being wrong: a replay repeats the captured
# operations on the memory of that time, whatever Python's objects have become since.

from types import SimpleNamespace

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torch_renaissance import graphs
from torch_renaissance._captured import static_input


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

    def __init__(self, device):
        self.released = 0

    def bytes(self):
        return 0

    def capture(self, work):
        recording = _Recording()
        try:
            with recording:
                value = work()
        except Exception as error:
            raise graphs.CaptureError(graphs.describe(error)) from None
        finally:
            recording.put_back()
        return Graph(recording), value

    def release(self, graph):
        graph._calls = SimpleNamespace(__iter__=None)  # a replay would fail
        self.released += 1
