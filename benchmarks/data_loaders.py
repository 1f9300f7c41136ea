# SPDX-License-Identifier: BSD-3-Clause
# Epochs of training, for bench_data.py: torch's DataLoader with torchvision, and what tr.data has
# instead of it, by themselves and inside of a TrainStep.
import argparse
import dataclasses
import os
from collections.abc import Callable
from functools import partial

import data_report as report
import data_stock as stock
import mnist_recipe
import timers
import torch
import train_step_cases as models
import train_step_variants as variants_of
from tables import progress
from torch import Tensor, nn
from train_step_measure import setting_of

import torch_renaissance as tr

BATCH = {"mnist": 200, "cifar": 256}
STEPS, QUICK_STEPS = 100, 2  # of an epoch


def transforms_of(recipe: str) -> tuple:
    if recipe == "mnist":
        return tuple(mnist_recipe.augmentation(torch.float32))
    data = tr.data
    moved = (data.RandomCrop(32, padding=4), data.RandomHorizontalFlip())
    erasing = data.RandomErasing(**stock.ERASING[recipe])
    normalize = data.Normalize(stock.MEAN[recipe], stock.STD[recipe])
    return (*moved, data.ToFloat(), erasing, normalize)


class ChannelsLast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last)


CASE_OF = {  # models that take a loader's batches
    "mnist": dataclasses.replace(
        models.CASES["mlp"], model=lambda quick: nn.Sequential(nn.Flatten(), models.mlp(quick))
    ),
    "cifar": dataclasses.replace(
        models.CASES["resnet18_cifar"],
        model=lambda quick: nn.Sequential(ChannelsLast(), models.resnet18_cifar(quick)),
    ),
}


def epochs(recipe: str, args: argparse.Namespace, device: torch.device) -> tuple[dict, dict]:
    """Calls that train for an epoch each, and how much that is."""
    batch = 4 if args.quick else BATCH[recipe]
    size = batch * (QUICK_STEPS if args.quick else STEPS)
    images = stock.random_images(recipe, size, torch.device("cpu"))
    labels = torch.randint(10, (size,), generator=torch.Generator().manual_seed(0))
    workers = 0 if args.quick else min(8, os.cpu_count() or 1)
    loader = stock.data_loader(stock.PilImages(recipe, images, labels), batch, workers, device)
    kept = tr.data.DeviceDataset(images, labels, device=device)
    on_device = tr.data.DeviceLoader(
        kept, batch, shuffle=True, drop_last=True, transforms=transforms_of(recipe), seed=0
    )
    setting = setting_of(CASE_OF[recipe], args.quick, args.precision, device)

    def train(step: Callable, make_batches: Callable) -> Callable[[], None]:
        def epoch() -> None:
            for x, y in make_batches():
                step(x.to(device, non_blocking=True), y.to(device, non_blocking=True))

        return epoch

    def step() -> Callable:
        return variants_of.train_step(setting).step

    resident = partial(stock.batches_on_device, recipe, images.to(device), labels.to(device), batch)
    within = variants_of.train_step(setting, data=on_device).step
    eager = variants_of.VARIANTS["eager fused"](setting).step
    return {
        "DataLoader + eager": train(eager, lambda: loader),
        "DataLoader + TrainStep": train(step(), lambda: loader),
        "prefetch + TrainStep": train(step(), lambda: tr.data.prefetch(loader, depth=2)),
        "torchvision on the device + TrainStep": train(step(), resident),
        "DeviceLoader + TrainStep": train(step(), lambda: on_device),
        report.IN_STEP: lambda: [within() for _ in range(len(on_device))],
    }, {"images": size, "batch": batch, "workers": workers}


def measure(recipe: str, args: argparse.Namespace, device: torch.device) -> dict:
    runs, sizes = epochs(recipe, args, device)
    for name, run in runs.items():  # workers start, steps are captured
        progress(f"    {name}")
        run()
    rounds = 3 if args.quick else 5
    wall = timers.interleave(runs, rounds, lambda name: timers.wall_time(runs[name], 1, device))
    return {**sizes, "us": {"epoch": wall}}
