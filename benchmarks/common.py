# SPDX-License-Identifier: BSD-3-Clause
# What every benchmark shares: the record of the machine, progress and tables of at most 100
# columns, JSON, and the comparison with an earlier run. The timers are in timers.py.
import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 100
START = time.perf_counter()


# --- the machine ---------------------------------------------------------------------------------


def output_of(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def command_line(argv: list[str]) -> str:
    """The command as a reader would type it: absolute paths are cut to what is in the project."""

    def short(word: str) -> str:
        path = Path(word)
        if not path.is_absolute():
            return word
        return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name

    return " ".join(["python", *map(short, argv)])


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
    record = {
        "gpu": None,
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "revision": output_of("git", "describe", "--always", "--dirty") or "unknown",
        "command": command_line(sys.argv),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    return record | (gpu_record(device) if device.type == "cuda" else {})


# --- output --------------------------------------------------------------------------------------


def progress(message: str) -> None:
    print(f"[{time.perf_counter() - START:6.1f} s] {message}", file=sys.stderr, flush=True)


def format_table(title: str, columns: list[str], rows: list[list[str]]) -> str:
    """Plain text: the first column to the left, the others to the right."""
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]

    def text(line: list[str]) -> str:
        first, *rest = zip(line, widths, strict=True)
        joined = "  ".join([first[0].ljust(first[1]), *(c.rjust(w) for c, w in rest)]).rstrip()
        return joined if len(joined) <= WIDTH else joined[: WIDTH - 1] + "…"

    rule = "-" * min(WIDTH, sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([title[:WIDTH], rule, text(columns), rule, *map(text, rows), rule])


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(format_table(title, columns, rows), flush=True)
        return
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)).print(table)


def warn_if_busy() -> None:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores:
        progress(f"note: load average {load:.1f} on {cores} cores; other work disturbs these times")


def write_json(path: Path, record: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, default=str) + "\n")


# --- comparison with an earlier run --------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    key: str
    old: float
    new: float

    @property
    def percent(self) -> float:
        return 100 * (self.new / self.old - 1)


def compare(old: dict, new: dict) -> list[Change]:
    """Speed ratios that both records hold; absolute times of two machines say nothing."""
    return [Change(k, old["ratios"][k], v) for k, v in new["ratios"].items() if k in old["ratios"]]


def regressions(changes: list[Change], percent: float) -> list[Change]:
    return [c for c in changes if c.percent < -percent]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--quick", action="store_true", help="small cases, few repeats")
    parser.add_argument("--json", type=Path, help="where to write the record")
    parser.add_argument("--compare", type=Path, metavar="OLD.json", help="an earlier record")
    parser.add_argument(
        "--fail-if-regression",
        type=float,
        metavar="PCT",
        help="exit with 1 if a ratio fell by more than PCT %% against --compare",
    )


def report_comparison(old: dict, new: dict, percent: float | None) -> bool:
    """Print what changed; true if something fell by more than `percent`."""
    changes = compare(old, new)
    for key in ("gpu", "cpu", "torch"):
        before, now = (r["environment"].get(key) for r in (old, new))
        if before != now:
            print(f"note: {key} differs: {before} then, {now} now")
    rows = [[c.key, f"{c.old:.2f}", f"{c.new:.2f}", f"{c.percent:+.1f} %"] for c in changes]
    print_table("ratios against the earlier run", ["key", "then", "now", "change"], rows)
    fallen = regressions(changes, percent) if percent is not None else []
    for c in fallen:
        print(f"regression: {c.key} fell from {c.old:.2f} to {c.new:.2f}")
    return bool(fallen)
