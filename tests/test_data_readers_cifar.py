# SPDX-License-Identifier: BSD-3-Clause
# Reading CIFAR, from folders and archives: what is read, and what is refused in a sentence that
# names the file, pickles that would run code among it.

import io
import os
import pickle
import tarfile

import numpy
import pytest
import torch
from data_files import CIFAR10, CIFAR100, Bomb, cifar10, datasets, python2_pickle, rows, same, write

from torch_renaissance.data import DeviceDataset


def newer_pickle(protocol):
    return lambda items: pickle.dumps({k.decode(): v for k, v in items.items()}, protocol)


PICKLES = {"python 2": python2_pickle, **{f"protocol {p}": newer_pickle(p) for p in (2, 4, 5)}}

SIZES = {"fine": 100, "coarse": 20}


def cifar100(dump=python2_pickle):
    files = {
        name: dump({b"data": rows(3, i), b"fine_labels": [i, 99, 7], b"coarse_labels": [19, i, 0]})
        for i, name in enumerate(["train", "test"])
    }
    names = {f"{b}_label_names".encode(): [b"x%d" % i for i in range(n)] for b, n in SIZES.items()}
    return files | {"meta": dump(names)}


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
