# SPDX-License-Identifier: BSD-3-Clause
"""Drop-ins for torch.optim: the same arguments, numbers and state, one launch a step."""

from .adam import Adam, AdamW
from .sgd import SGD

__all__ = ["SGD", "Adam", "AdamW"]
