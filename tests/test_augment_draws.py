# SPDX-License-Identifier: BSD-3-Clause
# What samples draw for tr.data's transforms: distributions and rules, beside torchvision's own.
# Bounds: a share of n draws is normal with deviation sqrt(p (1 - p) / n); five of these. The
# distance of Kolmogorov of n draws from their distribution exceeds 2.3 / sqrt(n) once in 20,000.

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import v2

from torch_renaissance import data
from torch_renaissance._ops import ops
from torch_renaissance.data import (
    ColorJitter,
    Pad,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomScale,
    RandomVerticalFlip,
)

N = 20_000
KOLMOGOROV = 2.3


def drawn(transforms, height=28, width=31, channels=3, n=N, **key):
    transforms = transforms if isinstance(transforms, list) else [transforms]
    return data.parameters((n, channels, height, width), transforms, **key)


def assert_share(events, p):
    n = len(events)
    bound = 5 * math.sqrt(max(p * (1 - p), 1e-12) / n)
    assert abs(events.double().mean().item() - p) <= bound


def assert_each_alike(values, count):
    """Whole numbers from 0 to count - 1, each as likely."""
    shares = torch.bincount(values.long(), minlength=count).double() / len(values)
    assert len(shares) == count
    assert (shares - 1 / count).abs().max() <= 5 * math.sqrt((1 / count) / len(values))


def assert_uniform(values, low, high):
    values = values.double().sort().values
    assert values[0] >= low and values[-1] <= high
    exact = (values - low) / (high - low)
    steps = torch.arange(1, len(values) + 1, dtype=torch.float64) / len(values)
    assert (steps - exact).abs().max() <= KOLMOGOROV / math.sqrt(len(values))


def assert_same_distribution(one, other):
    """Two samples: the distance between their shares below each value."""
    one, other = one.double().sort().values, other.double().sort().values
    at = torch.cat([one, other])
    below = [torch.searchsorted(v, at, right=True) / len(v) for v in (one, other)]
    bound = KOLMOGOROV * math.sqrt(1 / len(one) + 1 / len(other))
    assert (below[0] - below[1]).abs().max() <= bound


def torchvisions(transform, names, n=2000, height=28, width=31):
    """n draws of torchvision's own make_params, by name."""
    image = torch.zeros(3, height, width)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = [transform.make_params([image]) for _ in range(n)]
    return {name: torch.tensor([float(f[name]) for f in found]) for name in names}


def test_crops_are_uniform():
    crop = drawn([Pad((1, 2, 3, 4)), RandomCrop((20, 25), padding=2)])[1]
    rows, columns = 28 + 2 + 4 + 4 - 20 + 1, 31 + 1 + 3 + 4 - 25 + 1
    assert_each_alike(crop["top"], rows)
    assert_each_alike(crop["left"], columns)
    assert_each_alike(crop["top"] * columns + crop["left"], rows * columns)
    assert (crop["height"] == 20).all() and (crop["width"] == 25).all()


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_flips_and_erasing_have_their_probability(p):
    found = drawn([RandomHorizontalFlip(p), RandomVerticalFlip(p), RandomErasing(p)])
    for events in (found[0]["apply"], found[1]["apply"], found[2]["h"] > 0):
        assert_share(events, p)


@pytest.mark.parametrize("degrees", [20, (-5, 90), (300, 700), 0])
def test_angles_are_uniform(degrees):
    low, high = (-degrees, degrees) if isinstance(degrees, int) else degrees
    angle = drawn(RandomRotation(degrees))[0]["angle"]
    assert_uniform(angle, low, high) if degrees else torch.testing.assert_close(angle, angle * 0)


def test_scales_are_uniform():
    assert_uniform(drawn(RandomScale((0.8, 1.2)))[0]["scale"], 0.8 - 1e-7, 1.2)


def test_jitter_is_uniform_in_range_and_order():
    jitter = drawn(ColorJitter(0.4, (0.5, 3.0), 1.5, 0.2))[0]
    for name, low, high in (
        ("brightness_factor", 0.6, 1.4),
        ("contrast_factor", 0.5, 3.0),
        ("saturation_factor", 0.0, 2.5),
        ("hue_factor", -0.2, 0.2),
    ):
        assert_uniform(jitter[name], low - 1e-7, high + 1e-7)
    order = jitter["fn_idx"]
    assert (order.sort(1).values == torch.arange(4)).all()
    code = (order * torch.tensor([64, 16, 4, 1])).sum(1)
    _, kinds = code.unique(return_inverse=True)
    assert_each_alike(kinds, 24)
    # Order and factors are independent.
    assert_uniform(jitter["hue_factor"][order[:, 0] == 3], -0.2 - 1e-7, 0.2 + 1e-7)


CROPS = [
    {},
    {"scale": (0.5, 0.9)},
    {"ratio": (0.3, 3.3)},
    {"scale": (0.9, 1.0), "ratio": (0.3, 3.0)},  # where tries fail
    {"scale": (1.0, 1.0), "ratio": (1.5, 4.0)},  # where all of them fail: the middle
    {"scale": (1.0, 1.0), "ratio": (0.1, 0.2)},
    {"scale": (2.0, 3.0), "ratio": (0.2, 3.0)},
]


