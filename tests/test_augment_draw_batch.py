# SPDX-License-Identifier: BSD-3-Clause
# The ops of tr.data's augmentation: opcheck, batches that draw_batch draws in order, from subsets
# and into given tensors, labels, captured epochs, and indices out of range.

import pytest
import torch
from augmenting import (
    CIFAR,
    IMAGENET,
    MNIST,
    RECIPES,
    cursor_of,
    draw,
    each_device,
    each_recipe,
    noise,
)

from torch_renaissance import data
from torch_renaissance._ops import ops
from torch_renaissance.data import Program, RandomCrop, RandomRotation, ToFloat


@each_device
@each_recipe
@pytest.mark.parametrize("n", [0, 1, 5])
def test_opcheck(recipe, n, device):
    transforms, channels, size = RECIPES[recipe]
    program = Program(transforms, channels, size, size, channels_last=n == 5)
    images, indices = noise(6, channels, size, size, device), torch.arange(n, device=device)
    labels = torch.arange(6, device=device)
    numbers = (program.ints, program.values)
    samples = [
        (ops.augment, (images, indices, 1, 2, *numbers)),
        (
            ops.draw_batch,
            (images, labels, None, cursor_of(device=device), n, 6, True, 0, 2, *numbers),
        ),
        (
            ops.draw_batch,
            (images, labels, indices, cursor_of(device=device), n, n, False, 1, 2, *numbers),
        ),
    ]
    op, drawn = samples[1]
    samples.append((ops.draw_batch_, (*op(*drawn), *drawn[:4], *drawn[5:])))
    if device == "cpu":
        samples.append((ops.augment_parameters, (indices, 1, 2, *numbers)))
    for op, arguments in samples:
        results = torch.library.opcheck(op.default, arguments)
        assert set(results.values()) == {"SUCCESS"} and len(results) == 4


@each_device
@each_recipe
@pytest.mark.parametrize("channels_last", [False, True])
def test_draw_batch_into_given_tensors(recipe, channels_last, device):
    transforms, channels, size = RECIPES[recipe]
    images, labels = noise(9, channels, size, size, device), torch.arange(18, device=device)
    program = Program(transforms, channels, size, size, channels_last=channels_last)
    cursors = [cursor_of(device=device) for _ in range(2)]
    drawn = [draw(images, labels.view(9, 2), cursors[0], 4, program) for _ in range(3)]
    x, y = (torch.full_like(t, 77) for t in drawn[0])
    assert x.stride() == drawn[0][0].stride()
    arguments = (images, labels.view(9, 2), None, cursors[1], 9, True, 0, 1)
    for i, (wanted, wanted_labels) in enumerate(drawn):
        ops.draw_batch_(x, y, *arguments, program.ints, program.values)
        assert torch.equal(x, wanted) and torch.equal(y, wanted_labels)
        assert x._version == y._version == i + 1
    assert torch.equal(*cursors) and cursors[1].tolist() == [3, 2, 12, 0]


@each_device
@each_recipe
@pytest.mark.parametrize("shuffle", [False, True])
def test_draw_batch_is_augment_of_the_order(recipe, shuffle, device):
    transforms, channels, size = RECIPES[recipe]
    images = noise(23, channels, size, size, device)
    labels = torch.arange(23, device=device)
    program = Program(transforms, channels, size, size)
    for rank in (0, 1):
        cursor = cursor_of(device=device)
        for batch in range(4):
            where = (cursor, 23, shuffle, rank, 2, 6)
            indices = ops.order(*where)
            values, drawn = draw(
                images, labels, cursor, 6, program, shuffle=shuffle, rank=rank, world_size=2
            )
            assert torch.equal(drawn, indices)
            expected = data.augment(images, program, seed=3, epoch=2, indices=indices)
            assert torch.equal(values, expected)
            assert cursor.tolist() == [3, 2, 6 * (batch + 1), 0]


