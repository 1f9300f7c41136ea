# SPDX-License-Identifier: BSD-3-Clause
# Prints the table of the project's README from a record of bench_optim.py; --write puts it there.
import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README, RECORD = ROOT / "README.md", ROOT / "benchmarks" / "results" / "optim_h200.json"
TIMERS = {"b2b": "back to back", "single": "single step", "graph": "CUDA graph", "host": "host"}
VARIANTS = ("foreach", "fused", "gather", "flat")
OURS = ("gather", "flat")
BEGIN, END = "<!-- optim table -->", "<!-- /optim table -->"


def table(columns: list[str], rows: list[list[str]]) -> list[str]:
    rule = ["---", *["---:"] * (len(columns) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (columns, rule, *rows)]


def machine(record: dict) -> str:
    e, s = record["environment"], record["settings"]
    copy = record["copy_bytes_per_second"] / 1e12
    return (
        f"`{s['optimizer']}`, {s['dtype']}, on one {e['gpu']} (driver {e['driver']}, "
        f"{copy:.2f} TB/s in a device-to-device copy) and {e['cores']} cores of an {e['cpu']}; "
        f"torch {e['torch']}, Python {e['python']}, {e['date'][:10]}. Command: `{e['command']}`"
    )


def speed_ups(case: str, taken: dict) -> list[str]:
    def ratios(timer: str) -> str:
        us = taken["us"][timer]
        return " / ".join(f"{us['fused']['median'] / us[v]['median']:.2f}" for v in OURS)

    copy = " / ".join(f"{taken['percent_of_copy'][v]:.0f}" for v in ("fused", *OURS))
    return [
        f"{case}, {taken['tensors']:,} tensors, {taken['parameters'] / 1e6:.1f} M",
        *(ratios(t) for t in TIMERS),
        copy,
    ]


def times(case: str, taken: dict, timer: str) -> list[str]:
    def cell(found: dict) -> str:
        spread = 50 * (found["q3"] - found["q1"]) / found["median"]
        return f"{found['median']:,.{0 if found['median'] >= 100 else 1}f} ±{spread:.0f} %"

    return [f"{case}, {TIMERS[timer]}", *(cell(taken["us"][timer][v]) for v in VARIANTS)]


def report(record: dict) -> str:
    cases = record["cases"]
    above = ["model", *TIMERS.values(), "% of copy: fused / gather / flat"]
    below = ["µs, median ± half the quartiles' distance", *VARIANTS]
    lines = [machine(record) + ".", ""]
    lines += ["Time of `fused=True` over ours, `gather` / `flat`; above 1 is faster:", ""]
    lines += table(above, [speed_ups(c, taken) for c, taken in cases.items()])
    lines += ["", "<details><summary>Times and spread</summary>", ""]
    lines += table(below, [times(c, taken, t) for c, taken in cases.items() for t in TIMERS])
    return "\n".join([*lines, "", "</details>"])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The README's table of optimizer steps.")
    parser.add_argument("--write", action="store_true", help="update README.md in place")
    args = parser.parse_args(argv)
    found = report(json.loads(RECORD.read_text()))
    if not args.write:
        return print(found)
    parts = re.fullmatch(f"(.*{BEGIN}\n).*?({END}\n.*)", README.read_text(), re.DOTALL)
    if not parts:
        sys.exit(f"README.md has no place for the table: {BEGIN} and {END}, each on its own line")
    README.write_text(f"{parts[1]}{found}\n{parts[2]}")


if __name__ == "__main__":
    main()
