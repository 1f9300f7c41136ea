# SPDX-License-Identifier: BSD-3-Clause
# DeviceDataset itself: forms of images and labels, what is shared and what is copied, what is
# refused, and that nothing is moved to a device on which it doesn't fit.
import copy
import pickle

import numpy
import pytest
import torch
from testing import DEVICES
from torch.utils.data import DataLoader

import torch_renaissance as tr
from torch_renaissance.data import DeviceDataset, _limits


def pixels(*shape):
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


LABELS = torch.tensor([0, 1, 2, 1, 0])


# -- forms --------------------------------------------------------------------------------------


def test_it_is_public():
    assert tr.data.DeviceDataset is DeviceDataset


@pytest.mark.parametrize("form", ["tensor", "numpy"])
@pytest.mark.parametrize(
    ("shape", "layout", "logical"),
    [
        ((5, 3, 6, 7), None, (5, 3, 6, 7)),
        ((5, 3, 6, 7), "NCHW", (5, 3, 6, 7)),
        ((5, 6, 7, 3), "NHWC", (5, 3, 6, 7)),
        ((5, 6, 7), None, (5, 1, 6, 7)),
        ((5, 6, 7), "NHWC", (5, 1, 6, 7)),
        ((5, 1, 1, 1), None, (5, 1, 1, 1)),
        ((5, 8, 6, 7), None, (5, 8, 6, 7)),  # no picture, but nothing speaks for NHWC
        ((5, 8, 6, 3), "NCHW", (5, 8, 6, 3)),
        ((5, 2, 6, 3), None, (5, 2, 6, 3)),
    ],
)
def test_shapes_and_layouts(shape, layout, logical, form):
    images = pixels(*shape)
    given = images.numpy() if form == "numpy" else images
    dataset = DeviceDataset(given, LABELS, layout=layout)
    assert dataset.images.shape == logical and dataset.images.dtype == torch.uint8
    expected = images.permute(0, 3, 1, 2) if layout == "NHWC" and len(shape) == 4 else images
    assert torch.equal(dataset.images, expected.reshape(logical))
    assert dataset.images.data_ptr() == images.data_ptr(), "it was copied"
    nhwc = layout == "NHWC" and len(shape) == 4
    assert dataset.images.is_contiguous(
        memory_format=torch.channels_last if nhwc else torch.contiguous_format
    )


def test_channels_last_stays_as_it_is():
    images = pixels(5, 3, 6, 7).contiguous(memory_format=torch.channels_last)
    assert DeviceDataset(images, LABELS).images.data_ptr() == images.data_ptr()
    assert DeviceDataset(images, LABELS).images.stride() == images.stride()


@pytest.mark.parametrize(
    "images",
    [pixels(10, 3, 6, 7)[::2], pixels(5, 3, 6, 9)[..., 1:8], pixels(5, 3, 7, 6).transpose(2, 3)],
    ids=["every other", "cut out", "transposed"],
)
def test_what_is_not_dense_becomes_so(images):
    dataset = DeviceDataset(images, LABELS)
    assert torch.equal(dataset.images, images) and dataset.images.is_contiguous()
    assert dataset.nbytes == images.nbytes + LABELS.nbytes


def test_labels_become_dense_too():
    labels = torch.arange(10).view(5, 2)
    dataset = DeviceDataset(pixels(5, 6, 7), labels[:, 1])
    assert dataset.labels.is_contiguous() and dataset.labels.tolist() == [1, 3, 5, 7, 9]
    assert DeviceDataset(pixels(5, 6, 7), labels).labels.data_ptr() == labels.data_ptr()


def test_numpy_arrays_that_torch_cannot_share():
    images = pixels(5, 3, 6, 7).numpy()
    images.flags.writeable = False
    backwards = LABELS.numpy().astype(">i8")[::-1]
    dataset = DeviceDataset(images, backwards, num_classes=3)
    assert dataset.images.numpy().tolist() == images.tolist()
    assert dataset.labels.tolist() == [0, 1, 2, 1, 0][::-1] and dataset.labels.dtype == torch.int64
    dataset.images.zero_()  # must not reach the read-only array
    assert images.any()


