# SPDX-License-Identifier: BSD-3-Clause
"""Drop-ins for torch.optim (the same arguments, numbers and state, one launch a step), and LARS."""

from .adam import Adam, AdamW
from .lars import LARS
from .sgd import SGD

__all__ = ["LARS", "SGD", "Adam", "AdamW"]
