# SPDX-License-Identifier: BSD-3-Clause
"""Descriptions of augmentations, with torchvision.transforms.v2's names and argument meaning.

They hold no state and do nothing by themselves: `Program` compiles a list of them into one kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ._arguments import (
    check_choice,
    check_fill,
    check_flag,
    check_interpolation,
    check_number,
    check_padding,
    check_probability,
    check_range,
    check_size,
    check_values,
)

Fill = float | Sequence[float]
_PADDING_MODES = ("constant", "edge", "reflect")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Transform:
    """What all transforms are. `_set` stores an argument in the form that it was checked into."""

    def _set(self, **fields) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @property
    def _name(self) -> str:
        return type(self).__name__


@dataclass(frozen=True)
class Pad(Transform):
    """v2.Pad: one number for all sides, two for left and right, top and bottom, or four for left,
    top, right, bottom. `padding_mode` "edge" and "reflect" go on with the image; they are possible
    where no transform before pads or samples between pixels."""

    padding: int | Sequence[int]
    fill: Fill = 0
    padding_mode: str = "constant"

    def __post_init__(self):
        self._set(
            padding=check_padding(self._name, self.padding), fill=check_fill(self._name, self.fill)
        )
        check_choice(self._name, "padding_mode", self.padding_mode, _PADDING_MODES)


@dataclass(frozen=True)
class RandomCrop(Transform):
    """v2.RandomCrop: after `padding`, a part of `size` at a place drawn uniformly."""

    size: int | Sequence[int]
    padding: int | Sequence[int] | None = None
    pad_if_needed: bool = False
    fill: Fill = 0
    padding_mode: str = "constant"

    def __post_init__(self):
        self._set(size=check_size(self._name, self.size), fill=check_fill(self._name, self.fill))
        if self.padding is not None:
            self._set(padding=check_padding(self._name, self.padding))
        check_flag(self._name, "pad_if_needed", self.pad_if_needed)
        check_choice(self._name, "padding_mode", self.padding_mode, _PADDING_MODES)


@dataclass(frozen=True)
class CenterCrop(Transform):
    """v2.CenterCrop, of an image that is at least as large."""

    size: int | Sequence[int]

    def __post_init__(self):
        self._set(size=check_size(self._name, self.size))


@dataclass(frozen=True)
class Resize(Transform):
    """v2.Resize with antialias=False: one number is the length of the shorter side. As the map is
    one of samples, an image made much smaller is aliased; resize such a data set once instead."""

    size: int | Sequence[int]
    interpolation: str = "bilinear"
    antialias: bool = field(default=False, kw_only=True)  # v2 has another argument before it

    def __post_init__(self):
        several = isinstance(self.size, Sequence) and len(self.size) == 2
        self._set(
            size=check_size(self._name, self.size)[: 2 if several else 1],
            interpolation=check_interpolation(self._name, self.interpolation),
        )
        _refuse_antialias(self)


@dataclass(frozen=True)
class RandomHorizontalFlip(Transform):
    """v2.RandomHorizontalFlip."""

    p: float = 0.5

    def __post_init__(self):
        self._set(p=check_probability(self._name, self.p))


@dataclass(frozen=True)
class RandomVerticalFlip(Transform):
    """v2.RandomVerticalFlip."""

    p: float = 0.5

    def __post_init__(self):
        self._set(p=check_probability(self._name, self.p))


@dataclass(frozen=True)
class RandomRotation(Transform):
    """v2.RandomRotation about the middle, counter-clockwise by degrees drawn uniformly from
    (-degrees, degrees), or from the two given. The image keeps its size."""

    degrees: float | Sequence[float]
    interpolation: str = "nearest"
    fill: Fill = field(default=0, kw_only=True)  # v2 has other arguments before it

    def __post_init__(self):
        degrees = self.degrees
        if not isinstance(degrees, Sequence):
            number = check_number(self._name, "degrees", degrees)
            if number < 0:
                raise ValueError(
                    f"{self._name}: a single degrees must be at least 0, got {degrees}"
                )
            degrees = (-number, number)
        self._set(
            degrees=check_range(self._name, "degrees", degrees, -1e6, 1e6),
            interpolation=check_interpolation(self._name, self.interpolation),
            fill=check_fill(self._name, self.fill),
        )


@dataclass(frozen=True)
class RandomScale(Transform):
    """v2.RandomAffine(0, scale=scale): enlarges about the middle by a factor drawn uniformly. The
    image keeps its size."""

    scale: Sequence[float]
    interpolation: str = "nearest"
    fill: Fill = 0

    def __post_init__(self):
        self._set(
            scale=check_range(self._name, "scale", self.scale, 1e-3, 1e3),
            interpolation=check_interpolation(self._name, self.interpolation),
            fill=check_fill(self._name, self.fill),
        )


@dataclass(frozen=True)
class RandomResizedCrop(Transform):
    """v2.RandomResizedCrop with antialias=False (see `Resize`): a part with a share of the area
    from `scale` and an aspect ratio (width / height) from `ratio`, uniform in its logarithm,
    resized to `size`."""

    size: int | Sequence[int]
    scale: Sequence[float] = (0.08, 1.0)
    ratio: Sequence[float] = (3 / 4, 4 / 3)
    interpolation: str = "bilinear"
    antialias: bool = False

    def __post_init__(self):
        self._set(
            size=check_size(self._name, self.size),
            scale=check_range(self._name, "scale", self.scale, 0.0, 16.0),
            ratio=check_range(self._name, "ratio", self.ratio, 1e-6, 1e6),
            interpolation=check_interpolation(self._name, self.interpolation),
        )
        _refuse_antialias(self)


@dataclass(frozen=True)
class ColorJitter(Transform):
    """v2.ColorJitter: factors drawn uniformly, from [max(0, 1 - x), 1 + x] (hue: [-x, x]) or from
    the two given, applied in random order. In images of one channel saturation and hue do nothing.
    """

    brightness: float | Sequence[float] | None = None
    contrast: float | Sequence[float] | None = None
    saturation: float | Sequence[float] | None = None
    hue: float | Sequence[float] | None = None

    def __post_init__(self):
        for name in ("brightness", "contrast", "saturation"):
            self._set(**{name: self._range(name, 1.0, 0.0, 1e6)})
        self._set(hue=self._range("hue", 0.0, -0.5, 0.5))

    def _range(self, name: str, neutral: float, low: float, high: float):
        value = getattr(self, name)
        if value is None:
            return None
        if not isinstance(value, Sequence):
            number = check_number(self._name, name, value)
            if number < 0:
                raise ValueError(f"{self._name}: a single {name} must be at least 0, got {value}")
            value = (neutral - number, neutral + number)
            value = (max(value[0], low), value[1]) if neutral else value
        value = check_range(self._name, name, value, low, high)
        return None if value == (neutral, neutral) else value


@dataclass(frozen=True)
class RandomErasing(Transform):
    """v2.RandomErasing: with probability `p`, a rectangle becomes `value`. It has a share of the
    area from `scale` and an aspect ratio (height / width) from `ratio`, uniform in its logarithm.
    `value` is a number or one a channel, in the units of its place in the list: 0 to 255 before
    `ToFloat` and `Normalize`, 0 to 1 between the two, normalised after. "random" is not done.
    """

    p: float = 0.5
    scale: Sequence[float] = (0.02, 0.33)
    ratio: Sequence[float] = (0.3, 3.3)
    value: Fill = 0.0

    def __post_init__(self):
        if isinstance(self.value, str):
            raise ValueError(
                f"{self._name}: value must be a number or one a channel, got {self.value!r}; "
                "erase with the data's mean instead, or use torchvision's transform"
            )
        self._set(
            p=check_probability(self._name, self.p),
            scale=check_range(self._name, "scale", self.scale, 0.0, 1.0),
            ratio=check_range(self._name, "ratio", self.ratio, 1e-6, 1e6),
            value=check_fill(self._name, self.value, "value"),
        )


@dataclass(frozen=True)
class Normalize(Transform):
    """v2.Normalize of values from 0 to 1: (value - mean) / std, with a number or one a channel. It
    brings `ToFloat()` with it."""

    mean: Fill
    std: Fill

    def __post_init__(self):
        self._set(
            mean=check_values(self._name, "mean", self.mean),
            std=check_values(self._name, "std", self.std),
        )
        if min(self.std) <= 0:
            raise ValueError(f"{self._name}: std must be greater than 0, got {self.std}")


@dataclass(frozen=True)
class ToFloat(Transform):
    """v2.ToDtype(dtype, scale=True): values from 0 to 1, as float32, float16 or bfloat16. Without
    it and without `Normalize` the output stays uint8."""

    dtype: torch.dtype = torch.float32

    def __post_init__(self):
        check_choice(self._name, "dtype", self.dtype, DTYPES)


def _refuse_antialias(transform: Resize | RandomResizedCrop) -> None:
    if transform.antialias is not False:
        raise ValueError(
            f"{transform._name}: antialias must be False, got {transform.antialias!r}; to shrink "
            "images with antialiasing, resize the data set once before training"
        )


def log_range(ratio: tuple[float, float]) -> tuple[float, float]:
    return math.log(ratio[0]), math.log(ratio[1])
