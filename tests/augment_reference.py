# SPDX-License-Identifier: BSD-3-Clause
# What augmentation is compared with: torchvision's functions, given what a sample has drawn, and
# the composed map as one grid_sample in float64.

import math

import torch
from torch.nn.functional import grid_sample
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from torch_renaissance import data

_CROP = ("top", "left", "height", "width")
_JITTER = (
    (F.adjust_brightness, "brightness_factor"),
    (F.adjust_contrast, "contrast_factor"),
    (F.adjust_saturation, "saturation_factor"),
    (F.adjust_hue, "hue_factor"),
)


def torchvision_of(transform, image, drawn):
    """`transform` of one image [C, H, W], by torchvision with the drawn parameters."""
    mode = InterpolationMode(getattr(transform, "interpolation", "nearest"))
    fill = list(getattr(transform, "fill", (0,)))
    match transform:
        case data.Pad(padding=padding, padding_mode=padding_mode):
            return F.pad(image, list(padding), fill=fill, padding_mode=padding_mode)
        case data.RandomCrop(padding=padding, padding_mode=padding_mode):
            if padding:
                image = F.pad(image, list(padding), fill=fill, padding_mode=padding_mode)
            return F.crop(image, *(drawn[name] for name in _CROP))
        case data.CenterCrop(size=size):
            return F.center_crop(image, list(size))
        case data.Resize(size=size):
            return F.resize(image, list(size), interpolation=mode, antialias=False)
        case data.RandomHorizontalFlip():
            return F.horizontal_flip(image) if drawn["apply"] else image
        case data.RandomVerticalFlip():
            return F.vertical_flip(image) if drawn["apply"] else image
        case data.RandomRotation():
            return F.rotate(image, drawn["angle"], interpolation=mode, fill=fill)
        case data.RandomScale():
            scale = drawn["scale"]
            return F.affine(image, 0, [0, 0], scale, [0, 0], interpolation=mode, fill=fill)
        case data.RandomResizedCrop(size=size):
            box = (drawn[name] for name in _CROP)
            return F.resized_crop(image, *box, list(size), interpolation=mode, antialias=False)
        case data.ColorJitter():
            for kind in drawn["fn_idx"]:
                adjust, name = _JITTER[kind]
                if getattr(transform, name.removesuffix("_factor")) is not None:
                    image = adjust(image, drawn[name])
            return image
        case data.RandomErasing(value=value):
            if not drawn["h"]:
                return image
            value = torch.tensor(value, dtype=image.dtype)[:, None, None]
            return F.erase(image, *(drawn[name] for name in "ijhw"), value)
        case data.Normalize(mean=mean, std=std):
            image = F.to_dtype(image, torch.float32, scale=True)
            return F.normalize(image, *(v * (len(image) // len(v)) for v in (mean, std)))
        case data.ToFloat(dtype=dtype):
            return F.to_dtype(image, dtype, scale=True)
    raise AssertionError(transform)


def sequence(images, transforms, **key):
    """All transforms of each image, one after the other, as torchvision does it."""
    drawn = data.parameters(images.shape, transforms, **key)
    results = []
    for i, image in enumerate(images):
        for position, transform in enumerate(transforms):
            own = {name: v[i].tolist() for name, v in drawn.get(position, {}).items()}
            image = torchvision_of(transform, image, own)
        results.append(image)
    return torch.stack(results)


def rotation_matrix(degrees):
    """Of the inverse map of a counter-clockwise rotation: from a pixel to its source."""
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return torch.tensor([[c, -s], [s, c]], dtype=torch.float64)


def scale_matrix(factor):
    return torch.eye(2, dtype=torch.float64) / factor


def composed(image, matrices):
    """One bilinear sample of `image` [C, H, W] under the inverse maps `matrices` about the middle,
    in the order of the transforms. torchvision multiplies what it has sampled (with zeros outside)
    by the share that came from inside, at each transform; the frames between two transforms cut
    off what lies outside of them."""
    height, width = image.shape[-2:]
    middle = torch.tensor([(width - 1) / 2, (height - 1) / 2], dtype=torch.float64)
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    place = torch.stack([x, y], dim=-1).double() - middle
    shown = torch.ones(1, height, width, dtype=torch.float64)
    inside = torch.ones(1, 1, height, width, dtype=torch.float64)
    for matrix in reversed(matrices):  # from the output to the source
        place = place @ matrix.T
        grid = (2 * (place + middle) + 1) / torch.tensor([width, height]) - 1
        share = grid_sample(inside, grid[None], align_corners=False)[0]
        last = matrix is matrices[0]
        shown = shown * (share if last else share**2)
    sampled = grid_sample(image[None].double(), grid[None], align_corners=False)[0]
    return sampled * shown
