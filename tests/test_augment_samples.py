# SPDX-License-Identifier: BSD-3-Clause
# Augmented images in every layout, dtype and size, and what a sample depends on: its image, seed
# and epoch, and neither the batch, nor threads, nor the device. What it draws is in
# test_augment_draws.py.

import pytest
import torch
from augment_reference import composed, rotation_matrix, scale_matrix
from augmenting import GEOMETRIC, IMAGENET, JITTERS, RECIPES, each_device, each_recipe, noise

from torch_renaissance import data
from torch_renaissance.data import (
    Normalize,
    Program,
    RandomCrop,
    RandomHorizontalFlip,
    RandomRotation,
    RandomScale,
    ToFloat,
)

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


# -- layouts and dtypes ----------------------------------------------------------------------------


def transforms_to(transforms, dtype):
    """The recipe with another dtype of the result."""
    plain = [t for t in transforms if not isinstance(t, ToFloat)]
    return [*plain, ToFloat(dtype)]


@each_device
@each_recipe
def test_layouts(recipe, device):
    transforms, channels, size = RECIPES[recipe]
    values = [
        data.augment(
            noise(9, channels, size, size, device, channels_last=given),
            transforms,
            channels_last=wanted,
        )
        for given in (False, True)
        for wanted in (False, True)
    ]
    for i, value in enumerate(values):
        wanted = torch.channels_last if i % 2 else torch.contiguous_format
        assert value.is_contiguous(memory_format=wanted)
        assert torch.equal(value, values[0])


@each_device
@each_recipe
def test_narrow_dtypes_hold_the_same_values_rounded(recipe, device):
    transforms, channels, size = RECIPES[recipe]
    images = noise(9, channels, size, size, device)
    exact = data.augment(images, transforms_to(transforms, torch.float32))
    for dtype in FLOATS:
        value = data.augment(images, transforms_to(transforms, dtype))
        assert value.dtype == dtype and torch.equal(value, exact.to(dtype))


@each_device
@pytest.mark.parametrize("size", [(1, 1), (1, 7), (5, 3), (28, 28), (33, 61), (150, 130)], ids=str)
def test_sizes(size, device):
    """Odd ones, one pixel, and images that no shared memory holds."""
    for channels in (1, 3, 4):
        images = noise(5, channels, *size, device)
        transforms = [
            RandomHorizontalFlip(),
            RandomRotation(30, "bilinear"),
            RandomScale((0.7, 0.9), "bilinear"),
            Normalize(0.5, 0.5),
        ]
        program = Program(transforms, channels, *size)
        value = data.augment(images, program)
        assert value.shape[1:] == program.shape and value.isfinite().all()
        drawn = data.parameters(images.shape, transforms)
        matrices = [
            rotation_matrix(drawn[1]["angle"][0]),
            scale_matrix(drawn[2]["scale"][0].item()),
        ]
        image = images[0].flip(-1) if drawn[0]["apply"][0] else images[0]
        exact = (composed(image.cpu() / 255, matrices) - 0.5) / 0.5
        # Coordinates up to 150 are five times less exact than those of FLOAT's bound.
        torch.testing.assert_close(value[0].cpu(), exact.float(), rtol=0, atol=2 * 2e-4)


# -- what a sample depends on ----------------------------------------------------------------------


@each_device
@each_recipe
def test_batches_of_any_size_and_order_have_the_same_samples(recipe, device):
    transforms, channels, size = RECIPES[recipe]
    images = noise(40, channels, size, size, device)
    whole = data.augment(images, transforms, seed=4, epoch=1)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).to(device)
    shuffled = data.augment(images, transforms, seed=4, epoch=1, indices=order)
    assert torch.equal(shuffled, whole[order])
    for i in (0, 7, 39):
        one = torch.tensor([i], device=device)
        alone = data.augment(images, transforms, seed=4, epoch=1, indices=one)
        assert torch.equal(alone, whole[i : i + 1])


def test_threads_change_nothing():
    threads, values = torch.get_num_threads(), []
    images = noise(64, 3, 37, 37)
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            values.append(data.augment(images, IMAGENET))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*values)


@each_recipe
def test_seeds_and_epochs_differ(recipe):
    transforms, channels, size = RECIPES[recipe]
    images = noise(64, channels, size, size)
    first = data.augment(images, transforms, seed=4, epoch=1)
    assert torch.equal(data.augment(images, transforms, seed=4, epoch=1), first)
    for key in ({"seed": 5, "epoch": 1}, {"seed": 4, "epoch": 2}, {"seed": 2**64 - 1}):
        other = data.augment(images, transforms, **key)
        same = (other == first).flatten(1).all(1).double().mean()
        assert same == (recipe == "nothing") or same < 0.2


@pytest.mark.cuda
@each_recipe
@pytest.mark.parametrize("n", [1, 5, 3000])
def test_gpu_and_cpu_have_the_same_bits(recipe, n):
    """Up to blocks of several samples; images in and beyond shared memory."""
    transforms, channels, size = RECIPES[recipe]
    for side in (size, 97) if n == 5 else (size,):
        for dtype in FLOATS:
            chosen = transforms_to(transforms, dtype)
            images = noise(n, channels, side, side)
            values = [data.augment(images.to(d), chosen, seed=3, epoch=5) for d in ("cpu", "cuda")]
            assert torch.equal(values[0], values[1].cpu())


@pytest.mark.cuda
@pytest.mark.parametrize("rotates", [False, True])
def test_gpu_and_cpu_agree_where_a_crop_misses_the_image(rotates):
    """Nothing of it is seen then; the span of what is seen is empty."""
    transforms = [RandomCrop(12, padding=40), *[RandomRotation(30, "bilinear")] * rotates]
    images = noise(300, 1, 12, 12)
    values = [
        data.augment(images.to(d), [*transforms, ToFloat()], seed=3).cpu() for d in ("cpu", "cuda")
    ]
    assert torch.equal(*values)
    empty = (values[0] == 0).flatten(1).all(1)
    assert empty.any() and not empty.all()


@pytest.mark.cuda
@pytest.mark.parametrize("transform", [*GEOMETRIC, *JITTERS], ids=str)
def test_gpu_and_cpu_agree_on_each_transform(transform):
    images = noise(50, 3, 13, 18)
    values = [data.augment(images.to(d), transform, seed=3) for d in ("cpu", "cuda")]
    assert torch.equal(values[0], values[1].cpu())
