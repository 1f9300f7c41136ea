# SPDX-License-Identifier: BSD-3-Clause
# Reading folders of pictures, and their cache: what is read, what is refused in a sentence that
# names the file, and that a refusal leaves no file behind.

import os
import sys

import numpy
import pytest
import torch
from data_files import ENDINGS, Bomb, datasets, image_file, pixels, quiet, write_folder
from PIL import Image

from torch_renaissance.data import _limits

# -- image folders ------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 8])
def test_folder_as_torchvision_reads_it(tmp_path, workers):
    root = write_folder(tmp_path)
    dataset, theirs = quiet(root, workers=workers), datasets.ImageFolder(root)
    assert len(dataset) == len(theirs) == 6 and dataset.classes == tuple(theirs.classes)
    assert dataset.labels.tolist() == theirs.targets == [0, 0, 0, 1, 1, 1]
    assert dataset.images.shape == (6, 3, 6, 7)
    assert dataset.images.is_contiguous(memory_format=torch.channels_last)
    for i, (image, _) in enumerate(theirs):
        expected = torch.from_numpy(numpy.array(image)).permute(2, 0, 1)
        assert torch.equal(dataset.images[i], expected), theirs.imgs[i]


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1", "CMYK"])
def test_pictures_of_other_modes_become_rgb(tmp_path, mode):
    (tmp_path / "a").mkdir()
    picture = Image.fromarray(pixels(6, 7, 3).numpy()).convert(mode)
    name = tmp_path / "a" / ("x.tif" if mode == "CMYK" else "x.png")
    picture.save(name)
    image, _ = quiet(tmp_path)[0]
    expected = torch.from_numpy(numpy.array(picture.convert("RGB"))).permute(2, 0, 1)
    assert torch.equal(image, expected)


def test_size_covers_and_crops(tmp_path):
    from torchvision.transforms.v2.functional import center_crop, resize

    root = write_folder(tmp_path, [(12, 20), (30, 10), (8, 8), (3, 5)], [".png"] * 4)
    dataset = quiet(root, (8, 8))
    assert dataset.images.shape == (4, 3, 8, 8)
    found = {label: [] for label in (0, 1)}
    for image, label in dataset:
        found[label.item()].append(image)
    wide, small = pixels(3, 12, 20, seed=0), pixels(3, 8, 8, seed=2)
    tall, tiny = pixels(3, 30, 10, seed=1), pixels(3, 3, 5, seed=3)
    assert torch.equal(found[0][0], center_crop(resize(wide, [8, 13], antialias=True), [8, 8]))
    assert torch.equal(found[0][1], small)
    assert torch.equal(found[1][0], center_crop(resize(tall, [24, 8], antialias=True), [8, 8]))
    assert torch.equal(found[1][1], center_crop(resize(tiny, [8, 13], antialias=True), [8, 8]))
    assert quiet(root, [5, 9]).images.shape == (4, 3, 5, 9)


def test_mixed_sizes_name_the_first_two(tmp_path):
    root = write_folder(tmp_path, [(6, 7), (6, 7), (6, 7), (7, 6)], [".png"] * 8)
    with pytest.raises(ValueError) as caught:
        quiet(root, cache=tmp_path / "cache")
    assert str(caught.value) == (
        f"from_folder: {root}/birds/0.png has 6 × 7 pixels, but {root}/cats/3.PNG has 7 × 6; pass "
        "size=(H, W), to which all are resized and cropped"
    )
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("damage", ["empty", "cut off", "text"])
def test_a_broken_picture_is_named(tmp_path, ending, damage):
    root = write_folder(tmp_path / "root", endings=[".png", ".jpg", ".png"])
    content = image_file(pixels(3, 60, 70), ending)
    content = {"empty": b"", "cut off": content[: len(content) // 2], "text": b"hello" * 99}[damage]
    broken = root / "cats" / f"broken{ending}"
    broken.write_bytes(content)
    before = sorted(os.listdir(tmp_path))
    for size in (None, (6, 7)):
        with pytest.raises(ValueError) as caught:
            quiet(root, size, cache=tmp_path / "cache")
        assert str(caught.value).startswith(f"from_folder: {broken} can't be decoded: ")
    assert sorted(os.listdir(tmp_path)) == before


def test_no_folder_no_classes_no_pictures(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"from_folder: .*/nowhere is no folder"):
        quiet(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="has no sub-folders; each class must have its own"):
        quiet(tmp_path)
    write_folder(tmp_path)
    (tmp_path / "dogs").mkdir()
    with pytest.raises(ValueError, match=r"/dogs has no images \(files ending with \.jpg, "):
        quiet(tmp_path)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"size": 8}, TypeError, r"size must be a pair \(H, W\), got 8"),
        ({"size": (8, 8, 3)}, TypeError, r"size must be a pair \(H, W\)"),
        ({"size": (8, 0)}, ValueError, "W of size must be at least 1, got 0"),
        ({"size": (8.5, 8)}, TypeError, "H of size must be an int, got 8.5"),
        ({"workers": 0}, ValueError, "workers must be at least 1, got 0"),
        ({"cache": "nowhere/cache"}, FileNotFoundError, "nowhere is no folder; make it, then try"),
        ({"cache": "."}, IsADirectoryError, r"from_folder: \. is a folder; name a file"),
    ],
)
def test_options_of_folders(tmp_path, monkeypatch, options, error, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words):
        quiet(write_folder(tmp_path / "root"), **options)