@pytest.mark.parametrize(
    ("labels", "dtype"),
    [
        (LABELS, torch.int64),
        (LABELS.to(torch.uint8), torch.uint8),
        ([0, 1, 2, 1, 0], torch.int64),
        (torch.linspace(0, 1, 5), torch.float32),
        (torch.eye(5, 3).half(), torch.float16),  # soft targets
        (numpy.zeros((5, 2, 2), numpy.int32), torch.int32),
        (torch.full((5,), -100), torch.int64),  # what a loss may ignore
    ],
    ids=str,
)
def test_labels_keep_their_dtype(labels, dtype):
    dataset = DeviceDataset(pixels(5, 6, 7), labels)
    assert dataset.labels.dtype == dtype and dataset.num_classes is None
    assert torch.equal(dataset.labels, torch.as_tensor(labels))


@pytest.mark.parametrize("labels", [torch.tensor([9.0, -1, 7]), torch.full((3, 2), 9)])
def test_only_class_labels_have_a_range(labels):
    assert torch.equal(DeviceDataset(pixels(3, 6, 7), labels, num_classes=3).labels, labels)


def test_names_of_classes():
    dataset = DeviceDataset(pixels(5, 6, 7), LABELS, classes=["a", "b", "c"])
    assert dataset.classes == ("a", "b", "c") and dataset.num_classes == 3
    assert DeviceDataset(pixels(5, 6, 7), LABELS, num_classes=3).classes is None


# -- use ----------------------------------------------------------------------------------------


def test_items_and_length():
    images = pixels(5, 3, 6, 7)
    dataset = DeviceDataset(images, LABELS)
    assert len(dataset) == 5
    for index in (0, 4, -5, numpy.int64(2), torch.tensor(3)):
        image, label = dataset[index]
        assert torch.equal(image, images[index]) and label == LABELS[index]
    for index in (5, -6):
        with pytest.raises(IndexError):
            dataset[index]
    for index in (slice(2), 1.0, [0, 1], None):
        with pytest.raises(TypeError, match="DeviceDataset: an index must be an int, got "):
            dataset[index]
    assert len(list(dataset)) == 5  # the IndexError ends the loop


def test_it_is_a_map_style_dataset():
    images = pixels(5, 3, 6, 7)
    batches = list(DataLoader(DeviceDataset(images, LABELS), batch_size=2))
    assert torch.equal(torch.cat([x for x, _ in batches]), images)
    assert torch.equal(torch.cat([y for _, y in batches]), LABELS)


def test_repr_and_bytes():
    dataset = DeviceDataset(pixels(2048, 3, 32, 32), torch.zeros(2048).long(), num_classes=10)
    assert dataset.nbytes == 2048 * (3 * 32 * 32 + 8)
    assert repr(dataset) == (
        "DeviceDataset(2,048 images of 3 × 32 × 32 as NCHW, 10 classes, 6.0 MiB on cpu)"
    )
    dataset = DeviceDataset(pixels(5, 6, 7, 3), LABELS, layout="NHWC")
    assert repr(dataset) == "DeviceDataset(5 images of 3 × 6 × 7 as NHWC, 0.0 MiB on cpu)"


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda d: pickle.loads(pickle.dumps(d))])
def test_copies(duplicate):
    dataset = DeviceDataset(pixels(5, 6, 7, 3), LABELS, layout="NHWC", classes="abc")
    other = duplicate(dataset)
    assert torch.equal(other.images, dataset.images) and torch.equal(other.labels, dataset.labels)
    assert other.images.stride() == dataset.images.stride() and other.classes == tuple("abc")


def test_to_where_it_is():
    dataset = DeviceDataset(pixels(5, 6, 7), LABELS)
    assert dataset.to("cpu") is dataset and dataset.to(torch.device("cpu")) is dataset


