# SPDX-License-Identifier: BSD-3-Clause
# tr.data's augmentation: each transform beside torchvision's, compositions, layouts and dtypes,
# what a sample depends on, the ops, and refusals. Distributions: test_augment_draws.py.

import inspect
import math
from functools import partial

import pytest
import torch
from augment_reference import composed, rotation_matrix, scale_matrix, sequence
from testing import DEVICES
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

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

each_device = pytest.mark.parametrize("device", DEVICES)
each_channels = pytest.mark.parametrize("channels", [1, 3, 4])
FLOATS = [torch.float32, torch.float16, torch.bfloat16]

# Coordinates of pixels up to 32 carry some 10 roundings of 6e-8, relative, so 2e-5 pixels, which
# times the difference of two pixels (at most 1) is the error of a value. torchvision has the like.
FLOAT = {"rtol": 0, "atol": 4e-5}
# Where torchvision rounds to uint8, to the nearest value: half a step of 1/255, and ours none. It
# resizes uint8 along one axis after the other, and rounds twice, with weights rounded too.
ROUNDED = {"rtol": 0, "atol": 0.501 / 255 + 4e-5}
ROUNDED_TWICE = {"rtol": 0, "atol": 1.3 / 255}


def noise(n, channels, height, width, device="cpu", channels_last=False):
    generator = torch.Generator().manual_seed(0)
    shape = (n, channels, height, width)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device)
    return images.contiguous(memory_format=torch.channels_last) if channels_last else images


