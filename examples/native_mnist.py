# SPDX-License-Identifier: BSD-3-Clause
# The native side of mnist_recipe.py: the same recipe as plain PyTorch users write it.
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import InterpolationMode, v2


class Images(Dataset):
    """PIL images, as torchvision's datasets have them."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, transform):
        self.images = [v2.functional.to_pil_image(image) for image in images]
        self.labels, self.transform = labels.tolist(), transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int):
        return self.transform(self.images[i]), self.labels[i]


def transforms(augment: bool) -> v2.Compose:
    bilinear = {"interpolation": InterpolationMode.BILINEAR}
    geometry = [
        v2.Pad(2),
        v2.RandomCrop(28),
        v2.RandomRotation(20, **bilinear),
        v2.RandomAffine(0, scale=(0.8, 1.2), **bilinear),
    ]
    to_tensor = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    erase = [v2.RandomErasing(p=0.5, value=0.5)]
    normalize = [v2.Normalize([0.1307], [0.3081])]
    return v2.Compose([*geometry * augment, *to_tensor, *erase * augment, *normalize])


def loaders(args) -> tuple[DataLoader, DataLoader]:
    train, test = args.sets
    common = {
        "num_workers": args.workers,
        "pin_memory": args.device == "cuda",
        "persistent_workers": args.workers > 0,
    }
    return (
        DataLoader(
            Images(train.images, train.labels, transforms(True)), args.batch, shuffle=True, **common
        ),
        DataLoader(Images(test.images, test.labels, transforms(False)), 1000, **common),
    )


def train(model: nn.Module, args, schedule, epochs: int) -> Iterator[tuple[float, float]]:
    """Validation loss and accuracy of each epoch. `schedule(epoch)` is the learning rate."""
    device = torch.device(args.device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    model.to(device)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 1e-4},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=schedule(0), fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    low = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(args.precision)
    forward = torch.compile(model) if args.compile else model
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    batches, validation = loaders(args)

    for epoch in range(epochs):
        for group in optimizer.param_groups:
            group["lr"] = schedule(epoch)
        model.train()
        for x, y in batches:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast(device.type, low, enabled=low is not None):
                loss = criterion(forward(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        yield evaluate(model, validation, device, low)


@torch.no_grad()
def evaluate(model: nn.Module, batches: DataLoader, device, low) -> tuple[float, float]:
    model.eval()
    loss = correct = torch.zeros((), device=device)
    for x, y in batches:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        with torch.autocast(device.type, low, enabled=low is not None):
            output = model(x)
        loss = loss + nn.functional.cross_entropy(output.float(), y, reduction="sum")
        correct = correct + (output.argmax(1) == y).sum()
    n = len(batches.dataset)
    return loss.item() / n, correct.item() / n
