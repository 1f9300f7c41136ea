# SPDX-License-Identifier: BSD-3-Clause
"""Names to what `ab_test` takes: `mlp`, `gpt2`, torchvision's and timm's models, and
`module:function` for the user's own."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .gpt2 import CONTEXT, GPT2, VOCABULARY
from .near import near
from .own_model import call_as_text, own

# Learning rates are low, so that rounding grows slowly in the steps that are compared.
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4}),
    "adam": (torch.optim.Adam, {"lr": 1e-4}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-4, "weight_decay": 0.01}),
}
UNFIT = {
    "lbfgs": "its step evaluates the loss several times, through a closure",
    "muon": "it takes matrices alone, and there are biases or norms beside them",
    "sparseadam": "it takes sparse gradients alone, and these are dense",
}
CLASSES = 1000
MLP = (784, 1024, 512, 256, 10)


class Workload(NamedTuple):
    """What `ab_test` takes, in its order."""

    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    loss_fn: Callable
    batch: tuple | Callable[[int], tuple]


@dataclass(frozen=True)
class Options:
    """Of a model by name. Images have `image` pixels a side, None for what the model was made for;
    sequences have `tokens`."""

    batch: int = 64
    image: int | None = None
    tokens: int = 256
    channels_last: bool = False
    seed: int = 0


def workload(name: str, optimizer: str = "adamw", options: Options | None = None) -> Workload:
    """The model, optimizer, loss and random batches of a name; the batches are on the CPU.

    Args:
        name: "mlp", "gpt2", one of torchvision's classification models, one of timm's, or
            "module:function", where `function()` returns (make_model, make_optimizer, loss_fn,
            batch); it is given `batch` and `optimizer` where it has parameters of these names.
        optimizer: "sgd", "adam", "adamw", or another class of `torch.optim` with its defaults.

    Raises:
        ValueError: for a name that isn't known, with the nearest ones, an option out of range, or
            an optimizer that can't train a model by name.
    """
    options = options or Options()
    _check(options)
    if ":" in name:
        return Workload(*own(name, _given(optimizer, options)))
    make_optimizer = optimizer_named(optimizer)
    if name == "mlp":
        return Workload(mlp, make_optimizer, classification_loss, _flat(options))
    if name == "gpt2":
        return Workload(GPT2, make_optimizer, next_token_loss, _tokens(options))
    make_model, side = _image_model(name, options)
    return Workload(make_model, make_optimizer, classification_loss, _images(options, side))


def title_of(name: str, optimizer: str, options: Options) -> str:
    """What `workload` makes of the same arguments."""
    if ":" in name:
        return call_as_text(name, _given(optimizer, options))
    return f"{name}, {optimizer}, batch {options.batch}"


def _given(optimizer: str, options: Options) -> dict:
    return {"batch": options.batch, "optimizer": optimizer}


def optimizer_named(name: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    known = {
        key.lower(): kind
        for key, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
    }
    known.pop("optimizer", None)
    kind, arguments = OPTIMIZERS.get(name.lower(), (known.get(name.lower()), {}))
    if kind is None:
        raise ValueError(f"there is no optimizer {name!r} in torch.optim{near(name, known)}")
    if name.lower() in UNFIT:
        raise ValueError(
            f"torch.optim.{kind.__name__} can't train a model by name here: {UNFIT[name.lower()]}; "
            "choose another optimizer"
        )
    return lambda model: kind(model.parameters(), **arguments)


# --- models ---------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    layers = [m for i, o in pairwise(MLP) for m in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def classification_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Of the main output, where a model has auxiliary ones."""
    output = model(x)
    return F.cross_entropy(getattr(output, "logits", output), y)


def next_token_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def _image_model(name: str, options: Options) -> tuple[Callable[[], nn.Module], int]:
    """A function that builds it, and the pixels a side that it was made for."""
    known, build, side = ["mlp", "gpt2"], None, 224
    torchvision, timm = _module("torchvision.models"), _module("timm")
    if torchvision is not None:
        found = torchvision.list_models(module=torchvision)
        known += found
        if name in found:
            build, side = torchvision.get_model, 299 if name == "inception_v3" else 224
            arguments = {"weights": None}
            if name in ("googlenet", "inception_v3"):
                arguments |= {"init_weights": True}
    if build is None and timm is not None:
        found = timm.list_models()
        known += found
        if name in found:
            build, arguments = timm.create_model, {"pretrained": False}
            side = build(name, **arguments).default_cfg["input_size"][-1]
    if build is None:
        without = [p for p, m in (("torchvision", torchvision), ("timm", timm)) if m is None]
        hint = f" ({' and '.join(without)} not installed)" if without else ""
        raise ValueError(
            f"there is no model {name!r}{hint}; known are mlp, gpt2, the classification models of "
            f"torchvision and timm, and module:function for your own{near(name, known)}"
        )

    def make_model() -> nn.Module:
        model = build(name, **arguments)
        return model.to(memory_format=torch.channels_last) if options.channels_last else model

    return make_model, side


def _module(name: str):
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


# --- batches --------------------------------------------------------------------------------------


def _check(options: Options) -> None:
    for name in ("batch", "image", "tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if options.tokens > CONTEXT:
        raise ValueError(f"tokens must be at most {CONTEXT}, got {options.tokens}")


def _generator(options: Options, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(options.seed + step)


def _flat(options: Options) -> Callable[[int], tuple]:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        random = _generator(options, step)
        x = torch.randn(options.batch, MLP[0], generator=random)
        return x, torch.randint(MLP[-1], (options.batch,), generator=random)

    return batch


def _images(options: Options, side: int) -> Callable[[int], tuple]:
    side = options.image or side
    layout = torch.channels_last if options.channels_last else torch.contiguous_format

    def batch(step: int) -> tuple[Tensor, Tensor]:
        random = _generator(options, step)
        x = torch.randn(options.batch, 3, side, side, generator=random)
        y = torch.randint(CLASSES, (options.batch,), generator=random)
        return x.contiguous(memory_format=layout), y

    return batch


def _tokens(options: Options) -> Callable[[int], tuple]:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        shape = (options.batch, options.tokens + 1)
        tokens = torch.randint(VOCABULARY, shape, generator=_generator(options, step))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return batch
