# SPDX-License-Identifier: BSD-3-Clause
"""The ratios of a result, drawn with matplotlib."""

from __future__ import annotations

from pathlib import Path

from .report import AbResult, title_of


def check_format(path: str | Path) -> None:
    """Before there is anything to draw.

    Raises:
        ImportError: without matplotlib.
        ValueError: for a suffix of which it knows no format.
    """
    _, canvas = _matplotlib()
    known = canvas.get_supported_filetypes()
    suffix = Path(path).suffix[1:]
    if suffix and suffix.lower() not in known:
        raise ValueError(
            f"matplotlib can't write .{suffix}, of {Path(path).name}; it writes "
            f"{', '.join(sorted(known))}"
        )


def _matplotlib() -> tuple[type, type]:
    """Its figure, and its canvas without a display."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "AbResult.plot needs matplotlib: `pip install matplotlib`, or install "
            "torch_renaissance with its extra `plot`; `to_html` draws without it"
        ) from error
    return Figure, FigureCanvasAgg


def draw(result: AbResult, path: str | Path) -> None:
    """See `AbResult.plot`."""
    Figure, FigureCanvasAgg = _matplotlib()
    rows = [row for row in result.rows if row.ratio is not None][::-1]
    figure = Figure(figsize=(8, 1.2 + 0.4 * max(1, len(rows))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colours = ["tab:red" if row.status == "differs" else "tab:blue" for row in rows]
    medians = [row.ratio.median for row in rows]
    errors = [
        [row.ratio.median - row.ratio.q1 for row in rows],
        [row.ratio.q3 - row.ratio.median for row in rows],
    ]
    axes.barh([row.name for row in rows], medians, xerr=errors, color=colours)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("times as fast as eager (median and quartiles of the turns)")
    axes.set_title(title_of(result), fontsize=9)
    figure.savefig(path)
