# SPDX-License-Identifier: BSD-3-Clause
"""One captured step: what it was captured for, its inputs and results, and how often it ran."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from . import graphs
from ._ahead import Ahead
from ._ops import _C

_WAITING = 16  # keys that are kept until they are captured
PLAIN = (Tensor, int, float, complex, bool, str, type(None), torch.dtype, torch.device)


def flatten(batch: tuple) -> tuple[tuple, pytree.TreeSpec | None]:
    """The leaves of a call's arguments; no spec where they are leaves themselves."""
    if all(isinstance(a, PLAIN) for a in batch):
        return batch, None
    leaves, spec = pytree.tree_flatten(batch)
    return tuple(leaves), spec


def unflatten(leaves: tuple, spec: pytree.TreeSpec | None) -> tuple:
    return leaves if spec is None else pytree.tree_unflatten(list(leaves), spec)


def static_input(leaf: object, device: torch.device) -> Tensor | None:
    """Memory of a graph's own for one tensor of a batch, on the device; None for what isn't one.

    Raises:
        CaptureError: for a tensor or another object that a copy doesn't stand for.
    """
    if not isinstance(leaf, Tensor):
        if not isinstance(leaf, PLAIN):
            raise graphs.CaptureError(
                f"a batch with a {type(leaf).__name__}, whose contents may change"
            )
        return None
    if type(leaf) is not Tensor or leaf.requires_grad or leaf.layout != torch.strided:
        raise graphs.CaptureError(f"a batch with a {type(leaf).__name__} that isn't plain data")
    if leaf.is_contiguous() or not _C.is_dense(leaf):
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)


def levels() -> int:
    """Of the stack, from the caller up to the program: what `warnings.warn` wants to know."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(__package__):
        level, frame = level + 1, frame.f_back
    return level


class Key:
    """What a graph is for: arguments, watched Python objects, torch's switches."""

    def __init__(self, leaves: tuple, spec, watch, accumulates: bool):
        self.signature = _C.Signature(leaves)
        self.spec, self.watch, self.accumulates = spec, watch, accumulates
        self.switches = _C.GlobalState()
        self.calls = 0  # eager ones so far
        self.failed = ""  # why it can't be captured
        self.changes: dict[str, Tensor] = {}  # what loss_fn changes besides modules; for verify=

    def fits(self, leaves: tuple, spec, accumulates: bool) -> bool:
        return (
            self.accumulates == accumulates
            and self.spec == spec
            and self.signature.fits(leaves)
            and self.watch.check()
            and self.switches.fits()
        )

    def __str__(self) -> str:
        return f"({self.signature})" + (", one of several micro-batches" * self.accumulates)


class Keys:
    """Those that are waiting to be captured; and what keeps calls from having one twice.

    Args:
        patience: new keys in a row after which another one is a sign of that.
    """

    def __init__(self, patience: int):
        self._patience = patience
        self._keys: list[Key] = []
        self._misses = 0
        self._restless = ""

    def find(self, leaves: tuple, spec, accumulates: bool, new_watch: Callable) -> Key:
        """The key of a call, a new one where none fits."""
        for key in self._keys:
            if key.fits(leaves, spec, accumulates):
                self._misses = 0
                return key
        alike = [k for k in self._keys if k.signature.fits(leaves)]
        changed = alike[-1].watch.difference() if alike else "the arguments"
        self._misses += 1
        if self._misses > self._patience:
            self._restless = self._restless or f"it changes at every step: {changed}"
        else:
            self._restless = ""
        key = Key(leaves, spec, new_watch(), accumulates)
        key.failed = self._restless
        # What is only one of many states of the same call need not be kept alive.
        dropped = (alike if self._restless else alike[:-1]) + self._keys[:-_WAITING]
        for old in dropped:
            old.watch.release()
        self._keys = [*(k for k in self._keys if k not in dropped), key]
        return key

    def add(self, key: Key) -> None:
        self._keys.append(key)

    def remove(self, key: Key) -> None:
        self._keys = [k for k in self._keys if k is not key]

    def release(self) -> None:
        """Forgets all of them."""
        for key in self._keys:
            key.watch.release()
        self._keys, self._misses = [], 0


