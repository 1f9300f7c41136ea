# SPDX-License-Identifier: BSD-3-Clause
# Reading map-style datasets, the bar that shows how far a reader is, and each reader onto a device.

import sys
import warnings

import numpy
import pytest
import torch
from data_files import (
    CIFAR10,
    cifar10,
    datasets,
    pixels,
    quiet,
    same,
    write,
    write_folder,
    write_mnist,
)
from PIL import Image
from testing import DEVICES
from torch.utils.data import Dataset, IterableDataset, Subset

from torch_renaissance.data import DeviceDataset, _limits

# -- map-style datasets -------------------------------------------------------------------------


class Items(Dataset):
    def __init__(self, *items, classes=None):
        self.items = items
        if classes is not None:
            self.classes = classes

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def read(*items, **options):
    return DeviceDataset.from_dataset(Items(*items), progress=False, **options)


CHW = pixels(2, 3, 6, 7)
FORMS = {
    "CHW": (CHW, CHW),
    "HWC": (CHW.permute(0, 2, 3, 1), CHW),
    "numpy": (CHW.permute(0, 2, 3, 1).numpy(), CHW),
    "PIL": ([Image.fromarray(x.permute(1, 2, 0).numpy()) for x in CHW], CHW),
    "HW": (CHW[:, 0], CHW[:, :1]),
    "PIL L": ([Image.fromarray(x[0].numpy()) for x in CHW], CHW[:, :1]),
    "PIL RGBA": (
        [Image.fromarray(x.numpy(), "RGBA") for x in pixels(2, 6, 7, 4)],
        pixels(2, 6, 7, 4).permute(0, 3, 1, 2),
    ),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("given", "expected"), FORMS.values(), ids=FORMS)
def test_images_of_items(given, expected, workers):
    dataset = read((given[0], 4), (given[1], 2), num_workers=workers, num_classes=5)
    assert torch.equal(dataset.images, expected) and dataset.num_classes == 5
    assert dataset.labels.tolist() == [4, 2] and dataset.labels.dtype == torch.int64


@pytest.mark.parametrize(
    "label", [3, True, 2.5, numpy.int64(3), torch.tensor(3), torch.rand(4), numpy.zeros(2, "f4")]
)
def test_labels_of_items(label):
    dataset = read((CHW[0], label), (CHW[1], label))
    expected = torch.stack([torch.as_tensor(label)] * 2)
    assert torch.equal(dataset.labels, expected) and dataset.labels.dtype == expected.dtype


def test_reading_draws_no_random_numbers():
    state = torch.get_rng_state()
    read((CHW[0], 0), (CHW[1], 1))
    assert torch.equal(torch.get_rng_state(), state)


def test_layout_of_items():
    square = pixels(3, 32, 3)
    with pytest.raises(ValueError, match=r"has shape \[3, 32, 3\], which is not clearly"):
        read((square, 0))
    assert torch.equal(read((square, 0), layout="NCHW").images[0], square)
    assert torch.equal(read((square, 0), layout="NHWC").images[0], square.permute(2, 0, 1))
    with pytest.raises(ValueError, match=r"has shape \[8, 6, 7\], which is not clearly"):
        read((pixels(8, 6, 7), 0))
    assert read((pixels(8, 6, 7), 0), layout="NCHW").images.shape == (1, 8, 6, 7)


def test_datasets_of_torchvision(tmp_path):
    root = write_folder(tmp_path)
    theirs = datasets.ImageFolder(root)
    dataset = DeviceDataset.from_dataset(theirs, progress=False)
    same(dataset, quiet(root).images, quiet(root).labels)
    assert dataset.classes == ("birds", "cats")
    part = DeviceDataset.from_dataset(Subset(theirs, [5, 0]), progress=False)
    assert part.labels.tolist() == [1, 0] and part.num_classes is None
    assert torch.equal(part.images, dataset.images[[5, 0]])


def test_names_of_classes_of_a_dataset():
    items = Items((CHW[0], 0), (CHW[1], 2), classes=["a", "b"])
    with pytest.raises(ValueError, match=r"labels\[1\] is 2, expected 0 to 1"):
        DeviceDataset.from_dataset(items)
    dataset = DeviceDataset.from_dataset(items, num_classes=3)
    assert dataset.num_classes == 3 and dataset.classes is None


def test_reading_a_device_dataset_again():
    dataset = DeviceDataset(CHW, torch.tensor([1, 0]), classes="ab")
    again = DeviceDataset.from_dataset(dataset)
    same(again, CHW, dataset.labels)
    assert again.classes == dataset.classes


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


class NoLength:
    def __getitem__(self, index):
        return CHW[0], 0


PALETTE = Image.fromarray(CHW[0].permute(1, 2, 0).numpy()).convert("P")


