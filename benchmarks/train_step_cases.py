# SPDX-License-Identifier: BSD-3-Clause
# The models that bench_train_step.py and bench_sweep.py train, their random batches and their stock
# optimizers, each also in a tiny form that a CPU steps in milliseconds.
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn

BATCHES = 4  # resident on the device; a loop takes them in turn
SGD = {"lr": 1e-3, "momentum": 0.9, "nesterov": True}  # so low that rounding grows slowly


@dataclass(frozen=True)
class Case:
    """What is trained: `model(quick)` on batches of `size(quick)` with `optimizer(**options)`."""

    model: Callable[[bool], nn.Module]
    batch: int
    image: int  # pixels a side; 0 for other inputs
    classes: int
    options: dict
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
    criterion: nn.Module = field(default_factory=nn.CrossEntropyLoss)
    channels_last: bool = True
    tokens: int = 0  # length of a text, whose tokens are among `classes`
    quick_batch: int = 8

    def inputs(self, quick: bool) -> tuple[int, ...]:
        """Shape [batch, 784], [batch, tokens], or [batch, 3, height, width] of images."""
        batch = self.quick_batch if quick else self.batch
        if self.tokens:
            return (batch, 16 if quick else self.tokens)
        side = min(self.image // 2, 64) if quick else self.image
        return (batch, 3, side, side) if side else (batch, 784)

    def make_optimizer(self, model: nn.Module, **kind) -> torch.optim.Optimizer:
        return self.optimizer(model.parameters(), **self.options, **kind)


def mlp(quick: bool) -> nn.Module:
    widths = (784, 32, 16, 10) if quick else (784, 1024, 512, 256, 10)
    layers = [m for i, o in pairwise(widths) for m in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def resnet18_cifar(quick: bool) -> nn.Module:
    """torchvision's, with the stem for images of 32 x 32: no stride and no pooling."""
    from torchvision.models import resnet

    model = resnet.ResNet(resnet.BasicBlock, [1] * 4 if quick else [2] * 4, num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def resnet18(quick: bool) -> nn.Module:
    """torchvision's as it is, stem for large images and all."""
    from torchvision.models import resnet

    return resnet.ResNet(resnet.BasicBlock, [1] * 4 if quick else [2] * 4, num_classes=10)


def resnet50(quick: bool) -> nn.Module:
    from torchvision.models import resnet

    if not quick:
        return resnet.resnet50()
    return resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1], width_per_group=8)


def vgg16_bn(quick: bool) -> nn.Module:
    """Without dropout: the random numbers of two variants differ, and so would their losses."""
    from torchvision.models import vgg

    if not quick:
        return vgg.vgg16_bn(dropout=0.0)
    features = vgg.make_layers([8, "M", 16, "M"], batch_norm=True)
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 1000))


def vit_b_16(quick: bool) -> nn.Module:
    from torchvision.models import VisionTransformer, vit_b_16

    return VisionTransformer(64, 16, 2, 2, 32, 64) if quick else vit_b_16()


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm2(x))))


class GPT(nn.Module):
    """Logits [batch * tokens, vocabulary] of the next token; no dropout, for vgg16_bn's reason."""

    def __init__(self, vocabulary: int, context: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.place = nn.Parameter(0.02 * torch.randn(context, width))
        self.token = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x))).flatten(0, 1)


def gpt_small(quick: bool) -> nn.Module:
    return GPT(256, 16, 32, 2, 1) if quick else GPT(256, 256, 384, 6, 6)


class NextToken(nn.CrossEntropyLoss):
    def forward(self, logits: Tensor, tokens: Tensor) -> Tensor:
        return super().forward(logits, tokens.flatten())


CASES = {
    "mlp": Case(
        mlp,
        *(200, 0, 10),
        {"lr": 1e-3, "weight_decay": 1e-4},
        torch.optim.AdamW,
        nn.CrossEntropyLoss(label_smoothing=0.1),
        channels_last=False,
    ),
    "resnet18": Case(resnet18, 128, 32, 10, SGD | {"weight_decay": 5e-4}),
    "resnet18_cifar": Case(resnet18_cifar, 128, 32, 10, SGD | {"weight_decay": 5e-4}),
    "resnet50": Case(resnet50, 32, 224, 1000, SGD | {"weight_decay": 1e-4}),
    "resnet50_b256": Case(resnet50, 256, 224, 1000, SGD | {"weight_decay": 1e-4}),
    "vgg16_bn_b256": Case(vgg16_bn, 256, 224, 1000, SGD | {"weight_decay": 5e-4}),
    "vit_b_16_b64": Case(
        vit_b_16,
        *(64, 224, 1000),
        {"lr": 1e-4, "weight_decay": 0.05},
        torch.optim.AdamW,
        channels_last=False,
    ),
    "gpt_small": Case(
        gpt_small,
        *(64, 0, 256),
        {"lr": 1e-3, "weight_decay": 0.1},
        torch.optim.AdamW,
        NextToken(),
        channels_last=False,
        tokens=256,
    ),
}


def make_model(case: Case, quick: bool) -> nn.Module:
    """On the CPU, the same weights at each call; variants train copies of it."""
    torch.manual_seed(0)
    model = case.model(quick)
    return model.to(memory_format=torch.channels_last) if case.channels_last else model


def make_batches(case: Case, quick: bool, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator(device).manual_seed(0)
    shape = case.inputs(quick)
    found = []
    for _ in range(BATCHES):
        if case.tokens:
            x, y = torch.randint(case.classes, (2, *shape), generator=generator, device=device)
        else:
            x = torch.randn(shape, generator=generator, device=device)
            y = torch.randint(case.classes, shape[:1], generator=generator, device=device)
        if case.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        found.append((x, y))
    return found
