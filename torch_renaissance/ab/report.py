# SPDX-License-Identifier: BSD-3-Clause
"""What `ab_test` returns: a row for each variant, the table, JSON, and where to find the rest."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from .measure import Times

WIDTH = 100
_NOT_FINITE = {f"float {value}": value for value in (math.nan, math.inf, -math.inf)}
NAME = 20  # columns of a variant's name


@dataclass
class Row:
    """One variant. Times are in µs a step; memory is what the variant added to what was there."""

    name: str
    status: str = "ok"  # or "differs", "unchecked", "failed", "left out"
    reason: str = ""  # of a status other than "ok", or what is to be known besides
    wall: Times | None = None  # back to back, with one wait for the device a turn
    device: Times | None = None  # the same by CUDA events
    host: Times | None = None  # of the call alone, on an idle device
    ratio: Times | None = None  # time of the first row over this one's, turn by turn
    halves: list[float] = field(default_factory=list)  # that ratio in each half of the turns
    turns: list[float] = field(default_factory=list)  # wall, one for each turn
    steps: int = 0  # in a turn
    start_s: float | None = None  # building, compiling, warm-up and capture
    peak_bytes: int | None = None
    losses: list[float] = field(default_factory=list)  # of the first steps
    loss_difference: float | None = None
    loss_allowed: float | None = None
    parameter: str = ""  # nearest to, or farthest beyond, what is allowed
    parameter_difference: float | None = None  # relative to what the first steps changed in it
    parameter_allowed: float | None = None

    @property
    def measured(self) -> bool:
        return self.wall is not None

    @property
    def repeat_percent(self) -> float | None:
        """What the ratios of the two halves differ by."""
        if len(self.halves) != 2:
            return None
        return 100 * abs(self.halves[0] / self.halves[1] - 1)


@dataclass
class AbResult:
    """What was measured. `print` shows the table and the advice.

    `rows` begins with native eager PyTorch, to which all ratios relate. `interleaved` is False
    where memory didn't hold all variants at once, so that each was timed in blocks of its own.
    """

    title: str
    device: str  # "cpu" or "cuda"
    precision: str
    parameters: int  # elements
    check_steps: int = 0
    least_drift: float | None = None  # smallest wrong scaling of a weight a step that shows
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    interleaved: bool = True
    interrupted: bool = False
    seconds: float = 0.0  # of all of it
    environment: dict = field(default_factory=dict)

    @property
    def advice(self) -> str:
        """Which variant to use for this model, and why, from what was measured."""
        from .advice import advise

        return advise(self)

    @property
    def repeat_percent(self) -> float | None:
        """The largest difference of a ratio between the two halves of the turns, in percent."""
        found = [row.repeat_percent for row in self.rows if row.repeat_percent is not None]
        return max(found, default=None)

    def row(self, name: str) -> Row:
        """Raises KeyError where there is none of that name."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"there is no variant {name!r}; there are {[r.name for r in self.rows]}")

    def to_json(self) -> str:
        """All of it, and the advice; `AbResult.from_json` reads it back. JSON has no numbers that
        aren't finite: "float nan", "float inf" and "float -inf" stand for them."""
        derived = {"advice": self.advice, "repeat_percent": self.repeat_percent}
        return json.dumps(_each(asdict(self) | derived, _to_json), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> AbResult:
        known = {f.name for f in fields(cls)}
        read = _each(json.loads(text), lambda value: _NOT_FINITE.get(value, value))
        record = {k: v for k, v in read.items() if k in known}
        record["rows"] = [_row(row) for row in record["rows"]]
        return cls(**record)

    def to_html(self, path: str | Path) -> None:
        """Writes one page that needs nothing else: table, plots, advice, the record."""
        from .html import page

        Path(path).write_text(page(self), encoding="utf-8")

    def plot(self, path: str | Path) -> None:
        """Draws the ratios with their spread, in the format of the path's suffix.

        Raises:
            ImportError: without matplotlib.
        """
        from .draw import draw

        draw(self, path)

    def __str__(self) -> str:
        return "\n".join([table(self), *remarks(self), *textwrap.wrap(self.advice, WIDTH)])


def _row(record: dict) -> Row:
    for name in ("wall", "device", "host", "ratio"):
        record[name] = record[name] and Times(**record[name])
    return Row(**record)


# --- as text --------------------------------------------------------------------------------------


def milliseconds(times: Times | None, spread: bool = False) -> str:
    if times is None:
        return "-"
    ms = times.median / 1e3
    digits = 0 if ms >= 100 else 1 if ms >= 10 else 2 if ms >= 1 else 3
    percent = 100 * times.spread / times.median if times.median else 0
    return f"{ms:,.{digits}f} ±{percent:.0f}%" if spread else f"{ms:,.{digits}f}"


def _to_json(value: object) -> object:
    infinite = isinstance(value, float) and not math.isfinite(value)
    return f"float {value}" if infinite else value


def _each(value: object, convert: Callable[[object], object]) -> object:
    """With all that isn't a list or a dict converted."""
    if isinstance(value, dict):
        return {key: _each(item, convert) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_each(item, convert) for item in value]
    return convert(value)


def columns(result: AbResult) -> tuple[list[str], list[list[str]]]:
    """Heads and cells; what a CPU has no number for is left out."""
    on_gpu = result.device == "cuda"
    heads = ["variant", "same", "step ms", "x eager"]
    heads += ["device ms", "host ms"] if on_gpu else []
    heads += ["start s"] + (["peak MiB"] if on_gpu else [])
    same = {"ok": "yes", "differs": "NO", "unchecked": "?"}
    lines = []
    for row in result.rows:
        name = row.name if len(row.name) <= NAME else row.name[: NAME - 1] + "…"
        cells = [name, same.get(row.status, "-")]
        cells += [
            milliseconds(row.wall, spread=True) if row.measured else row.status.replace("ok", "-")
        ]
        cells += [f"{row.ratio.median:.2f} ±{row.ratio.spread:.2f}" if row.ratio else "-"]
        if on_gpu:
            cells += [milliseconds(row.device), milliseconds(row.host)]
        cells += ["-" if row.start_s is None else f"{row.start_s:.1f}"]
        if on_gpu:
            cells += ["-" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:,.0f}"]
        lines.append(cells)
    return heads, lines


def table(result: AbResult) -> str:
    heads, lines = columns(result)
    widths = [max(len(line[i]) for line in [heads, *lines]) for i in range(len(heads))]

    def text(line: list[str]) -> str:
        first, *rest = zip(line, widths, strict=True)
        joined = "  ".join([first[0].ljust(first[1]), *(c.rjust(w) for c, w in rest)]).rstrip()
        return joined if len(joined) <= WIDTH else joined[: WIDTH - 1] + "…"

    rule = "-" * min(WIDTH, sum(widths) + 2 * (len(widths) - 1))
    title = textwrap.shorten(title_of(result), WIDTH, placeholder=" …")
    return "\n".join([title, rule, text(heads), rule, *map(text, lines), rule])


def title_of(result: AbResult) -> str:
    where = result.environment.get("gpu") or result.environment.get("cpu") or result.device
    return f"{result.title}: {result.parameters:,} parameters, {result.precision}, on {where}"


def remarks(result: AbResult) -> list[str]:
    """What the cells have no room for, wrapped."""
    said: dict[str, list[str]] = {}
    for row in result.rows:
        if row.reason:
            kind = "" if row.status in ("ok", "differs", "unchecked") else f"{row.status}: "
            said.setdefault(kind + row.reason, []).append(row.name)
    found = [f"{', '.join(names)}: {text}" for text, names in said.items()] + result.notes
    return [line for text in found for line in textwrap.wrap(text, WIDTH, subsequent_indent="  ")]