@pytest.mark.parametrize(
    ("dataset", "error", "words"),
    [
        (Stream(), TypeError, "Stream is not map-style; it needs __len__ and __getitem__"),
        (NoLength(), TypeError, "NoLength is not map-style"),
        (Items(), ValueError, "the dataset has no items"),
        (Items(CHW[0]), TypeError, "must be pairs (image, label), item 0 is a Tensor"),
        (Items((CHW[0], 1, 2)), TypeError, "must be pairs (image, label), item 0 is a tuple"),
        (
            Items((CHW[0], 0), (CHW[0].float() / 255, 0)),
            TypeError,
            "the image of item 1 is torch.float32, expected a PIL image or uint8; leave ToTensor",
        ),
        (Items((CHW[0].numpy() / 255, 0)), TypeError, "the image of item 0 is float64, expected"),
        (Items((CHW[0].tolist(), 0)), TypeError, "the image of item 0 is list, expected"),
        (Items((PALETTE, 0)), ValueError, "item 0 has mode P, expected L, RGB, RGBA; convert it"),
        (Items((CHW[0, 0, 0], 0)), ValueError, "the image of item 0 has shape [7], which is not"),
        (
            Items((CHW[0], 0), (CHW[0], 0), (CHW[0, :, 1:], 0)),
            ValueError,
            "the image of item 2 has shape [5, 7, 3], that of item 0 has [6, 7, 3]; resize and",
        ),
        (Items((CHW[0], 0), (CHW[0, 0], 0)), ValueError, "item 1 has shape [6, 7, 1], that of"),
        (Items((CHW[0], 0), (CHW[0], torch.zeros(2))), ValueError, "the label of item 1 has shape"),
        (
            Items((CHW[0], 0), (CHW[0], 0.5)),
            TypeError,
            "the label of item 1 is torch.float32, that",
        ),
        (Items((CHW[0], "cat")), TypeError, "the label of item 0 is a str, expected a number or a"),
        (Items((CHW[0], None)), TypeError, "the label of item 0 is a NoneType, expected"),
    ],
)
def test_refused_datasets(dataset, error, words):
    with pytest.raises(error) as caught:
        DeviceDataset.from_dataset(dataset, progress=False)
    assert str(caught.value).startswith("from_dataset: ") and words in str(caught.value)


def test_other_refusals():
    with pytest.raises(ValueError, match="layout must be 'NCHW' or 'NHWC', got 'CHW'"):
        read((CHW[0], 0), layout="CHW")
    with pytest.raises(TypeError, match="the image of item 0 is torch"):  # from a worker
        read((CHW[0].float(), 0), num_workers=1)


def test_a_dataset_that_does_not_fit_is_not_read(monkeypatch):
    monkeypatch.setattr(_limits, "_free_bytes", lambda device: (256 << 20) + 2 * (126 + 8) - 1)
    seen = []

    class Counted(Items):
        def __getitem__(self, index):
            seen.append(index)
            return self.items[index]

    with pytest.raises(RuntimeError, match="from_dataset: the images and labels take"):
        DeviceDataset.from_dataset(Counted((CHW[0], 0), (CHW[1], 0)), progress=False)
    assert seen == [0]


# -- onto a device ---------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["meta", *DEVICES])
def test_each_reader_onto_a_device(tmp_path, device):
    write_mnist(tmp_path / "mnist")
    write(tmp_path / CIFAR10, cifar10())
    write_folder(tmp_path / "folder")
    items = Items((CHW[0], 1), (CHW[1], 0))
    for read_all in (
        lambda **to: DeviceDataset.from_mnist(tmp_path / "mnist", **to),
        lambda **to: DeviceDataset.from_cifar(tmp_path, **to),
        lambda **to: quiet(tmp_path / "folder", cache=tmp_path / "cache", **to),
        lambda **to: quiet(tmp_path / "folder", cache=tmp_path / "cache", **to),
        lambda **to: DeviceDataset.from_dataset(items, progress=False, **to),
    ):
        dataset = read_all(device=device)
        assert dataset.device.type == dataset.labels.device.type == device
        with torch.device("meta"):  # what is read lies on the CPU unless somebody says so
            plain = read_all()
        assert plain.device.type == "cpu" and plain.images.shape == dataset.images.shape
        if device != "meta":
            same(dataset.to("cpu"), plain.images, plain.labels)


# -- the bar ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rich", [True, False], ids=["rich", "no rich"])
def test_no_bar_where_no_terminal_is(tmp_path, monkeypatch, capfd, rich):
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(DeviceDataset.from_folder(write_folder(tmp_path))) == 6
        assert len(DeviceDataset.from_dataset(Items((CHW[0], 0)))) == 1
    assert capfd.readouterr() == ("", "")


def test_a_bar_on_a_terminal(monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setenv("FORCE_COLOR", "1")  # for rich that is a terminal
    monkeypatch.setenv("TERM", "xterm")
    dataset = Items((CHW[0], 0), (CHW[1], 1))
    DeviceDataset.from_dataset(dataset, progress=False)
    assert capsys.readouterr() == ("", "")
    DeviceDataset.from_dataset(dataset)
    out, err = capsys.readouterr()
    assert out == "" and "reading" in err
