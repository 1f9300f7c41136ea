# SPDX-License-Identifier: BSD-3-Clause
# Pictures of augmented samples: what stands where in the grid, the list of transforms as text, the
# command. Stand-ins with results known by heart take the place of transforms, but for the end.
import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest
import torch

from torch_renaissance import data
from torch_renaissance.data import DeviceDataset
from torch_renaissance.data import show as module
from torch_renaissance.data.show import add_arguments, main, parse_transforms, show

Image = pytest.importorskip("PIL.Image", reason="reads the pictures")

EXAMPLE = Path(__file__).parents[1] / "examples" / "data"
GAP, PAPER = module._GAP, module._PAPER


@dataclass(frozen=True)
class Shift:
    """Adds `by` for each epoch to the bytes, and one for an odd seed."""

    by: int
    name: str = "x"
    sizes: tuple = (1, 2)

    def __post_init__(self):
        if isinstance(self.by, int) and self.by < 0:
            raise ValueError(f"Shift: by must be at least 0, got {self.by}")


@dataclass(frozen=True)
class Normalize:
    mean: tuple
    std: tuple


@dataclass(frozen=True)
class Cut:
    size: int


def augment(images, transforms, *, seed=0, epoch=0, indices=None):
    """Returns bytes or floats in [0, 1], as `tr.data.augment` may."""
    assert images.dtype == torch.uint8 and indices is not None
    out = images[indices].float()
    for transform in transforms:
        if isinstance(transform, Shift):
            out = out + transform.by * epoch + seed % 2
    if not any(isinstance(transform, Normalize | Cut) for transform in transforms):
        return out.clamp(0, 255).to(torch.uint8)
    out = out / 255
    for transform in transforms:
        if isinstance(transform, Normalize):
            mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (transform.mean, transform.std))
            out = (out - mean) / std
        elif isinstance(transform, Cut):
            out = out[:, :, : transform.size, : transform.size]
    return out


@pytest.fixture
def stand_ins(monkeypatch):
    for value in (Shift, Normalize, Cut, augment):
        monkeypatch.setattr(data, value.__name__, value, raising=False)


def opened(path):
    return torch.from_numpy(numpy.array(Image.open(path))).permute(2, 0, 1)


def cell(picture, row, column, height, width):
    """The pixels of a cell, without what is between cells."""
    top = GAP + row * (height + GAP)
    left = GAP + column * (width + GAP) + (2 * GAP if column else 0)
    return picture[:, top : top + height, left : left + width]


# -- the picture --------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_what_stands_where(tmp_path, stand_ins, channels, layout):
    values = torch.arange(7, dtype=torch.uint8).view(7, 1, 1, 1) * 20
    images = values.expand(7, channels, 100, 110).contiguous()
    images[:, 0, :50] += 10  # not the same everywhere
    given = images.permute(0, 2, 3, 1) if layout == "NHWC" else images
    dataset = DeviceDataset(given, torch.zeros(7), layout=layout)
    show(dataset, [Shift(2)], tmp_path / "x.png", rows=3, columns=4, seed=1, epoch=5)
    picture = opened(tmp_path / "x.png")
    assert picture.shape == (3, GAP + 3 * (100 + GAP), GAP + 4 * (110 + GAP) + 2 * GAP)
    for row, sample in enumerate((0, 3, 6)):
        original = images[sample].expand(3, -1, -1)
        assert torch.equal(cell(picture, row, 0, 100, 110), original)
        for column, epoch in ((1, 5), (2, 6), (3, 7)):
            assert torch.equal(cell(picture, row, column, 100, 110), original + 2 * epoch + 1)
    assert (picture[:, :GAP] == PAPER).all() and (picture[:, :, -GAP:] == PAPER).all()


