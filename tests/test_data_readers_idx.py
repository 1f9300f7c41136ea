# SPDX-License-Identifier: BSD-3-Clause
# Reading IDX files, MNIST's: what is read, and what is refused in a sentence that names the file.

import gzip
import os
from pathlib import Path

import numpy
import pytest
import torch
from data_files import CODES, IMAGES, LABELS, idx, pixels, same, write_mnist

from torch_renaissance.data import DeviceDataset
from torch_renaissance.data.idx import read_idx

EXAMPLE = Path(__file__).parents[1] / "examples" / "data"


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("shape", [(1,), (7,), (2, 3), (2, 1, 3, 2)])
def test_idx_of_every_dtype(tmp_path, dtype, shape):
    values = (numpy.random.default_rng(0).random(shape) * 1e4).astype("i8").astype(dtype)
    (tmp_path / "x").write_bytes(idx(values))
    read = read_idx(tmp_path / "x")
    assert read.numpy().dtype == values.dtype and read.shape == shape
    assert read.tolist() == values.tolist()


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gz"])
def test_the_content_tells_whether_it_is_packed(tmp_path, pack):
    (tmp_path / "x").write_bytes(pack(idx(IMAGES)))
    (tmp_path / "y.gz").write_bytes(pack(idx(LABELS.to(torch.uint8))))
    dataset = DeviceDataset.from_idx(tmp_path / "x", str(tmp_path / "y.gz"))
    same(dataset)
    assert dataset.images.shape == (6, 1, 4, 5) and dataset.num_classes is None


def test_idx_of_coloured_images_and_other_labels(tmp_path):
    (tmp_path / "x").write_bytes(idx(pixels(6, 3, 4, 5)))
    for dtype, expected in (("i4", torch.int64), ("i1", torch.int64), ("f4", torch.float32)):
        (tmp_path / "y").write_bytes(idx(LABELS.numpy().astype(dtype)))
        dataset = DeviceDataset.from_idx(tmp_path / "x", tmp_path / "y", num_classes=10)
        assert dataset.images.shape == (6, 3, 4, 5) and dataset.num_classes == 10
        assert dataset.labels.dtype == expected and dataset.labels.tolist() == LABELS.tolist()


@pytest.mark.parametrize("where", [".", "raw", "MNIST/raw"])
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_mnist_is_found(tmp_path, where, ending):
    write_mnist(tmp_path / where, ending)
    write_mnist(tmp_path / where, ending, "t10k", IMAGES[:2], LABELS[:2])
    same(DeviceDataset.from_mnist(tmp_path))
    same(DeviceDataset.from_mnist(str(tmp_path), train=False), IMAGES[:2], LABELS[:2])
    assert DeviceDataset.from_mnist(tmp_path).num_classes == 10


def test_the_real_mnist():
    dataset = DeviceDataset.from_mnist(EXAMPLE, train=False)
    assert dataset.images.shape == (10_000, 1, 28, 28)
    counts = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert dataset.labels.bincount().tolist() == counts
    raw = gzip.decompress((EXAMPLE / "t10k-images-idx3-ubyte.gz").read_bytes())
    assert bytes(dataset.images[1234].flatten().tolist()) == raw[16:][1234 * 784 : 1235 * 784]
    assert repr(dataset) == (
        "DeviceDataset(10,000 images of 1 × 28 × 28 as NCHW, 10 classes, 7.6 MiB on cpu)"
    )


GOOD = idx(IMAGES)
PACKED = gzip.compress(GOOD)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is no IDX file: it begins with '', expected two zero bytes"),
        (GOOD[:3], "is no IDX file: it begins with '000008'"),
        (b"\x89PNG" + GOOD, "is no IDX file: it begins with '89504e47'"),
        (idx(IMAGES, code=7), "is no IDX file: it begins with '00000703'"),
        (bytes((0, 0, 8, 0)), "is no IDX file: it begins with '00000800'"),
        (GOOD[:13], "is cut off within its header, after 13 bytes"),
        (GOOD[:16], "is cut off: 0 bytes follow its header, expected 120 for shape [6, 4, 5] of u"),
        (GOOD[:-1], "is cut off: 119 bytes follow its header, expected 120"),
        (GOOD + b"x", "goes on after its last value: more bytes follow its header, expected 120"),
        (GOOD + bytes(1 << 20), "goes on after its last value"),
        (idx(IMAGES[:0]), "has no elements: its shape is [0, 4, 5]"),
        (
            b"\0\0\x08\x03" + b"\xff" * 12 + GOOD,
            "is cut off: 136 bytes follow its header, expected",
        ),
        (b"\0\0\x0e\xff" + b"\xff" * 1020, "is cut off: 0 bytes follow its header, expected"),
        (PACKED[:-20], "is damaged or cut off: "),
        (PACKED[:-8] + bytes(8), "is damaged or cut off: CRC check failed"),
        (PACKED[:20] + b"\xff\xff" + PACKED[22:], "is damaged or cut off: "),
        (PACKED + b"garbage", "is damaged or cut off: Not a gzipped file"),
        (PACKED + PACKED, "goes on after its last value"),
        (gzip.compress(GOOD[:-1]), "is cut off: 119 bytes follow its header, expected 120"),
        (gzip.compress(GOOD + b"x"), "goes on after its last value"),
        (b"\x1f\x8b", "is damaged or cut off: "),
        (
            idx(IMAGES.numpy().astype("i4")),
            "holds int32 of shape [6, 4, 5], expected images: uint8",
        ),
        (idx(IMAGES[0]), "holds uint8 of shape [4, 5], expected images: uint8 of shape [N, H, W]"),
        (idx(IMAGES[:5]), "has 5 images, but "),
    ],
)
def test_broken_idx(tmp_path, content, words):
    write_mnist(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(content)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ValueError) as caught:
        DeviceDataset.from_mnist(tmp_path)
    assert str(caught.value).startswith(str(path)) and words in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_label_out_of_range(tmp_path):
    write_mnist(tmp_path, labels=torch.tensor([3, 1, 4, 1, 10, 9]))
    with pytest.raises(ValueError, match=r"-ubyte: labels\[4\] is 10, expected 0 to 9, as"):
        DeviceDataset.from_mnist(tmp_path)


def test_missing_idx(tmp_path):
    write_mnist(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"neither t10k-images-idx3-ubyte nor t10k-.*\.gz"):
        DeviceDataset.from_mnist(tmp_path, train=False)
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither train-labels.*download=True\) fetches"):
        DeviceDataset.from_mnist(tmp_path)
    with pytest.raises(FileNotFoundError):
        DeviceDataset.from_idx(tmp_path / "x", tmp_path / "y")
