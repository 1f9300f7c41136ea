# SPDX-License-Identifier: BSD-3-Clause
"""Native PyTorch and this package side by side on one model: `tr.ab_test`."""

from .report import AbResult, Row
from .run import ab_test
from .variants import VARIANTS

__all__ = ["VARIANTS", "AbResult", "Row", "ab_test"]