def test_normalize_is_undone(tmp_path, stand_ins):
    images = torch.randint(256, (4, 3, 100, 100), dtype=torch.uint8)
    dataset = DeviceDataset(images, torch.zeros(4))
    transforms = [Normalize((0.5, 0.25, 0.1), (0.2, 0.3, 0.4))]
    show(dataset, transforms, tmp_path / "x.png", columns=2)
    picture = opened(tmp_path / "x.png")
    for row in range(4):
        assert torch.equal(cell(picture, row, 1, 100, 100), images[row])


@pytest.mark.parametrize("form", ["list", "one", "generator", "program"])
def test_transforms_in_every_form(tmp_path, form):
    images = torch.randint(256, (4, 3, 100, 100), dtype=torch.uint8)
    normalize = data.Normalize((0.5, 0.25, 0.1), (0.2, 0.3, 0.4))
    transforms = {
        "list": [normalize],
        "one": normalize,
        "generator": iter([normalize]),
        "program": data.Program([normalize], 3, 100, 100),
    }[form]
    show(DeviceDataset(images, torch.zeros(4)), transforms, tmp_path / "x.png", columns=3)
    picture = opened(tmp_path / "x.png")
    for row in range(4):
        for column in range(3):
            assert torch.equal(cell(picture, row, column, 100, 100), images[row])


def test_small_images_are_magnified_and_other_sizes_centred(tmp_path, stand_ins):
    images = torch.randint(256, (1, 1, 8, 8), dtype=torch.uint8)
    dataset = DeviceDataset(images, torch.zeros(1))
    show(dataset, [Cut(4)], str(tmp_path / "x.png"), rows=1, columns=3)
    picture = opened(tmp_path / "x.png")
    times = 12
    large = images[0].repeat_interleave(times, 1).repeat_interleave(times, 2).expand(3, -1, -1)
    assert torch.equal(cell(picture, 0, 0, 96, 96), large)
    for column in (1, 2):
        found = cell(picture, 0, column, 96, 96)
        assert torch.equal(found[:, 24:72, 24:72], large[:, :48, :48])
        assert (found[:, :24] == PAPER).all() and (found[:, :, 72:] == PAPER).all()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"rows": 0}, ValueError, "rows must be at least 1, got 0"),
        ({"rows": 5}, ValueError, "rows must be at most 4, got 5"),
        ({"columns": 1}, ValueError, "columns must be at least 2, got 1"),
        ({"columns": 2.0}, TypeError, "columns must be an int, got 2.0"),
        ({"epoch": -1}, ValueError, "epoch must be at least 0, got -1"),
        ({"path": "nowhere/x.png"}, FileNotFoundError, "nowhere is no folder; make it, then"),
        ({"path": "."}, IsADirectoryError, "is a folder; name a file"),
        ({"channels": 2}, ValueError, "images have 2 channels; only one or three are drawn"),
    ],
)
def test_show_refuses(tmp_path, monkeypatch, stand_ins, options, error, words):
    monkeypatch.chdir(tmp_path)
    images = torch.zeros(4, options.pop("channels", 1), 8, 8, dtype=torch.uint8)
    path = options.pop("path", "x.png")
    with pytest.raises(error, match=f"show: .*{words}"):
        show(DeviceDataset(images, torch.zeros(4)), [], path, **options)
    assert os.listdir(tmp_path) == []


