# SPDX-License-Identifier: BSD-3-Clause
"""`Evaluator` and `evaluate`: loss and accuracy of a model, with captured forward passes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain

import torch
from torch import Tensor, nn

from . import _watch, amp, graphs
from ._captured import Captured, Explanation, Key, Keys, flatten, levels, static_input, unflatten
from ._evaluation_arguments import check, check_output, parts
from ._measures import Evaluation, Submitted, Sums
from ._ops import _C, build_info
from .data import prefetch
from .loss import cross_entropy

_ON_THE_CPU = "the model is on the CPU, which has no graphs"
_IGNORED = -100  # torch's default for `ignore_index`


class Evaluator:
    """Loss and accuracy of a model over a loader, with one wait for the device at the end.

    `evaluator(loader)` runs the model in eval mode and without gradients, and gives each module its
    mode back. Sums stay on the device: the loss in fp64, counts in int64. On a GPU the first batch
    of a shape runs eagerly; at the next one forward pass, loss and sums are captured in a CUDA
    graph, which is replayed from then on, in later evaluations too. The last, smaller batch is a
    shape of its own. Weights and buffers are read at every replay, so whatever a training step or
    `tr.Ema.swapped()` writes counts. What else has changed since a capture (moved or replaced
    parameters, other modules, Python numbers in modules, in their `forward` and in `loss_fn`,
    torch's switches) means an eager batch and a new graph; see docs/evaluate.md. Models with
    forward hooks run eagerly, and so does what can't be captured, with one warning that says why.

    Args:
        model: `model(*inputs)` returns a tensor: scores (N, C) or (N, C, d1, ...) of C classes, or
            whatever `loss_fn` takes if `topk` is empty.
        loss_fn: `loss_fn(output, target)` returns the mean over the batch, a tensor of one element;
            by default `tr.cross_entropy`. If it has an `ignore_index`, as `nn.CrossEntropyLoss`
            has, samples with that label aren't counted; else those with -100 aren't.
        precision: "bf16" or "fp16": autocast inside, from the weights as they are.
        topk: for which k to count the labels among the k largest outputs; with C <= k classes all
            are. For targets other than integer labels it must be empty.
        max_graphs: graphs kept. Beyond, one that the last two evaluations didn't use makes room.

    Raises:
        TypeError, ValueError: for arguments that don't fit.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable | None = None,
        *,
        precision: str | None = None,
        topk: Iterable[int] = (1, 5),
        max_graphs: int = 8,
    ):
        self._topk = check(model, loss_fn, precision, topk, max_graphs)
        self._model, self._precision, self._max_graphs = model, precision, max_graphs
        self._loss_fn = cross_entropy if loss_fn is None else loss_fn
        self._sums: Sums | None = None
        self._last: Submitted | None = None
        self._pool: graphs.Pool | None = None
        self._graphs: list[Captured] = []  # the one used last comes first
        self._keys = Keys(patience=6)
        self._evaluations = 0
        self._running = False
        self._fallbacks: dict[str, int] = {}
        self._warned: set[str] = set()
        self.captured = False

    captured: bool
    """Whether the last batch was a replay."""

    def __call__(self, loader: Iterable) -> Evaluation:
        """One evaluation: `submit(loader).result()`.

        Args:
            loader: of batches `(*inputs, target)`, on the host (they are prefetched) or on the
                model's device; a DataLoader, `tr.data.CachedValidation`, a list, ...

        Raises:
            TypeError: for batches without a target, and outputs that aren't tensors.
            ValueError: for a loader without samples, a loss of several elements, and targets that
                accuracy isn't defined for.
            IndexError: for labels that are neither a class nor ignored, at the end; not where
                `topk` is empty and the loss has no `ignore_index`, as they needn't be labels then.
            RuntimeError: with `precision` inside of torch.autocast.
            Whatever the loader, the model and the loss raise.
        """
        return self.submit(loader).result()

    def submit(self, loader: Iterable) -> Submitted:
        """The same without waiting for the device: hands it all batches, and returns what has the
        evaluation as its `result()`. Training can go on meanwhile; the weights that count are those
        of now, since the device works in order. Batches in pinned memory, which it reads itself,
        must stay as they are until `done()`.

        Raises:
            As a call, but what is wrong with labels or with the number of samples is seen, and
            raised, by `result()`.
        """
        if self._running:
            raise RuntimeError("Evaluator: it is evaluating already; use another Evaluator inside")
        device = self._device()
        if self._precision and torch.is_autocast_enabled(device.type):
            raise RuntimeError(
                f"Evaluator: precision={self._precision!r} does its own autocast; evaluate outside "
                "of torch.autocast, or leave precision out"
            )
        self._running = True
        try:
            with evaluating(self._model), torch.inference_mode(False), torch.no_grad():
                self._last = self._run(prefetch(loader, device=device), device)
        finally:
            self._running = False
            torch.clear_autocast_cache()  # casts in the memory of a graph, or of earlier weights
        return self._last

    def _run(self, batches: Iterable, device: torch.device) -> Submitted:
        if device.type == "cuda" and self._last is not None and self._last.event is not None:
            # The evaluation before may have been submitted on another stream.
            torch.cuda.current_stream(device).wait_event(self._last.event)
        if self._sums is None or self._sums.device != device:
            self.reset()
            # Of other losses, without accuracy, integers may be whatever they like.
            classes = self._loss_fn is cross_entropy or hasattr(self._loss_fn, "ignore_index")
            self._sums = Sums(device, self._topk, classes)
        self._evaluations += 1
        self._drop_stale()
        self._sums.zero_()
        torch.clear_autocast_cache()
        for index, batch in enumerate(batches):
            ignored = getattr(self._loss_fn, "ignore_index", _IGNORED)
            self._batch(*flatten((*parts(batch, index), ignored)))
        return self._sums.submit()

    def _device(self) -> torch.device:
        tensors = chain(self._model.parameters(), self._model.buffers())
        return next((t.device for t in tensors), torch.device("cpu"))

    # -- one batch -------------------------------------------------------------------------------

    def _batch(self, leaves: tuple, spec) -> None:
        for captured in self._graphs:
            if captured.key.fits(leaves, spec, False):
                return self._replay(captured, leaves)
        self.captured = False
        reason, key = self._why_not(), None
        if not reason:
            key = self._keys.find(leaves, spec, False, self._new_watch)
            reason = key.failed or self._why_no_room()
        if not reason and key.calls:
            try:
                return self._replay(self._capture(key, leaves), leaves)
            except graphs.CaptureError as error:
                key.failed = reason = str(error)
                torch.cuda.empty_cache()
        if reason:
            self._fall_back(reason)
        if key is not None:
            key.calls += 1
        return self._work(leaves, spec)

    def _work(self, leaves: tuple, spec) -> None:
        """Forward pass, loss and sums: what is captured."""
        *inputs, target, ignored = unflatten(leaves, spec)
        with self._autocast():
            output = self._model(*inputs)
            check_output(output, target, self._topk)
            loss = self._loss_fn(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                "Evaluator: loss_fn must return the mean over the batch, a tensor of one element, "
                f"got {got}"
            )
        self._sums.add(loss, output, target, ignored)

    def _autocast(self):
        if not self._precision:
            return nullcontext()
        return torch.autocast(self._sums.device.type, amp.PRECISIONS[self._precision])

    def _replay(self, captured: Captured, leaves: tuple) -> None:
        captured.replay(leaves)
        captured.last_used = self._evaluations
        self._graphs = [captured, *(g for g in self._graphs if g is not captured)]
        self.captured = True

    # -- capture ---------------------------------------------------------------------------------

    def _why_not(self) -> str:
        reason = self._why_no_graphs()
        if reason:
            return reason
        modules = _watch.all_modules(self._roots(self._look()))
        return _watch.unseen(modules) or _watch.forward_hooks(modules)

    def _why_no_graphs(self) -> str:
        device = self._sums.device
        if device.type != "cuda":
            return _ON_THE_CPU
        if build_info()["cuda"] is None:
            return "this build of torch_renaissance has no CUDA kernels"
        others = {t.device for t in chain(self._model.parameters(), self._model.buffers())}
        if others - {device}:
            return f"the model is on several devices, {', '.join(sorted(map(str, others)))}"
        return ""

    def _look(self) -> _watch.Found:
        return _watch.look_into(self._loss_fn, *_watch.forwards(self._model.modules()))

    def _roots(self, found: _watch.Found) -> dict[nn.Module, str]:
        model = {self._model: "model"}
        return model | found.modules | model  # named by that, and first

    def _new_watch(self):
        found = self._look()
        return _watch.watch(found, _watch.all_modules(self._roots(found)), None)

    def _capture(self, key: Key, leaves: tuple) -> Captured:
        device = self._sums.device
        self._pool = self._pool or graphs.Pool(device)
        inputs = tuple(static_input(leaf, device) for leaf in leaves)
        given = tuple(leaf if s is None else s for s, leaf in zip(inputs, leaves, strict=True))

        def work():
            copies = _C.GraphCopies(inputs)
            self._work(given, key.spec)
            return copies

        try:
            torch.clear_autocast_cache()  # a graph makes its casts itself
            graph, copies = self._pool.capture(work)
        except graphs.CaptureError:
            key.watch.restore()
            raise
        finally:
            torch.clear_autocast_cache()  # casts that were captured, not made
        changed = key.watch.difference()
        if changed:
            key.watch.restore()
            self._pool.release(graph)
            raise graphs.CaptureError(f"running it changes Python's state: {changed}")
        self._keys.remove(key)
        return Captured(key, graph, inputs, copies)

    def _drop_stale(self) -> None:
        """Graphs for a state of the model that is gone, which they would keep alive."""
        for captured in list(self._graphs):
            recent = captured.last_used >= self._evaluations - 1
            if not recent and not captured.key.watch.check():
                self._drop(captured)

    def _why_no_room(self) -> str:
        if len(self._graphs) < self._max_graphs:
            return ""
        oldest = min(self._graphs, key=lambda g: g.last_used)
        if oldest.last_used < self._evaluations - 1:
            self._drop(oldest)
            return ""
        return f"all {self._max_graphs} graphs (max_graphs) are in use"

    def _drop(self, captured: Captured) -> None:
        self._graphs = [g for g in self._graphs if g is not captured]
        captured.close(self._pool)

    def _fall_back(self, reason: str) -> None:
        self._fallbacks[reason] = self._fallbacks.get(reason, 0) + 1
        if reason not in self._warned and reason != _ON_THE_CPU:
            self._warned.add(reason)
            warnings.warn(f"Evaluator runs eagerly: {reason}", stacklevel=levels())

    # -- for the program -------------------------------------------------------------------------

    def explain(self) -> Explanation:
        """Prints and returns what was captured and what ran eagerly, and why."""
        found = Explanation(
            "captured" if self.captured else "eager",
            [g.summary() for g in self._graphs],
            self._pool.bytes() if self._pool else 0,
            dict(self._fallbacks),
            {},
        )
        print(found)
        return found

    def reset(self) -> None:
        """Frees the graphs and their memory. The next evaluation captures anew."""
        device, had = self._sums and self._sums.device, bool(self._graphs)
        for captured in self._graphs:
            captured.close(self._pool)
        self._keys.release()
        self._graphs, self._pool, self._sums, self.captured = [], None, None, False
        if had:
            graphs.free_unused(device)


def evaluate(
    model: nn.Module, loader: Iterable, loss_fn: Callable | None = None, **options
) -> Evaluation:
    """One evaluation, of which nothing is kept: `Evaluator(model, loss_fn, **options)(loader)`.

    For evaluations that come again, an `Evaluator` kept over all of them captures once.
    """
    evaluator = Evaluator(model, loss_fn, **options)
    try:
        return evaluator(loader)
    finally:
        evaluator.reset()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode for all modules, and then for each the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        # By train(), which some modules override; parents first, since it acts on all below.
        for module, mode in modes:
            if module.training != mode:
                module.train(mode)
        for module, mode in modes:
            module.training = mode