@pytest.mark.parametrize("device", ["meta", *DEVICES[1:]])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_to_another_device(device, layout):
    images = pixels(5, 3, 6, 3)
    dataset = DeviceDataset(images, LABELS, layout=layout, classes="abc")
    moved = dataset.to(device)
    assert moved.device == moved.labels.device and moved.device.type == device
    assert moved.images.stride() == dataset.images.stride() and moved.classes == dataset.classes
    assert dataset.device.type == "cpu"
    at_once = DeviceDataset(images, LABELS, device=device, layout=layout)
    assert at_once.device == moved.device and at_once.images.shape == moved.images.shape
    assert moved.to(device) is moved
    if device == "cuda":
        assert torch.equal(moved.images.cpu(), dataset.images)
        assert torch.equal(moved.labels.cpu(), LABELS)
        held = DeviceDataset(moved.images, LABELS)  # labels follow the images
        assert held.images.data_ptr() == moved.images.data_ptr() and held.labels.is_cuda


def test_the_default_device_moves_nothing():
    images = pixels(5, 6, 7).numpy()
    with torch.device("meta"):
        dataset = DeviceDataset(images, [0, 1, 2, 1, 0], num_classes=3)
    assert dataset.device.type == "cpu" and dataset.labels.device.type == "cpu"


# -- refusals -----------------------------------------------------------------------------------

GOOD = pixels(5, 6, 7)


@pytest.mark.parametrize(
    ("images", "labels", "options", "error", "words"),
    [
        (GOOD.float(), LABELS, {}, TypeError, r"must be uint8, got float32; \(images \* 255\)"),
        (GOOD.numpy().astype("i4"), LABELS, {}, TypeError, "images must be uint8, got int32"),
        (GOOD.tolist(), LABELS, {}, TypeError, "must be a tensor or a numpy array, got list"),
        ("mnist", LABELS, {}, TypeError, "got str; files and datasets have constructors"),
        (GOOD[0], LABELS, {}, ValueError, r"images have shape \[6, 7\], expected \[N, C, H, W\]"),
        (GOOD.view(5, 6, 7, 1, 1), LABELS, {}, ValueError, r"images have shape \[5, 6, 7, 1, 1\]"),
        (GOOD[:0], LABELS[:0], {}, ValueError, r"images have shape \[0, 6, 7\], so there are none"),
        (GOOD[:, :0], LABELS, {}, ValueError, "so there are none"),
        (pixels(5, 6, 7, 3), LABELS, {}, ValueError, r"may be \[N, H, W, C\]; say so with layout="),
        (GOOD, LABELS, {"layout": "HWC"}, ValueError, "must be 'NCHW' or 'NHWC', got 'HWC'"),
        (GOOD, LABELS[:4], {}, ValueError, r"5 images, but labels have shape \[4\]"),
        (GOOD, torch.tensor(3), {}, ValueError, r"5 images, but labels have shape \[\]"),
        (GOOD, ["a"] * 5, {}, TypeError, "labels hold no numbers that torch has"),
        (GOOD, [[1], [1, 2]], {}, TypeError, "labels hold no numbers that torch has"),
        (GOOD, numpy.array(["a"] * 5), {}, TypeError, "labels hold no numbers that torch has"),
        (GOOD, None, {}, TypeError, "labels must be a tensor or a numpy array, got NoneType"),
        (
            GOOD,
            LABELS,
            {"num_classes": 2},
            ValueError,
            r"labels\[2\] is 2, expected 0 to 1, as there are 2 classes",
        ),
        (GOOD, LABELS - 1, {"num_classes": 5}, ValueError, r"labels\[0\] is -1, expected 0 to 4"),
        (GOOD, LABELS.byte(), {"num_classes": 2}, ValueError, r"labels\[2\] is 2, expected 0 to 1"),
        (GOOD, LABELS, {"classes": "ab"}, ValueError, r"labels\[2\] is 2, expected 0 to 1"),
        (GOOD, LABELS, {"num_classes": 0}, ValueError, "num_classes must be at least 1, got 0"),
        (GOOD, LABELS, {"num_classes": 3.0}, TypeError, "num_classes must be an int, got 3.0"),
        (
            GOOD,
            LABELS,
            {"classes": "abc", "num_classes": 4},
            ValueError,
            "num_classes is 4, but classes has 3 names; leave num_classes out",
        ),
    ],
)
def test_refused(images, labels, options, error, words):
    with pytest.raises(error, match=words) as caught:
        DeviceDataset(images, labels, **options)
    assert str(caught.value).startswith("DeviceDataset: ")