def test_a_folder_that_does_not_fit_is_not_read(tmp_path, monkeypatch):
    root = write_folder(tmp_path, endings=[".png"] * 6)
    (root / "cats" / "9.png").write_bytes(b"never read")
    room = 256 << 20
    for full in ("cpu", "meta"):
        monkeypatch.setattr(
            _limits,
            "_free_bytes",
            lambda device, full=full: room + (7 * 3 * 6 * 7 - 1 if device.type == full else 9999),
        )
        with pytest.raises(RuntimeError, match=f"from_folder: .* but {full} has 0.25 GiB free"):
            quiet(root, device="meta")


def test_without_torchvision(tmp_path, monkeypatch):
    root = write_folder(tmp_path / "root")
    first = quiet(root, cache=tmp_path / "cache")
    monkeypatch.setitem(sys.modules, "torchvision.datasets.folder", None)
    with pytest.raises(
        ImportError, match="decodes with torchvision: `pip install torchvision`, or"
    ):
        quiet(root)
    assert torch.equal(quiet(root, cache=tmp_path / "cache").images, first.images)


# -- the cache of a folder ----------------------------------------------------------------------


@pytest.fixture
def decoded(monkeypatch):
    """How often pictures have been decoded."""
    from torch_renaissance.data import folder

    count, decode_all = [], folder._decode_all
    monkeypatch.setattr(folder, "_decode_all", lambda *a: count.append(1) or decode_all(*a))
    return count


def test_cache_is_read_instead(tmp_path, decoded):
    root, cache = write_folder(tmp_path / "root"), tmp_path / "cache.pt"
    first = quiet(root, cache=cache)
    assert os.listdir(tmp_path / "root") and sorted(os.listdir(tmp_path)) == ["cache.pt", "root"]
    again = quiet(root, cache=str(cache))
    assert len(decoded) == 1
    assert (
        torch.equal(again.images, first.images) and again.images.stride() == first.images.stride()
    )
    assert torch.equal(again.labels, first.labels) and again.classes == first.classes
    os.rename(root, tmp_path / "moved")  # names count from the root on
    quiet(tmp_path / "moved", cache=cache)
    assert len(decoded) == 1


@pytest.mark.parametrize("change", ["size", "content", "time", "more", "fewer", "name"])
def test_stale_cache_is_written_anew(tmp_path, decoded, change):
    root, cache = write_folder(tmp_path / "root"), tmp_path / "cache"
    before = quiet(root, (6, 7), cache=cache)
    size, picture = (6, 7), root / "birds" / "0.png"
    if change == "size":
        size = (5, 7)
    elif change == "content":
        picture.write_bytes(image_file(pixels(3, 6, 7, seed=99), ".png") + b"x")
    elif change == "time":
        os.utime(picture, ns=(0, 0))
    elif change == "more":
        (root / "cats" / "9.png").write_bytes(picture.read_bytes())
    elif change == "fewer":
        picture.unlink()
    else:
        picture.rename(picture.with_name("00.png"))
    after = quiet(root, size, cache=cache)
    assert len(decoded) == 2
    fresh = quiet(root, size)
    assert torch.equal(after.images, fresh.images) and torch.equal(after.labels, fresh.labels)
    assert (change in ("time", "name")) == torch.equal(after.images[:1], before.images[:1]) or (
        change == "more"
    )
    quiet(root, size, cache=cache)
    assert len(decoded) == 3


@pytest.mark.parametrize("damage", ["empty", "text", "cut off", "other", "pickle"])
def test_what_is_no_cache_is_refused_and_stays(tmp_path, monkeypatch, damage):
    monkeypatch.chdir(tmp_path)
    root, cache = write_folder(tmp_path / "root"), tmp_path / "cache"
    quiet(root, cache=cache)
    whole = cache.read_bytes()
    if damage == "other":
        torch.save({"weights": torch.zeros(3)}, cache)
    elif damage == "pickle":
        torch.save({"format": Bomb()}, cache)
    else:
        cache.write_bytes({"empty": b"", "text": b"my thesis", "cut off": whole[:-100]}[damage])
    content = cache.read_bytes()
    with pytest.raises(ValueError, match=r"cache is no cache of images, or damaged; delete it or"):
        quiet(root, cache=cache)
    assert cache.read_bytes() == content and sorted(os.listdir(tmp_path)) == ["cache", "root"]


def test_a_cache_that_cannot_be_completed(tmp_path, monkeypatch):
    root, cache = write_folder(tmp_path / "root"), tmp_path / "cache"
    quiet(root, cache=cache)
    whole = cache.read_bytes()

    def full_disk(content, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="No space left"):
        quiet(root, (3, 3), cache=cache)
    assert cache.read_bytes() == whole and sorted(os.listdir(tmp_path)) == ["cache", "root"]
