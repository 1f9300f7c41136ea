# SPDX-License-Identifier: BSD-3-Clause
# The kept records, and what the README's tables and plots take from them. A record that isn't there
# leaves its tables and plots out.
import json
from pathlib import Path

from comparison import how_far
from tables import half_spread

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# Several, where one run would take too long. Of a case in two of them, the later file counts.
SEVERAL = {
    "steps": "train_step*_h200.json",
    "lars": "lars*_h200.json",
    "chain": "chain*_h200.json",
}
GPU_RECORDS = ("optim", "loss", "sweep", "data", "loader", "recipe")

Record = dict
Range = tuple[float, float, float]  # ratio of medians, and its ends with either quartile


def load(folder: Path = RESULTS) -> dict[str, list[Record]]:
    """Records by subject; an empty list where there is none."""
    found = {name: [folder / f"{name}_h200.json"] for name in GPU_RECORDS}
    found |= {name: sorted(folder.glob(pattern)) for name, pattern in SEVERAL.items()}
    found["cpu"] = [folder / "optim_cpu.json"]
    return {
        name: [json.loads(path.read_text()) for path in paths if path.exists()]
        for name, paths in found.items()
    }


HALF = "median ± half the quartiles' distance"
SPREAD = f"µs, {HALF}"
ENDS = "± half of what lies between its ends, which opposite quartiles of the two times give"


# --- cells ---------------------------------------------------------------------------------------


def table(columns: list[str], rows: list[list[str]]) -> list[str]:
    rule = ["---", *["---:"] * (len(columns) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (columns, rule, *rows)]


def cell(times: dict | None, unit: float = 1.0) -> str:
    """Median in units of so many µs, and half the quartiles' distance."""
    if not times:
        return "–"
    median = times["median"] / unit
    return f"{median:,.{0 if median >= 100 else 1}f} ±{half_spread(times):.0f} %"


def quotient(above: dict | None, below: dict | None) -> Range | None:
    if not above or not below:
        return None
    ends = above["q1"] / below["q3"], above["q3"] / below["q1"]
    return above["median"] / below["median"], *ends


def times_cell(found: Range | None) -> str:
    return "–" if found is None else f"{found[0]:.2f}"


def spread_cell(found: Range | None) -> str:
    """As ENDS says it."""
    if found is None:
        return "–"
    middle, low, high = found
    return f"{middle:.2f} ±{50 * (high - low) / middle:.0f} %"


def span(ratios: list[float]) -> str:
    least, most = f"{min(ratios):.1f}", f"{max(ratios):.1f}"
    return least if least == most else f"{least} to {most}"


def machine(record: Record) -> str:
    e = record["environment"]
    gpu = f"one {e['gpu']} (driver {e['driver']}), " if e["gpu"] else ""
    return (
        f"{gpu}{e['cores']} cores of an {e['cpu']}, "
        f"torch {e['torch']}, Python {e['python']}, {e['date'][:10]}"
    )


def command(record: Record) -> str:
    return f"`{record['environment']['command']}`"


def repeats(record: Record) -> str:
    """How far two runs of it lay apart, where there were two."""
    found = how_far(record)
    return found and f" {found}"


def where(record: Record) -> str:
    return f"On {machine(record)}. Command: {command(record)}.{repeats(record)}"


def fold(title: str, lines: list[str]) -> list[str]:
    """Hidden until a reader opens it."""
    return ["", f"<details><summary>{title}</summary>", "", *lines, "", "</details>"]