def test_an_error_leaves_the_old_picture(tmp_path, stand_ins, monkeypatch):
    path = tmp_path / "x.png"
    dataset = DeviceDataset(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.zeros(4))
    show(dataset, [], path)
    before = path.read_bytes()

    def full_disk(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        show(dataset, [Shift(3)], path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["x.png"]


# -- the list of transforms ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("  \n", []),
        ("[]", []),
        ("Shift(2)", [Shift(2)]),
        (" Shift( by = 2 , name='y') ", [Shift(2, "y")]),
        ("Shift(2), Cut(3)", [Shift(2), Cut(3)]),
        ("Shift(2),", [Shift(2)]),
        ("[Shift(2), Cut(3)]", [Shift(2), Cut(3)]),
        ("(Shift(2), Shift(2))", [Shift(2), Shift(2)]),
        (
            "Shift(2, sizes=(-1, 2.5, None)), Cut(size=[1, True])",
            [Shift(2, sizes=(-1, 2.5, None)), Cut([1, True])],
        ),
    ],
)
def test_transforms_are_read(stand_ins, text, expected):
    assert parse_transforms(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Shift(2", "'Shift(2' can't be read: "),
        ("Shift(2) Cut(3)", "can't be read: "),
        ("x = Shift(2)", "can't be read: "),
        ("import os", "can't be read: "),
        ("Shift(2); Cut(3)", "can't be read: "),
        ("\0", "can't be read: "),
        ("Shift(" * 999, "can't be read: "),
        ("Shift", "Shift is no transform with its arguments in parentheses"),
        ("3", "3 is no transform with its arguments in parentheses"),
        ("Shift(2) + Cut(3)", "is no transform with its arguments in parentheses"),
        ("[*Shift(2)]", "is no transform with its arguments in parentheses"),
        ("data.Shift(2)", "data.Shift(2) is no transform with its arguments in parentheses"),
        ("(lambda: Shift(2))()", "is no transform with its arguments in parentheses"),
        ("[Shift(2) for _ in range(3)]", "is no transform with its arguments in parentheses"),
        ("Blur(2)", "there is no Blur; there are C"),
        ("DeviceDataset(2)", "there is no DeviceDataset; there are "),
        ("augment(2)", "there is no augment; there are "),
        ("__import__('os')", "there is no __import__; there are "),
        ("Shift(open('x'))", "Shift(open('x')) has an argument that is no literal, such as 2, 0.5"),
        ("Shift(1 + 1)", "has an argument that is no literal"),
        ("Shift(by=Cut(2))", "has an argument that is no literal"),
        ("Shift(*[2])", "has an argument that is no literal"),
        ("Shift(**{'by': 2})", "has ** arguments; write each with its name"),
        ("Shift()", "Shift() is refused: "),
        ("Shift(2, blur=3)", "Shift(2, blur=3) is refused: "),
        ("Shift(-2)", "Shift(-2) is refused: Shift: by must be at least 0, got -2"),
    ],
)
def test_other_text_is_refused(tmp_path, monkeypatch, stand_ins, text, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as caught:
        parse_transforms(text)
    assert str(caught.value).startswith("transforms: ") and words in str(caught.value)
    assert os.listdir(tmp_path) == []


# -- the command --------------------------------------------------------------------------------


def run(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return main(parser.parse_args(list(map(str, arguments))))


def test_the_command(tmp_path, stand_ins, capsys):
    out = tmp_path / "x.png"
    run("--mnist", EXAMPLE, "--test", "--transforms", "Shift(20)", "--out", out, "--columns", 3)
    assert capsys.readouterr().out == (
        f"{out}: DeviceDataset(10,000 images of 1 × 28 × 28 as NCHW, 10 classes, 7.6 MiB on cpu), "
        "4 samples, the originals in the first column\n"
    )
    picture = opened(out)
    assert picture.shape == (3, GAP + 4 * (84 + GAP), GAP + 3 * (84 + GAP) + 2 * GAP)
    images = DeviceDataset.from_mnist(EXAMPLE, train=False).images
    small = cell(picture, 3, 0, 84, 84)[:, 1::3, 1::3]
    assert torch.equal(small, images[-1].expand(3, -1, -1))
    later = (images[-1].int() + 20).clamp(max=255).byte().expand(3, -1, -1)
    assert torch.equal(cell(picture, 3, 2, 84, 84)[:, 1::3, 1::3], later)


def test_the_command_on_a_folder(tmp_path, stand_ins, capsys):
    pytest.importorskip("torchvision")
    for name in "ab":
        (tmp_path / "root" / name).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (20 + i, 30), (200, 100, i)).save(
                tmp_path / "root" / name / f"{i}.png"
            )
    source, out = ("--folder", tmp_path / "root"), ("--out", tmp_path / "x.png")
    run(*source, *out, "--size", 40, 50)
    assert "4 images of 3 × 40 × 50 as NHWC, 2 classes" in capsys.readouterr().out
    assert opened(tmp_path / "x.png").shape[1] == GAP + 4 * (80 + GAP)
    with pytest.raises(SystemExit, match=r"data show: from_folder: .* pass size=\(H, W\)"):
        run(*source, *out)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mnist", "nowhere"], "data show: nowhere has neither train-images-idx3-ubyte nor"),
        (["--cifar", "nowhere"], "data show: from_cifar: nowhere has neither CIFAR-10 nor"),
        (["--folder", "nowhere"], "data show: from_folder: nowhere is no folder"),
        (["--folder", ".", "--test"], "data show: --test: a folder has no test images; name the"),
        (["--mnist", ".", "--transforms", "Blur(2)"], "data show: transforms: there is no Blur"),
        (["--mnist", ".", "--out", "no/x.png"], "data show: --out: no is no folder; make it"),
        (["--mnist", EXAMPLE, "--test", "--rows", "0"], "data show: show: rows must be at least 1"),
        (["--mnist", EXAMPLE, "--test", "--device", "tpu"], "data show: .*tpu"),
    ],
)
def test_the_command_refuses_in_a_sentence(tmp_path, monkeypatch, stand_ins, arguments, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=words):
        run("--out", "x.png", *arguments)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "x"], "one of the arguments --mnist --cifar --folder is required"),
        (["--mnist", "a"], "the following arguments are required: --out"),
        (["--mnist", "a", "--cifar", "b"], "--cifar: not allowed with argument --mnist"),
    ],
)
def test_the_command_needs_one_source_and_a_target(capsys, arguments, words):
    with pytest.raises(SystemExit) as leaving:
        run(*arguments)
    assert leaving.value.code == 2 and words in capsys.readouterr().err


