# SPDX-License-Identifier: BSD-3-Clause
"""A whole dataset of images on the device that trains with it, as bytes."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable

import torch
from torch import Tensor

from ..lr._checks import check_count
from ._limits import check_fits, check_labels
from .cifar import from_cifar
from .folder import from_folder
from .idx import from_idx, from_mnist
from .map_style import from_dataset

_WHO = "DeviceDataset"


class DeviceDataset:
    """Images and labels that stay on a device, so that batches are made there.

    It is a map-style dataset: `len(dataset)`, `dataset[i]` and `torch.utils.data.DataLoader` work.

    Args:
        images: uint8 tensor or numpy array of shape (N, C, H, W), (N, H, W, C), or (N, H, W) for
            one channel. Where it is on `device` and dense already, it isn't copied.
        labels: tensor, numpy array or list of length N; (N) integers are classes. The dtype stays.
        device: where to keep both. Default: where `images` is.
        layout: "NCHW" or "NHWC", the order of images' dimensions; NHWC stays so in memory. Default:
            NCHW, if C is then below 5 or the last dimension isn't.
        num_classes: classes must be in [0, num_classes). Default: any integer may be a label.
        classes: their names, instead of `num_classes`.

    Attributes:
        images: uint8 of shape (N, C, H, W), contiguous or, for NHWC, in torch.channels_last.
        labels: of length N, contiguous, on the same device.
        device, num_classes, classes: as given; the last two may be None.

    Raises:
        TypeError: for images that are no bytes, and labels that are no numbers.
        ValueError: for other shapes, no images, another number of labels, a label out of range.
        RuntimeError: where they don't fit on the device. In no case has anything been copied there.
    """

    from_idx = classmethod(from_idx)
    from_mnist = classmethod(from_mnist)
    from_cifar = classmethod(from_cifar)
    from_folder = classmethod(from_folder)
    from_dataset = classmethod(from_dataset)

    def __init__(
        self,
        images,
        labels,
        *,
        device: torch.device | str | None = None,
        layout: str | None = None,
        num_classes: int | None = None,
        classes: Iterable[str] | None = None,
    ):
        self.classes = None if classes is None else tuple(classes)
        if self.classes is not None:
            if num_classes not in (None, len(self.classes)):
                raise ValueError(
                    f"{_WHO}: num_classes is {num_classes}, but classes has {len(self.classes)} "
                    "names; leave num_classes out"
                )
            num_classes = len(self.classes)
        if num_classes is not None:
            check_count(_WHO, "num_classes", num_classes)
        self.num_classes = num_classes
        images = _as_nchw(_as_tensor("images", images), layout)
        labels = _as_tensor("labels", labels)
        if labels.layout != torch.strided:
            raise TypeError(f"{_WHO}: labels must be dense, got {labels.layout}; use .to_dense()")
        if labels.dim() == 0 or len(labels) != len(images):
            raise ValueError(
                f"{_WHO}: there are {len(images)} images, but labels have shape "
                f"{list(labels.shape)}; their first dimension must be {len(images)}"
            )
        check_labels(_WHO, labels, num_classes)
        device = images.device if device is None else _indexed(device)
        dense = _is_dense(images)
        new = 0 if dense and images.device == device else images.nbytes
        new += 0 if labels.is_contiguous() and labels.device == device else labels.nbytes
        if new:
            check_fits(_WHO, new, device)
        images = images.detach() if dense else images.detach().contiguous()
        self.images: Tensor = images.to(device)
        self.labels: Tensor = labels.detach().contiguous().to(device)

    @property
    def device(self) -> torch.device:
        return self.images.device

    @property
    def nbytes(self) -> int:
        """Bytes of images and labels on the device."""
        return self.images.nbytes + self.labels.nbytes

    def to(self, device: torch.device | str) -> DeviceDataset:
        """This dataset on `device`: itself where it is there already.

        Raises:
            RuntimeError: where it doesn't fit; nothing has been copied then.
        """
        if _indexed(device) == self.device:
            return self
        return type(self)(
            self.images,
            self.labels,
            device=device,
            layout="NCHW",
            num_classes=self.num_classes,
            classes=self.classes,
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """An image (C, H, W) of uint8 and its label, as views.

        Raises:
            IndexError: where there is none.
            TypeError: for anything but an int; `dataset.images[...]` takes slices and tensors.
        """
        try:
            index = operator.index(index)
        except TypeError:
            raise TypeError(
                f"{_WHO}: an index must be an int, got {type(index).__name__}; images[...] and "
                "labels[...] take slices and tensors"
            ) from None
        return self.images[index], self.labels[index]

    def __repr__(self) -> str:
        n, *shape = self.images.shape
        layout = "NCHW" if self.images.is_contiguous() else "NHWC"
        classes = "" if self.num_classes is None else f"{self.num_classes} classes, "
        return (
            f"{_WHO}({n:,} images of {' × '.join(map(str, shape))} as {layout}, {classes}"
            f"{self.nbytes / 2**20:.1f} MiB on {self.device})"
        )


def _indexed(device: torch.device | str) -> torch.device:
    """With the number that a tensor's device has."""
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"{_WHO}: device is {device}, but PyTorch finds no GPU here")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _as_tensor(name: str, values) -> Tensor:
    if isinstance(values, Tensor):
        return values
    numpy = sys.modules.get("numpy")
    try:
        if numpy is not None and isinstance(values, numpy.ndarray):
            # What torch can't share is copied: read-only, byte-swapped and backwards arrays.
            own = not values.flags.writeable or min(values.strides, default=0) < 0
            values = numpy.array(values, values.dtype.newbyteorder("="), copy=own or None)
            return torch.from_numpy(values)
        if name == "labels" and isinstance(values, list | tuple):
            return torch.tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{_WHO}: {name} hold no numbers that torch has: {error}") from error
    raise TypeError(
        f"{_WHO}: {name} must be a tensor or a numpy array, got {type(values).__name__}; files and "
        "datasets have constructors of their own, DeviceDataset.from_..."
    )


def _is_dense(images: Tensor) -> bool:
    """In one of the two memory formats that images may have."""
    return images.is_contiguous() or images.is_contiguous(memory_format=torch.channels_last)


def _as_nchw(images: Tensor, layout: str | None) -> Tensor:
    """Checked, as a view."""
    if images.layout != torch.strided:
        raise TypeError(
            f"{_WHO}: images must be dense, got {images.layout}; .to_dense() makes them"
        )
    if layout not in (None, "NCHW", "NHWC"):
        raise ValueError(f"{_WHO}: layout must be 'NCHW' or 'NHWC', got {layout!r}")
    if images.dtype != torch.uint8:
        raise TypeError(
            f"{_WHO}: images must be uint8, got {str(images.dtype).removeprefix('torch.')}; "
            "(images * 255).round().to(torch.uint8) brings [0, 1] there, and what normalizes them "
            "belongs to the transforms"
        )
    shape = list(images.shape)
    if images.dim() not in (3, 4):
        raise ValueError(
            f"{_WHO}: images have shape {shape}, expected [N, C, H, W], [N, H, W, C] or [N, H, W]"
        )
    if 0 in shape:
        raise ValueError(f"{_WHO}: images have shape {shape}, so there are none")
    if images.dim() == 3:
        images = images.unsqueeze(1)
    elif layout is None and shape[1] > 4 >= shape[3]:
        raise ValueError(
            f"{_WHO}: images of shape {shape} may be [N, H, W, C]; say so with layout='NHWC', or "
            "layout='NCHW' if they aren't"
        )
    elif layout == "NHWC":
        images = images.permute(0, 3, 1, 2)
    return images