@each_device
def test_draw_batch_from_a_subset(device):
    images, program = noise(30, 1, 6, 6, device), Program([RandomCrop(5)], 1, 6, 6)
    labels, subset = torch.arange(30, device=device), torch.arange(29, 0, -3, device=device)
    cursor = cursor_of(device=device)
    values, drawn = draw(images, labels, cursor, len(subset), program, subset=subset)
    assert sorted(drawn.tolist()) == sorted(subset.tolist())
    # What a sample draws depends on its image, not on its place in the subset.
    assert torch.equal(values, data.augment(images, program, seed=3, epoch=2, indices=drawn))


LABELS = [
    lambda n: torch.arange(n),
    lambda n: torch.arange(n, dtype=torch.uint8),
    lambda n: torch.arange(n * 7, dtype=torch.int16).view(n, 7),
    lambda n: torch.arange(n * 4, dtype=torch.float64).view(n, 2, 2),
    lambda n: torch.arange(n) % 2 == 0,
    lambda n: torch.empty(n, 0),
]


@each_device
@pytest.mark.parametrize("make", LABELS)
def test_labels_of_any_dtype_and_shape(make, device):
    labels = make(19).to(device)
    program = Program([], 3, 4, 4)
    cursor = cursor_of(device=device)
    indices = ops.order(cursor, 19, True, 0, 1, 7)
    _, drawn = draw(noise(19, 3, 4, 4, device), labels, cursor, 7, program)
    assert drawn.dtype == labels.dtype and torch.equal(drawn, labels[indices])


@each_device
def test_empty_batch(device):
    images, none = noise(4, 1, 28, 28, device), torch.empty(0, dtype=torch.int64, device=device)
    assert data.augment(images, MNIST, indices=none).shape == (0, 1, 28, 28)
    cursor = cursor_of(position=5, device=device)
    program = Program(MNIST, 1, 28, 28)
    values, drawn = draw(images, torch.arange(4, device=device), cursor, 0, program)
    assert len(values) == len(drawn) == 0 and cursor.tolist() == [3, 2, 5, 0]


@pytest.mark.cuda
def test_a_captured_epoch_replays_without_the_host():
    images, labels = noise(1000, 1, 28, 28, "cuda"), torch.arange(1000, device="cuda")
    program, cursor = Program(MNIST, 1, 28, 28), cursor_of(device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        draw(images, labels, cursor, 200, program)
    torch.cuda.synchronize()
    cursor.copy_(cursor_of(device="cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values, drawn = draw(images, labels, cursor, 200, program)
    assert cursor.tolist() == [3, 2, 0, 0], "capture runs nothing"
    seen = []
    for _ in range(5):
        graph.replay()
        expected = data.augment(images, program, seed=3, epoch=2, indices=drawn)
        assert torch.equal(values, expected)
        seen += drawn.tolist()
    assert sorted(seen) == list(range(1000)) and cursor.tolist() == [3, 2, 1000, 0]


@pytest.mark.cuda
def test_an_index_out_of_range_is_nan_on_a_gpu():
    images, indices = noise(4, 3, 32, 32, "cuda"), torch.tensor([1, 4, -1, 2], device="cuda")
    for transforms in (CIFAR, IMAGENET, [RandomRotation(9), ToFloat()]):
        values = data.augment(images, transforms, indices=indices)
        assert values[1:3].isnan().all() and values[[0, 3]].isfinite().all()
        program = Program(transforms, 3, 32, 32)
        values, drawn = draw(
            images,
            torch.arange(4, device="cuda"),
            cursor_of(device="cuda"),
            4,
            program,
            subset=indices,
            shuffle=False,
        )
        assert values[1:3].isnan().all() and drawn.tolist() == [1, -1, -1, 2]


@pytest.mark.multigpu
def test_second_gpu():
    images = noise(40, 1, 28, 28)
    assert torch.equal(data.augment(images.to("cuda:1"), MNIST).cpu(), data.augment(images, MNIST))


def test_meta_tensors_have_shapes_only():
    program = Program(MNIST, 1, 28, 28)
    images = torch.empty(5, 1, 28, 28, dtype=torch.uint8, device="meta")
    indices = torch.empty(3, dtype=torch.int64, device="meta")
    out = ops.augment(images, indices, 0, 0, program.ints, program.values)
    assert out.is_meta and out.shape == (3, 1, 28, 28) and out.dtype == torch.float16
