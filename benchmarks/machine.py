# SPDX-License-Identifier: BSD-3-Clause
# What a number comes with: the machine, its clocks and driver, versions, command and revision.
import os
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from torch_renaissance.ab import machine

ROOT = Path(__file__).resolve().parents[1]


def output_of(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def command_line(argv: list[str]) -> str:
    """The command as a reader would type it: absolute paths are cut to what is in the project."""

    def short(word: str) -> str:
        path = Path(word)
        if not path.is_absolute():
            return word
        return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name

    return shlex.join(["python", *map(short, argv)])


def gpu_record(device: torch.device) -> dict:
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    which = f"GPU-{uuid}" if uuid else str(device.index or 0)
    fields = "driver_version,clocks.sm,clocks.max.sm,clocks.mem"
    answer = output_of(
        "nvidia-smi", "-i", which, f"--query-gpu={fields}", "--format=csv,noheader,nounits"
    )
    values = [v.strip() for v in (answer or "").split(",")]
    keys = ("driver", "sm_clock_mhz", "sm_clock_max_mhz", "memory_clock_mhz")
    smi = dict(zip(keys, values if len(values) == len(keys) else [None] * len(keys), strict=True))
    return {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory, **smi}


def environment(device: torch.device) -> dict:
    """Call it at the end of a run: the clocks are then those just after load."""
    return {
        **machine.environment(device),
        "load_average": os.getloadavg()[0],
        "revision": output_of("git", "describe", "--always", "--dirty") or "unknown",
        "command": command_line(sys.argv),
        **(gpu_record(device) if device.type == "cuda" else {}),
    }