def smooth(n, channels, height, width):
    """Waves of some ten pixels, which interpolation hardly changes."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    phase = torch.arange(n * channels).view(n, channels, 1, 1)
    return (127 + 100 * torch.sin(0.3 * x + 0.2 * y + phase)).to(torch.uint8)


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


# -- one transform beside torchvision's ------------------------------------------------------------


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


# -- compositions ----------------------------------------------------------------------------------

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


# -- layouts and dtypes ----------------------------------------------------------------------------

RECIPES = {"mnist": (MNIST, 1, 28), "cifar": (CIFAR, 3, 32), "imagenet": (IMAGENET, 3, 37)}
RECIPES |= {"rgba": ([RandomRotation(9), RandomCrop(7)], 4, 9), "nothing": ([], 3, 5)}
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


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


# -- the ops ---------------------------------------------------------------------------------------


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


@each_device
@each_recipe
@pytest.mark.parametrize("n", [0, 1, 5])
def test_opcheck(recipe, n, device):
    transforms, channels, size = RECIPES[recipe]
    program = Program(transforms, channels, size, size, channels_last=n == 5)
    images, indices = noise(6, channels, size, size, device), torch.arange(n, device=device)
    labels = torch.arange(6, device=device)
    numbers = (program.ints, program.values)
    samples = [
        (ops.augment, (images, indices, 1, 2, *numbers)),
        (
            ops.draw_batch,
            (images, labels, None, cursor_of(device=device), n, 6, True, 0, 2, *numbers),
        ),
        (
            ops.draw_batch,
            (images, labels, indices, cursor_of(device=device), n, n, False, 1, 2, *numbers),
        ),
    ]
    op, drawn = samples[1]
    samples.append((ops.draw_batch_, (*op(*drawn), *drawn[:4], *drawn[5:])))
    if device == "cpu":
        samples.append((ops.augment_parameters, (indices, 1, 2, *numbers)))
    for op, arguments in samples:
        results = torch.library.opcheck(op.default, arguments)
        assert set(results.values()) == {"SUCCESS"} and len(results) == 4


@each_device
@each_recipe
@pytest.mark.parametrize("channels_last", [False, True])
def test_draw_batch_into_given_tensors(recipe, channels_last, device):
    transforms, channels, size = RECIPES[recipe]
    images, labels = noise(9, channels, size, size, device), torch.arange(18, device=device)
    program = Program(transforms, channels, size, size, channels_last=channels_last)
    cursors = [cursor_of(device=device) for _ in range(2)]
    drawn = [draw(images, labels.view(9, 2), cursors[0], 4, program) for _ in range(3)]
    x, y = (torch.full_like(t, 77) for t in drawn[0])
    assert x.stride() == drawn[0][0].stride()
    arguments = (images, labels.view(9, 2), None, cursors[1], 9, True, 0, 1)
    for i, (wanted, wanted_labels) in enumerate(drawn):
        ops.draw_batch_(x, y, *arguments, program.ints, program.values)
        assert torch.equal(x, wanted) and torch.equal(y, wanted_labels)
        assert x._version == y._version == i + 1
    assert torch.equal(*cursors) and cursors[1].tolist() == [3, 2, 12, 0]


@each_device
@each_recipe
@pytest.mark.parametrize("shuffle", [False, True])
def test_draw_batch_is_augment_of_the_order(recipe, shuffle, device):
    transforms, channels, size = RECIPES[recipe]
    images = noise(23, channels, size, size, device)
    labels = torch.arange(23, device=device)
    program = Program(transforms, channels, size, size)
    for rank in (0, 1):
        cursor = cursor_of(device=device)
        for batch in range(4):
            where = (cursor, 23, shuffle, rank, 2, 6)
            indices = ops.order(*where)
            values, drawn = draw(
                images, labels, cursor, 6, program, shuffle=shuffle, rank=rank, world_size=2
            )
            assert torch.equal(drawn, indices)
            expected = data.augment(images, program, seed=3, epoch=2, indices=indices)
            assert torch.equal(values, expected)
            assert cursor.tolist() == [3, 2, 6 * (batch + 1), 0]


@each_device
def test_draw_batch_from_a_subset(device):
    images, program = noise(30, 1, 6, 6, device), Program([RandomCrop(5)], 1, 6, 6)
    labels, subset = torch.arange(30, device=device), torch.arange(29, 0, -3, device=device)
    cursor = cursor_of(device=device)
    values, drawn = draw(images, labels, cursor, len(subset), program, subset=subset)
    assert sorted(drawn.tolist()) == sorted(subset.tolist())
    # What a sample draws depends on its image, not on its place in the subset.
    assert torch.equal(values, data.augment(images, program, seed=3, epoch=2, indices=drawn))


LABELS = [
    lambda n: torch.arange(n),
    lambda n: torch.arange(n, dtype=torch.uint8),
    lambda n: torch.arange(n * 7, dtype=torch.int16).view(n, 7),
    lambda n: torch.arange(n * 4, dtype=torch.float64).view(n, 2, 2),
    lambda n: torch.arange(n) % 2 == 0,
    lambda n: torch.empty(n, 0),
]


@each_device
@pytest.mark.parametrize("make", LABELS)
def test_labels_of_any_dtype_and_shape(make, device):
    labels = make(19).to(device)
    program = Program([], 3, 4, 4)
    cursor = cursor_of(device=device)
    indices = ops.order(cursor, 19, True, 0, 1, 7)
    _, drawn = draw(noise(19, 3, 4, 4, device), labels, cursor, 7, program)
    assert drawn.dtype == labels.dtype and torch.equal(drawn, labels[indices])


@each_device
def test_empty_batch(device):
    images, none = noise(4, 1, 28, 28, device), torch.empty(0, dtype=torch.int64, device=device)
    assert data.augment(images, MNIST, indices=none).shape == (0, 1, 28, 28)
    cursor = cursor_of(position=5, device=device)
    program = Program(MNIST, 1, 28, 28)
    values, drawn = draw(images, torch.arange(4, device=device), cursor, 0, program)
    assert len(values) == len(drawn) == 0 and cursor.tolist() == [3, 2, 5, 0]


@pytest.mark.cuda
def test_a_captured_epoch_replays_without_the_host():
    images, labels = noise(1000, 1, 28, 28, "cuda"), torch.arange(1000, device="cuda")
    program, cursor = Program(MNIST, 1, 28, 28), cursor_of(device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        draw(images, labels, cursor, 200, program)
    torch.cuda.synchronize()
    cursor.copy_(cursor_of(device="cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values, drawn = draw(images, labels, cursor, 200, program)
    assert cursor.tolist() == [3, 2, 0, 0], "capture runs nothing"
    seen = []
    for _ in range(5):
        graph.replay()
        expected = data.augment(images, program, seed=3, epoch=2, indices=drawn)
        assert torch.equal(values, expected)
        seen += drawn.tolist()
    assert sorted(seen) == list(range(1000)) and cursor.tolist() == [3, 2, 1000, 0]


@pytest.mark.cuda
def test_an_index_out_of_range_is_nan_on_a_gpu():
    images, indices = noise(4, 3, 32, 32, "cuda"), torch.tensor([1, 4, -1, 2], device="cuda")
    for transforms in (CIFAR, IMAGENET, [RandomRotation(9), ToFloat()]):
        values = data.augment(images, transforms, indices=indices)
        assert values[1:3].isnan().all() and values[[0, 3]].isfinite().all()
        program = Program(transforms, 3, 32, 32)
        values, drawn = draw(
            images,
            torch.arange(4, device="cuda"),
            cursor_of(device="cuda"),
            4,
            program,
            subset=indices,
            shuffle=False,
        )
        assert values[1:3].isnan().all() and drawn.tolist() == [1, -1, -1, 2]


@pytest.mark.multigpu
def test_second_gpu():
    images = noise(40, 1, 28, 28)
    assert torch.equal(data.augment(images.to("cuda:1"), MNIST).cpu(), data.augment(images, MNIST))


def test_meta_tensors_have_shapes_only():
    program = Program(MNIST, 1, 28, 28)
    images = torch.empty(5, 1, 28, 28, dtype=torch.uint8, device="meta")
    indices = torch.empty(3, dtype=torch.int64, device="meta")
    out = ops.augment(images, indices, 0, 0, program.ints, program.values)
    assert out.is_meta and out.shape == (3, 1, 28, 28) and out.dtype == torch.float16


# -- refusals --------------------------------------------------------------------------------------

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
