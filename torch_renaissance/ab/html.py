# SPDX-License-Identifier: BSD-3-Clause
"""A result as one page that loads nothing: table, advice, plots as inline SVG, the record."""

from __future__ import annotations

import math
from html import escape

from .report import AbResult, Row, columns, remarks, title_of

WIDTH, LEFT, BAR = 760, 190, 22  # pixels
COLOURS = ("#2563a8", "#c8641e", "#3a8f4d", "#a83a3a", "#7350a0", "#7d5a4f", "#c060a0", "#666")
WRONG = "#a83a3a"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; } th, td { padding: .2em .8em; text-align: right; }
th:first-child, td:first-child { text-align: left; } tr { border-bottom: 1px solid #ddd; }
.advice { font-size: 1.1em; border-left: 4px solid #2563a8; padding-left: 1em; }
pre { white-space: pre-wrap; } svg { font: 12px sans-serif; }
"""


def page(result: AbResult) -> str:
    title = escape(title_of(result))
    environment = "".join(
        f"<tr><td>{escape(k)}</td><td>{escape(str(v))}</td></tr>"
        for k, v in result.environment.items()
    )
    parts = [
        f"<h1>{title}</h1>",
        f'<p class="advice">{escape(result.advice)}</p>',
        _table(result),
        *(f"<p>{escape(line)}</p>" for line in remarks(result)),
        "<h2>Times as fast as eager</h2>",
        _bars([row for row in result.rows if row.ratio is not None]),
        "<h2>Step time, turn by turn, ms</h2>",
        _curves({row.name: [t / 1e3 for t in row.turns] for row in result.rows}),
        "<h2>Loss of the first steps</h2>",
        _curves({row.name: row.losses for row in result.rows}),
        f"<h2>Machine</h2><table>{environment}</table>",
        f"<details><summary>The record</summary><pre>{escape(result.to_json())}</pre></details>",
    ]
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


def _table(result: AbResult) -> str:
    heads, lines = columns(result)
    head = "".join(f"<th>{escape(h)}</th>" for h in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _bars(rows: list[Row]) -> str:
    """A bar for each ratio, a line for its quartiles, and one across at 1."""
    if not rows:
        return "<p>Nothing was measured.</p>"
    scale = (WIDTH - LEFT - 90) / max(1.0, max(row.ratio.q3 for row in rows))
    parts = []
    for i, row in enumerate(rows):
        y, ratio = i * BAR, row.ratio
        colour = WRONG if row.status == "differs" else COLOURS[0]
        x1, x2, end = (LEFT + scale * v for v in (ratio.q1, ratio.q3, ratio.median))
        label = f"{ratio.median:.2f} ±{ratio.spread:.2f}"
        parts += [
            f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(row.name[:28])}</text>',
            f'<rect x="{LEFT}" y="{y + 4}" width="{end - LEFT:.1f}" height="14" fill="{colour}"/>',
            f'<path d="M{x1:.1f} {y + 11}H{x2:.1f}" stroke="#000" stroke-width="2"/>',
            f'<text x="{max(x2, end) + 6:.1f}" y="{y + 15}">{label}</text>',
        ]
    height = BAR * len(rows)
    parts.append(f'<path d="M{LEFT + scale:.1f} 0V{height}" stroke="#000" stroke-dasharray="3"/>')
    return f'<svg width="{WIDTH}" height="{height}" role="img">{"".join(parts)}</svg>'


def _curves(series: dict[str, list[float]]) -> str:
    """A line for each series over its index, with the least and the largest value named."""
    series = {n: [v for v in values if math.isfinite(v)] for n, values in series.items()}
    series = {n: values for n, values in series.items() if len(values) > 1}
    if not series:
        return "<p>There are no numbers.</p>"
    height, right = 200, WIDTH - 180
    low, high = (f(v for values in series.values() for v in values) for f in (min, max))
    span = (high - low) or 1.0
    parts = [
        f'<text x="50" y="14" text-anchor="end">{high:.4g}</text>',
        f'<text x="50" y="{height - 2}" text-anchor="end">{low:.4g}</text>',
    ]
    for i, (name, values) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        points = " ".join(
            f"{60 + (right - 60) * k / (len(values) - 1):.1f},"
            f"{8 + (height - 16) * (high - v) / span:.1f}"
            for k, v in enumerate(values)
        )
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>',
            f'<text x="{right + 8}" y="{14 + 17 * i}" fill="{colour}">{escape(name[:24])}</text>',
        ]
    height = max(height, 17 * len(series) + 6)
    return f'<svg width="{WIDTH}" height="{height}" role="img">{"".join(parts)}</svg>'
