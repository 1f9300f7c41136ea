# SPDX-License-Identifier: BSD-3-Clause
"""What was probably meant by a name that isn't known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def near(name: str, known: Iterable[str]) -> str:
    """A question to end a sentence with, or nothing."""
    found = difflib.get_close_matches(name.lower(), list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(found)}?" if found else ""
