# SPDX-License-Identifier: BSD-3-Clause
"""Data on the device: resident datasets, augmentation as one kernel, batches copied ahead."""

from . import transforms
from ._augment import augment, parameters
from ._program import Program
from .dataset import DeviceDataset
from .loader import DeviceLoader
from .prefetch import prefetch
from .transforms import (
    CenterCrop,
    ColorJitter,
    Normalize,
    Pad,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomScale,
    RandomVerticalFlip,
    Resize,
    ToFloat,
)
from .validation import CachedValidation

__all__ = [
    "CachedValidation",
    "CenterCrop",
    "ColorJitter",
    "DeviceDataset",
    "DeviceLoader",
    "Normalize",
    "Pad",
    "Program",
    "RandomCrop",
    "RandomErasing",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RandomRotation",
    "RandomScale",
    "RandomVerticalFlip",
    "Resize",
    "ToFloat",
    "augment",
    "parameters",
    "prefetch",
    "transforms",
]
