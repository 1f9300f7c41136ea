# SPDX-License-Identifier: BSD-3-Clause
"""`Recipe`: which initializer each kind of parameter gets, and how their values are drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from numbers import Integral

import torch
from torch import Tensor, nn

from .._ops import build_info, ops
from ..regions import Kind, classify
from ._initializers import Initializer, ones, zeros
from ._residual import last_norm_weights

_NATIVE = {"cpu", "meta"} | ({"cuda"} if build_info()["cuda"] else set())
_ZEROS, _ONES = zeros(), ones()


@dataclass(frozen=True)
class Recipe:
    """Which initializer each kind of parameter gets; None leaves it as it is.

    `Recipe(tr.init.kaiming_normal(nonlinearity="relu")).initialize(model)` is all that many
    networks need. A recipe holds no state: it serves any number of models.

    Args:
        weights: for `Kind.LINEAR_WEIGHT` to `Kind.OTHER_WEIGHT`.
        biases: for `Kind.BIAS` and `Kind.NORM_BIAS`. As everywhere in torch_renaissance, each
            parameter with `ndim <= 1` outside of norm layers is a bias, a `PReLU`'s weight or a
            layer scale too: `on` says otherwise, by name.
        norm_weights: for `Kind.NORM_WEIGHT`.
        zero_gamma: starts the norm weight that ends each residual branch from 0, whatever else is
            said, so that each block starts as the identity (https://arxiv.org/abs/1706.02677,
            torchvision's `zero_init_residual`). Such blocks have an attribute `downsample` or
            `shortcut` and end in `conv<n>`, `bn<n>` (or `norm<n>`), as torchvision's and timm's
            ResNets do.
        overrides: what `on` has added.

    Raises:
        TypeError: for an argument of another type.
    """

    weights: Initializer | None
    biases: Initializer | None = _ZEROS
    norm_weights: Initializer | None = _ONES
    zero_gamma: bool = False
    overrides: tuple[tuple[Kind | str, Initializer | None], ...] = ()

    def __post_init__(self):
        for name in ("weights", "biases", "norm_weights"):
            _check_initializer(name, getattr(self, name))
        if not isinstance(self.zero_gamma, bool):
            raise TypeError(f"Recipe: zero_gamma must be a bool, got {self.zero_gamma!r}")

    def on(
        self, where: Kind | str | Iterable[Kind | str], initializer: Initializer | None
    ) -> Recipe:
        """A recipe with another initializer for some parameters; what is said last counts.

        Args:
            where: a kind, a pattern of names as in a shell (`"head.*"`, `"*.gamma"`), or several.

        Raises:
            TypeError: for an argument of another type.
        """
        several = isinstance(where, Iterable) and not isinstance(where, str)
        chosen = list(where) if several else [where]
        for one in chosen:
            if not isinstance(one, (Kind, str)):
                raise TypeError(
                    f"Recipe.on: where must be tr.Kind's or patterns of names, got {one!r}"
                )
        _check_initializer("initializer", initializer)
        return replace(self, overrides=(*self.overrides, *((one, initializer) for one in chosen)))

    def initialize(self, model: nn.Module, *, seed: int | None = None) -> nn.Module:
        """Initialises `model`'s parameters in place, frozen ones too, and returns it.

        Random values are drawn in float64 and rounded to the parameter's dtype. Each depends on
        `seed`, the parameter's name (the first, where it is tied) and the element's index, and on
        nothing else: not on other parameters, on what was drawn before, on the device, the number
        of ranks or the strides. So a second call gives the same values: pass each member of an
        ensemble a seed of its own. Call it before `DistributedDataParallel` or `torch.compile`
        wrap the model, since they prefix its names; before or after `tr.accelerate`.

        Args:
            seed: from 0 to 2**64 - 1. None: the one that `tr.seed` or `torch.manual_seed` has set
                last, `torch.initial_seed()`. torch's generators stay as they are.

        Raises:
            TypeError: where `model` is no `nn.Module` or `seed` no integer.
            ValueError: for a seed out of range, a pattern that no name matches, `zero_gamma` where
                no residual branch is found, and a parameter that its initializer doesn't suit:
                uninitialised, sparse or sharded, with elements that share memory, of a dtype other
                than float32, float64, float16 and bfloat16, or without a fan (`ndim <= 1`).
            Whatever it raises, nothing has been changed.
        """
        seed = _check_seed(seed)
        chosen = self._choose(model)
        for p, (name, initializer) in chosen.items():
            _check(p, name, initializer)
        with torch.no_grad():
            for p, (name, initializer) in chosen.items():
                _fill(p, name, initializer, seed)
        return model

    def _choose(self, model: nn.Module) -> dict[Tensor, tuple[str, Initializer]]:
        """Name and initializer of each parameter that gets new values."""
        if not isinstance(model, nn.Module):
            raise TypeError(f"initialize: model must be an nn.Module, got {type(model).__name__}")
        found = classify(model)
        for where, _ in self.overrides:
            matches = isinstance(where, Kind) or any(_fits(where, *f) for f in found.values())
            if not matches:
                raise ValueError(f"initialize: no parameter's name matches {where!r}")
        gammas = set(last_norm_weights(model)) if self.zero_gamma else set()
        if self.zero_gamma and not gammas:
            raise ValueError(
                "initialize: zero_gamma=True, but no residual branch was found: it is looked for "
                "in modules that have an attribute downsample or shortcut and end in conv<n>, "
                "bn<n>; give its norms' names to .on(..., tr.init.zeros()) instead"
            )
        chosen = {p: (f[0], _ZEROS if p in gammas else self._of(*f)) for p, f in found.items()}
        return {p: (name, rule) for p, (name, rule) in chosen.items() if rule is not None}

    def _of(self, name: str, kind: Kind) -> Initializer | None:
        for where, initializer in reversed(self.overrides):
            if _fits(where, name, kind):
                return initializer
        if kind is Kind.NORM_WEIGHT:
            return self.norm_weights
        return self.biases if kind.bias_like else self.weights


def stream_of(name: str) -> int:
    """The stream of random bits of a parameter of this name: the first 8 bytes of its SHA-256."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)


def _fits(where: Kind | str, name: str, kind: Kind) -> bool:
    return kind is where if isinstance(where, Kind) else fnmatchcase(name, where)


def _fill(p: Tensor, name: str, initializer: Initializer, seed: int) -> None:
    if initializer.distribution == "constant":
        p.fill_(initializer.a)
    elif p.numel():
        # Where there is no kernel for it, a tensor is filled on the CPU: the values are the same.
        out = p if p.device.type in _NATIVE else torch.empty(p.shape, dtype=p.dtype, device="cpu")
        parameters = initializer.parameters(p.shape)
        ops.fill_random_(out, seed, stream_of(name), initializer.distribution, *parameters)
        if out is not p:
            p.copy_(out)


def _check(p: Tensor, name: str, initializer: Initializer) -> None:
    what = f"initialize: {name}"
    if isinstance(p, nn.parameter.UninitializedTensorMixin):
        raise ValueError(f"{what} has no shape yet; pass a batch through the model first")
    if type(p.data) is not Tensor or p.layout is not torch.strided:
        raise ValueError(
            f"{what} is a {type(p.data).__name__} of layout {p.layout}; initialise "
            "the model before it is sharded, quantised or made sparse"
        )
    if any(size > 1 and stride == 0 for size, stride in zip(p.shape, p.stride(), strict=True)):
        raise ValueError(f"{what} has strides {p.stride()}, so its elements share memory")
    if initializer.distribution == "constant":
        try:
            # two elements: torch lets a single one become infinite
            torch.empty(2, dtype=p.dtype, device="cpu").fill_(initializer.a)
        except RuntimeError:
            raise ValueError(f"{what} is {p.dtype}, which cannot hold {initializer.a}") from None
    elif p.numel():
        try:  # the op checks before it does anything, and here there is nothing to do
            parameters = initializer.parameters(p.shape)
            none = torch.empty(0, dtype=p.dtype, device="cpu")
            ops.fill_random_(none, 0, 0, initializer.distribution, *parameters)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"{what}: {error}") from None


def _check_initializer(name: str, initializer: Initializer | None) -> None:
    if not isinstance(initializer, Initializer | None):
        raise TypeError(
            f"Recipe: {name} must be one of tr.init's initializers, such as tr.init.zeros(), or "
            f"None, got {initializer!r}"
        )


def _check_seed(seed: int | None) -> int:
    """`seed` as the op takes it, a signed number of 64 bits."""
    seed = torch.initial_seed() if seed is None else seed
    if not isinstance(seed, Integral) or isinstance(seed, bool):
        raise TypeError(f"initialize: seed must be an int, got {seed!r}")
    if not 0 <= seed < 2**64:
        raise ValueError(f"initialize: seed must be from 0 to 2**64 - 1, got {seed}")
    return int(seed) - 2**64 * (seed >= 2**63)
