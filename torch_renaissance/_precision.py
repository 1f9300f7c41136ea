# SPDX-License-Identifier: BSD-3-Clause
"""A step's `precision=`: which weights it reads in 16 bits, as its first forwards find out."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

from . import _watch, amp
from ._low import LowWeights, ReadsWeight, places_of_low, same_places
from ._ops import ops
from ._weight_gradients import WeightGradients
from .graphs import RandomState

T = TypeVar("T")


@contextmanager
def own_kernels(on: bool = True) -> Iterator[None]:
    """Where autocast is on, on a GPU, some of torch's functions are kernels of ours: cross entropy,
    batch norm (with what follows it in place), max pooling. Not for this thread alone: autograd's
    compute again what is checkpointed."""
    ops.count_autocast_steps.default(int(on))
    try:
        yield
    finally:
        ops.count_autocast_steps.default(-int(on))


def _compiles_autograd() -> bool:
    """Whether torch's compiled autograd is on, which takes no nodes written in C++."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return getattr(module, "compiled_autograd_enabled", False)


class Precision:
    """Autocast in the forward pass, and plane H for the weights that it would cast.

    Args:
        name: "fp16", "bf16", or None, with which nothing here does anything.
        optimizer: whose plan has the plane.
        roots: returns the modules that `loss_fn` uses, with names.
        device: of the parameters. On a CPU, torch's kernels are as they are.
    """

    def __init__(
        self,
        name: str | None,
        optimizer,
        roots: Callable[[], dict[nn.Module, str]],
        device: torch.device,
    ):
        self.name, self._optimizer, self._roots, self._device = name, optimizer, roots, device
        self._names: dict[nn.Module, str] = {}
        self._places: list[tuple] = []
        self._dropped: dict[nn.Module, str] = {}
        self._proven = False  # whether a forward has used them
        self._weights = LowWeights([], {})
        self._gradients = WeightGradients(self._weights, None)

    @property
    def _plan(self):
        return self._optimizer._current_plan()

    def autocast(self):
        """Of the forward pass only: backward follows the dtypes of what it differentiates."""
        kind = self._device.type
        if torch.is_autocast_enabled(kind):
            if self.name:
                raise RuntimeError(
                    f"TrainStep: precision={self.name!r} does its own autocast; call the step "
                    "outside of torch.autocast, or leave precision out"
                )
            torch.clear_autocast_cache()  # casts of weights that have been updated since
        if not self.name:
            return nullcontext()
        return torch.autocast(kind, amp.PRECISIONS[self.name])

    # -- plane H ---------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Gives the weights that autocast would cast their places in plane H."""
        if not self.name:
            return
        roots = self._roots()
        self._names = _watch.all_modules(roots)
        before, self._places = self._places, places_of_low(list(roots), set(self._dropped))
        self._proven = self._proven and same_places(before, self._places)
        wanted = {p: amp.PRECISIONS[self.name] for _, _, p in self._places}
        plan = self._plan
        if plan.low != wanted:
            plan.low = wanted
            plan.sync(self._optimizer)

    def update(self) -> None:
        """Before an eager step: of weights that have changed since the last update."""
        if not self.name:
            return
        self.prepare()
        if not self._plan.host.fits(vars(self._optimizer)):
            self._plan.sync(self._optimizer)
        self._plan.host.refresh_low()

    def copies(self) -> dict[Tensor, Tensor]:
        return self._plan.low_copies() if self.name else {}

    def refresh(self) -> None:
        """Makes all copies anew."""
        with torch.no_grad():
            for p, copy in self.copies().items():
                copy.copy_(p)

    # -- forward and backward --------------------------------------------------------------------

    def run(self, work: Callable[[], T], branch: AbstractContextManager | None = None) -> T:
        """`work()`, forward and backward, in which modules find the copies in the place of their
        weights. Where one can't have them it is done again without. In a capture, gradients of
        weights are put on `branch`, a `Pool.branch`."""
        own = self.name is not None and self._device.type == "cuda" and not _compiles_autograd()
        look = True
        for _ in range(len(self._places) + 2):
            before = self._before_trial()
            self._weights = LowWeights(self._places, self.copies(), before is not None and look)
            try:
                self._gradients = WeightGradients(self._weights, branch)
                with torch.enable_grad(), own_kernels(own), self._weights:
                    with self._gradients:
                        result = work()
                break
            except ReadsWeight as read:
                if read.reads:
                    self._drop_readers(read.reads)
                else:
                    self._drop([module for module, _, _ in self._places], str(read))
            except torch.OutOfMemoryError:  # perhaps since nothing ran compiled
                if before is None or not look:
                    raise
                look = False
            except RuntimeError as error:
                if before is None:
                    raise
                if self._weights.reads:  # perhaps it has failed since they are in 16 bits
                    self._drop_readers(self._weights.reads)
                elif not self._drop_failed(error):
                    raise
            before()
        self._proven = True
        return result

    def forward_is_done(self) -> None:
        """To be called by `work` before it looks at what a forward returned that may be done
        again, and before backward, whose hooks shall run once."""
        self._weights.forward_is_done()

    def backward_begins(self, loss: Tensor) -> None:
        """To be called by `work` as well."""
        self._gradients.look(loss)

    def gradients_are_used(self) -> None:
        self._weights.restore_grad_dtypes()

    def prove_again(self) -> None:
        """The next step takes another way through `loss_fn`, perhaps."""
        self._proven = False

    def left_to_autocast(self) -> dict[str, str]:
        """The modules that have their own weights, with the reason."""
        return {self._names.get(m, type(m).__name__): why for m, why in self._dropped.items()}

    def _before_trial(self) -> Callable[[], None] | None:
        """Where the 16-bit weights are untried: puts back what a forward changes that failed."""
        if not self.name or self._proven:
            return None
        buffers = [b for m in _watch.all_modules(self._roots()) for b in m.buffers(recurse=False)]
        values = [b.clone() for b in buffers]
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        randoms = RandomState(params[0].device)
        gradients = {p: p.grad for p in params}

        def put_back() -> None:
            self._weights.put_back()
            for buffer, value in zip(buffers, values, strict=True):
                buffer.copy_(value)
            randoms.restore()
            self._weights.restore_grad_dtypes()
            for p, grad in gradients.items():
                p.grad = grad

        return put_back

    def _drop(self, modules: list[nn.Module], why: str) -> None:
        self._dropped |= dict.fromkeys(modules, why)
        self.prepare()

    def _drop_readers(self, reads: dict[Tensor, str]) -> None:
        for weight, what in reads.items():
            self._drop(self._weights.owners(weight), what)

    def _drop_failed(self, error: RuntimeError) -> bool:
        """A module that was called where autocast is off needs its float32 weights."""
        if "type" not in str(error):
            return False
        owners = {module for module, _, _ in self._places}
        for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
            module = frame.f_locals.get("self")
            if not isinstance(module, nn.Module):
                continue
            # Its own weights, or those of modules below that it uses directly.
            found = [m for m in module.modules() if m in owners]
            if found:
                self._drop(found, str(error).splitlines()[0])
                return True
        return False
