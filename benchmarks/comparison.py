# SPDX-License-Identifier: BSD-3-Clause
# Ratios against those of an earlier record, and of several runs one after the other.
import statistics
from dataclasses import dataclass

from tables import print_table

SHOWN = 10  # ratios of repeated runs, those that differ most


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


def differences(runs: list[dict[str, float]]) -> dict[str, float]:
    """How far the same ratio of several runs lies apart, in % of the smallest."""
    shared = [key for key in runs[0] if all(key in run for run in runs)]
    ranges = {key: [run[key] for run in runs] for key in shared}
    return {key: round(100 * (max(r) / min(r) - 1), 2) for key, r in ranges.items()}


def of_the_device(record: dict) -> set[str]:
    """Ratios of two times that the device sets: of graphs, and of steps that take the host less
    than half as long to hand over. All others move with the host and what else it has to do."""
    found = {key for key in record["ratios"] if "/graph/" in key}
    for case, taken in record["cases"].items():
        handed_over = {n: v for n, v in taken.get("variants", {}).items() if "host_us" in v}
        set_by_it = [
            name
            for name, times in handed_over.items()
            if 2 * times["host_us"]["median"] < times["us"]["median"]
        ]
        pairs = [f"{a} over {b}" for a in set_by_it for b in set_by_it]
        found |= {f"{record['key']}/{case}/{pair}" for pair in pairs} & record["ratios"].keys()
    return found


def largest(ratios: list[dict[str, float]], of: set[str] | None = None) -> float | None:
    found = differences(ratios).items()
    return max((percent for key, percent in found if of is None or key in of), default=None)


def middle(found: list):
    """Of what several processes measured, in the form of one: medians of numbers (of two, the lower
    one), sums of samples; all else is the first one's."""
    first = found[0]
    if isinstance(first, dict):
        result = {k: middle([f[k] for f in found if k in f]) for k in first}
        if "samples" in first:
            result["samples"] = sum(f["samples"] for f in found)
        return result
    numbers = all(isinstance(f, int | float) and not isinstance(f, bool) for f in found)
    return statistics.median_low(found) if numbers else first


def repeated(records: list[dict]) -> dict:
    """What the first of several records says of all of them."""
    ratios = [record["ratios"] for record in records]
    return {
        "ratios": ratios,
        "largest_difference_percent": largest(ratios),
        "largest_difference_percent_of_the_device": largest(ratios, of_the_device(records[0])),
        "failed": [record["failed"] for record in records],
    }


def how_far(record: dict) -> str:
    """A sentence; empty where nothing was measured twice."""
    if "repeat" not in record:
        return ""
    ratios = record["repeat"]["ratios"]
    apart, device = largest(ratios), largest(ratios, of_the_device(record))
    if apart is None:
        return ""
    of_it = "" if device is None else f", those of times that the GPU sets by {device:.1f} %"
    return f"Ratios of its runs differ by {apart:.1f} % at most{of_it}."


def print_repeat(record: dict) -> None:
    runs = record["repeat"]["ratios"]
    found = sorted(differences(runs).items(), key=lambda item: -item[1])
    columns = ["ratio", *(f"run {i + 1}" for i in range(len(runs))), "apart"]
    rows = [[k, *(f"{run[k]:.2f}" for run in runs), f"{d:.1f} %"] for k, d in found[:SHOWN]]
    if rows:
        print_table("ratios that differ most between runs", columns, rows)
        print(how_far(record))
