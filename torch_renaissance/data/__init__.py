# SPDX-License-Identifier: BSD-3-Clause
"""Batches: on their way to the device, and kept there."""

from .prefetch import prefetch
from .validation import CachedValidation

__all__ = ["CachedValidation", "prefetch"]
