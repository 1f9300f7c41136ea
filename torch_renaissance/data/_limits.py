# SPDX-License-Identifier: BSD-3-Clause
"""What images, labels and memory must be, refused in a sentence before anything is copied."""

from __future__ import annotations

import torch
from torch import Tensor

_ROOM = 256 << 20  # bytes that stay free: kernels, and the first batch with its gradients


def check_labels(who: str, labels: Tensor, num_classes: int | None) -> None:
    """Class labels, which are integers with one dimension, must be in [0, num_classes).

    Raises:
        ValueError: naming the first that isn't. Without `num_classes`, and for other labels, never.
    """
    kind = labels.dtype
    if num_classes is None or labels.dim() != 1 or kind.is_floating_point or kind.is_complex:
        return
    labels = labels.cpu().long()
    wrong = ((labels < 0) | (labels >= num_classes)).nonzero()
    if len(wrong):
        first = wrong[0].item()
        raise ValueError(
            f"{who}: labels[{first}] is {labels[first].item()}, expected 0 to {num_classes - 1}, "
            f"as there are {num_classes} classes"
        )


def check_fits(who: str, nbytes: int, device: torch.device) -> None:
    """`nbytes` more must be free on `device`, and 256 MiB besides.

    Raises:
        RuntimeError: with both numbers, where they aren't.
    """
    free = _free_bytes(device)
    if free is None or nbytes + _ROOM <= free:
        return
    raise RuntimeError(
        f"{who}: the images and labels take {_gib(nbytes)}, but {device} has {_gib(free)} free, of "
        f"which {_gib(_ROOM)} must stay so; choose smaller images, fewer of them or another "
        "device, free what else is there, or load batches with torch.utils.data.DataLoader"
    )


def check_fits_when_read(who: str, nbytes: int, device: torch.device | str | None) -> None:
    """`check_fits` on the CPU, where what is read lies first, and on `device`."""
    check_fits(who, nbytes, torch.device("cpu"))
    if device is not None and torch.device(device).type != "cpu":
        check_fits(who, nbytes, torch.device(device))


def _free_bytes(device: torch.device) -> int | None:
    """What can still be had, or None where nothing tells."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device.type == "cpu":
        try:
            with open("/proc/meminfo", encoding="ascii") as lines:
                found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
        except OSError:  # not on Linux
            return None
        return int(found[0]) << 10 if found else None
    return None


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
