# SPDX-License-Identifier: BSD-3-Clause
"""What our optimizers share: a step of one launch, and torch's meaning of everything else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import optimizer as _torch

from .._ops import _C
from ..amp import LossScale
from ..regions import Kind, Regions, Slot, classify
from . import _native
from ._judge import is_fresh, step_is_hosted
from ._plan import Plan
from ._rule import Options, Rule

_DONE = _C.DONE
_OWN = ("max_grad_norm", "ema_decay", "amp")  # attributes that travel with deepcopy and pickle
_profiler_enabled = torch.autograd._profiler_enabled
_ATTEMPTS = 4  # the plan is stale, a gradient turns out unsupported, state is foreign, it fits


def module_groups(params) -> tuple[object, dict[Tensor, tuple[str, Kind]]]:
    """A module as two param groups, weights and, without decay, bias-like ones; else unchanged."""
    if not isinstance(params, nn.Module):
        return params, {}
    known = classify(params)
    weights = [p for p, (_, kind) in known.items() if not kind.bias_like]
    others = [p for p, (_, kind) in known.items() if kind.bias_like]
    groups = [{"params": weights}, {"params": others, "weight_decay": 0.0}]
    return [g for g in groups if g["params"]], known


class Fused:
    """Mixed in before a class of torch.optim. Its instances may also be torch's own objects whose
    class was swapped, so nothing here relies on `__init__`."""

    _step_supports_amp_scaling = True  # GradScaler hands grad_scale and found_inf over
    _rule: Rule
    _native: type

    max_grad_norm: float | None = None
    """What `step()` clips the norm of all gradients to, as `torch.nn.utils.clip_grad_norm_` does
    before it; None: nothing. Read at every step. `.grad` itself stays unclipped."""

    ema_decay: float | Callable[[int], float] | None = None
    """How much of the averaged weights (`tr.Ema`) each step keeps; or a function of the number of
    steps so far, skipped ones included, that says so. Set by `tr.accelerate`, read every step."""

    _sums_dropped = False  # whether zero_grad() was called since sums of gradients were begun

    amp: LossScale | None = None
    """The loss scale of `tr.TrainStep(precision="fp16")`."""

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of all gradients at the last step with `max_grad_norm` or a loss scale, before
        clipping: a 0-dim tensor on the device; None if there was no such step."""
        plan = vars(self).get("_plan")
        return plan.grad_norm() if plan else None

    @property
    def skipped_steps(self) -> int:
        """How many steps a found infinity has skipped. Waits for the device."""
        plan = vars(self).get("_plan")
        return vars(self).get("_skipped_before", 0) + (plan.skipped_steps() if plan else 0)

    def step(self, closure: Callable | None = None):
        """Updates all parameters that have a gradient; see the torch class of the same name.

        Args:
            closure: reevaluates the model and returns the loss, with gradients enabled.

        Returns:
            What `closure` returned, or None.

        Raises:
            RuntimeError: what torch's step raises for the parameters left to it, where state
                doesn't fit its parameter, and for an lr or a decay that float32 can't hold.
            AssertionError: from `GradScaler.step` where no parameter has a gradient, as natively.
        """
        own = self.__dict__
        plan = own.get("_plan")
        if type(own.get("found_inf")) is int:
            self._take_no_checks()
        if (
            closure is None
            and plan is not None
            and plan.simple
            and not own["_optimizer_step_pre_hooks"]
            and not own["_optimizer_step_post_hooks"]
            and not _torch._global_optimizer_pre_hooks
            and not _torch._global_optimizer_post_hooks
            and not _profiler_enabled()
            and plan.host.run(own) == _DONE
        ):
            return None  # everything as it was at the last step: one call has done it
        return _step_with_hooks(self, closure)

    step.hooked = True  # torch need not wrap it: hooks and profiler are seen to
    step._torchdynamo_disable = True  # nothing in it is worth tracing

    def pack_gradients(self) -> list[Tensor]:
        """Copies the gradients into contiguous planes and returns them, one flat tensor a block.

        With `gradients="flat"` only. Parameters without a gradient count as zeros in the planes and
        stay untouched by the step. The next `step()` updates from the planes, whatever happens to
        `.grad` in between, so that an all-reduce of them takes effect; `zero_grad()` forgets them.

        Raises:
            RuntimeError: with `gradients="gather"`; and in the `step()` after it, where the planes
                no longer fit the parameters.
        """
        plan = self._current_plan()
        if plan.options.gradients != "flat":
            raise RuntimeError(
                "pack_gradients: this optimizer gathers its gradients; pass gradients='flat' to "
                "tr.accelerate for contiguous ones"
            )
        self._run(lambda: plan.host.pack(vars(self)), lambda params: None)
        self._packed = plan.packed()
        return list(self._packed)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch.optim.Optimizer.zero_grad; packed gradients are forgotten, and so is what a
        TrainStep with `accumulate > 1` has summed so far."""
        self._packed, self._sums_dropped = None, True
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict:
        """As torch's: the same keys, shapes and dtypes, `step` on the CPU unless the group is
        capturable or fused, and nothing for parameters whose every step was skipped."""
        live = self.state
        self.state = self._portable_state()
        try:
            return super().state_dict()
        finally:
            self.state = live

    def __getstate__(self) -> dict:
        # As state_dict shows it: a copy that hasn't stepped yet has no plan that would know better.
        state = {**super().__getstate__(), "state": self._portable_state()}
        plan = vars(self).get("_plan")
        options = plan.options if plan else vars(self).get("_options", Options())
        options.learn({p for group in self.param_groups for p in group["params"]})
        own = {k: vars(self)[k] for k in (*_OWN, "_averages") if k in vars(self)}
        if plan and plan.swapped:
            raise RuntimeError(
                f"{type(self).__name__}: the parameters hold their averages now; copy or pickle it "
                "outside of `Ema.swapped()`"
            )
        if plan and options.averages:
            own["_averages"] = plan.averages(), plan.averaged(), plan.host.ema_calls
        return {**state, **own, "_options": options, "_skipped_before": self.skipped_steps}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        # A load_state_dict: the values go into our memory. What it lacks the next step makes.
        if "_plan" in vars(self):
            self._plan.sync(self, making=False)

    def _regions(self) -> Regions:
        plan = self._current_plan()
        plan.sync(self)
        return plan.regions()

    def _current_plan(self) -> Plan:
        plan = vars(self).get("_plan")
        if plan is None:
            plan = self._plan = Plan(self._rule, vars(self).get("_options") or Options())
            if "_averages" in vars(self):
                averages, averaged, plan.host.ema_calls = vars(self).pop("_averages")
                plan.start_averages(averages, averaged)
        return plan

    def _run(self, attempt: Callable[[], int], native: Callable[[set[Tensor]], None]) -> None:
        """`attempt` until the plan fits; before it, `native` once for each parameter of torch's, so
        that what torch's form refuses is refused before anything has changed."""
        plan = self._current_plan()
        stepped: set[Tensor] = set()
        for _ in range(_ATTEMPTS):
            left = plan.native.keys() - stepped
            if left:
                native(left)
                stepped |= left
            answer = attempt()
            if answer == _C.DONE:
                return
            if answer == _C.UNSUPPORTED:
                plan.leave_to_torch(plan.host.unsupported())
            plan.sync(self)
        raise RuntimeError(
            f"{type(self).__name__}.step: parameters or state change while the step prepares; "
            "don't modify them from another thread"
        )

    def _take_no_checks(self) -> None:
        """GradScaler found no gradient that it could check, and would have refused an optimizer
        that isn't fused."""
        self.found_inf = None
        if not all(group.get("fused") for group in self.param_groups):
            del self.grad_scale, self.found_inf
            raise AssertionError("No inf checks were recorded for this optimizer.")

    def _refuse_averages(self) -> None:
        if self._current_plan().swapped:
            raise RuntimeError(
                f"{type(self).__name__}.step: the parameters hold their averages now; step outside "
                "of `Ema.swapped()`"
            )

    def _update(
        self, loss_scale: tuple | None = None, micro_batches: int = 1, prepared: bool = False
    ) -> None:
        """The step without hooks. For TrainStep: `loss_scale` (`LossScale.parts`) has scaled the
        gradients; with `micro_batches > 1` they were summed by `_accumulate`; `prepared`: the
        hyper-parameters are on the device already."""
        self._refuse_averages()
        plan = self._current_plan()
        own = vars(self)
        if micro_batches == 1 and plan.options.gradients == "flat" and not own.get("_packed"):
            self.pack_gradients()
        packed = own.get("_packed")
        self._packed = None
        source = _C.PACKED if packed else _C.GATHER if micro_batches == 1 else _C.ACCUMULATED

        def attempt() -> int:
            if packed and [id(plane) for plane in packed] != [id(p) for p in plan.packed()]:
                raise RuntimeError(
                    f"{type(self).__name__}.step: parameters have got gradients or a new layout "
                    "since pack_gradients(); call it again"
                )
            return plan.host.run(own, source, loss_scale, micro_batches, prepared)

        if prepared:  # in a capture, where nothing can be made anew
            if attempt() != _C.DONE:
                raise RuntimeError(
                    "a parameter gets its first gradient, or one that is no plain one"
                )
            return
        self._run(attempt, lambda params: self._update_native(params, loss_scale))

    def _train_step(
        self, loss_scale: tuple | None = None, micro_batches: int = 1, prepared: bool = False
    ) -> None:
        """`_update` with hooks, for TrainStep."""
        self._opt_called = True  # what schedulers look for
        self._train_step_arguments = loss_scale, micro_batches, prepared
        try:
            _train_step_with_hooks(self)
        finally:
            del self._train_step_arguments

    def _begin_accumulation(self) -> None:
        """Sums of gradients, in plane G, start from zero."""
        plan = self._current_plan()
        if not plan.sums:
            plan.sums = True
            plan.sync(self)
        plan.host.begin_accumulation()
        self._sums_dropped = False

    def _accumulate(self) -> None:
        """Adds the gradients to the sums."""
        plan = self._current_plan()
        own = vars(self)

        def refuse(params: set[Tensor]) -> None:
            self._refuse_native(params, "accumulate > 1")

        self._run(lambda: plan.host.accumulate(own), refuse)

    def _has_step_hooks(self) -> bool:
        own = (self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks)
        return any((*own, _torch._global_optimizer_pre_hooks, _torch._global_optimizer_post_hooks))

    def _show_sums(self, micro_batches: int) -> None:
        """Puts the means of the sums into `.grad`, where step hooks look for gradients."""
        for p, total in self._current_plan().summed().items():
            p.grad = total / micro_batches

    def _update_native(self, params: set[Tensor], loss_scale: tuple | None) -> None:
        plan = self._current_plan()
        if self.max_grad_norm is not None:
            self._refuse_native(params, "max_grad_norm")
        if loss_scale is not None:
            self._refuse_native(params, "a loss scale")
        if plan.options.averages:
            self._refuse_native(params, "ema_decay")

        def decays(p: Tensor) -> bool:
            return plan.decays(plan.options.describe(p)[1])

        _native.step(self, self._native, params, decays)

    def _refuse_native(self, params: set[Tensor], what: str) -> None:
        native = self._current_plan().native
        for p in params:
            if p.grad is not None:
                name, why = native[p]
                raise RuntimeError(
                    f"{type(self).__name__}.step: {what} can't be had with {name}, which is left "
                    f"to torch's own form ({why}); do that part by hand for this model"
                )

    def _slots_with_state(self) -> list[tuple[Slot, dict, Tensor]]:
        """With the entry in `state` and the count on the CPU, which is copied once a block."""
        plan = vars(self).get("_plan")
        steps: dict[int, Tensor] = {}
        found = []
        for p, slot in plan.slots.items() if plan else ():
            entry = self.state.get(p)
            if slot.block is None or not entry:
                continue
            if id(slot.block) not in steps:
                steps[id(slot.block)] = slot.block.steps.cpu()
            found.append((slot, entry, steps[id(slot.block)][slot.index]))
        return found

    def _begun_state(self, slots: list[tuple[Slot, dict, Tensor]]) -> defaultdict:
        """`state`, or a copy of it without the entries that torch would only make in a step."""
        planes = self._rule.planes
        fresh = {slot.param for slot, entry, step in slots if is_fresh(entry, planes, step)}
        if not fresh:
            return self.state
        return defaultdict(dict, {p: entry for p, entry in self.state.items() if p not in fresh})

    def _portable_state(self) -> defaultdict:
        slots = self._slots_with_state()
        result = defaultdict(dict, self._begun_state(slots))
        for slot, entry, step in slots:
            if slot.param not in result or "step" not in entry:
                continue
            group = self.param_groups[slot.group]
            dtype = _torch._get_scalar_dtype(group.get("fused"))
            if step_is_hosted(group) and slot.block.device.type != "cpu":
                result[slot.param] = {**entry, "step": step.to(dtype, copy=True)}
            elif entry["step"].dtype != dtype:
                result[slot.param] = {**entry, "step": entry["step"].to(dtype)}
        return result


def _plain_step(self, closure: Callable | None = None):
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    self._update()
    return loss


def _plain_train_step(self) -> None:
    loss_scale, micro_batches, prepared = self._train_step_arguments
    self._update(loss_scale, micro_batches, prepared)


_train_step_with_hooks = torch.optim.Optimizer.profile_hook_step(_plain_train_step)
_step_with_hooks = torch._disable_dynamo(torch.optim.Optimizer.profile_hook_step(_plain_step))
