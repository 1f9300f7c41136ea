# SPDX-License-Identifier: BSD-3-Clause
"""What one step does, in the order of a hand-written loop; TrainStep captures the same code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from . import _watch, amp
from ._ahead import Ahead, memory
from ._batch_counts import READERS, BatchCounts
from ._captured import unflatten
from ._compiled import compile_loss
from ._cycle import Cycle
from ._ops import _C
from ._precision import Precision
from ._results import Results
from ._step_arguments import check, check_data, compile_arguments, loss_and_extras
from .graphs import CaptureError, Pool


class _Aids(NamedTuple):
    """What a captured forward and backward has besides."""

    between: Callable[[], None] | None = None  # called between the two
    branch: AbstractContextManager | None = None  # takes what backward needn't wait for
    counts: AbstractContextManager = nullcontext()  # around forward


_NO_AIDS = _Aids()


class Eager:
    """Forward, backward, update and `zero_grad` of one (micro-)batch."""

    def __init__(self, loss_fn, optimizer, model, precision, scaler, accumulate, compile, data):
        check(loss_fn, optimizer, model, precision, scaler)
        arguments = compile_arguments(compile)
        self._original, self.compiles = loss_fn, arguments is not None
        self.optimizer, self._scaler, self._model = optimizer, scaler, model
        self.cycle = Cycle(optimizer, accumulate)
        self.device = next(p.device for g in optimizer.param_groups for p in g["params"])
        own = precision is not None and self.device.type == "cuda"
        self.loss_fn: Callable = (
            loss_fn if arguments is None else compile_loss(loss_fn, arguments, own)
        )
        self.precision = Precision(precision, optimizer, self.roots, self.device)
        self.data = data
        check_data(data, self.device)
        if precision == "fp16" and optimizer.amp is None:
            optimizer.amp = amp.LossScale(self.device)
        optimizer._loss_scaled = precision == "fp16" or scaler is not None  # for tr.lr's handles

    # -- how it is set up ------------------------------------------------------------------------

    @property
    def accumulates(self) -> bool:
        return self.cycle.size > 1

    @property
    def model(self) -> nn.Module | None:
        reference = vars(self.optimizer).get("_model")
        return self._model if self._model is not None else reference and reference()

    def roots(self) -> dict[nn.Module, str]:
        """The modules that `loss_fn` uses, with names for messages."""
        roots = {self.model: "model"} if self.model is not None else {}
        return {**_watch.look_into(self._original).modules, **roots}

    @property
    def step_replaced(self) -> bool:
        step = vars(self.optimizer).get("step")
        return step is not None and not getattr(step, "_wrapped_by_lr_sched", False)

    def scale_parts(self) -> tuple | None:
        if self._scaler is not None:
            return amp.parts_of_scaler(self._scaler, self.device)
        return self.optimizer.amp.parts if self.precision.name == "fp16" else None

    # -- one step --------------------------------------------------------------------------------

    def __call__(self, leaves: tuple, spec):
        """An eager step; returns what `loss_fn` returned, detached, as copies.

        Raises:
            RuntimeError: inside of `Ema.swapped()`, amid another TrainStep's micro-batches, and for
            a replaced `optimizer.step` that wouldn't be called. Nothing has been changed then.
        """
        self._refuse()
        self.precision.update()
        outputs, results = self._run(leaves, spec)
        loss, *rest = [t.clone() for t in outputs]
        return results(loss, rest)

    def captured_work(
        self, leaves: tuple, spec, copies, pool: Pool, ahead: Ahead | None
    ) -> Results:
        """The same for a capture in `pool`: nothing is executed, and the hyper-parameters are on
        the device already. `copies`, a GraphCopies, gets the outputs; returns what makes a result
        of them. With `data`, the batch is the one of `ahead`."""
        params = self._params()
        _C.renew_accumulators(params)
        try:
            with pool.branch() as beside:
                batch = unflatten(leaves, spec) if ahead is None else ahead.begin(beside)
                aids = self._aids(pool)._replace(between=ahead and ahead.draw)
                with self._watching_outsiders():
                    outputs, results = self._forward_backward(batch, aids)
                holder = results.holder()
                if holder:
                    raise CaptureError(
                        f"its extras have a {holder}, in which tensors lie that are not copied; "
                        "return them in a dict, list or (named) tuple"
                    )
                if ahead is not None:
                    ahead.advance(outputs, params)
                low = self.precision.copies().values()
                # A loss that comes alone is copied beside the update, unless that writes it. Extras
                # may be anything, and are copied after the update, as in an eager step.
                alone = len(outputs) == 1 and not memory(outputs) & memory((*params, *low))
                if alone:
                    beside(lambda: copies.add_results(outputs))
                self._update(True)
            if not alone:
                copies.add_results(outputs)
        finally:
            self._forget_gradients(params)
            self.precision.gradients_are_used()
            torch.clear_autocast_cache()  # casts that were captured, not made
        return results

    def _run(self, leaves: tuple, spec) -> tuple[list[Tensor], Results]:
        params = self._params()
        had_gradients = any(p.grad is not None for p in params)
        done = False
        try:
            batch = unflatten(leaves, spec)
            batch = batch if self.data is None else self.data.draw(*batch)
            outputs, results = self._forward_backward(batch)
            self._update(False)
            done = True
        finally:
            # After a failure, half of the gradients must not be added to by the next step.
            if not (done or had_gradients):
                self._forget_gradients(params)
            self.precision.gradients_are_used()
            if not done:
                self.precision.refresh()  # it may have written to the copies
        return outputs, results

    def _forward_backward(
        self, batch: tuple, aids: _Aids = _NO_AIDS
    ) -> tuple[list[Tensor], Results]:
        between_them = [aids.between] if aids.between is not None else []

        def work() -> tuple[Tensor, object, object]:
            with self.precision.autocast(), aids.counts:
                returned = self.loss_fn(*batch)
            self.precision.forward_is_done()
            loss, extras = loss_and_extras(returned)
            self.precision.backward_begins(loss)
            while between_them:  # once, if this is tried again
                between_them.pop()()
            loss.backward(self._seed(loss))
            return loss, returned, extras

        loss, returned, extras = self.precision.run(work, aids.branch)
        results = Results(returned, extras)
        return [loss.detach(), *results.rest], results

    def _seed(self, loss: Tensor) -> Tensor | None:
        parts = self.scale_parts()
        return None if parts is None else parts[0].to(loss.dtype).expand(loss.shape)

    def _update(self, prepared: bool) -> None:
        parts = self.scale_parts()
        if self.accumulates:
            if prepared:
                if self._plan.host.accumulate(vars(self.optimizer), True) != _C.DONE:
                    raise CaptureError("the set of gradients changes from step to step")
                return
            self.cycle.begin()
            self.optimizer._accumulate()
            self._forget_gradients(self._params())
            self.cycle.end(parts)
        elif prepared:
            self.optimizer._update(parts, 1, True)
        else:
            if self.optimizer._has_step_hooks():
                self.precision.gradients_are_used()  # hooks find them in the weights' dtype
            if self.step_replaced and parts is None:
                self.optimizer.step()
            else:
                self.optimizer._train_step(parts)
            dropped = self.optimizer._sums_dropped
            self.optimizer.zero_grad()
            self.optimizer._sums_dropped = dropped  # they may be another TrainStep's

    def _refuse(self) -> None:
        self.optimizer._refuse_averages()
        if self.accumulates:
            self.cycle.refuse_another()
        if self.step_replaced and (self.accumulates or self.scale_parts() is not None):
            why = f"accumulate={self.cycle.size}" if self.accumulates else "a loss scale"
            raise RuntimeError(
                f"TrainStep: optimizer.step was replaced, which a step with {why} doesn't call; "
                f"delete the attribute, or train without {why}"
            )

    def _aids(self, pool: Pool) -> _Aids:
        """They change modules for a while, at which compiled code looks: it would be made anew."""
        roots = self.roots()
        modules = _watch.all_modules(roots)
        found = _watch.look_into(self._original, *_watch.forwards(modules))
        if self.compiles or found.compiled or any(map(_watch.is_compiled, modules)):
            return _NO_AIDS
        reads = any(_watch.names_one_of(READERS, function) for function in found.functions)
        counts = nullcontext() if reads else BatchCounts(roots, modules)
        return _Aids(branch=pool.branch(1), counts=counts)

    # -- gradients -------------------------------------------------------------------------------

    @property
    def _plan(self):
        return self.optimizer._current_plan()

    def _params(self) -> list[Tensor]:
        return [p for g in self.optimizer.param_groups for p in g["params"]]

    @staticmethod
    def _forget_gradients(params: list[Tensor]) -> None:
        for p in params:
            p.grad = None

    def _outsiders(self) -> dict[Tensor, str]:
        """Parameters that no optimizer of ours steps: a replay would overwrite their gradients
        instead of adding to them."""
        known = set(self._params())
        found = _watch.look_into(self._original)
        named = {t: name for t, name in found.tensors.items() if t.requires_grad and t.is_leaf}
        for module, name in _watch.all_modules(self.roots()).items():
            for key, p in module._parameters.items():
                if p is not None and p.is_leaf:
                    named.setdefault(p, f"{name}.{key}")
        return {p: name for p, name in named.items() if p not in known}

    @contextmanager
    def _watching_outsiders(self) -> Iterator[None]:
        outsiders = self._outsiders()
        gradients = {p: p.grad for p in outsiders}
        self._forget_gradients(list(outsiders))
        try:
            yield
            touched = [name for p, name in outsiders.items() if p.grad is not None]
        finally:
            for p, grad in gradients.items():
                p.grad = grad
        if touched:
            raise CaptureError(
                f"{touched[0]} gets a gradient but isn't in the optimizer; requires_grad_(False) "
                "would keep it from one"
            )