# -- with the transforms themselves --------------------------------------------------------------


def test_real_transforms(tmp_path):
    text = "Pad(2), RandomCrop(28), RandomRotation(20), Normalize((0.1307,), (0.3081,))"
    transforms = parse_transforms(text)
    assert transforms == [
        data.Pad(2),
        data.RandomCrop(28),
        data.RandomRotation(20),
        data.Normalize((0.1307,), (0.3081,)),
    ]
    dataset = DeviceDataset.from_mnist(EXAMPLE, train=False)
    show(dataset, transforms, tmp_path / "x.png", rows=2, columns=3, seed=7, epoch=1)
    picture = opened(tmp_path / "x.png")
    chosen = torch.tensor([0, 9999])
    for column, epoch in ((1, 1), (2, 2)):  # without Normalize, the result is in bytes
        plain = data.augment(dataset.images, transforms[:3], seed=7, epoch=epoch, indices=chosen)
        for row in range(2):
            expected = plain[row].float().expand(3, -1, -1)
            found = cell(picture, row, column, 84, 84)[:, 1::3, 1::3].float()
            assert (found - expected).abs().max() <= 1  # Normalize and back rounds
            assert not torch.equal(found, cell(picture, row, 0, 84, 84)[:, 1::3, 1::3].float())


@pytest.mark.cuda
def test_a_picture_from_the_gpu(tmp_path):
    dataset = DeviceDataset.from_mnist(EXAMPLE, train=False)
    transforms = [data.Pad(2), data.RandomCrop(28), data.RandomRotation(20)]
    show(dataset, transforms, tmp_path / "cpu.png", seed=7)
    show(dataset.to("cuda"), transforms, tmp_path / "cuda.png", seed=7)
    assert (tmp_path / "cpu.png").read_bytes() == (tmp_path / "cuda.png").read_bytes()
