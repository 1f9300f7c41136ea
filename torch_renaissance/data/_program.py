# SPDX-License-Identifier: BSD-3-Clause
"""`Program`: a list of transforms as the numbers that the kernel takes."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from functools import lru_cache, singledispatchmethod
from numbers import Integral

import torch

from . import transforms as t

_MAX_STEPS, _MAX_SAMPLINGS, _CHANNELS = 12, 3, 4
_MAX_SIDE, _MAX_SIZE = 2**20, 2**30  # pixels, and values of an image
_OUTPUTS = (torch.uint8, torch.float32, torch.float16, torch.bfloat16)
_PADDING_MODES = ("constant", "edge", "reflect")
_JITTERS = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.0}


class _Kind(enum.IntEnum):
    WINDOW, RANDOM_CROP, HORIZONTAL_FLIP, VERTICAL_FLIP = 0, 1, 2, 3
    ROTATION, SCALE, RESIZE, RESIZED_CROP, COLOR_JITTER, ERASING = 4, 5, 6, 7, 8, 9


class Program:
    """What a list of transforms does to images of one size, compiled for the kernel.

    Geometric transforms come first, then at most one `ColorJitter`, at most one `RandomErasing`;
    `Normalize` after geometry and colour; `ToFloat` anywhere.

    Args:
        transforms: one of `tr.data.transforms`, several, or another program's.
        channels, height, width: of the uint8 images; 1, 3 or 4 channels.
        channels_last: the memory format of the output.

    Attributes:
        transforms, input_shape: what it was made from; (channels, height, width).
        ints, values: `program` and `values` of the ops `augment` and `draw_batch`.
        shape: (channels, height, width) of an augmented image.
        dtype, memory_format: of the output; uint8 without `ToFloat` and `Normalize`.
        positions: for each step of the kernel, the place of its transform in `transforms`.

    Raises:
        TypeError: for something that is no transform.
        ValueError: for a sequence of transforms that one kernel can't do; it names the transform.
    """

    def __init__(
        self,
        transforms: Transforms,
        channels: int,
        height: int,
        width: int,
        channels_last: bool = False,
    ):
        self.transforms = listed(transforms)
        if channels not in (1, 3, 4):
            raise ValueError(f"Program: images must have 1, 3 or 4 channels, got {channels}")
        for name, side in (("height", height), ("width", width)):
            if not isinstance(side, Integral):
                raise TypeError(f"Program: {name} must be an int, got {side!r}")
        if not (height >= 1 and width >= 1):
            raise ValueError(f"Program: images must not be empty, got {height} x {width}")
        check_size("the images given", channels, height, width)
        compiler = _Compiler(channels, height, width)
        for position, transform in enumerate(self.transforms):
            compiler.add(position, transform)
        self.input_shape = channels, height, width
        self.shape = channels, compiler.height, compiler.width
        self.dtype = compiler.dtype
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.ints = compiler.ints(self.input_shape, bool(channels_last))
        self.values = compiler.values()
        beyond = [v for v in self.values if not abs(v) <= torch.finfo(torch.float32).max]
        if beyond:
            raise ValueError(
                "Program: fill, value, mean and 1 / std must be what float32 holds, but "
                f"{beyond[0]} came of {list(self.transforms)}"
            )
        self.positions = [step[1] for step in compiler.steps]

    def __repr__(self):
        return f"Program({list(self.transforms)}, {', '.join(map(str, self.input_shape))})"


def check_size(what: str, channels: int, height: int, width: int) -> None:
    if max(height, width) > _MAX_SIDE or channels * height * width > _MAX_SIZE:
        raise ValueError(
            f"Program: {what} are {channels} x {height} x {width}, but a side has up to 2^20 "
            "pixels and an image up to 2^30 values"
        )


Transforms = t.Transform | Iterable[t.Transform] | Program


def listed(transforms: Transforms) -> tuple[t.Transform, ...]:
    """What may be given as transforms, as a tuple of them."""
    if isinstance(transforms, Program):
        return transforms.transforms
    if isinstance(transforms, t.Transform):
        return (transforms,)
    if not isinstance(transforms, Iterable):
        raise TypeError(
            "Program: transforms must be a list of those of tr.data.transforms, got "
            f"{transforms!r}; [] changes nothing"
        )
    return tuple(transforms)


class _Compiler:
    def __init__(self, channels: int, height: int, width: int):
        self.channels, self.height, self.width = channels, height, width
        self.steps, self.step_values = [], []
        self.interpolation = self.fill = None  # (value, name of the transform that said it first)
        self.scale, self.bias = [1.0] * channels, [0.0] * channels
        self.erased = None  # the name of what erases, and its values
        self.unit, self.normalised, self.dtype = 255.0, False, torch.uint8
        self.converted = self.jittered = self.padded = False
        self.samplings = 0

    def ints(self, input_shape: tuple[int, int, int], channels_last: bool) -> list[int]:
        nearest = self.interpolation is not None and self.interpolation[0] == "nearest"
        head = [*input_shape, _OUTPUTS.index(self.dtype), int(channels_last)]
        return [*head, int(nearest)] + [number for step in self.steps for number in step]

    def values(self) -> list[float]:
        fill = self.fill[0] if self.fill else [0.0]
        erased = [0.0] * self.channels
        if self.erased is not None:
            value, scale, bias = self.erased  # those that still lay ahead when it was added
            erased = [
                v * (s / s0) + (b - b0 * (s / s0))
                for v, s, b, s0, b0 in zip(value, self.scale, self.bias, scale, bias, strict=True)
            ]
        head = [self._four(fill), self._four(self.scale), self._four(self.bias), self._four(erased)]
        return [v for values in (*head, *self.step_values) for v in values]

    @staticmethod
    def _four(values) -> list[float]:
        values = list(values) * (_CHANNELS if len(values) == 1 else 1)
        return (values + [0.0] * _CHANNELS)[:_CHANNELS]

    def _of_channels(self, what: str, name: str, values: tuple[float, ...]) -> list[float]:
        if len(values) not in (1, self.channels):
            raise ValueError(
                f"{what}: {name} must be a number or one for each of {self.channels} channels, "
                f"got {list(values)}"
            )
        return list(values) * (self.channels // len(values))

    def _step(self, kind, position, height=None, width=None, top=0, left=0, mode=0, values=()):
        if len(self.steps) == _MAX_STEPS:
            raise ValueError(
                f"Program: at most {_MAX_STEPS} steps fit one kernel; leave some transforms out"
            )
        height, width = height or self.height, width or self.width
        check_size(f"images after {kind.name}", self.channels, height, width)
        self.height, self.width = height, width
        self.steps.append([int(kind), position, self.height, self.width, top, left, mode])
        self.step_values.append([*map(float, values), *[0.0] * (8 - len(values))])

    # -- What may follow what

    def _geometric(self, what: str) -> None:
        for came, blocker in (
            (self.normalised, "Normalize"),
            (self.jittered, "ColorJitter"),
            (self.erased is not None, "RandomErasing"),
        ):
            if came:
                raise ValueError(
                    f"Program: {what} moves pixels and comes after {blocker}; put {blocker} "
                    "behind it"
                )

    def _agree(self, what: str, name: str, value) -> None:
        """One kernel has one interpolation and one fill."""
        said = getattr(self, name)
        if said is not None and said[0] != value:
            raise ValueError(
                f"Program: {what} has {name}={value}, but {said[1]} before it has {said[0]}, and "
                f"there is one {name} for all; give both the same"
            )
        setattr(self, name, said or (value, what))

    def _filled(self, what: str, fill: tuple[float, ...]) -> None:
        values = self._of_channels(what, "fill", fill)
        self._agree(what, "fill", [v * (255.0 / self.unit) for v in values])

    def _sampling(self, what: str, interpolation: str, fill: tuple[float, ...] | None) -> None:
        self._geometric(what)
        self._agree(what, "interpolation", interpolation)
        if fill is not None:
            self._filled(what, fill)
        self.samplings += 1
        if self.samplings > _MAX_SAMPLINGS:
            raise ValueError(
                f"Program: {what} is the transform number {self.samplings} that samples between "
                f"pixels, and one kernel composes at most {_MAX_SAMPLINGS}; leave one out"
            )

    def _pad(self, position, what, padding, fill, mode) -> None:
        left, top, right, bottom = padding
        if not any(padding):
            return
        if mode == "constant":
            self._filled(what, fill)
        elif self.padded or self.samplings:
            raise ValueError(
                f"Program: {what} has padding_mode={mode!r}, which is possible for the first "
                "transform that pads, before rotation, scaling and resizing; put it there or use "
                "'constant'"
            )
        if mode == "reflect" and (
            max(left, right) >= self.width or max(top, bottom) >= self.height
        ):
            raise ValueError(
                f"Program: {what} reflects {padding} pixels (left, top, right, bottom) of an image "
                f"of {self.height} x {self.width}; use less than its sides"
            )
        self.padded = True
        height, width = self.height + top + bottom, self.width + left + right
        number = _PADDING_MODES.index(mode)
        self._step(_Kind.WINDOW, position, height, width, -top, -left, number)

    def _fits(self, what: str, size: tuple[int, int], remedy: str) -> None:
        if size[0] > self.height or size[1] > self.width:
            raise ValueError(
                f"Program: {what} takes {size[0]} x {size[1]} from an image that is "
                f"{self.height} x {self.width} there; {remedy}"
            )

    # -- Transforms

    @singledispatchmethod
    def _add(self, transform, position: int, what: str) -> None:
        raise TypeError(
            f"Program: transforms must be those of tr.data.transforms, got {transform!r}"
        )

    def add(self, position: int, transform: t.Transform) -> None:
        self._add(transform, position, type(transform).__name__)

    @_add.register
    def _(self, pad: t.Pad, position, what):
        self._geometric(what)
        self._pad(position, what, pad.padding, pad.fill, pad.padding_mode)

    @_add.register
    def _(self, crop: t.RandomCrop, position, what):
        self._geometric(what)
        left, top, right, bottom = crop.padding or (0, 0, 0, 0)
        if crop.pad_if_needed:
            missing = crop.size[0] - (self.height + top + bottom)
            top, bottom = (side + max(missing, 0) for side in (top, bottom))
            missing = crop.size[1] - (self.width + left + right)
            left, right = (side + max(missing, 0) for side in (left, right))
        self._pad(position, what, (left, top, right, bottom), crop.fill, crop.padding_mode)
        self._fits(what, crop.size, "pad more, or set pad_if_needed=True")
        self._step(_Kind.RANDOM_CROP, position, *crop.size)

    @_add.register
    def _(self, crop: t.CenterCrop, position, what):
        self._geometric(what)
        self._fits(what, crop.size, "put a Pad before it")
        top = round((self.height - crop.size[0]) / 2)
        left = round((self.width - crop.size[1]) / 2)
        self._step(_Kind.WINDOW, position, *crop.size, top, left)

    @_add.register
    def _(self, resize: t.Resize, position, what):
        self._sampling(what, resize.interpolation, None)
        size = resize.size
        if len(size) == 1:
            short, long = sorted((self.height, self.width))
            sides = size[0], int(size[0] * long / short)
            size = sides if self.height <= self.width else sides[::-1]
        self._step(_Kind.RESIZE, position, *size)

    @_add.register
    def _(self, flip: t.RandomHorizontalFlip, position, what):
        self._geometric(what)
        self._step(_Kind.HORIZONTAL_FLIP, position, values=[flip.p])

    @_add.register
    def _(self, flip: t.RandomVerticalFlip, position, what):
        self._geometric(what)
        self._step(_Kind.VERTICAL_FLIP, position, values=[flip.p])

    @_add.register
    def _(self, rotation: t.RandomRotation, position, what):
        self._sampling(what, rotation.interpolation, rotation.fill)
        self._step(_Kind.ROTATION, position, values=rotation.degrees)

    @_add.register
    def _(self, scaling: t.RandomScale, position, what):
        self._sampling(what, scaling.interpolation, scaling.fill)
        self._step(_Kind.SCALE, position, values=scaling.scale)

    @_add.register
    def _(self, crop: t.RandomResizedCrop, position, what):
        self._sampling(what, crop.interpolation, None)
        values = [*crop.scale, *crop.ratio, *t.log_range(crop.ratio)]
        self._step(_Kind.RESIZED_CROP, position, *crop.size, values=values)

    @_add.register
    def _(self, jitter: t.ColorJitter, position, what):
        for came, blocker in (
            (self.normalised, "Normalize"),
            (self.erased is not None, "RandomErasing"),
        ):
            if came:
                raise ValueError(f"Program: {what} comes after {blocker}; put {blocker} behind it")
        if self.jittered:
            raise ValueError(f"Program: two {what}s; join their ranges in one")
        if self.channels == 4:
            raise ValueError(
                f"Program: {what} needs images of 1 or 3 channels, got 4; drop one channel"
            )
        self.jittered = True
        on, values = 0, []
        for bit, (name, neutral) in enumerate(_JITTERS.items()):
            chosen = getattr(jitter, name)
            on |= (chosen is not None) << bit
            values += chosen or (neutral, neutral)
        self._step(_Kind.COLOR_JITTER, position, top=on, values=values)

    @_add.register
    def _(self, erasing: t.RandomErasing, position, what):
        if self.erased is not None:
            raise ValueError(f"Program: two {what}s; one kernel erases one rectangle")
        # In its units: what lies ahead turns them into those of the output.
        values = self._of_channels(what, "value", erasing.value)
        self.erased = values, list(self.scale), list(self.bias)
        logs = t.log_range(erasing.ratio)
        values = [erasing.p, *erasing.scale, *erasing.ratio, *logs]
        self._step(_Kind.ERASING, position, values=values)

    @_add.register
    def _(self, normalize: t.Normalize, position, what):
        if self.normalised:
            raise ValueError(f"Program: two {what}s; join their means and deviations in one")
        self._convert(torch.float32)
        mean = self._of_channels(what, "mean", normalize.mean)
        std = self._of_channels(what, "std", normalize.std)
        self.normalised = True
        self.scale = [s / d for s, d in zip(self.scale, std, strict=True)]
        self.bias = [-m / d for m, d in zip(mean, std, strict=True)]

    @_add.register
    def _(self, to_float: t.ToFloat, position, what):
        if self.converted:
            raise ValueError(f"Program: two {what}s; the output has one dtype, that of the last")
        self._convert(to_float.dtype)
        self.converted = True

    def _convert(self, dtype: torch.dtype) -> None:
        if self.dtype == torch.uint8:
            self.unit, self.scale = 1.0, [1 / 255.0] * self.channels
            self.dtype = torch.float32
        if dtype != torch.float32:
            self.dtype = dtype


@lru_cache(maxsize=64)
def program_of(
    transforms: tuple[t.Transform, ...], shape: tuple[int, int, int], channels_last: bool
) -> Program:
    return Program(transforms, *shape, channels_last=channels_last)
