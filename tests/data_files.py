# SPDX-License-Identifier: BSD-3-Clause
# What the tests of DeviceDataset's readers share: files of every kind, written here.

import gzip
import io
import os
import struct

import numpy
import pytest
import torch

from torch_renaissance.data import DeviceDataset

datasets = pytest.importorskip("torchvision.datasets", reason="an extra: data")
from PIL import Image  # noqa: E402  torchvision brings it


def pixels(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, shape, dtype=torch.uint8, generator=generator)


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


def write(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("bomb",)


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
