# SPDX-License-Identifier: BSD-3-Clause
"""torch.compile for a step with `precision=` on a GPU: Inductor, with kernels of ours where it has
none that are as quick."""

from .backend import compile_loss

__all__ = ["compile_loss"]
