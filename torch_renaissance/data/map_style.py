# SPDX-License-Identifier: BSD-3-Clause
"""Any map-style torch.utils.data.Dataset, read once from the first item to the last."""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ._files import counted
from ._limits import check_fits_when_read

_WHO = "from_dataset"
_BANDS = {"L": 1, "RGB": 3, "RGBA": 4}


def from_dataset(
    cls, dataset, *, device=None, layout=None, num_classes=None, num_workers=0, progress=True
):
    """Reads items (image, label) of a map-style dataset, in order. What its transforms draw at
    random is drawn once and stays; leave that to `tr.data`'s transforms.

    Args:
        dataset: with `__len__` and `__getitem__`. An image is a PIL image (of mode L, RGB or RGBA)
            or a uint8 tensor or numpy array with shape (H, W), (C, H, W) or (H, W, C). A label is
            a number, or a tensor or array of the same shape and dtype in all items.
        device: as `DeviceDataset`'s.
        layout: "NCHW" or "NHWC", the order of each image's dimensions. Default: the one of them
            that makes C 1, 3 or 4.
        num_classes: as `DeviceDataset`'s. Default: as many as the dataset has `classes`, where it
            has this list of names, as torchvision's datasets do.
        num_workers: processes that read, as in `torch.utils.data.DataLoader`.
        progress: shows a bar on a terminal, where rich is installed.

    Raises:
        TypeError: for a dataset without a length or items, items that are no pairs, and images that
            are no bytes.
        ValueError: for no items, and images or labels whose shape differs, naming the items.
        Whatever the dataset and DeviceDataset raise.
    """
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    ):
        raise TypeError(
            f"{_WHO}: {type(dataset).__name__} is not map-style; it needs __len__ and __getitem__"
        )
    total = len(dataset)
    if total == 0:
        raise ValueError(f"{_WHO}: the dataset has no items")
    tensors = _AsTensors(dataset, layout)
    if num_workers:
        items = DataLoader(tensors, None, num_workers=num_workers, collate_fn=_as_it_is)
    else:  # DataLoader would draw from torch's generator
        items = map(tensors.__getitem__, range(total))
    images = labels = None
    for i, (image, label) in enumerate(counted(items, total, "reading", progress)):
        if images is None:
            nbytes = total * (image.nbytes + label.nbytes)
            check_fits_when_read(_WHO, nbytes, device)
            images = torch.empty((total, *image.shape), dtype=torch.uint8, device="cpu")
            labels = torch.empty((total, *label.shape), dtype=label.dtype, device="cpu")
        _check_same(i, image, images, "image")
        _check_same(i, label, labels, "label")
        images[i], labels[i] = image, label
    names = getattr(dataset, "classes", None)
    if not isinstance(names, list | tuple) or num_classes not in (None, len(names)):
        names = None
    return cls(images, labels, device=device, layout="NHWC", num_classes=num_classes, classes=names)


class _AsTensors(Dataset):
    """Items as tensors (H, W, C) of uint8 and labels, made in the process that reads them."""

    def __init__(self, dataset: Dataset, layout: str | None):
        if layout not in (None, "NCHW", "NHWC"):
            raise ValueError(f"{_WHO}: layout must be 'NCHW' or 'NHWC', got {layout!r}")
        self._dataset, self._layout = dataset, layout

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        item = self._dataset[i]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise TypeError(
                f"{_WHO}: items must be pairs (image, label), item {i} is a {type(item).__name__}"
            )
        image = _image(f"{_WHO}: the image of item {i}", item[0], self._layout)
        try:
            label = torch.as_tensor(item[1], device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"{_WHO}: the label of item {i} is a {type(item[1]).__name__}, expected a number "
                "or a tensor"
            ) from error
        return image, label


def _as_it_is(item):
    return item


def _check_same(i: int, value: Tensor, values: Tensor, what: str) -> None:
    if value.shape != values.shape[1:]:
        remedy = "; resize and crop in the dataset's transform" if what == "image" else ""
        raise ValueError(
            f"{_WHO}: the {what} of item {i} has shape {list(value.shape)}, that of item 0 has "
            f"{list(values.shape[1:])}{remedy}"
        )
    if value.dtype != values.dtype:
        raise TypeError(
            f"{_WHO}: the {what} of item {i} is {value.dtype}, that of item 0 is {values.dtype}"
        )


def _image(who: str, image, layout: str | None) -> Tensor:
    """An image in any of its forms as a tensor (H, W, C)."""
    pil = sys.modules.get("PIL.Image")
    if pil is not None and isinstance(image, pil.Image):
        return from_pil(who, image)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(image, numpy.ndarray) and image.dtype == "uint8":
        image = torch.tensor(image, device="cpu")
    kind = getattr(image, "dtype", type(image).__name__)
    if not isinstance(image, Tensor) or image.dtype != torch.uint8:
        raise TypeError(
            f"{who} is {kind}, expected a PIL image or uint8; leave ToTensor, ToDtype and "
            "Normalize out of the dataset's transform (tr.data's transforms scale and normalize)"
        )
    if image.dim() == 2:
        return image.unsqueeze(2)
    first, last = (image.dim() == 3 and image.shape[at] in (1, 3, 4) for at in (0, -1))
    if image.dim() != 3 or (layout is None and first == last):
        raise ValueError(
            f"{who} has shape {list(image.shape)}, which is not clearly (C, H, W) or (H, W, C) "
            "with 1, 3 or 4 channels; pass layout='NCHW' or layout='NHWC'"
        )
    return image.permute(1, 2, 0) if layout == "NCHW" or (layout is None and first) else image


def from_pil(who: str, image) -> Tensor:
    """The pixels of a PIL image, (H, W, C)."""
    if image.mode not in _BANDS:
        raise ValueError(
            f"{who} has mode {image.mode}, expected {', '.join(_BANDS)}; convert it: "
            "image.convert('RGB')"
        )
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, _BANDS[image.mode])
