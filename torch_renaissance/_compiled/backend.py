# SPDX-License-Identifier: BSD-3-Clause
"""A backend of torch.compile that rewrites Dynamo's graph and hands it to Inductor."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
from torch.fx import GraphModule

from . import attention, counters, gelu, layer_norms, norms, patches, pools

_PASS = "post_grad_custom_pre_pass"


_PARTS = (counters, norms, pools, gelu, attention, patches, layer_norms)


def rewrite(module: GraphModule) -> None:
    """Functions in it whose kernels are ours; those of graphs within it stay Inductor's. What can't
    be rewritten stays as it was, with a warning."""
    before = copy.deepcopy(module.graph)
    try:
        for part in _PARTS:
            part.rewrite(module.graph)
        module.graph.lint()
    except Exception as error:
        module.graph = before
        warnings.warn(
            "TrainStep: this graph has Inductor's kernels alone, since putting ours in their place "
            f"failed: {type(error).__name__}: {error}",
            stacklevel=2,
        )
    module.recompile()


class _Backend:
    """Inductor with `mode` and `options`, after `rewrite`."""

    compiler_name = "inductor"

    def __init__(self, mode: str | None, options: dict | None, dynamic: bool | None):
        from torch._inductor import config

        from .late import LatePass

        self._inductor = torch._TorchCompileInductorWrapper(mode, options, dynamic)
        if getattr(config, _PASS, None) is None:  # else it is the user's
            self._inductor.config.setdefault(_PASS, LatePass())

    def __call__(self, module: GraphModule, inputs: list):
        rewrite(module)
        return self._inductor(module, inputs)

    def get_compiler_config(self):
        return self._inductor.get_compiler_config()

    def reset(self) -> None:
        self._inductor.reset()


def compile_loss(loss_fn: Callable, arguments: dict, own: bool) -> Callable:
    """`torch.compile(loss_fn, **arguments)`; if `own`, with kernels of ours.

    Raises:
        Whatever torch.compile raises for the arguments.
    """
    options = arguments.get("options") or {}
    others = {"guard_filter_fn", "use_aoti"} & set(options)  # are for torch.compile itself
    inductor = arguments.get("backend", "inductor") == "inductor"
    if not own or not inductor or others or not hasattr(torch, "_TorchCompileInductorWrapper"):
        return torch.compile(loss_fn, **arguments)
    if None not in (arguments.get("mode"), arguments.get("options")):
        return torch.compile(loss_fn, **arguments)  # raises
    rest = {k: v for k, v in arguments.items() if k not in ("mode", "options", "backend")}
    backend = _Backend(arguments.get("mode"), arguments.get("options"), arguments.get("dynamic"))
    return torch.compile(loss_fn, backend=backend, **rest)
