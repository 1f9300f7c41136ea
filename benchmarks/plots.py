# SPDX-License-Identifier: BSD-3-Clause
# The README's plots. What a plot shows is computed first and kept inside its PNG as text, so that a
# test can compare it with the records without drawing.
import json
from pathlib import Path

from report_parts import OURS, TIMERS
from report_records import ROOT, Record, quotient
from report_steps import gain, step_rows, sweep_models, sweep_times

FOLDER = ROOT / "benchmarks" / "plots"
DATA = "Description"  # the PNG's key under which its numbers stand
STEP_BARS = ("hand graph", "TrainStep", "TrainStep compile")
SWEEP_LINES = {"hand graph": "--", "TrainStep": "-"}
COLOURS = ("#9aa5b1", "#1f77b4", "#0b3c5d", "#e07b39")


# --- what is shown --------------------------------------------------------------------------------


def rounded(found: tuple | None) -> list[float] | None:
    return None if found is None else [round(value, 3) for value in found]


def steps(records: list[Record]) -> dict:
    rows = step_rows(records)
    bars = {ours: [rounded(gain(t, "eager", ours)) for t in rows.values()] for ours in STEP_BARS}
    return {
        "title": "Whole training step, times as fast as eager",
        "groups": list(rows),
        "bars": {name: values for name, values in bars.items() if any(values)},
    }


def optim(records: list[Record]) -> dict:
    (record,) = records
    cases = record["cases"]
    return {
        "title": f"{record['settings']['optimizer']} step, times as fast as fused=True ({OURS[0]})",
        "groups": list(cases),
        "bars": {
            title: [
                rounded(quotient(taken["us"][timer]["fused"], taken["us"][timer][OURS[0]]))
                for taken in cases.values()
            ]
            for timer, title in TIMERS.items()
        },
    }


def sweep(records: list[Record]) -> dict:
    (record,) = records
    lines: dict[str, dict] = {}
    for model, sizes in sweep_models(record).items():
        for ours in SWEEP_LINES:
            found = [(s["batch"], gain(sweep_times(s), "eager fused", ours)) for s in sizes]
            line = [[batch, *rounded(values)] for batch, values in found if values]
            if line:
                lines.setdefault(model, {})[ours] = line
    return {
        "title": "Times as fast as eager steps with the fused optimizer",
        "least": record["least_gain"],
        "lines": lines,
    }


PLOTS = {"steps": steps, "optim": optim, "sweep": sweep}


# --- drawing --------------------------------------------------------------------------------------


def draw_bars(axes, shown: dict) -> None:
    """Groups of bars with their ends; the scale is logarithmic, on which equal factors look so."""
    count = len(shown["bars"])
    for i, (name, values) in enumerate(shown["bars"].items()):
        drawn = [(g, *v) for g, v in enumerate(values) if v]
        places = [g + (i - (count - 1) / 2) * 0.8 / count for g, *_ in drawn]
        tops = [v[1] for v in drawn]
        errors = [[max(0, v[1] - v[2]) for v in drawn], [max(0, v[3] - v[1]) for v in drawn]]
        style = {"label": name, "color": COLOURS[i], "capsize": 2}
        heights = [top - 1 for top in tops]  # what is slower hangs down from 1
        bars = axes.bar(places, heights, 0.76 / count, bottom=1, yerr=errors, **style)
        axes.bar_label(bars, [f"{top:.1f}" for top in tops], padding=2, fontsize=7)
    axes.set_yscale("log", base=2)
    groups = [name.replace(", ", "\n") for name in shown["groups"]]
    axes.set_xticks(range(len(groups)), groups, fontsize=8)
    axes.margins(y=0.15)


def draw_lines(axes, shown: dict) -> None:
    for colour, (model, lines) in zip(COLOURS[::-1], shown["lines"].items(), strict=False):
        for ours, line in lines.items():
            batches, middle, low, high = zip(*line, strict=True)
            style = {"color": colour, "linestyle": SWEEP_LINES[ours], "marker": "."}
            axes.plot(batches, middle, label=f"{model}, {ours}", **style)
            axes.fill_between(batches, low, high, color=colour, alpha=0.12, linewidth=0)
    axes.axhline(shown["least"], color="#888888", linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("batch size")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def draw(shown: dict, path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit(
            "The plots are drawn with matplotlib: `pip install matplotlib`, or the project's "
            "`plot` extra."
        ) from None
    figure = Figure(figsize=(8.6, 3.6), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    (draw_bars if "bars" in shown else draw_lines)(axes, shown)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.axhline(1, color="#444444", linewidth=0.8)
    axes.set_title(shown["title"], fontsize=10, loc="left")
    figure.legend(fontsize=7, frameon=False, loc="outside right upper")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    # No date and no version, so that equal numbers give equal files.
    figure.savefig(path, metadata={"Software": None, DATA: json.dumps(shown)})


def draw_all(records: dict[str, list[Record]], folder: Path) -> None:
    for name, show in PLOTS.items():
        if records[name]:
            draw(show(records[name]), folder / f"{name}.png")