@dataclass
class Captured:
    """A graph and all that a replay needs."""

    key: Key
    graph: torch.cuda.CUDAGraph
    inputs: tuple  # static tensors, None for what isn't a tensor
    copies: object  # _C.GraphCopies: into the inputs, and out of the results
    rebuild: object = None  # makes extras of their leaves
    generation: int = 0  # of the optimizer's HostStep
    scale: Tensor | None = None  # of the loss, whose address the graph has
    accumulated: list[bool] = field(default_factory=list)
    ahead: Ahead | None = None  # where it draws its batches
    replays: int = 0
    last_used: int = 0
    _nodes: dict[str, int] | None = None
    _results: list[Tensor] = field(default_factory=list)

    def __post_init__(self):
        self._exec = self.graph.raw_cuda_graph_exec()

    def replay(self, leaves: tuple) -> None:
        self._results = self.copies.prepare(self._exec, leaves)
        if self.ahead is None:
            self.graph.replay()
        else:
            self.ahead.fill()
            self.graph.replay()
            self.ahead.replayed()
        self.replays += 1

    def results(self):
        """What `loss_fn` returned in the last replay."""
        loss, *rest = self._results
        self._results = []
        return self.rebuild(loss, rest)

    @property
    def nodes(self) -> dict[str, int]:
        if self._nodes is None:
            self._nodes = graphs.nodes(self.graph)
        return self._nodes

    def summary(self) -> dict:
        """For `Explanation.graphs`."""
        others = ("memcpy", "memset", "other")
        return {
            "key": str(self.key),
            "nodes": sum(self.nodes.values()),
            "kernels": {n: c for n, c in self.nodes.items() if n not in others},
            "replays": self.replays,
        }

    def close(self, pool: graphs.Pool) -> None:
        pool.release(self.graph)
        self.key.watch.release()
        self.copies, self._results, self.inputs, self.ahead = None, [], (), None


@dataclass(frozen=True)
class Explanation:
    """What `TrainStep.explain` returns; prints as a text.

    Attributes:
        state: "captured" if the last call was a replay, else "eager".
        graphs: for each graph its `key`, number of `nodes`, `kernels` (name -> count) and
            `replays`.
        pool_bytes: device memory that the graphs share.
        fallbacks: why calls ran eagerly, and how many did, in the order of their first occurrence.
        autocast: modules whose weights were left to autocast, with the reason.
    """

    state: str
    graphs: list[dict]
    pool_bytes: int
    fallbacks: dict[str, int]
    autocast: dict[str, str]

    def __str__(self) -> str:
        lines = [f"state: {self.state}; {len(self.graphs)} graphs in {self.pool_bytes:,} bytes"]
        for i, g in enumerate(self.graphs):
            lines.append(
                f"graph {i}: {g['key']}: {g['nodes']} nodes, {sum(g['kernels'].values())} kernels, "
                f"{g['replays']:,} replays"
            )
            for name, count in sorted(g["kernels"].items(), key=lambda item: -item[1]):
                lines.append(f"  {count:5} x {name if len(name) <= 88 else name[:87] + '…'}")
        lines += [f"eager {n:,} times: {why}" for why, n in self.fallbacks.items()]
        lines += [
            f"weights left to autocast: {name} ({why})" for name, why in self.autocast.items()
        ]
        return "\n".join(lines)

    @property
    def nodes(self) -> int:
        """Of the graph replayed last."""
        return self.graphs[0]["nodes"] if self.graphs else 0

    @property
    def kernels(self) -> dict[str, int]:
        """Of the graph replayed last."""
        return self.graphs[0]["kernels"] if self.graphs else {}

    @property
    def key(self) -> str:
        """Of the graph replayed last."""
        return self.graphs[0]["key"] if self.graphs else ""

    @property
    def replays(self) -> int:
        return sum(g["replays"] for g in self.graphs)
