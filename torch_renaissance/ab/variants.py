# SPDX-License-Identifier: BSD-3-Clause
"""The ways to take a training step: torch's own, eager, compiled and captured by hand, and ours.

Each is a function of a `Setting` that returns a `Variant`, whose `step(*batch)` trains once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..accelerate import accelerate
from ..train_step import TrainStep
from .setting import INIT_SCALE, Setting, loss_of

WARMUP = 3  # eager steps before a capture


@dataclass
class Variant:
    """`step(*batch)` trains on one batch and returns the loss, which the next call may overwrite.

    `model` is what it trains, None where that isn't known.
    """

    step: Callable
    model: nn.Module | None
    close: Callable[[], object] = lambda: None  # gives back memory that outlives the step


Maker = Callable[[Setting], Variant]


# --- torch's own ----------------------------------------------------------------------------------


def bind(loss_fn: Callable, model: nn.Module) -> Callable:
    """`loss_fn` of one model."""

    def loss(*batch):
        return loss_fn(model, *batch)

    # torch.compile counts how often a piece of code is compiled anew, and gives up; a code object
    # of its own keeps one variant's compilations from counting for another.
    loss.__code__ = loss.__code__.replace()
    return loss


def stock_step(setting: Setting, loss_fn: Callable, optimizer: torch.optim.Optimizer) -> Callable:
    """The loop's body as torch's documentation writes it; `loss_fn(*batch)` knows its model."""
    scaler = setting.scaler()

    def step(*batch) -> Tensor:
        optimizer.zero_grad()
        with setting.autocast():
            loss = loss_of(loss_fn(*batch))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def eager(setting: Setting, **kind: bool) -> Variant:
    model = setting.model()
    optimizer = setting.optimizer(model, **kind)
    return Variant(stock_step(setting, bind(setting.loss_fn, model), optimizer), model)


def compiled(setting: Setting, mode: str = "default") -> Variant:
    """With torch's fused optimizer: the strongest that torch has without a graph of the user's."""
    model = setting.model()
    loss_fn = torch.compile(bind(setting.loss_fn, model), mode=mode)
    step = stock_step(setting, loss_fn, setting.strongest(model))

    def marked(*batch) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return step(*batch)

    return Variant(step if mode == "default" else marked, model)


class HandGraph:
    """The same body captured once it is warm; later calls copy the batch and replay.

    With a fused optimizer GradScaler never waits for the device, so that its finite check, its skip
    and its update are in the graph and the step does all that the eager one does. Numbers such as
    the learning rate are baked in, which nothing here changes.

    Warmed up on the current stream: with kernels on more streams of a process, graphs of many
    short kernels may take longer, its own (a fifth on an H200) and those timed beside it.
    """

    def __init__(self, setting: Setting, model: nn.Module) -> None:
        if setting.device.type != "cuda":
            raise RuntimeError("a CUDA graph needs a GPU")
        kind = {"fused": True}
        if "capturable" in setting.optimizer(model).defaults:
            kind["capturable"] = True
        self.optimizer = setting.optimizer(model, **kind)
        self.step = stock_step(setting, bind(setting.loss_fn, model), self.optimizer)
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *batch) -> Tensor:
        if self.graph is None:
            self.calls += 1
            if self.calls <= WARMUP:
                return self.step(*batch)
            self.capture(batch)
        for mine, given in zip(self.leaves, pytree.tree_leaves(batch), strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(given)
        self.graph.replay()
        return self.loss

    def capture(self, batch: tuple) -> None:
        leaves, spec = pytree.tree_flatten(batch)
        self.leaves = [t.clone() if isinstance(t, Tensor) else t for t in leaves]
        self.optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.loss = self.step(*pytree.tree_unflatten(self.leaves, spec))
        self.graph = graph


def hand_graph(setting: Setting) -> Variant:
    model = setting.model()
    return Variant(HandGraph(setting, model), model)


# --- ours -----------------------------------------------------------------------------------------


def accelerated(setting: Setting) -> Variant:
    """The loop as it is, after the one line."""
    model = setting.model()
    model, optimizer = accelerate(model, setting.optimizer(model))
    return Variant(stock_step(setting, bind(setting.loss_fn, model), optimizer), model)


def train_step(setting: Setting, compile: bool = False) -> Variant:
    model = setting.model()
    model, optimizer = accelerate(model, setting.optimizer(model))
    step = TrainStep(
        bind(setting.loss_fn, model),
        optimizer,
        model=model,
        precision=None if setting.precision == "fp32" else setting.precision,
        warmup=WARMUP,
        compile=compile,
        strict=setting.device.type == "cuda",  # an eager step must not pass for a captured one
    )
    if setting.precision == "fp16":
        optimizer.amp.load_state_dict(optimizer.amp.state_dict() | {"scale": INIT_SCALE})
    return Variant(lambda *batch: loss_of(step(*batch)), model, step.reset)


# --- all of them ----------------------------------------------------------------------------------

VARIANTS: dict[str, Maker] = {
    "eager": eager,
    "eager fused": lambda setting: eager(setting, fused=True),
    "compile": compiled,
    "compile max-autotune": lambda setting: compiled(setting, "max-autotune"),
    "hand graph": hand_graph,
    "accelerate": accelerated,
    "TrainStep": train_step,
    "TrainStep compile": lambda setting: train_step(setting, compile=True),
}
REFERENCE = "eager"
AUTOTUNED = "compile max-autotune"
COMPILED = ("compile", AUTOTUNED, "TrainStep compile")
# What a reader would rather have, where times are equal: the fewer changes, the better.
SIMPLEST = (
    *("eager", "eager fused", "accelerate", "TrainStep", "compile"),
    *("hand graph", "TrainStep compile", "compile max-autotune"),
)


def own(make_step: Callable) -> Maker:
    """The user's variant: `make_step(make_model, make_optimizer, loss_fn)` returns a step."""

    def make(setting: Setting) -> Variant:
        built: list[nn.Module] = []

        def make_model() -> nn.Module:
            built.append(setting.model())
            return built[-1]

        def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
            built.append(model)
            return setting.optimizer(model)

        step = make_step(make_model, make_optimizer, setting.loss_fn)
        if not callable(step):
            raise TypeError(f"a variant must return a callable step, got {type(step).__name__}")
        return Variant(lambda *batch: loss_of(step(*batch)).detach(), built[-1] if built else None)

    return make