# -- memory -------------------------------------------------------------------------------------


def test_what_does_not_fit_is_not_moved(monkeypatch):
    """ "meta" stands for a device of 256 MiB and 300 bytes, where 250 bytes fit and 301 don't."""
    monkeypatch.setattr(_limits, "_free_bytes", lambda device: (256 << 20) + 300)
    labels = torch.zeros(5, dtype=torch.uint8)
    assert DeviceDataset(pixels(5, 7, 7), labels, device="meta").nbytes == 250
    assert DeviceDataset(pixels(5, 59, 1), labels, device="meta").nbytes == 300
    with pytest.raises(RuntimeError, match="DeviceDataset: the images and labels take"):
        DeviceDataset(pixels(5, 60, 1), labels, device="meta")
    big = DeviceDataset(pixels(5, 60, 1), labels)  # where they are, nothing is needed
    with pytest.raises(RuntimeError, match=r"meta has 0.25 GiB free, of which 0.25 GiB must stay"):
        big.to("meta")
    assert big.device.type == "cpu"


def test_what_does_not_fit_is_not_copied_on_the_host():
    """One byte, in the shape of 2**50; making that dense would fail in another way."""
    images = torch.zeros(1, dtype=torch.uint8).expand(1 << 20, 1, 1 << 15, 1 << 15)
    labels = torch.zeros(1, dtype=torch.uint8).expand(1 << 20)
    free = _limits._free_bytes(torch.device("cpu"))
    if free is not None:
        with pytest.raises(RuntimeError, match=r"take 1048576.00 GiB, but cpu has"):
            DeviceDataset(images, labels)


def test_no_limit_is_known():
    assert _limits._free_bytes(torch.device("meta")) is None
    _limits.check_fits("here", 1 << 60, torch.device("meta"))


def test_host_memory():
    free = _limits._free_bytes(torch.device("cpu"))
    if free is not None:
        assert 0 < free < 1 << 50
        with pytest.raises(RuntimeError, match=r"here: .* take 1048576.00 GiB, but cpu has "):
            _limits.check_fits("here", 1 << 50, torch.device("cpu"))


@pytest.mark.cuda
def test_gpu_memory(monkeypatch):
    device = torch.device("cuda", torch.cuda.current_device())
    total = torch.cuda.mem_get_info(device)[1]

    def of_this_process(_device):  # what others take and give back meanwhile is left out
        return total - torch.cuda.memory_reserved(device), total

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", of_this_process)
        free = _limits._free_bytes(device)
        held = torch.empty(1 << 30, dtype=torch.uint8, device=device)
        assert free - _limits._free_bytes(device) == 1 << 30
        del held  # torch keeps it in its cache, from which it can be had
        assert free == _limits._free_bytes(device)
    # One byte, in the shape of too many: whoever copies it anywhere fails in another way.
    side = 1 << 15
    images = torch.zeros(1, dtype=torch.uint8).expand(total // side**2 + 1, 1, side, side)
    before = torch.cuda.memory_allocated(device)
    with pytest.raises(RuntimeError, match=r"GiB, but cuda:\d has [\d.]+ GiB free, of which 0.25"):
        DeviceDataset(images, torch.zeros(len(images)), device="cuda")
    assert torch.cuda.memory_allocated(device) == before
