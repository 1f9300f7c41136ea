# SPDX-License-Identifier: BSD-3-Clause
"""Augmentation of a batch that lies in memory: one kernel, whatever the list of transforms."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor

from .._ops import ops
from . import transforms as t
from ._program import Program, Transforms, listed, program_of

_CROP = ("top", "left", "height", "width")


def augment(
    images: Tensor,
    transforms: Transforms,
    *,
    seed: int = 0,
    epoch: int = 0,
    indices: Tensor | None = None,
    channels_last: bool = False,
) -> Tensor:
    """Augmented copies of images, in one kernel: one read, one write.

    What a sample draws is a function of `seed`, `epoch`, its index and the transform's place in the
    list, and of nothing else: not of the batch, the device or the rank. The result has the same
    bits on CPU and GPU.

    Each transform does what torchvision.transforms.v2's of the same name does to tensors, with
    these differences:

    * Values stay float from the first transform to the last, where torchvision rounds uint8 images
      after each: to the nearest value after geometric ones (results differ by up to 0.5 / 255 for
      each, 1 / 255 for resizing), down after each part of `ColorJitter` (by up to 1 / 255 for each,
      times the factors that follow). Of float images torchvision's results are the same, within
      4e-5 for images of up to 32 pixels, as coordinates are float32.
    * Geometric transforms compose into one map, so pixels are interpolated once, not once a
      transform: several of them blur less. What one pushes out of its frame stays lost to the next,
      as in torchvision, except that a `Resize` after another transform that interpolates goes on
      by half a pixel at the border instead of repeating it.

    Args:
        images: uint8 [N, C, H, W] on any device, contiguous as NCHW or channels_last; C is 1, 3
            or 4.
        transforms: of `tr.data.transforms`, or the `Program` made of them.
        seed: from 0 to 2**64 - 1.
        epoch: from 0 to 2**24 - 1.
        indices: int64 [B], contiguous on the images' device: which images, in which order; all by
            default. An index out of range raises on the CPU and makes that sample NaN (0 for uint8)
            on a GPU.
        channels_last: the memory format of the result. A `Program` has its own.

    Returns:
        [B, C, height, width] of the dtype of `ToFloat`; float32 with `Normalize` alone, uint8
        without both.

    Raises:
        TypeError, ValueError: for arguments that are not so, and for what `Program` raises.
        RuntimeError: for images that aren't contiguous, and indices of another dtype, shape or
            device.
        IndexError: for an index out of range, on the CPU.
    """
    if not isinstance(images, Tensor) or images.dtype != torch.uint8 or images.dim() != 4:
        got = f"{images.dtype} {list(images.shape)}" if isinstance(images, Tensor) else repr(images)
        raise TypeError(f"augment: images must be a uint8 tensor [N, C, H, W], got {got}")
    program = _program(transforms, images.shape[1:], channels_last)
    if indices is None:
        indices = torch.arange(images.shape[0], device=images.device)
    _check_indices("augment", indices)
    seed, epoch = _check_key("augment", seed, epoch)
    return ops.augment(images, indices, seed, epoch, program.ints, program.values)


def parameters(
    images_shape: Sequence[int],
    transforms: Transforms,
    *,
    seed: int = 0,
    epoch: int = 0,
    indices: Tensor | None = None,
) -> dict[int, dict[str, Tensor]]:
    """What each sample draws in `augment`, by the transform's place in the list.

    Args:
        images_shape: (N, C, H, W) of the images.
        indices: int64 [B], any numbers; all N by default.

    Returns:
        For each transform that draws, tensors of shape [B] (on the CPU) with the names that
        torchvision's `make_params` uses: `top`, `left`, `height`, `width` of crops; `apply` of
        flips; `angle` in degrees; `scale`; `brightness_factor`, `contrast_factor`,
        `saturation_factor`, `hue_factor` and their order `fn_idx` [B, 4]; `i`, `j`, `h`, `w` of
        erasing, with h = 0 where nothing is erased.

    Raises:
        As `augment`, but for an index out of range.
    """
    program = _program(transforms, images_shape[1:], False)
    if indices is None:
        indices = torch.arange(images_shape[0])
    _check_indices("parameters", indices)
    seed, epoch = _check_key("parameters", seed, epoch)
    integers, reals = ops.augment_parameters(
        indices.cpu(), seed, epoch, program.ints, program.values
    )
    found = {}
    for step, position in enumerate(program.positions):
        drawn = _named(program.transforms[position], integers[:, step], reals[:, step])
        if drawn:
            found[position] = drawn  # of two steps of a RandomCrop the later one draws
    return found


def _named(transform: t.Transform, integers: Tensor, reals: Tensor) -> dict[str, Tensor]:
    columns, first = integers.unbind(1), reals[:, 0]
    match transform:
        case t.RandomCrop() | t.RandomResizedCrop():
            return dict(zip(_CROP, columns, strict=True))
        case t.RandomHorizontalFlip() | t.RandomVerticalFlip():
            return {"apply": columns[0].bool()}
        case t.RandomRotation():
            return {"angle": first}
        case t.RandomScale():
            return {"scale": first}
        case t.ColorJitter():
            names = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")
            order = torch.stack([columns[0] >> 2 * i & 3 for i in range(4)], dim=1)
            return dict(zip(names, reals.unbind(1), strict=True)) | {"fn_idx": order}
        case t.RandomErasing():
            return dict(zip("ijhw", columns, strict=True))
    return {}


def _program(transforms: Transforms, shape: Sequence[int], channels_last: bool) -> Program:
    if isinstance(transforms, Program):
        if tuple(shape) != transforms.input_shape:
            raise ValueError(
                f"augment: images are {list(shape)}, but the program was made for "
                f"{list(transforms.input_shape)}; make one for their size"
            )
        return transforms
    return program_of(listed(transforms), tuple(map(int, shape)), bool(channels_last))


def _check_indices(what: str, indices: Tensor) -> None:
    if not isinstance(indices, Tensor):
        raise TypeError(
            f"{what}: indices must be an int64 tensor of shape (B,), got {type(indices).__name__}"
        )


def _check_key(what: str, seed: int, epoch: int) -> tuple[int, int]:
    """`seed` as the op takes it, a signed number of 64 bits, and the epoch."""
    for name, value, bits in (("seed", seed, 64), ("epoch", epoch, 24)):
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise TypeError(f"{what}: {name} must be an int, got {value!r}")
        if not 0 <= value < 2**bits:
            raise ValueError(f"{what}: {name} must be from 0 to 2**{bits} - 1, got {value}")
    return int(seed) - 2**64 * (seed >= 2**63), int(epoch)
