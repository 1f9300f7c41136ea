# SPDX-License-Identifier: BSD-3-Clause
# The readers of DeviceDataset on files written here: what they read, what they refuse in a sentence
# that names the file, and that a refusal leaves no file behind.
import gzip
import io
import os
import pickle
import struct
import sys
import tarfile
import warnings
from pathlib import Path

import numpy
import pytest
import torch
from testing import DEVICES
from torch.utils.data import Dataset, IterableDataset, Subset

from torch_renaissance.data import DeviceDataset, _limits
from torch_renaissance.data.idx import read_idx

datasets = pytest.importorskip("torchvision.datasets", reason="an extra: data")
from PIL import Image  # noqa: E402  torchvision brings it

EXAMPLE = Path(__file__).parents[1] / "examples" / "data"


def pixels(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, shape, dtype=torch.uint8, generator=generator)


# -- IDX ----------------------------------------------------------------------------------------

CODES = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}


def idx(array, code=None):
    """The bytes of an IDX file; numpy does the byte order, the reader does without it."""
    array = numpy.asarray(array)
    head = bytes((0, 0, CODES[array.dtype.str[1:]] if code is None else code, array.ndim))
    return (
        head
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.astype(array.dtype.newbyteorder(">")).tobytes()
    )


IMAGES, LABELS = pixels(6, 4, 5), torch.tensor([3, 1, 4, 1, 5, 9])


def write_mnist(folder, ending="", part="train", images=IMAGES, labels=LABELS):
    folder.mkdir(parents=True, exist_ok=True)
    pack = gzip.compress if ending else bytes
    for name, content in (("images-idx3", images), ("labels-idx1", labels.to(torch.uint8))):
        (folder / f"{part}-{name}-ubyte{ending}").write_bytes(pack(idx(content)))
    return folder


def same(dataset, images=IMAGES, labels=LABELS):
    assert torch.equal(dataset.images.flatten(), images.flatten())
    assert torch.equal(dataset.labels, labels) and dataset.labels.dtype == torch.int64


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


# -- CIFAR --------------------------------------------------------------------------------------

CIFAR10, CIFAR100 = "cifar-10-batches-py", "cifar-100-python"


