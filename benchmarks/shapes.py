# SPDX-License-Identifier: BSD-3-Clause
# Parameter shapes of real and synthetic models, written as formulas in the models' own order:
# no download, no torchvision, and nothing is allocated.
from collections.abc import Callable
from itertools import pairwise
from math import prod

Shape = tuple[int, ...]


def linear(outputs: int, inputs: int) -> list[Shape]:
    return [(outputs, inputs), (outputs,)]


def norm(width: int) -> list[Shape]:
    return [(width,), (width,)]


def mnist_mlp() -> list[Shape]:
    widths = (784, 1024, 512, 256, 10)
    return [s for i, o in pairwise(widths) for s in linear(o, i)]


def resnet50() -> list[Shape]:
    shapes = [(64, 3, 7, 7), *norm(64)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(width, inputs, 1, 1), *norm(width)]
            shapes += [(width, width, 3, 3), *norm(width)]
            shapes += [(4 * width, width, 1, 1), *norm(4 * width)]
            if block == 0:
                shapes += [(4 * width, inputs, 1, 1), *norm(4 * width)]
            inputs = 4 * width
    return [*shapes, *linear(1000, 2048)]


def vgg16_bn() -> list[Shape]:
    shapes: list[Shape] = []
    inputs = 3
    for width, repeats in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(repeats):
            shapes += [(width, inputs, 3, 3), (width,), *norm(width)]
            inputs = width
    return [*shapes, *linear(4096, 512 * 7 * 7), *linear(4096, 4096), *linear(1000, 4096)]


def vit_b_16() -> list[Shape]:
    d = 768
    shapes: list[Shape] = [(1, 1, d), (d, 3, 16, 16), (d,), (1, 197, d)]
    for _ in range(12):
        shapes += [*norm(d), *linear(3 * d, d), *linear(d, d)]
        shapes += [*norm(d), *linear(4 * d, d), *linear(d, 4 * d)]
    return [*shapes, *norm(d), *linear(1000, d)]


def gpt2(d: int, layers: int) -> list[Shape]:
    """GPT-2 with a tied head; its projections lie as (inputs, outputs)."""
    shapes: list[Shape] = [(50257, d), (1024, d)]
    for _ in range(layers):
        shapes += [*norm(d), (d, 3 * d), (3 * d,), (d, d), (d,)]
        shapes += [*norm(d), (d, 4 * d), (4 * d,), (4 * d, d), (d,)]
    return [*shapes, *norm(d)]


def thousand() -> list[Shape]:
    """Small tensors in 50 groups of 20: what per-tensor and per-group host work costs."""
    group = [*linear(64, 64), *linear(128, 64), *norm(128), *linear(32, 96), (32, 16, 3, 3), (32,)]
    return (group * 2) * GROUPS["thousand"]


CASES: dict[str, Callable[[], list[Shape]]] = {
    "mnist_mlp": mnist_mlp,
    "resnet50": resnet50,
    "vgg16_bn": vgg16_bn,
    "vit_b_16": vit_b_16,
    "gpt2_124m": lambda: gpt2(768, 12),
    "gpt2_774m": lambda: gpt2(1280, 36),
    "thousand": thousand,
    "cpu_25m": lambda: linear(512, 610) * 80,
    "cpu_500x1000": lambda: [(1000,)] * 500,
}
GROUPS = {"thousand": 50}


def parameters(shapes: list[Shape]) -> int:
    return sum(prod(s) for s in shapes)


def split_into_groups(case: str, tensors: list, lr: float) -> list[dict]:
    """Param groups of equal size; each has an lr of its own, so none can be merged."""
    count = GROUPS.get(case, 1)
    size = len(tensors) // count
    return [
        {"params": tensors[i * size : (i + 1) * size], "lr": lr * (1 + i / count)}
        for i in range(count)
    ]
