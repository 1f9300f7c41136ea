# SPDX-License-Identifier: BSD-3-Clause
# What data refuses before it makes anything: sizes, numbers and files that are no data for it.
import gzip
import shutil
from pathlib import Path

import pytest
import torch

from torch_renaissance.data import (
    DeviceDataset,
    DeviceLoader,
    Normalize,
    Pad,
    Program,
    RandomCrop,
    RandomErasing,
    Resize,
)

DIGITS = Path(__file__).parents[1] / "examples" / "data"


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        ([Resize(10**9)], "images after RESIZE are 1 x 1000000000 x 1000000000, but a side has up"),
        ([Pad(2**21)], "images after WINDOW are 1 x 4194312 x 4194312"),
        ([Resize(2**20)], "an image up to 2\\^30 values"),
        ([RandomCrop(2**21, pad_if_needed=True)], "images after WINDOW are 1 x 4194296 x 4194296"),
        ([Normalize(0.1, 1e-40)], "must be what float32 holds, but .* came of .*Normalize"),
        ([Pad(1, fill=1e300)], "must be what float32 holds, but 1e\\+300 came of"),
        ([RandomErasing(value=1e300)], "must be what float32 holds"),
    ],
)
def test_what_the_kernel_cannot_hold_is_refused_by_the_program(transforms, message):
    with pytest.raises(ValueError, match=message):
        Program(transforms, 1, 8, 8)
    dataset = DeviceDataset(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), [0, 1])
    with pytest.raises(ValueError, match=message):
        DeviceLoader(dataset, 2, transforms=transforms)


def test_sides_of_images_are_ints():
    with pytest.raises(TypeError, match=r"Program: height must be an int, got 8\.5"):
        Program([], 1, 8.5, 8)
    with pytest.raises(ValueError, match="the images given are 1 x 1 x 1048577"):
        Program([], 1, 1, 2**20 + 1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"indices": "abc"}, TypeError, r"indices must be ints of shape \(n,\): "),
        ({"indices": [None]}, TypeError, r"indices must be ints of shape \(n,\): "),
        ({"indices": {1, 2}}, TypeError, r"indices must be ints of shape \(n,\): "),
        ({"indices": torch.tensor([1j])}, ValueError, ".* got complex64 of shape"),
        ({"batch_size": 2**40}, ValueError, r"batch_size must be less than 2\*\*31, got 1099"),
        ({"world_size": 2**31}, ValueError, r"world_size must be less than 2\*\*31, got 2147"),
    ],
)
def test_arguments_of_a_loader(arguments, error, message):
    dataset = DeviceDataset(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), [0, 1, 2, 3])
    with pytest.raises(error, match=f"DeviceLoader: {message}"):
        DeviceLoader(dataset, **({"batch_size": 2} | arguments))


def test_a_dataset_is_dense_and_on_a_device_that_is_there(monkeypatch):
    images = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    with pytest.raises(TypeError, match=r"images must be dense, got torch\.sparse_coo"):
        DeviceDataset(images.to_sparse(), [0, 1])
    with pytest.raises(TypeError, match=r"labels must be dense, got torch\.sparse_coo"):
        DeviceDataset(images, torch.tensor([0, 1]).to_sparse())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="device is cuda, but PyTorch finds no GPU here"):
        DeviceDataset(images, [0, 1], device="cuda")


@pytest.fixture
def mnist(tmp_path):
    for name in ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"):
        shutil.copy(DIGITS / name, tmp_path)
    return tmp_path


def test_images_in_the_place_of_labels(mnist):
    shutil.copy(mnist / "t10k-images-idx3-ubyte.gz", mnist / "t10k-labels-idx1-ubyte.gz")
    message = r"labels-idx1-ubyte.gz holds values of shape \[10000, 28, 28\], expected labels of"
    with pytest.raises(ValueError, match=message):
        DeviceDataset.from_mnist(mnist, train=False)


def test_labels_of_digits_are_integers(mnist):
    labels = b"\0\0\x0d\x01" + (10_000).to_bytes(4, "big") + b"\x7f\xc0\0\0" * 10_000  # NaN
    (mnist / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    with pytest.raises(ValueError, match="holds float32, expected classes from 0 to 9"):
        DeviceDataset.from_mnist(mnist, train=False)


@pytest.mark.parametrize("wrong", [-1, 0, True, "10"])
def test_the_number_of_classes_is_checked_first(mnist, wrong):
    files = mnist / "t10k-images-idx3-ubyte.gz", mnist / "t10k-labels-idx1-ubyte.gz"
    with pytest.raises((TypeError, ValueError), match="from_idx: num_classes must be"):
        DeviceDataset.from_idx(*files, num_classes=wrong)
