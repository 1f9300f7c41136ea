# SPDX-License-Identifier: BSD-3-Clause
# What tr.data's augmentation refuses: arguments of transforms, sequences that one kernel can't do,
# images, indices, and programs made by hand.

import math
from functools import partial

import pytest
import torch
from augmenting import cursor_of, draw, noise
from torchvision.transforms import v2

from torch_renaissance import data
from torch_renaissance._ops import ops
from torch_renaissance.data import (
    CenterCrop,
    ColorJitter,
    Normalize,
    Pad,
    Program,
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

BAD_ARGUMENTS = [
    (partial(Pad, -1), ValueError, "Pad: padding must be at least 0, got -1"),
    (partial(Pad, (1, 2, 3)), TypeError, "padding must be 1 or 2 or 4 whole numbers"),
    (partial(Pad, 1.5), TypeError, r"whole numbers, got 1\.5"),
    (partial(Pad, 1, padding_mode="symmetric"), ValueError, "constant, edge, reflect, got 'symm"),
    (partial(Pad, 1, fill=None), TypeError, "fill must be a number or one a channel, got None"),
    (partial(Pad, 1, fill=math.nan), ValueError, "fill must be finite, got nan"),
    (partial(RandomCrop, 0), ValueError, "RandomCrop: size must be at least 1, got 0"),
    (partial(RandomCrop, 8, pad_if_needed=1), TypeError, "pad_if_needed must be a bool, got 1"),
    (partial(RandomHorizontalFlip, 1.1), ValueError, "p must be from 0 to 1, got 1.1"),
    (partial(RandomVerticalFlip, "0.5"), TypeError, "p must be a number, got '0.5'"),
    (partial(RandomRotation, -3), ValueError, "degrees must be at least 0, got -3"),
    (partial(RandomRotation, (3, 1)), ValueError, "degrees must be in order"),
    (partial(RandomRotation, 3, "bicubic"), ValueError, "nearest, bilinear, got 'bicubic'"),
    (partial(RandomScale, (0, 1)), ValueError, "scale must be in order and from 0.001"),
    (partial(RandomScale, 2), TypeError, "scale must be two numbers, least and most, got 2"),
    (partial(Resize, 8, antialias=True), ValueError, "Resize: antialias must be False, got True"),
    (partial(RandomResizedCrop, 8, ratio=(0, 1)), ValueError, "ratio must be in order"),
    (partial(ColorJitter, -0.1), ValueError, "a single brightness must be at least 0, got -0.1"),
    (partial(ColorJitter, hue=0.6), ValueError, "hue must be in order and from -0.5 to 0.5"),
    (partial(ColorJitter, contrast=(-1, 2)), ValueError, "contrast must be in order and from 0"),
    (partial(RandomErasing, 2), ValueError, "RandomErasing: p must be from 0 to 1, got 2"),
    (partial(RandomErasing, scale=(0.5, 1.5)), ValueError, "scale must be in order and from 0 to"),
    (partial(RandomErasing, value="random"), ValueError, "value must be a number .*'random'"),
    (partial(Normalize, 0.5, 0.0), ValueError, "Normalize: std must be greater than 0"),
    (partial(Normalize, (), 1), ValueError, "mean must be a number or one a channel"),
    (partial(ToFloat, torch.float64), ValueError, "dtype must be one of torch.float32"),
]


@pytest.mark.parametrize(("make", "error", "message"), BAD_ARGUMENTS)
def test_bad_arguments_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


CANNOT = [
    (
        [RandomErasing(), RandomCrop(5)],
        "RandomCrop moves pixels and comes after RandomErasing; put",
    ),
    ([ColorJitter(0.1), Pad(1)], "Pad moves pixels and comes after ColorJitter; put ColorJitter"),
    ([Normalize(0, 1), RandomRotation(3)], "RandomRotation moves pixels and comes after Normalize"),
    ([ColorJitter(0.1), ColorJitter(0.1)], "two ColorJitters; join their ranges in one"),
    ([RandomErasing(), ColorJitter(0.1)], "ColorJitter comes after RandomErasing; put"),
    ([Normalize(0, 1), ColorJitter(0.1)], "ColorJitter comes after Normalize; put Normalize"),
    ([RandomErasing(), RandomErasing()], "two RandomErasings; one kernel erases one rectangle"),
    ([Normalize(0, 1), Normalize(0, 1)], "two Normalizes; join"),
    ([ToFloat(), ToFloat()], "two ToFloats; the output has one dtype"),
    ([Pad(1), RandomCrop(11)], "RandomCrop takes 11 x 11 from an image that is 10 x 10 there; pad"),
    ([CenterCrop(9)], "CenterCrop takes 9 x 9 from an image that is 8 x 8 there; put a Pad"),
    (
        [RandomRotation(3), RandomScale((1, 2), "bilinear")],
        "RandomScale has interpolation=bilinear, but RandomRotation before it has nearest",
    ),
    ([Pad(1, fill=3), RandomRotation(3)], r"RandomRotation has fill=\[0.0, 0.0, 0.0\], but Pad"),
    ([Pad(1, fill=(1, 2))], "Pad: fill must be a number or one for each of 3 channels"),
    ([Normalize((0, 0), 1)], "Normalize: mean must be a number or one for each of 3 channels"),
    ([Pad(8, padding_mode="reflect")], r"Pad reflects \(8, 8, 8, 8\) pixels .* 8 x 8; use less"),
    ([Pad(1), Pad(1, padding_mode="edge")], "Pad has padding_mode='edge', which is possible for"),
    ([RandomScale((1, 2))] * 4, "transform number 4 that samples .* at most 3; leave one out"),
    ([RandomHorizontalFlip()] * 13, "at most 12 steps fit one kernel"),
]


@pytest.mark.parametrize(("transforms", "message"), CANNOT)
def test_impossible_sequences_are_refused(transforms, message):
    with pytest.raises(ValueError, match=message):
        Program(transforms, 3, 8, 8)


def test_program_refuses_images_and_other_objects():
    with pytest.raises(ValueError, match="must have 1, 3 or 4 channels, got 2"):
        Program([], 2, 8, 8)
    with pytest.raises(ValueError, match="must not be empty, got 0 x 8"):
        Program([], 3, 0, 8)
    with pytest.raises(TypeError, match=r"must be those of tr\.data\.transforms, got RandomCrop"):
        Program([v2.RandomCrop(3)], 3, 8, 8)
    with pytest.raises(ValueError, match="ColorJitter needs images of 1 or 3 channels, got 4"):
        Program([ColorJitter(0.1)], 4, 8, 8)


def test_augment_refuses():
    images = noise(3, 1, 8, 8)
    with pytest.raises(
        TypeError, match=r"uint8 tensor \[N, C, H, W\], got torch.float32 \[3, 1, 8"
    ):
        data.augment(images.float(), [])
    with pytest.raises(ValueError, match="seed must be from 0 to 2"):
        data.augment(images, [], seed=-1)
    with pytest.raises(TypeError, match=r"epoch must be an int, got 0\.5"):
        data.augment(images, [], epoch=0.5)
    with pytest.raises(ValueError, match=r"epoch must be from 0 to 2\*\*24 - 1, got 16777216"):
        data.augment(images, [], epoch=2**24)
    with pytest.raises(ValueError, match=r"images are \[1, 8, 8\], but the program was made for"):
        data.augment(images, Program([], 1, 9, 9))
    with pytest.raises(
        IndexError, match="sample 1 of the batch is image 3, but there are 3 images"
    ):
        data.augment(images, [], indices=torch.tensor([0, 3]))
    with pytest.raises(TypeError, match=r"augment: indices must be an int64 tensor .* got list"):
        data.augment(images, [], indices=[0, 1])
    with pytest.raises(TypeError, match="parameters: indices must be an int64 tensor"):
        data.parameters(images.shape, [], indices=[0, 1])
    with pytest.raises(TypeError, match=r"list of those of tr\.data\.transforms, got 3; \[\]"):
        data.augment(images, 3)
    with pytest.raises(RuntimeError, match="indices must be a contiguous int64 vector on cpu"):
        data.augment(images, [], indices=torch.tensor([0, 1], dtype=torch.int32))
    with pytest.raises(RuntimeError, match="images must be contiguous, as NCHW or channels_last"):
        data.augment(noise(3, 3, 8, 9)[..., :8], [])


def test_draw_batch_refuses_and_leaves_the_cursor():
    images, labels = noise(5, 1, 8, 8), torch.arange(5)
    program, cursor = Program([RandomCrop(6)], 1, 8, 8), cursor_of()
    bad = torch.tensor([0, 5])
    for arguments, options, error, message in (
        (
            (images, labels[:4]),
            {},
            RuntimeError,
            "labels must be contiguous, on cpu and have 5 rows",
        ),
        ((images, labels), {"count": 6}, RuntimeError, "count is 6, but there are 5 samples"),
        ((images, labels), {"count": 0}, RuntimeError, "count is 0, but a batch of 2 needs"),
        (
            (images, labels),
            {"rank": 2, "world_size": 2},
            RuntimeError,
            "got rank 2 and world_size 2",
        ),
        ((images, labels), {"subset": bad, "shuffle": False}, IndexError, "is image 5, but there"),
    ):
        with pytest.raises(error, match=message):
            draw(*arguments, cursor, 2, program, **options)
        assert cursor.tolist() == [3, 2, 0, 0]
    with pytest.raises(RuntimeError, match="cursor must have 4 numbers, got 3"):
        draw(images, labels, cursor[:3], 2, program)
    x, y = torch.zeros(2, 1, 6, 6, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    for wrong, message in (
        ((x[:, 0], y), "x must have 4 dimensions, as images, got 3"),
        ((x[..., :5], y), r"x must be Byte of shape \[2, 1, 6, 6\] on cpu, .* 6, 5\]"),
        ((x.mT, y), "got Byte of shape .* and strides"),
        ((x.float(), y), "x must be Byte .* got Float"),
        ((x.to("meta"), y), "must be on one device, got some on meta and one on cpu"),
        ((x, y[:1]), r"y must be Long of shape \[2\] on cpu, .* got Long of shape \[1\]"),
        ((x, y.int()), "y must be Long .* got Int"),
        ((x, y.new_zeros(4)[::2]), r"y must be Long .* strides \[2\]"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.draw_batch_(
                *wrong, images, labels, None, cursor, 5, True, 0, 1, program.ints, program.values
            )
        assert cursor.tolist() == [3, 2, 0, 0] and not x.any() and not y.any()


def changed(numbers, **at):
    numbers = list(numbers)
    for place, value in at.items():
        numbers[int(place[1:])] = value
    return numbers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i, v: (i[:-1], v), "program has 12 numbers and values 24, expected 6 . 7n and 16"),
        (lambda i, v: (i, v[:-1]), "program has 13 numbers and values 23"),
        (lambda i, v: (changed(i, _0=2), v), "images must have 1, 3 or 4 channels, got 2"),
        (lambda i, v: (changed(i, _1=0), v), "an image of 1 x 0 x 8 is empty or too large"),
        (lambda i, v: (changed(i, _3=4), v), "dtype is 4, expected 0 to 3"),
        (lambda i, v: (changed(i, _6=10), v), "step 0 is of kind 10"),
        (lambda i, v: (changed(i, _7=256), v), "step 0 has stream 256"),
        (lambda i, v: (changed(i, _8=9), v), "step 0 crops 9 x 6 from 8 x 8"),
        (lambda i, v: (changed(i, _8=2**21), v), "step 0 holds 2097152, expected at most"),
        (lambda i, v: (changed(i, _6=2), v), "step 0 has size 6 x 6, expected 8 x 8"),
        (lambda i, v: (changed(i, _6=5), v), "a value of step 0 is out of range"),
        (lambda i, v: (i, changed(v, _3=math.nan)), "values holds nan"),
        (lambda i, v: (i + i[6:], v + v[16:]), None),
        (
            lambda i, v: (
                [*i, 9, 0, 6, 6, 0, 0, 0, *i[6:]],
                [*v, 0.0, 0, 0, 1, 1, 0, 0, 0, *v[16:]],
            ),
            "step 2 comes too late: geometry, ColorJitter, RandomErasing",
        ),
    ],
)
def test_programs_made_by_hand_are_checked(change, message):
    images, program = noise(2, 1, 8, 8), Program([RandomCrop(6)], 1, 8, 8)
    ints, values = change(program.ints, program.values)
    if message is None:
        ops.augment(images, torch.arange(2), 0, 0, ints, values)
        return
    with pytest.raises(RuntimeError, match=f"augment: .*{message}"):
        ops.augment(images, torch.arange(2), 0, 0, ints, values)
