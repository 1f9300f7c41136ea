# SPDX-License-Identifier: BSD-3-Clause
"""What a number came from: the machine, torch, the date."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import torch

from .._ops import __version__


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def busy() -> str:
    """A sentence where other work disturbs what is about to be timed, or nothing."""
    load, cores = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, os.cpu_count() or 1
    if load <= cores:
        return ""
    return (
        f"Before the start the load average was {load:.1f} on {cores} cores: other work disturbs "
        "these times."
    )


def environment(device: torch.device) -> dict:
    on_gpu = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "torch_renaissance": __version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
