# SPDX-License-Identifier: BSD-3-Clause
"""The debug mode: checks that have to wait for the device."""

from __future__ import annotations

from ._ops import ops


class debug:
    """Turns the debug mode on or off: as a function for good, with `with` for a block.

    It checks what otherwise shows as a NaN, and waits for the device to do so:
    `cross_entropy` on a GPU raises an `IndexError` that names a label out of bounds and its row.
    While a CUDA graph is captured nothing can wait, so nothing is checked; run the step eagerly.

    Args:
        mode: whether to check.

    Raises:
        TypeError: for a mode that is no bool.
    """

    def __init__(self, mode: bool = True) -> None:
        if not isinstance(mode, bool):
            raise TypeError(f"debug: mode must be a bool, got {mode!r}")
        self._before = ops.set_debug.default(mode)

    def __enter__(self) -> debug:
        return self

    def __exit__(self, *exception: object) -> None:
        ops.set_debug.default(self._before)
