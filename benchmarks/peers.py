# SPDX-License-Identifier: BSD-3-Clause
# The fused Adam and AdamW of other projects, for bench_optim.py where they are installed.
from importlib import import_module
from importlib.util import find_spec

import torch

# name: (what must be installed, where its FusedAdam is)
FUSED_ADAM = {
    "apex": ("apex", "apex.optimizers"),
    "TransformerEngine": ("transformer_engine", "transformer_engine.pytorch.optimizers"),
}
INSTALLED = tuple(n for n, (package, _) in FUSED_ADAM.items() if find_spec(package) is not None)


def peers_of(optimizer: str, on_gpu: bool) -> tuple[str, ...]:
    """Both are CUDA kernels alone."""
    return INSTALLED if on_gpu and optimizer in ("adam", "adamw") else ()


def make(name: str, optimizer: str, groups: list[dict], options: dict) -> torch.optim.Optimizer:
    """FusedAdam over the same groups; both libraries' takes the same arguments, and torch's eps."""
    fused_adam = import_module(FUSED_ADAM[name][1]).FusedAdam
    return fused_adam(groups, adam_w_mode=optimizer == "adamw", **options)
