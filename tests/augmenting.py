# SPDX-License-Identifier: BSD-3-Clause
# What the tests of augmentation share: images, transforms and recipes, and batches drawn by the
# ops.

import pytest
import torch
from testing import DEVICES

from torch_renaissance._ops import ops
from torch_renaissance.data import (
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

each_device = pytest.mark.parametrize("device", DEVICES)


def noise(n, channels, height, width, device="cpu", channels_last=False):
    generator = torch.Generator().manual_seed(0)
    shape = (n, channels, height, width)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device)
    return images.contiguous(memory_format=torch.channels_last) if channels_last else images


GEOMETRIC = [
    Pad(3),
    Pad((1, 2)),
    Pad((1, 2, 3, 0), fill=77),
    Pad((2, 3), padding_mode="edge"),
    Pad((4, 3, 2, 1), padding_mode="reflect"),
    RandomCrop((9, 14)),
    RandomCrop(12, padding=4, fill=9),
    RandomCrop(13, padding=(2, 3), padding_mode="reflect"),
    CenterCrop((8, 13)),
    CenterCrop((9, 12)),
    RandomHorizontalFlip(),
    RandomVerticalFlip(),
    *(
        transform
        for mode in ("bilinear", "nearest")
        for transform in (
            Resize((20, 11), interpolation=mode),
            Resize(7, interpolation=mode),
            RandomRotation(40, interpolation=mode),
            RandomRotation((170, 350), interpolation=mode, fill=200),
            RandomScale((0.4, 1.9), interpolation=mode),
            RandomScale((0.5, 0.9), interpolation=mode, fill=31),
            RandomResizedCrop((10, 17), interpolation=mode),
            RandomResizedCrop(24, scale=(0.2, 0.4), ratio=(0.5, 3), interpolation=mode),
        )
    ),
]

JITTERS = [
    ColorJitter(brightness=0.5),
    ColorJitter(contrast=0.5),
    ColorJitter(contrast=(1.5, 3.0)),
    ColorJitter(saturation=0.7),
    ColorJitter(hue=0.3),
    ColorJitter(hue=(-0.5, -0.4)),
    ColorJitter(0.4, 0.4, 0.4, 0.1),
    ColorJitter(2.0, 2.0, 2.0, 0.5),
]

MNIST = [
    Pad(2),
    RandomCrop(28),
    RandomRotation(20, "bilinear"),
    RandomScale((0.8, 1.2), "bilinear"),
    RandomErasing(0.5),
    Normalize(0.1307, 0.3081),
    ToFloat(torch.float16),
]
CIFAR = [
    RandomCrop(32, padding=4),
    RandomHorizontalFlip(),
    RandomErasing(0.5),
    Normalize((0.49, 0.48, 0.45), (0.25, 0.24, 0.26)),
    ToFloat(torch.bfloat16),
]
IMAGENET = [
    RandomResizedCrop((18, 21)),
    RandomHorizontalFlip(),
    ColorJitter(0.4, 0.4, 0.4, 0.1),
    RandomErasing(0.5, value=99),
    Normalize((0.49, 0.48, 0.45), (0.25, 0.24, 0.26)),
]

RECIPES = {"mnist": (MNIST, 1, 28), "cifar": (CIFAR, 3, 32), "imagenet": (IMAGENET, 3, 37)}
RECIPES |= {"rgba": ([RandomRotation(9), RandomCrop(7)], 4, 9), "nothing": ([], 3, 5)}
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


def cursor_of(seed=3, epoch=2, position=0, device="cpu"):
    return torch.tensor([seed, epoch, position, 0], device=device)


def draw(images, labels, cursor, size, program, subset=None, count=None, shuffle=True, **ranks):
    available = len(images) if subset is None else len(subset)
    ranks = {"rank": 0, "world_size": 1} | ranks
    return ops.draw_batch(
        images,
        labels,
        subset,
        cursor,
        size,
        available if count is None else count,
        shuffle,
        ranks["rank"],
        ranks["world_size"],
        program.ints,
        program.values,
    )