def python2_pickle(items):
    """A pickle as Python 2 with its numpy wrote it: protocol 2, strings as bytes."""

    def string(value):
        return b"T" + struct.pack("<i", len(value)) + value

    out = b"\x80\x02}("
    for key, value in items.items():
        out += string(key)
        if isinstance(value, numpy.ndarray):
            rows, columns = (b"J" + struct.pack("<i", size) for size in value.shape)
            out += b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85"
            out += string(b"b") + b"\x87R(K\x01" + rows + columns + b"\x86"
            out += b"cnumpy\ndtype\n" + string(b"u1") + b"K\x00K\x01\x87R(K\x03"
            out += string(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
            out += b"\x89" + string(value.tobytes()) + b"tb"
        elif isinstance(value[0], int):
            out += b"](" + b"".join(b"K" + bytes([label]) for label in value) + b"e"
        else:
            out += b"](" + b"".join(string(text) for text in value) + b"e"
    return out + b"u."


def newer_pickle(protocol):
    return lambda items: pickle.dumps({k.decode(): v for k, v in items.items()}, protocol)


PICKLES = {"python 2": python2_pickle, **{f"protocol {p}": newer_pickle(p) for p in (2, 4, 5)}}


def rows(n, seed):
    return pixels(n, 3072, seed=seed).numpy()


def cifar10(dump=python2_pickle):
    """File name -> content."""
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    files = {
        name: dump({b"data": rows(3, i), b"labels": [i, 9, 0], b"filenames": [b"a", b"b", b"c"]})
        for i, name in enumerate(names)
    }
    return files | {"batches.meta": dump({b"label_names": [b"class %d" % i for i in range(10)]})}


def cifar100(dump=python2_pickle):
    files = {
        name: dump({b"data": rows(3, i), b"fine_labels": [i, 99, 7], b"coarse_labels": [19, i, 0]})
        for i, name in enumerate(["train", "test"])
    }
    names = {f"{b}_label_names".encode(): [b"x%d" % i for i in range(n)] for b, n in SIZES.items()}
    return files | {"meta": dump(names)}


SIZES = {"fine": 100, "coarse": 20}


def write(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def pack(path, folder, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize("dump", PICKLES.values(), ids=PICKLES)
def test_cifar10(tmp_path, dump):
    write(tmp_path / CIFAR10, cifar10(dump))
    for root in (tmp_path, tmp_path / CIFAR10):
        dataset = DeviceDataset.from_cifar(root)
        expected = torch.cat([torch.from_numpy(rows(3, i)) for i in range(5)])
        same(dataset, expected, torch.tensor([[i, 9, 0] for i in range(5)]).flatten())
        assert dataset.images.shape == (15, 3, 32, 32) and dataset.images.is_contiguous()
        assert dataset.classes == tuple(f"class {i}" for i in range(10))
    test = DeviceDataset.from_cifar(tmp_path, train=False)
    same(test, torch.from_numpy(rows(3, 5)), torch.tensor([5, 9, 0]))


@pytest.mark.parametrize("dump", PICKLES.values(), ids=PICKLES)
def test_cifar100(tmp_path, dump):
    write(tmp_path / CIFAR100, cifar100(dump))
    same(DeviceDataset.from_cifar(tmp_path), torch.from_numpy(rows(3, 0)), torch.tensor([0, 99, 7]))
    dataset = DeviceDataset.from_cifar(tmp_path / CIFAR100, train=False, coarse=True)
    same(dataset, torch.from_numpy(rows(3, 1)), torch.tensor([19, 1, 0]))
    assert dataset.num_classes == 20 and DeviceDataset.from_cifar(tmp_path).num_classes == 100


def test_as_torchvision_reads_it(tmp_path, monkeypatch):
    write(tmp_path / CIFAR10, cifar10())
    monkeypatch.setattr(datasets.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5: True)
    theirs, ours = datasets.CIFAR10(tmp_path), DeviceDataset.from_cifar(tmp_path)
    assert torch.equal(torch.from_numpy(theirs.data).permute(0, 3, 1, 2), ours.images)
    assert theirs.targets == ours.labels.tolist()


@pytest.mark.parametrize(
    ("folder", "files", "length"), [(CIFAR10, cifar10(), 15), (CIFAR100, cifar100(), 3)]
)
def test_cifar_in_its_archive(tmp_path, folder, files, length):
    name = {CIFAR10: "cifar-10-python.tar.gz", CIFAR100: "cifar-100-python.tar.gz"}[folder]
    path = pack(tmp_path / name, folder, files)
    write(tmp_path / "unpacked", files)
    plain = DeviceDataset.from_cifar(tmp_path / "unpacked")
    for root in (path, tmp_path):
        dataset = DeviceDataset.from_cifar(root)
        same(dataset, plain.images, plain.labels)
        assert len(dataset) == length and dataset.classes == plain.classes
    assert sorted(os.listdir(tmp_path)) == [name, "unpacked"]  # nothing was unpacked


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("bomb",)


class Named:
    """Pickled, it is the name of something that exists."""

    def __init__(self, function, *arguments):
        self.value = function, arguments

    def __reduce__(self):
        return self.value


DAMAGED = "is no batch of CIFAR's python version, or damaged: "
ADMITTED = "which is not admitted"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", DAMAGED),
        (b"hello", DAMAGED),
        (cifar10()["test_batch"][:-100], DAMAGED),
        (pickle.dumps([1, 2]), DAMAGED),
        (pickle.dumps({"data": Bomb()}), f"it asks for {os.name}.mkdir, {ADMITTED}"),
        (pickle.dumps(Named(eval, "1 + 1")), f"it asks for builtins.eval, {ADMITTED}"),
        (pickle.dumps(Named(getattr, "", "upper")), f"builtins.getattr, {ADMITTED}"),
        (pickle.dumps({"data": numpy.float64(1)}), f"scalar, {ADMITTED}"),
        (pickle.dumps({"data": rows(3, 0).astype(object)}), "it has an array of |O8"),
        (pickle.dumps({"data": rows(3, 0).astype("f4")}), "it has an array of <f4"),
        (pickle.dumps({"data": rows(3, 0).astype(">i4")}), "it has an array of >i4"),
        (pickle.dumps({"data": rows(0, 0)}), "it has an array of 0 bytes, expected 0"),
        (
            cifar10()["test_batch"].replace(b"J\0\x0c\0\0", b"J\1\x0c\0\0"),
            "it has an array of 9216 bytes, expected 9219",
        ),
        (pickle.dumps({"labels": [1]}), "has no images: data must be uint8 of shape [N, 3072]"),
        (pickle.dumps({"data": [1, 2], "labels": [1]}), "has no images"),
        (pickle.dumps({"data": rows(3, 0)[:, 1:], "labels": [1]}), "has no images"),
        (pickle.dumps({"data": rows(3, 0)}), "needs labels, a list of 3 integers"),
        (pickle.dumps({"data": rows(3, 0), "labels": [1, 2]}), "needs labels, a list of 3"),
        (pickle.dumps({"data": rows(3, 0), "labels": [1, 2.5, 3]}), "needs labels, a list of 3"),
        (pickle.dumps({"data": rows(3, 0), "labels": [1, 2, 10]}), "labels[2] is 10, expected 0 t"),
        (pickle.dumps({"data": rows(3, 0), "labels": [1, -2, 1]}), "labels[1] is -2, expected 0 t"),
    ],
)
@pytest.mark.parametrize("packed", [False, True], ids=["folder", "archive"])
def test_broken_cifar(tmp_path, monkeypatch, content, words, packed):
    monkeypatch.chdir(tmp_path)
    files = cifar10() | {"data_batch_3": content}
    if packed:
        root = pack(tmp_path / "x.tar.gz", CIFAR10, files)
    else:
        root = write(tmp_path / CIFAR10, files)
    before = os.listdir(tmp_path)
    with pytest.raises(ValueError) as caught:
        DeviceDataset.from_cifar(root)
    assert str(caught.value).startswith(f"{root}/data_batch_3") and words in str(caught.value)
    assert os.listdir(tmp_path) == before  # the bomb would have made a folder


def test_a_dtype_that_lies_about_its_items(tmp_path):
    """Bytes as Python objects, which numpy's own unpickling takes for addresses."""
    array = python2_pickle({b"data": rows(1, 0), b"labels": [1]})
    files = cifar10() | {"test_batch": array.replace(b"u1", b"O8")}
    write(tmp_path, files)
    with pytest.raises(ValueError, match=r"test_batch is no batch .* it has an array of \|O8"):
        DeviceDataset.from_cifar(tmp_path, train=False)


def test_arrays_in_the_order_of_fortran(tmp_path):
    data = numpy.asfortranarray(rows(3, 0))
    files = cifar10() | {
        "test_batch": pickle.dumps({"data": data, "labels": numpy.array([3, 2, 1])})
    }
    write(tmp_path, files)
    same(
        DeviceDataset.from_cifar(tmp_path, train=False),
        torch.from_numpy(rows(3, 0)),
        torch.tensor([3, 2, 1]),
    )


def test_where_is_cifar(tmp_path):
    with pytest.raises(FileNotFoundError, match="has neither CIFAR-10 nor CIFAR-100"):
        DeviceDataset.from_cifar(tmp_path)
    with pytest.raises(FileNotFoundError, match="has neither CIFAR-10 nor CIFAR-100"):
        DeviceDataset.from_cifar(tmp_path / "nowhere")
    write(tmp_path / CIFAR10, cifar10())
    with pytest.raises(ValueError, match="is CIFAR-10, which has no coarse labels"):
        DeviceDataset.from_cifar(tmp_path, coarse=True)
    (tmp_path / CIFAR10 / "data_batch_4").unlink()
    with pytest.raises(FileNotFoundError, match="cifar-10-batches-py has no data_batch_4"):
        DeviceDataset.from_cifar(tmp_path)
    write(tmp_path / CIFAR10, {"batches.meta": pickle.dumps({"label_names": ["a"]})})
    with pytest.raises(ValueError, match=r"batches.meta has no 10 label_names"):
        DeviceDataset.from_cifar(tmp_path, train=False)
    write(tmp_path / CIFAR100, cifar100())
    with pytest.raises(
        ValueError, match=r"has both CIFAR-10 and CIFAR-100; name .*-py or .*-python"
    ):
        DeviceDataset.from_cifar(tmp_path)
    assert len(DeviceDataset.from_cifar(tmp_path / CIFAR100)) == 3


def test_broken_archives(tmp_path):
    path = pack(tmp_path / "x.tar.gz", CIFAR10, cifar10())
    content = path.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    for broken in (b"", b"hello", content[:middle], content[:-1], content[:-30], flipped):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"x.tar.gz is no archive, damaged or cut off: "):
            DeviceDataset.from_cifar(path)
    pack(path, "other", cifar10())
    with pytest.raises(ValueError, match="is an archive of something else: nothing in it is in"):
        DeviceDataset.from_cifar(path)
    pack(path, CIFAR10, {k: v for k, v in cifar10().items() if k != "test_batch"})
    with pytest.raises(FileNotFoundError, match=r"x.tar.gz has no test_batch"):
        DeviceDataset.from_cifar(path, train=False)


# -- image folders ------------------------------------------------------------------------------


def image_file(image, ending):
    out = io.BytesIO()
    kind = {".jpg": "JPEG", ".tif": "TIFF", ".ppm": "PPM"}.get(ending, ending[1:].upper())
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(out, kind)
    return out.getvalue()


ENDINGS = (".png", ".jpg", ".bmp", ".ppm", ".tif", ".webp")


def write_folder(root, sizes=((6, 7),), endings=ENDINGS):
    """Two classes with a picture of each ending; one lies deeper."""
    for i, ending in enumerate(endings):
        folder = root / ("cats" if i % 2 else "birds/deep" if i == 2 else "birds")
        folder.mkdir(parents=True, exist_ok=True)
        image = pixels(3, *sizes[i % len(sizes)], seed=i)
        (folder / f"{i}{ending.upper() if i == 3 else ending}").write_bytes(
            image_file(image, ending)
        )
    (root / "birds" / "notes.txt").write_text("no picture")
    (root / "README").write_text("no class")
    return root


def quiet(root, *arguments, **options):
    return DeviceDataset.from_folder(root, *arguments, progress=False, **options)


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
