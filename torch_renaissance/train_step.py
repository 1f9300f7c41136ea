# SPDX-License-Identifier: BSD-3-Clause
"""`TrainStep`: forward, loss, backward and update as one CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import nn

from . import _verify, _watch, graphs
from ._ahead import Ahead
from ._captured import Captured, Explanation, Key, Keys, flatten, levels, static_input
from ._eager import Eager
from ._ops import _C, build_info
from .data.loader import DeviceLoader

_IDLE = 100  # calls after which a graph may make room for another


class TrainStep:
    """A training step in one call: `loss = step(*batch)`.

    Runs `loss_fn`, backward, and the optimizer's step, and leaves `.grad`s as `step()` followed by
    `zero_grad()` does. The first calls are ordinary eager steps; then the step is captured in a
    CUDA graph and replayed: one launch, no wait for the device. A call that the graph wasn't made
    for (other shapes, dtypes, strides or devices, train or eval mode, frozen parameters, Python
    numbers that `loss_fn` finds in its closure and globals or in modules, torch's switches) runs
    eagerly and gets a graph of its own. Where a step can't be captured it runs eagerly, training
    goes on undisturbed, and one warning says why.

    Args:
        loss_fn: `loss_fn(*batch)` returns the loss, a tensor of one element, or `(loss, extras)`
            with any pytree of tensors as extras. It may read whatever it likes, but should change
            nothing but buffers of modules.
        optimizer: from `tr.accelerate`, or one of `tr.optim`'s.
        model: whose mode and parameters are watched, besides the modules that `loss_fn` names; by
            default the one given to `accelerate`.
        precision: "bf16" or "fp16": autocast inside of the step, with the weights of Linear, Conv
            and attention kept in 16 bits by the update, so that nothing casts them. Parameters and
            `state_dict` stay float32, and cross entropy on a GPU is `tr.cross_entropy`, which
            rounds nothing on the way. "fp16" scales the loss: `optimizer.amp`. After changing
            weights through `.data`, which torch doesn't see either, call `step.refresh()`.
        scaler: the program's `torch.amp.GradScaler` for a `loss_fn` with autocast of its own: the
            step scales, skips and updates as `scaler.scale(loss).backward()`, `scaler.step` and
            `scaler.update` do.
        accumulate: micro-batches per update; the update is that of their mean. May be set between
            updates: `step.accumulate = k`.
        warmup: eager calls before the first capture, at least 1.
        max_graphs: graphs kept. Beyond, a graph that wasn't used for 100 calls makes room.
        compile: compile `loss_fn` with `torch.compile`; its kernels become part of the graph. Also
            a mode of torch.compile or a dict of its arguments; graphs of its own are left out.
            With `precision` on a GPU some of Inductor's kernels are replaced by ours: norms,
            pooling, GELU and gradients of biases (docs/train_step.md says when).
        verify: compare the first replay of each graph with an eager step from the same state, and
            stay eager where they differ.
        strict: raise a `tr.CaptureError` instead of falling back.
        data: a `tr.data.DeviceLoader`, from which `step()` then draws its batches, epoch after
            epoch. Drawing is part of the graph: the host copies nothing, and a replay draws the
            next batch beside its own work.

    Raises:
        TypeError, ValueError: for arguments that don't fit, or that exclude each other.
        What torch.compile raises, for `compile`.
        TypeError: from `copy` and `pickle`: make a new one instead.
    """

    def __init__(
        self,
        loss_fn: Callable,
        optimizer: torch.optim.Optimizer,
        *,
        model: nn.Module | None = None,
        precision: str | None = None,
        scaler: torch.amp.GradScaler | None = None,
        accumulate: int = 1,
        warmup: int = 3,
        max_graphs: int = 8,
        compile: bool | str | dict = False,
        verify: bool = False,
        strict: bool = False,
        data: DeviceLoader | None = None,
    ):
        for name, value in (("warmup", warmup), ("max_graphs", max_graphs)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"TrainStep: {name} must be an int >= 1, got {value!r}")
        self._eager = Eager(loss_fn, optimizer, model, precision, scaler, accumulate, compile, data)
        self._optimizer, self._loss_fn = optimizer, loss_fn
        self._warmup, self._max_graphs = warmup, max_graphs
        self._verify, self._strict = verify, strict
        self._pool: graphs.Pool | None = None
        self._graphs: list[Captured] = []  # the one used last comes first
        self._current: Captured | None = None
        self._keys = Keys(patience=warmup + 5)
        self._calls = 0
        self._fallbacks: dict[str, int] = {}
        self._warned: set[str] = set()
        self.captured = False

    captured: bool
    """Whether the last call was a replay."""

    def __reduce_ex__(self, protocol):
        raise TypeError(
            "TrainStep: graphs, and a loss_fn that knows its model, can't be copied or pickled; "
            "copy the model and the optimizer and make a TrainStep of them"
        )

    @property
    def accumulate(self) -> int:
        """Micro-batches per update; a new value counts from the next update on."""
        return self._eager.cycle.accumulate

    @accumulate.setter
    def accumulate(self, value: int) -> None:
        self._eager.cycle.accumulate = value

    @property
    def inputs(self) -> tuple:
        """The static inputs of the graph used last. A batch written into them and passed to the
        step is not copied again; empty before the first capture."""
        return self._graphs[0].inputs if self._graphs else ()

    def __call__(self, *batch):
        """One step, or one micro-batch of it. With `data`, it is called without a batch.

        Returns:
            What `loss_fn` returned, detached; tensors keep their value after later steps.
        """
        data = self._eager.data
        if data is None:
            return self._step(batch)
        if batch:
            raise TypeError("TrainStep: with data=, step() draws its batches and takes none")
        size, done = data.upcoming(), False
        try:
            results = self._step((size,))
            done = True
        finally:
            data.drawn(certain=done)
        return results

    def _step(self, batch: tuple):
        self._calls += 1
        captured = self._current
        leaves, spec = (batch, None) if captured and captured.key.spec is None else flatten(batch)
        if captured is not None and captured.key.fits(leaves, spec, self._eager.accumulates):
            if self._ready(captured):
                return self._replay(captured, leaves)
        return self._slowly(*flatten(batch))

    # -- replay ----------------------------------------------------------------------------------

    def _ready(self, captured: Captured) -> bool:
        """Whether a replay does what an eager step would; the device then knows this step's
        hyper-parameters."""
        plan = self._optimizer._current_plan()
        if plan.native or plan.swapped:
            return False
        host, updates = plan.host, not captured.key.accumulates
        parts = self._eager.scale_parts()
        if captured.scale is not (parts and parts[0]):
            return False
        answer = host.ready(vars(self._optimizer), parts, self._eager.cycle.size, updates)
        if answer == _C.DONE and host.generation != captured.generation:
            host.ema_calls -= updates
            return False
        return answer == _C.DONE

    def _replay(self, captured: Captured, leaves: tuple):
        host = self._optimizer._current_plan().host
        if captured.key.accumulates:
            self._eager.cycle.begin()
            captured.replay(leaves)
            host.add_accumulated(captured.accumulated)
            self._eager.cycle.end(self._eager.scale_parts())
        else:
            captured.replay(leaves)
            host.replayed()
            self._optimizer._opt_called = True
        captured.last_used = self._calls
        self.captured = True
        return captured.results()

    # -- everything else -------------------------------------------------------------------------

    def _slowly(self, leaves: tuple, spec):
        for captured in self._graphs:
            if captured.key.fits(leaves, spec, self._eager.accumulates) and self._ready(captured):
                self._use(captured)
                return self._replay(captured, leaves)
        self.captured = False
        reason = self._why_not()
        key = None
        if not reason:
            key = self._keys.find(leaves, spec, self._eager.accumulates, self._new_watch)
            reason = key.failed or self._why_no_room()
        if reason:
            self._fall_back(reason)
        elif key.calls >= self._eager_calls():
            return self._capture(key, leaves)
        if key is None:
            return self._eager(leaves, spec)
        key.calls += 1
        if self._eager.compiles and key.calls == self._eager_calls():
            leaves = _as_static(leaves, self._eager.device)
        if key.calls == 1 and not key.failed:
            self._eager.precision.prove_again()
        kept = _verify.Kept(self._loss_fn) if self._verify else None
        results = self._eager(leaves, spec)
        if kept is not None:
            key.changes = kept.changed()
        return results

    def _eager_calls(self) -> int:
        """Before a kind of call is captured; with precision= the first runs nothing compiled."""
        return max(1 if self._graphs else self._warmup, 2 if self._eager.precision.name else 1)

    def _why_not(self) -> str:
        device = self._eager.device
        if device.type != "cuda":
            return f"the parameters are on the {device.type.upper()}, which has no graphs"
        if build_info()["cuda"] is None:
            return "this build of torch_renaissance has no CUDA kernels"
        plan = self._optimizer._current_plan()
        for name, why in plan.native.values():
            return f"{name} is left to torch's own form of the step ({why})"
        if self._eager.step_replaced:
            return "the optimizer's step was replaced"
        if any(p.grad is not None for g in self._optimizer.param_groups for p in g["params"]):
            return "a parameter has a gradient already, to which backward adds"
        modules = _watch.all_modules(self._eager.roots())
        return _watch.unseen(modules) or _watch.hooks(modules, self._optimizer)

    def _why_no_room(self) -> str:
        generation = self._optimizer._current_plan().host.generation
        for captured in [g for g in self._graphs if g.generation != generation]:
            self._drop(captured)  # written for memory that is used no more
        if len(self._graphs) < self._max_graphs:
            return ""
        oldest = min(self._graphs, key=lambda g: g.last_used)
        if self._calls - oldest.last_used > _IDLE:
            self._drop(oldest)
            return ""
        return f"all {self._max_graphs} graphs (max_graphs) are in use"

    def _fall_back(self, reason: str) -> None:
        self._fallbacks[reason] = self._fallbacks.get(reason, 0) + 1
        if self._strict:
            raise graphs.CaptureError(f"TrainStep: the step can't be captured: {reason}")
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(f"TrainStep runs eagerly: {reason}", stacklevel=levels())

    def _use(self, captured: Captured) -> None:
        self._graphs = [captured, *(g for g in self._graphs if g is not captured)]
        self._current = captured

    def _drop(self, captured: Captured) -> None:
        self._graphs = [g for g in self._graphs if g is not captured]
        self._current = None if self._current is captured else self._current
        captured.close(self._pool)

    # -- capture ---------------------------------------------------------------------------------

    def _capture(self, key: Key, leaves: tuple):
        expected = None
        if self._verify:
            expected = _verify.eager_step(self._eager, leaves, key.spec, key.changes)
        host = self._optimizer._current_plan().host
        calls = host.ema_calls
        captured, failure = self._try(key, leaves)
        if captured is None:
            key.failed = failure
            host.ema_calls = calls
            torch.cuda.empty_cache()
            self._fall_back(failure)
            if expected is None:
                return self._eager(leaves, key.spec)
            expected.take_over()
            return expected.results
        self._use(captured)
        self._keys.remove(key)
        results = self._replay(captured, leaves)
        if expected is not None:
            difference = expected.difference(results)
            if difference:
                key.failed = f"a replay differs from an eager step: {difference}"
                self._drop(captured)
                again = Key(leaves, key.spec, self._new_watch(), key.accumulates)
                again.failed = key.failed
                self._keys.add(again)
                self.captured = False
                (expected.undo if self._strict else expected.take_over)()
                self._fall_back(key.failed)
                return expected.results
        return results

    def _new_watch(self):
        roots = self._eager.roots()
        forwards = _watch.forwards(_watch.all_modules(roots))
        found = _watch.look_into(self._loss_fn, *forwards)
        modules = _watch.all_modules(roots | found.modules | roots)  # named as roots, and first
        return _watch.watch(found, modules, self._optimizer)

    def _try(self, key: Key, leaves: tuple) -> tuple[Captured | None, str]:
        try:
            return self._attempt(key, leaves), ""
        except graphs.CaptureError as error:
            return None, str(error)

    def _attempt(self, key: Key, leaves: tuple) -> Captured:
        eager, optimizer = self._eager, self._optimizer
        plan = optimizer._current_plan()
        self._pool = self._pool or graphs.Pool(eager.device)
        eager.precision.prepare()
        for _ in range(2):
            answer = plan.host.ready(
                vars(optimizer), eager.scale_parts(), eager.cycle.size, not key.accumulates
            )
            if answer == _C.DONE:
                break
            plan.sync(optimizer)
        else:
            raise graphs.CaptureError("the optimizer's state changes from step to step")
        inputs = tuple(static_input(leaf, eager.device) for leaf in leaves)
        ahead = None if eager.data is None else Ahead(eager.data, *leaves)
        given = tuple(leaf if s is None else s for s, leaf in zip(inputs, leaves, strict=True))

        def work():
            copies = _C.GraphCopies(inputs)
            return copies, eager.captured_work(given, key.spec, copies, self._pool, ahead)

        try:
            graph, (copies, rebuild) = self._pool.capture(work)
        except graphs.CaptureError:
            key.watch.restore()
            raise
        changed = key.watch.difference()
        if changed:
            key.watch.restore()
            self._pool.release(graph)
            raise graphs.CaptureError(f"running it changes Python's state: {changed}")
        parts = eager.scale_parts()
        scale = parts and parts[0]
        touched, generation = plan.host.taking_part(), plan.host.generation
        return Captured(key, graph, inputs, copies, rebuild, generation, scale, touched, ahead)

    # -- for the program -------------------------------------------------------------------------

    def explain(self) -> Explanation:
        """Prints and returns what was captured and what ran eagerly, and why."""
        found = Explanation(
            "captured" if self.captured else "eager",
            [g.summary() for g in self._graphs],
            self._pool.bytes() if self._pool else 0,
            dict(self._fallbacks),
            self._eager.precision.left_to_autocast(),
        )
        print(found)
        return found

    def reset(self) -> None:
        """Frees the graphs and their memory. The next calls warm up and capture anew."""
        for captured in self._graphs:
            captured.close(self._pool)
        self._keys.release()
        self._graphs, self._current, self._pool = [], None, None
        self.captured = False
        graphs.free_unused(self._eager.device)

    def refresh(self) -> None:
        """Makes the 16-bit copies anew from the weights. Only needed after a change through
        `.data`; every other change is seen."""
        self._eager.precision.refresh()


def _as_static(leaves: tuple, device: torch.device) -> tuple:
    """A batch in memory like that of a graph's inputs, for which is compiled before the capture."""
    try:
        inputs = [static_input(leaf, device) for leaf in leaves]
    except graphs.CaptureError:
        return leaves
    return tuple(
        leaf if given is None else given.copy_(leaf)
        for given, leaf in zip(inputs, leaves, strict=True)
    )