@pytest.mark.parametrize("options", CROPS, ids=str)
def test_resized_crops_are_torchvisions(options):
    names = ("top", "left", "height", "width")
    ours = drawn(RandomResizedCrop(8, **options))[0]
    theirs = torchvisions(v2.RandomResizedCrop(8, **options), names)
    for name in names:
        assert_same_distribution(ours[name], theirs[name])
    area = lambda crop: crop["height"] * crop["width"]  # noqa: E731
    assert_same_distribution(area(ours), area(theirs))
    ratio = lambda crop: crop["width"] / crop["height"]  # noqa: E731
    assert_same_distribution(ratio(ours), ratio(theirs))
    assert (ours["top"] >= 0).all() and (ours["top"] + ours["height"] <= 28).all()
    assert (ours["left"] >= 0).all() and (ours["left"] + ours["width"] <= 31).all()


def test_offsets_of_resized_crops_are_uniform_given_their_size():
    crop = drawn(RandomResizedCrop(8, scale=(0.2, 0.3)))[0]
    size = int(crop["height"].mode().values)
    assert_each_alike(crop["top"][crop["height"] == size], 28 - size + 1)


ERASINGS = [
    {},
    {"scale": (0.3, 0.9), "ratio": (0.2, 5.0)},  # where tries fail
    {"scale": (0.9, 1.0), "ratio": (3.0, 4.0)},  # where all of them fail: nothing is erased
    {"scale": (0.0, 0.01)},
]


@pytest.mark.parametrize("options", ERASINGS, ids=str)
def test_erasing_is_torchvisions(options):
    ours = drawn(RandomErasing(1.0, **options))[0]
    # torchvision says with a value of None that nothing is erased.
    transform, image = v2.RandomErasing(1.0, **options), torch.zeros(3, 28, 31)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = [transform.make_params([image]) for _ in range(2000)]
    for name in "ijhw":
        theirs = torch.tensor([0.0 if f["v"] is None else float(f[name]) for f in found])
        assert_same_distribution(ours[name], theirs)
    assert (ours["i"] + ours["h"] <= 28).all() and (ours["j"] + ours["w"] <= 31).all()


def test_transforms_samples_seeds_and_epochs_are_independent():
    """Of n pairs the correlation is normal with deviation n^-0.5."""
    angle = lambda n=N, **key: drawn([RandomRotation(1), RandomRotation(1)], n=n, **key)  # noqa: E731
    first = angle()[0]["angle"]
    others = [angle()[1]["angle"], angle(seed=1)[0]["angle"], angle(epoch=1)[0]["angle"]]
    for other in [*others, first.roll(1), first.roll(2)]:
        assert abs(torch.corrcoef(torch.stack([first, other]))[0, 1]) < 5 / math.sqrt(N)


def test_a_sample_draws_by_its_index():
    transforms = [RandomCrop(7), ColorJitter(0.1, 0.1), RandomErasing()]
    whole = drawn(transforms, n=100)
    indices = torch.tensor([99, 3, 3, 0])
    some = data.parameters((5, 3, 28, 31), transforms, indices=indices)
    for position, tensors in whole.items():
        for name, tensor in tensors.items():
            assert torch.equal(some[position][name], tensor[indices])


@settings(deadline=None, max_examples=60)
@given(
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    scale=st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted),
    ratio=st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)).map(sorted),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 2**24 - 1),
)
def test_rectangles_lie_within_any_image(height, width, scale, ratio, seed, epoch):
    transforms = [RandomResizedCrop((height, width), scale, ratio), RandomErasing(1, scale, ratio)]
    crop, erased = drawn(transforms, height, width, n=50, seed=seed, epoch=epoch).values()
    assert (crop["height"] >= 1).all() and (crop["width"] >= 1).all()
    assert (crop["top"] >= 0).all() and (crop["left"] >= 0).all()
    assert (crop["top"] + crop["height"] <= height).all()
    assert (crop["left"] + crop["width"] <= width).all()
    assert (erased["i"] >= 0).all() and (erased["i"] + erased["h"] <= height).all()
    assert (erased["j"] >= 0).all() and (erased["j"] + erased["w"] <= width).all()
    assert ((erased["h"] < height) | (erased["h"] == 0)).all()


def test_sine_and_cosine():
    """To a few ulp of 1, for angles of all sizes."""
    for degrees in (1.0, 90.0, 400.0, 1e5):
        program = data.Program([RandomRotation(degrees)], 1, 5, 5)
        indices = torch.arange(5000)
        _, reals = ops.augment_parameters(indices, 0, 0, program.ints, program.values)
        angle, cosine, sine = reals[:, 0, :3].double().unbind(1)
        exact = torch.deg2rad(angle)
        torch.testing.assert_close(cosine, exact.cos(), rtol=0, atol=2.5e-7)
        torch.testing.assert_close(sine, exact.sin(), rtol=0, atol=2.5e-7)
