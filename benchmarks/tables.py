# SPDX-License-Identifier: BSD-3-Clause
# What every benchmark prints: progress, tables of at most 100 columns, cells with spread, and the
# bars that the project promises to reach.
import shutil
import sys
import time

WIDTH = 100
START = time.perf_counter()


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


# --- cells ---------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def half_spread(times: dict) -> float:
    """Half the distance between the quartiles, in % of the median."""
    return 50 * (times["q3"] - times["q1"]) / times["median"]


def microseconds(times: dict | None) -> str:
    if not times:
        return "-"
    digits = 0 if times["median"] >= 100 else 1
    return f"{number(times['median'], digits)} ±{half_spread(times):.0f}%"


# --- bars ----------------------------------------------------------------------------------------


def bar(name: str, bound: str, reached: float | str, holds: bool) -> dict:
    return {"name": name, "bar": bound, "reached": reached, "holds": bool(holds)}


def print_bars(bars: list[dict]) -> None:
    rows = []
    for b in bars:
        reached = b["reached"] if isinstance(b["reached"], str) else f"{b['reached']:g}"
        rows.append([b["name"], b["bar"], reached, "yes" if b["holds"] else "NO"])
    if rows:
        print_table("bars", ["bar", "wanted", "reached", "holds"], rows)
