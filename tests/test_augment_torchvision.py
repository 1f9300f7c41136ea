# SPDX-License-Identifier: BSD-3-Clause
# tr.data's augmentation beside torchvision's: each transform with its arguments, and compositions
# of them, which sample an image once.

import inspect

import pytest
import torch
from augment_reference import composed, rotation_matrix, scale_matrix, sequence
from augmenting import CIFAR, GEOMETRIC, IMAGENET, JITTERS, MNIST, noise
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

from torch_renaissance import data
from torch_renaissance.data import (
    CenterCrop,
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

each_channels = pytest.mark.parametrize("channels", [1, 3, 4])

# Coordinates of pixels up to 32 carry some 10 roundings of 6e-8, relative, so 2e-5 pixels, which
# times the difference of two pixels (at most 1) is the error of a value. torchvision has the like.
FLOAT = {"rtol": 0, "atol": 4e-5}
# Where torchvision rounds to uint8, to the nearest value: half a step of 1/255, and ours none. It
# resizes uint8 along one axis after the other, and rounds twice, with weights rounded too.
ROUNDED = {"rtol": 0, "atol": 0.501 / 255 + 4e-5}
ROUNDED_TWICE = {"rtol": 0, "atol": 1.3 / 255}


# -- one transform beside torchvision's ------------------------------------------------------------


def smooth(n, channels, height, width):
    """Waves of some ten pixels, which interpolation hardly changes."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    phase = torch.arange(n * channels).view(n, channels, 1, 1)
    return (127 + 100 * torch.sin(0.3 * x + 0.2 * y + phase)).to(torch.uint8)


def close(values, expected, tolerance, nearest=False):
    """With nearest sampling a pixel may differ where its place is halfway between two."""
    if nearest:
        differ = ((values - expected).abs() > tolerance["atol"]).double().mean()
        assert differ < 0.002
    else:
        torch.testing.assert_close(values, expected, **tolerance)


@each_channels
@pytest.mark.parametrize("transform", GEOMETRIC, ids=str)
def test_geometric_transforms_are_torchvisions(transform, channels):
    images = noise(24, channels, 13, 18)
    nearest = getattr(transform, "interpolation", "bilinear") == "nearest"
    values = data.augment(images, [transform, ToFloat()], seed=5, epoch=2)
    exact = sequence(images.float(), [transform], seed=5, epoch=2) / 255
    close(values, exact, FLOAT, nearest)
    rounded = sequence(images, [transform, ToFloat()], seed=5, epoch=2)
    resizes = isinstance(transform, (Resize, RandomResizedCrop))
    close(values, rounded, ROUNDED_TWICE if resizes else ROUNDED, nearest)
    # Without ToFloat: uint8, as torchvision's.
    whole = data.augment(images, transform, seed=5, epoch=2)
    assert whole.dtype == torch.uint8
    step = {"rtol": 0, "atol": (2 if resizes else 1) * 1.001 / 255}
    close(whole.float() / 255, rounded, step, nearest)


@pytest.mark.parametrize("transform", GEOMETRIC[:12], ids=str)
def test_whole_pixels_are_moved_exactly(transform):
    images = noise(24, 3, 13, 18)
    assert torch.equal(data.augment(images, transform), sequence(images, [transform]))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("transform", JITTERS, ids=str)
def test_color_jitter_is_torchvisions(transform, channels):
    images = noise(48, channels, 9, 14)
    images[0] = 99  # without hue
    images[1, :, 3:] = 255
    transforms = [ToFloat(), transform]
    values = data.augment(images, transforms, seed=1)
    # Each step rounds a few times at 6e-8 and enlarges what came before by its factor, up to 3.
    torch.testing.assert_close(
        values, sequence(images, transforms, seed=1), rtol=0, atol=81 * 4 * 6e-8
    )


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("transform", JITTERS[:2] + JITTERS[3:5] + JITTERS[6:7], ids=str)
def test_color_jitter_beside_uint8(transform, channels):
    """torchvision rounds down at each of up to four steps, and the grey, which counts by
    |1 - factor| <= 0.7; factors up to 1.4 enlarge what was lost before."""
    images = noise(48, channels, 9, 14)
    transforms = [transform, ToFloat()]
    values = data.augment(images, transforms, seed=1)
    steps = sum(getattr(transform, name) is not None for name in vars(transform))
    lost = sum(1.4**i for i in range(steps)) + 0.7
    bound = 1.7 / 255 if steps == 1 else lost / 255
    torch.testing.assert_close(values, sequence(images, transforms, seed=1), rtol=0, atol=bound)


@each_channels
@pytest.mark.parametrize(
    "transforms",
    [
        [RandomErasing(0.6)],
        [RandomErasing(0.6, value=128), ToFloat()],
        [ToFloat(), RandomErasing(0.6, value=0.25)],
        [ToFloat(), RandomErasing(0.6, value=0.25), Normalize(0.3, 0.2)],
        [RandomErasing(0.6, value=50), Normalize(0.3, 0.2)],
        [Normalize(0.3, 0.2), RandomErasing(0.6, (0.3, 0.9), (0.1, 2), value=-1.5)],
    ],
    ids=str,
)
def test_erasing_and_normalisation_are_torchvisions(transforms, channels):
    images = noise(64, channels, 13, 18)
    values, exact = data.augment(images, transforms), sequence(images, transforms)
    assert values.dtype == exact.dtype
    torch.testing.assert_close(values, exact, rtol=0, atol=2e-6)


def test_values_by_channel():
    images = noise(32, 3, 10, 11)
    for transforms in (
        [Pad(2, fill=(10, 20, 30)), RandomRotation(30, "bilinear", fill=(10, 20, 30))],
        [RandomErasing(0.7, value=(1, 2, 3)), ToFloat()],
        [Normalize((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)), RandomErasing(0.7, value=(1, 2, 3))],
        [ToFloat(), RandomErasing(0.7, value=(0.1, 0.2, 0.3)), Normalize((0.1, 0.2, 0.3), 0.5)],
        [ToFloat(), RandomScale((0.5, 0.6), "bilinear", fill=(0.1, 0.2, 0.3))],
    ):
        values, exact = data.augment(images, transforms), sequence(images, transforms)
        bound = 1 if values.dtype == torch.uint8 else 4e-5  # torchvision's values are rounded once
        torch.testing.assert_close(values.float(), exact.float(), rtol=0, atol=bound)


def test_arguments_and_defaults_are_torchvisions():
    for ours in data.transforms.Transform.__subclasses__():
        if ours in (RandomScale, ToFloat):  # RandomAffine and ToDtype there
            continue
        theirs = inspect.signature(getattr(v2, ours.__name__)).parameters
        for name, parameter in inspect.signature(ours).parameters.items():
            default = theirs[name].default
            default = getattr(default, "value", default)  # of InterpolationMode
            if name != "antialias":
                assert parameter.default == default, (ours, name)


@pytest.mark.parametrize("options", [{}, {"padding": 1}, {"padding": (0, 3, 1, 2)}], ids=str)
@pytest.mark.parametrize("size", [(20, 14), (11, 30), (16, 24), (9, 9)], ids=str)
def test_pad_if_needed_is_torchvisions(size, options):
    images = noise(16, 3, 13, 18)
    transform = RandomCrop(size, pad_if_needed=True, fill=7, **options)
    theirs = v2.RandomCrop(size, pad_if_needed=True, **options).make_params([images[0]])
    drawn = data.parameters(images.shape, [transform])[0]
    padded = F.pad(images, theirs["padding"], fill=7) if theirs["needs_pad"] else images
    values = data.augment(images, transform)
    for i, image in enumerate(padded):
        top, left = drawn["top"][i], drawn["left"][i]
        assert torch.equal(values[i], F.crop(image, top, left, *size))


def test_one_number_or_a_list_of_one():
    assert Resize(7) == Resize([7]) == Resize((7,)) != Resize((7, 7))
    assert RandomCrop(7) == RandomCrop([7]) == RandomCrop((7, 7))
    assert Pad(2) == Pad([2]) == Pad((2, 2)) == Pad((2, 2, 2, 2))
    assert Program([Resize(26)], 3, 13, 18).shape == (3, 26, 36)


def test_torchvisions_interpolation_modes_are_taken():
    assert RandomRotation(3, InterpolationMode.BILINEAR) == RandomRotation(3, "bilinear")


@pytest.mark.parametrize(
    "ours, theirs",
    [(getattr(data, name), getattr(v2, name)) for name in sorted(set(data.__all__) & set(dir(v2)))],
    ids=lambda kind: kind.__name__,
)
def test_a_position_means_the_same_argument_as_torchvisions(ours, theirs):
    """Where they part, only the name says which one is meant."""
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    found = list(inspect.signature(ours).parameters.values())
    places = [p.name for p in found if p.kind is kinds[0]]
    named = list(inspect.signature(theirs).parameters)
    assert {p.kind for p in found} <= set(kinds) and {p.name for p in found} <= set(named)
    assert places == named[: len(places)]


def test_what_has_another_place_in_torchvision_has_none_here():
    for make in (lambda: Resize(7, "bilinear", 9), lambda: RandomRotation(3, "nearest", True)):
        with pytest.raises(TypeError, match="positional arguments"):
            make()


# -- compositions ----------------------------------------------------------------------------------

# Each samples once between pixels, so that torchvision's images between the steps are exact.
ONE_SAMPLING = [
    [Pad(2), RandomCrop(14), RandomRotation(30, "bilinear")],
    [Pad((4, 3, 2, 1)), RandomVerticalFlip(), RandomScale((0.5, 1.5), "bilinear")],
    [RandomCrop(11), Pad(3), RandomRotation(30, "bilinear"), Pad(2), RandomCrop(14)],
    [RandomCrop(11), Pad(3, fill=60), RandomRotation(30, "bilinear", fill=60), CenterCrop(9)],
    [Pad(3, padding_mode="edge"), RandomCrop(13), RandomRotation(45, "bilinear"), Pad(1)],
    [Pad(3, padding_mode="reflect"), Pad(2), RandomHorizontalFlip(), Resize(23)],
    [RandomHorizontalFlip(), RandomRotation(90, "bilinear"), RandomHorizontalFlip(), Pad(4)],
    [RandomCrop(10), Resize(17), RandomHorizontalFlip(), Pad(2), RandomCrop(15)],
    [Pad(3), RandomResizedCrop(16), Pad(1), RandomVerticalFlip(), CenterCrop((14, 12))],
    [Pad((5, 0, 0, 0)), Resize((30, 30)), RandomCrop(20)],
    [Pad(9), RandomCrop(6), RandomCrop(6, padding=2)],  # often without a pixel of the image
    [RandomRotation(60, "nearest"), Pad(3), RandomHorizontalFlip(), RandomCrop(15)],
]


@each_channels
@pytest.mark.parametrize(
    "transforms", ONE_SAMPLING, ids=lambda ts: "-".join(type(t).__name__ for t in ts)
)
def test_sequences_with_one_sampling_are_torchvisions(transforms, channels):
    images = noise(48, channels, 13, 18)
    values = data.augment(images, [*transforms, ToFloat()], seed=9)
    exact = sequence(images.float(), transforms, seed=9) / 255
    nearest = any(getattr(t, "interpolation", "") == "nearest" for t in transforms)
    close(values, exact, FLOAT, nearest)


@pytest.mark.parametrize("name", ["cifar", "imagenet", "mnist-without-scale"])
def test_recipes_are_torchvisions(name):
    transforms = {"cifar": CIFAR, "imagenet": IMAGENET}.get(name, MNIST[:3] + MNIST[4:])
    transforms = [t for t in transforms if not isinstance(t, ToFloat)]
    size = 28 if name.startswith("mnist") else 32
    images = noise(32, 1 if size == 28 else 3, size, size)
    transforms = [ToFloat(), *transforms]
    if name == "imagenet":
        transforms[4] = RandomErasing(0.5, value=0.3)
    exact = sequence(images, transforms, seed=3)
    # The bounds of pixels and of colours, divided by the standard deviation.
    torch.testing.assert_close(
        data.augment(images, transforms, seed=3), exact, rtol=0, atol=(4e-5 + 2e-5) / 0.24
    )


@pytest.mark.parametrize(
    "transforms",
    [
        [RandomRotation(50, "bilinear"), RandomScale((0.5, 1.5), "bilinear")],
        [RandomScale((0.5, 1.5), "bilinear"), RandomRotation(180, "bilinear")],
        [RandomScale((0.9, 1.1), "bilinear"), RandomScale((0.5, 0.8), "bilinear")],
        [
            RandomScale((0.9, 1.5), "bilinear"),
            RandomRotation(50, "bilinear"),
            RandomScale((0.4, 0.8), "bilinear"),
        ],
    ],
    ids=str,
)
def test_two_samplings_are_one_grid_sample(transforms):
    images = noise(32, 3, 17, 14)
    drawn = data.parameters(images.shape, transforms, seed=7)
    values = data.augment(images, [*transforms, ToFloat()], seed=7)
    for i, image in enumerate(images):
        matrices = [
            rotation_matrix(drawn[k]["angle"][i].item())
            if isinstance(transform, RandomRotation)
            else scale_matrix(drawn[k]["scale"][i].item())
            for k, transform in enumerate(transforms)
        ]
        exact = composed(image / 255, matrices).float()
        torch.testing.assert_close(values[i], exact, **FLOAT)


def test_two_samplings_hardly_differ_from_one_after_the_other():
    """Of images that interpolation hardly changes, but for the pixels at a border, which
    torchvision blends twice."""
    images = smooth(32, 1, 28, 28)
    transforms = MNIST[:4]
    values = data.augment(images, [*transforms, ToFloat()])
    difference = (values - sequence(images.float(), transforms) / 255).abs()
    assert difference.mean() < 0.01 and difference.quantile(0.9) < 0.02


def test_resizing_twice():
    """The border of an image between two samplings is continued by at most half of a pixel."""
    images = smooth(8, 3, 30, 20)
    transforms = [RandomResizedCrop(26), Resize(31), RandomScale((0.6, 0.9), "bilinear")]
    values = data.augment(images, [*transforms, ToFloat()])
    difference = (values - sequence(images.float(), transforms) / 255).abs()
    assert difference.mean() < 0.01 and difference.quantile(0.9) < 0.02
