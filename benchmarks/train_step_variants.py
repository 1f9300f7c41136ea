# SPDX-License-Identifier: BSD-3-Clause
# The ways to take a training step that bench_train_step.py compares: torch's own, eager, compiled
# and captured by hand, and tr.TrainStep. Each is a callable `loss = step(x, y)`, as in a loop.
import contextlib
import copy
import io
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from train_step_cases import Case

import torch_renaissance as tr

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": None}
# Of the loss, in the first steps. There eager fp32 and eager fp16 or bf16 part by up to 1 %, where
# batch norm over few images amplifies rounding; two variants of one precision may each do so.
TOLERANCE = {"fp16": 0.02, "bf16": 0.02, "fp32": 0.002}
INIT_SCALE = 1024.0  # at GradScaler's 65536 the first steps may be skipped, and losses differ
WARMUP = 3  # eager steps before a capture
EXPLAINED = ("state", "nodes", "kernels", "pool_bytes", "replays", "fallbacks")


@dataclass(frozen=True)
class Setting:
    """What all variants of a case start from; `start` is on the CPU and is never trained."""

    case: Case
    start: nn.Module
    precision: str
    device: torch.device

    def model(self) -> nn.Module:
        return copy.deepcopy(self.start).to(self.device)

    def autocast(self) -> torch.autocast:
        dtype = DTYPES[self.precision]
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)

    def scaler(self) -> torch.amp.GradScaler:
        enabled = self.precision == "fp16"
        return torch.amp.GradScaler(self.device.type, INIT_SCALE, enabled=enabled)


@dataclass
class Variant:
    """`step(x, y)` trains on one batch and returns the loss, which the next call may overwrite."""

    step: Callable[[Tensor, Tensor], Tensor]
    replayed: Callable[[], bool] = lambda: False  # whether the last call replayed a graph
    explain: Callable[[], dict] = dict
    close: Callable[[], object] = lambda: None  # gives back memory that outlives the step


# --- torch's own ----------------------------------------------------------------------------------


def stock_step(
    setting: Setting, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[Tensor, Tensor], Tensor]:
    """The loop's body as torch's documentation writes it."""
    scaler, criterion = setting.scaler(), setting.case.criterion

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with setting.autocast():
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def eager(setting: Setting, **kind) -> Variant:
    model = setting.model()
    return Variant(stock_step(setting, model, setting.case.make_optimizer(model, **kind)))


def compiled(setting: Setting, mode: str = "default") -> Variant:
    model = setting.model()
    optimizer = setting.case.make_optimizer(model)
    step = stock_step(setting, torch.compile(model, mode=mode), optimizer)

    def marked(x: Tensor, y: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return step(x, y)

    return Variant(step if mode == "default" else marked)


class HandGraph:
    """The same body captured once it is warm; later calls copy the batch and replay.

    With a fused optimizer GradScaler never waits for the device, so that its finite check, its skip
    and its update are in the graph and the step does all that the eager one does. Numbers such as
    the learning rate are baked in, which no variant here changes.

    Warmed up on the current stream: with kernels on more streams of a process, graphs of many
    short kernels may take longer, its own (a fifth on an H200) and those timed beside it.
    """

    def __init__(self, setting: Setting) -> None:
        if setting.device.type != "cuda":
            raise RuntimeError("a CUDA graph needs a GPU")
        model = setting.model()
        kind = {} if setting.case.optimizer is torch.optim.SGD else {"capturable": True}
        self.optimizer = setting.case.make_optimizer(model, fused=True, **kind)
        self.step = stock_step(setting, model, self.optimizer)
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        if self.graph is None:
            self.calls += 1
            if self.calls <= WARMUP:
                return self.step(x, y)
            self.capture(x, y)
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()
        return self.loss

    def capture(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x.clone(), y.clone()
        self.optimizer.zero_grad()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.loss = self.step(self.x, self.y)


def hand_graph(setting: Setting) -> Variant:
    step = HandGraph(setting)
    return Variant(step, lambda: step.graph is not None)


# --- ours -----------------------------------------------------------------------------------------


def train_step(setting: Setting, **options) -> Variant:
    """Captured or an error; with `options` of TrainStep's own."""
    criterion = setting.case.criterion
    model = setting.model()
    model, optimizer = tr.accelerate(model, setting.case.make_optimizer(model))
    step = tr.TrainStep(
        lambda x, y: criterion(model(x), y),
        optimizer,
        precision=None if setting.precision == "fp32" else setting.precision,
        warmup=WARMUP,
        strict=setting.device.type == "cuda",  # an eager step must not pass for a captured one
        **options,
    )
    if setting.precision == "fp16":
        optimizer.amp.load_state_dict(optimizer.amp.state_dict() | {"scale": INIT_SCALE})
    return Variant(step, lambda: step.captured, lambda: explained(step), step.reset)


def explained(step) -> dict:
    with contextlib.redirect_stdout(io.StringIO()):
        found = step.explain()
    found = found if isinstance(found, dict) else {k: getattr(found, k, None) for k in EXPLAINED}
    return {k: found.get(k) for k in EXPLAINED}


# --- all of them ----------------------------------------------------------------------------------

VARIANTS: dict[str, Callable[[Setting], Variant]] = {
    "eager": eager,
    "eager fused": lambda setting: eager(setting, fused=True),
    "compile": compiled,
    "compile max-autotune": lambda setting: compiled(setting, "max-autotune"),
    "hand graph": hand_graph,
    "TrainStep": train_step,
    "TrainStep compile": lambda setting: train_step(setting, compile=True),
}
OURS = ("TrainStep", "TrainStep compile")
COMPILED = ("compile", "compile max-autotune", "TrainStep compile")
AUTOTUNED_CASES = ("mlp", "resnet18_cifar")  # elsewhere autotuning takes longer than all the rest


def names_for(case: str, device: torch.device, quick: bool) -> list[str]:
    """The variants of a case unless --variants names them; what compiles long is left out."""
    skipped = set() if case in AUTOTUNED_CASES and not quick else {"compile max-autotune"}
    skipped |= set(COMPILED) if device.type == "cpu" or (quick and case != "mlp") else set()
    return [name for name in VARIANTS if name not in skipped]
