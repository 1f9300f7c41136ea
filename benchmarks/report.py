# SPDX-License-Identifier: BSD-3-Clause
# Prints the README's tables from the records in benchmarks/results; --write puts them there, and
# draws the plots. What a record is missing for stays empty.
import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

import plots
import report_data
import report_losses
import report_parts
import report_steps
from report_records import ROOT, Record, load

README = ROOT / "README.md"
TABLES: dict[str, Callable[[list[Record]], list[str]]] = {
    "steps": report_steps.steps,
    "split": report_steps.split,
    "sweep": report_steps.sweep,
    "optim": report_parts.optim,
    "lars": report_parts.lars,
    "chain": report_parts.chain,
    "loss": report_parts.loss,
    "data": report_data.data,
    "loader": report_data.loader,
    "recipe": report_data.recipe,
    "losses": report_losses.losses,
}
OF = {"split": "steps"}  # the records of a table that has none of its own


def tables(records: dict[str, list[Record]]) -> dict[str, str]:
    """The text between the markers of each table; empty where no record has its cases."""
    every = [record for found in records.values() for record in found]
    found = {}
    for name, make in TABLES.items():
        given = every if name == "losses" else records[OF.get(name, name)]
        lines = make(given) if given else []
        found[name] = "\n".join(lines) + "\n" if lines else ""
    return found


def fill(text: str, found: dict[str, str], path: Path) -> str:
    """`text` with each table between its two markers, which stand on lines of their own."""
    for name, table in found.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
        parts = re.fullmatch(f"(.*{begin}).*?({end}.*)", text, re.DOTALL)
        if not parts:
            sys.exit(f"{path.name} has no place for {name}: {begin.strip()} and {end.strip()}")
        text = parts[1] + table + parts[2]
    return text


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The README's tables and plots.")
    parser.add_argument("--write", action="store_true", help="update README.md and the plots")
    args = parser.parse_args(argv)
    records = load()
    found = tables(records)
    if not args.write:
        return print(*found.values(), sep="\n")
    README.write_text(fill(README.read_text(), found, README))
    plots.draw_all(records, plots.FOLDER)


if __name__ == "__main__":
    main()
