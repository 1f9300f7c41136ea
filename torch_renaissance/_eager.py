# SPDX-License-Identifier: BSD-3-Clause
"""What one step does, in the order of a hand-written loop; TrainStep captures the same code."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from . import _low, _watch, amp
from ._ahead import Ahead, memory
from ._captured import unflatten
from ._ops import _C
from ._results import Results
from ._step_arguments import check, check_data, compile_arguments, loss_and_extras
from .graphs import CaptureError, Pool, RandomState

# Whose micro-batches an optimizer's sums hold.
_LAST_CYCLE: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Eager]]
_LAST_CYCLE = weakref.WeakKeyDictionary()


class Eager:
    """Forward, backward, update and `zero_grad` of one (micro-)batch."""

    def __init__(self, loss_fn, optimizer, model, precision, scaler, accumulate, compile, data):
        check(loss_fn, optimizer, model, precision, scaler)
        arguments = compile_arguments(compile)
        self.loss_fn: Callable = (
            loss_fn if arguments is None else torch.compile(loss_fn, **arguments)
        )
        self._original, self.compiles = loss_fn, arguments is not None
        self.optimizer, self.precision, self._scaler = optimizer, precision, scaler
        self._model = model
        self.accumulate = accumulate
        self._micro = 0  # micro-batches since the last update
        self._dropped: dict[nn.Module, str] = {}
        self._names: dict[nn.Module, str] = {}
        self._places: list[tuple] = []
        self._proven = False  # whether a forward has used them
        self._low = _low.LowWeights([], {})
        self.device = next(p.device for g in optimizer.param_groups for p in g["params"])
        self.data = data
        check_data(data, self.device)
        if precision == "fp16" and optimizer.amp is None:
            optimizer.amp = amp.LossScale(self.device)
        optimizer._loss_scaled = precision == "fp16" or scaler is not None  # for tr.lr's handles

    # -- how it is set up ------------------------------------------------------------------------

    @property
    def accumulate(self) -> int:
        return self._accumulate

    @accumulate.setter
    def accumulate(self, value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"TrainStep: accumulate must be an int >= 1, got {value!r}")
        self._accumulate = value
        if not getattr(self, "_micro", 0):
            self.cycle = value

    @property
    def accumulates(self) -> bool:
        return self.cycle > 1

    @property
    def model(self) -> nn.Module | None:
        reference = vars(self.optimizer).get("_model")
        return self._model if self._model is not None else reference and reference()

    @property
    def step_replaced(self) -> bool:
        step = vars(self.optimizer).get("step")
        return step is not None and not getattr(step, "_wrapped_by_lr_sched", False)

    def scale_parts(self) -> tuple | None:
        if self._scaler is not None:
            return amp.parts_of_scaler(self._scaler, self.device)
        return self.optimizer.amp.parts if self.precision == "fp16" else None

    # -- one step --------------------------------------------------------------------------------

    def __call__(self, leaves: tuple, spec):
        """An eager step; returns what `loss_fn` returned, detached, as copies.

        Raises:
            RuntimeError: inside of `Ema.swapped()`, amid another TrainStep's micro-batches, and for
            a replaced `optimizer.step` that wouldn't be called. Nothing has been changed then.
        """
        self._refuse()
        if self.precision:
            self.prepare_low(self.roots())
            if not self._plan.host.fits(vars(self.optimizer)):
                self._plan.sync(self.optimizer)
            self._plan.host.refresh_low()
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
                with self._watching_outsiders():
                    outputs, results = self._forward_backward(batch, ahead and ahead.draw)
                holder = results.holder()
                if holder:
                    raise CaptureError(
                        f"its extras have a {holder}, in which tensors lie that are not copied; "
                        "return them in a dict, list or (named) tuple"
                    )
                if ahead is not None:
                    ahead.advance(outputs, params)
                low = self._plan.low_copies().values() if self.precision else ()
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
            self._low.restore_grad_dtypes()
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
            self._low.restore_grad_dtypes()
            if self.precision and not done:
                self.refresh_low()  # it may have written to them
        return outputs, results

    def _forward_backward(
        self, batch: tuple, between: Callable[[], None] | None = None
    ) -> tuple[list[Tensor], Results]:
        """`between` is called between the two."""
        look = True
        for _ in range(len(self._places) + 2):
            before = self._before_trial()
            copies = self._plan.low_copies() if self.precision else {}
            self._low = _low.LowWeights(self._places, copies, before is not None and look)
            try:
                with torch.enable_grad(), self._low:
                    with self._autocast():
                        returned = self.loss_fn(*batch)
                    loss, extras = loss_and_extras(returned)
                    if between is not None:
                        between()
                        between = None  # another trial doesn't do it again
                    loss.backward(self._seed(loss))
                self._proven = True
                break
            except _low.ReadsWeight as read:
                self._drop_read(read)
                before()
            except torch.OutOfMemoryError:  # perhaps since nothing ran compiled
                if before is None or not look:
                    raise
                look = False
                before()
            except RuntimeError as error:
                if before is None or not self._drop_from_low(error):
                    raise
                before()
        results = Results(returned, extras)
        return [loss.detach(), *results.rest], results

    def prove_again(self) -> None:
        """The next step takes another way through `loss_fn`, perhaps."""
        self._proven = False

    def _before_trial(self) -> Callable | None:
        """Where the 16-bit weights are untried: puts back what a forward changes that failed."""
        if not self.precision or self._proven:
            return None
        # Also weights that aren't trained: those of a teacher follow the model.
        kept = [t for m in _watch.all_modules(self.roots()) for t in _untrained(m)]
        values = [t.clone() for t in kept]
        randoms = RandomState(self.device)
        gradients = {p: p.grad for p in self._params()}

        def put_back() -> None:
            for tensor, value in zip(kept, values, strict=True):
                tensor.copy_(value)
            randoms.restore()
            self._low.restore_grad_dtypes()
            for p, grad in gradients.items():
                p.grad = grad

        return put_back

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
            self.begin_micro_batch()
            self.optimizer._accumulate()
            self._forget_gradients(self._params())
            self.end_micro_batch()
        elif prepared:
            self.optimizer._update(parts, 1, True)
        else:
            if self.step_replaced and parts is None:
                self.optimizer.step()
            else:
                self.optimizer._train_step(parts)
            dropped = self.optimizer._sums_dropped
            self.optimizer.zero_grad()
            self.optimizer._sums_dropped = dropped  # they may be another TrainStep's

    def begin_micro_batch(self) -> None:
        self._refuse_another_cycle()
        last = _LAST_CYCLE.get(self.optimizer)
        if last is None or last() is not self:
            self._micro = 0
        if self._micro == 0 or self.optimizer._sums_dropped:
            self.optimizer._begin_accumulation()
            _LAST_CYCLE[self.optimizer] = weakref.ref(self)

    def end_micro_batch(self) -> None:
        """After the last one of a cycle: the update. If that raises, the cycle counts for nothing,
        as the gradients of a step that raises."""
        self._micro += 1
        if self._micro >= self.cycle:
            size, self._micro, self.cycle = self.cycle, 0, self.accumulate
            if self.optimizer._has_step_hooks():
                self._update_from_gradients(size)
            else:
                self.optimizer._train_step(self.scale_parts(), size)

    def _update_from_gradients(self, size: int) -> None:
        """Hooks may read and change `.grad`, as in a loop."""
        self.optimizer._show_sums(size)
        try:
            self.optimizer._train_step(self.scale_parts())
        finally:
            self._forget_gradients(self._params())

    def _refuse(self) -> None:
        self.optimizer._refuse_averages()
        if self.accumulates:
            self._refuse_another_cycle()
        if self.step_replaced and (self.accumulates or self.scale_parts() is not None):
            why = f"accumulate={self.cycle}" if self.accumulates else "a loss scale"
            raise RuntimeError(
                f"TrainStep: optimizer.step was replaced, which a step with {why} doesn't call; "
                f"delete the attribute, or train without {why}"
            )

    def _refuse_another_cycle(self) -> None:
        """The sums are the optimizer's: two cycles would take each other's."""
        last = _LAST_CYCLE.get(self.optimizer)
        other = last and last()
        begun = other is not None and other._micro and not self.optimizer._sums_dropped
        if begun and other is not self:
            raise RuntimeError(
                f"TrainStep: another TrainStep has summed {other._micro} of {other.cycle} "
                "micro-batches on this optimizer; call it until it has updated, or delete it"
            )

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

    # -- mixed precision -------------------------------------------------------------------------

    def roots(self) -> dict[nn.Module, str]:
        roots = {self.model: "model"} if self.model is not None else {}
        return {**_watch.look_into(self._original).modules, **roots}

    def _autocast(self):
        """Of the forward pass only: backward follows the dtypes of what it differentiates."""
        if torch.is_autocast_enabled(self.device.type):
            if self.precision:
                raise RuntimeError(
                    f"TrainStep: precision={self.precision!r} does its own autocast; call the step "
                    "outside of torch.autocast, or leave precision out"
                )
            torch.clear_autocast_cache()  # casts of weights that have been updated since
        if not self.precision:
            return nullcontext()
        return torch.autocast(self.device.type, amp.PRECISIONS[self.precision])

    def prepare_low(self, roots: dict[nn.Module, str]) -> None:
        """Gives the weights that autocast would cast their places in plane H."""
        self._names = _watch.all_modules(roots)
        before, self._places = self._places, _low.places_of_low(list(roots), set(self._dropped))
        self._proven = self._proven and _low.same_places(before, self._places)
        wanted = {p: amp.PRECISIONS[self.precision] for _, _, p in self._places}
        plan = self._plan
        if plan.low != wanted:
            plan.low = wanted
            plan.sync(self.optimizer)

    def refresh_low(self) -> None:
        with torch.no_grad():
            for p, copy in self._plan.low_copies().items():
                copy.copy_(p)

    def left_to_autocast(self) -> dict[str, str]:
        return {self._names.get(m, type(m).__name__): why for m, why in self._dropped.items()}

    def _drop_read(self, read: _low.ReadsWeight) -> None:
        """What reads one weight for its gradient may be tried again without that one. Where there
        is none, or a second one is read, it may read all, and mustn't do by halves what it does."""
        owners = self._low.owners(read.weight)
        if not read.differentiable or any(_low.READ in why for why in self._dropped.values()):
            owners = [module for module, _, _ in self._places]
        self._dropped |= dict.fromkeys(owners, str(read))
        self.prepare_low(self.roots())

    def _drop_from_low(self, error: RuntimeError) -> bool:
        """A module that was called where autocast is off needs its float32 weights."""
        if not self.precision or "type" not in str(error):
            return False
        owners = {module for module, _, _ in self._places}
        for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
            module = frame.f_locals.get("self")
            if not isinstance(module, nn.Module):
                continue
            # Its own weights, or those of modules below that it uses directly.
            found = [m for m in module.modules() if m in owners]
            if found:
                self._dropped |= dict.fromkeys(found, str(error).splitlines()[0])
                self.prepare_low(self.roots())
                return True
        return False


def _untrained(module: nn.Module) -> list[Tensor]:
    tensors = (*module._parameters.values(), *module._buffers.values())
    return [t for t in tensors if t is not None and not t.requires_grad]
