# SPDX-License-Identifier: BSD-3-Clause
# Tables and plots from planted records: what each says, what a missing record leaves out.
import copy
import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import plots
import report
import report_parts
import report_records
import report_steps

ENVIRONMENT = {
    "gpu": "a GPU",
    "driver": "1.2",
    "cores": 4,
    "cpu": "a CPU",
    "torch": "3.4",
    "python": "3.5",
    "date": "2026-01-02T03:04:05Z",
    "command": "python benchmarks/bench_x.py",
}


def us(median, half=0.0):
    return {"median": median, "q1": median - half, "q3": median + half}


def variants(**times):
    return {name.replace("_", " "): {"us": us(time, time / 10)} for name, time in times.items()}


@pytest.fixture
def steps():
    cases = {
        "mlp": {"inputs": [200, 784], "variants": variants(eager=80, hand_graph=20, TrainStep=10)},
        "net": {"inputs": [8, 3, 32, 32], "variants": {"eager": {"failed": "no"}}},
    }
    cases["net"]["variants"] |= variants(hand_graph=6, TrainStep=5)
    return [{"environment": ENVIRONMENT, "settings": {"precision": "fp16"}, "cases": cases}]


@pytest.fixture
def sweep():
    def size(model, batch, **times):
        found = variants(**times)
        found["TrainStep"]["samples_per_s"] = 1234.5
        return {"model": model, "batch": batch, "variants": found}

    sizes = [
        size("mlp", 512, eager_fused=100, hand_graph=99, TrainStep=98),
        size("mlp", 8, eager_fused=100, hand_graph=20, TrainStep=10),
        size("net", 8, eager_fused=30, TrainStep=10),
    ]
    return [
        {
            "environment": ENVIRONMENT,
            "least_gain": 1.1,
            "cases": {f"{s['model']}/{s['batch']}": s for s in sizes},
            "fades": {"mlp": {"together": {"ends": 8}}, "net": {"together": {"ends": None}}},
            "ratios": {"k/mlp/8/eager fused over TrainStep": 10.0},
            "repeat": {"ratios": [{"a": 1.0, "b": 2.0}, {"a": 1.0234, "b": 2.0}]},
        }
    ]


def test_steps_have_a_headline_rows_and_machine(steps):
    text = "\n".join(report_steps.steps(steps))
    assert "is 8.0 times as fast as" in text and "and 1.2 to 2.0 times" in text
    assert "| mlp, batch 200 | 80.0 ±10 % | 20.0 ±10 % | 10.0 ±10 % | 8.00 |" in text
    assert "| net, batch 8 | – | 6.0 ±10 % | 5.0 ±10 % | – |" in text
    assert "one a GPU (driver 1.2), 4 cores of an a CPU, torch 3.4, Python 3.5, 2026-01-02" in text
    assert "`python benchmarks/bench_x.py`" in text
    assert "several runs" not in text


def test_model_of_two_records_is_told_by_the_clock(steps):
    other = copy.deepcopy(steps[0])
    other["environment"] = ENVIRONMENT | {"date": "2026-01-02T11:12:00Z"}
    del other["cases"]["net"]
    labels = list(report_steps.step_rows([*steps, other]))
    assert labels == ["mlp, batch 200 (03:04)", "net, batch 8", "mlp, batch 200 (11:12)"]
    assert "several runs" in "\n".join(report_steps.steps([*steps, other]))


def test_gain_is_split(steps):
    assert report_steps.split(steps)[2] == "| mlp, batch 200 | 4.00 | 2.00 | – | 8.00 |"


def test_sweep_says_where_the_gain_ends(sweep):
    text = "\n".join(report_steps.sweep(sweep))
    assert "a factor of 1.1 or more" in text
    assert "mlp up to 8; net up to the largest measured." in text
    assert "Ratios of its runs differ by 2.3 % at most." in text
    rows = [line for line in text.splitlines() if line.startswith("| mlp")]
    assert rows[0].endswith("| 1,234 | 5.00 | 2.00 | 10.00 |")  # by batch
    assert rows[1].endswith("| 1.01 | 1.01 | 1.02 |")


def test_data_is_over_ours():
    times = {"ours": us(2.0), "torchvision": us(5.0)}
    taken = {"images": 4, "us": {"b2b": times}, "percent_of_copy": 81.0}
    record = {"environment": ENVIRONMENT, "cases": {"augment/mnist_8": taken}}
    text = "\n".join(report_parts.data([record]))
    assert "as a share of a copy's bandwidth: mnist_8 81 %." in text
    assert "| augment/mnist_8, b2b: torchvision | 5.0 ±0 % | 800,000 | 2.50 |" in text


def test_recipe_has_each_backends_trainings():
    def run(speed, *accuracy):
        return {"accuracy": accuracy, "epochs_per_second": speed}

    taken = {"images": 60_000, "ours": [run(40.0, 0.5, 0.99), run(44.0, 0.5, 0.97)]}
    taken["native"] = [run(0.25, 0.5)]
    record = {"environment": ENVIRONMENT, "cases": {"mnist": taken}}
    text = "\n".join(report_parts.recipe([record]))
    assert "on 60,000 images." in text and "`python benchmarks/bench_x.py`" in text
    assert (
        "| ours | 2 of 2 epochs | 42.00 (40.00 to 44.00) | 98.00 (97.00 to 99.00) |\n"
        "| native | 1 of 1 epochs | 0.25 (0.25 to 0.25) | 50.00 (50.00 to 50.00) |" in text
    )
    taken["native"] = []
    assert "native |" not in "\n".join(report_parts.recipe([record]))


def test_losses_are_ours_alone():
    ratios = {"a/flat": 0.9, "a/gather": 1.0, "b/eager fused over hand graph": 0.5}
    rows = report_parts.losses([{"ratios": ratios}])
    assert [row for row in rows if row.startswith("| `")] == ["| `a/flat` | 0.90 |"]


def test_missing_records_leave_their_tables_and_plots_out(steps, tmp_path):
    path = tmp_path / "train_step_some_h200.json"
    path.write_text(json.dumps(steps[0] | {"ratios": {}}))
    records = report_records.load(tmp_path)
    assert records["steps"] == [steps[0] | {"ratios": {}}] and records["sweep"] == []
    found = report.tables(records)
    assert {name for name, table in found.items() if table} == {"steps", "split", "losses"}
    plots.draw_all(records, tmp_path / "plots")
    assert [p.name for p in (tmp_path / "plots").iterdir()] == ["steps.png"]


def test_ranges_are_those_of_the_quartiles():
    found = report_records.quotient(us(8.0, 2.0), us(2.0, 0.5))
    assert found == (4.0, 6.0 / 2.5, 10.0 / 1.5)
    assert report_records.quotient(None, us(1.0)) is None


def test_plots_hold_what_they_show(steps, sweep):
    assert plots.steps(steps)["bars"] == {
        "hand graph": [[4.0, 3.273, 4.889], None],
        "TrainStep": [[8.0, 6.545, 9.778], None],
    }
    lines = plots.sweep(sweep)["lines"]
    assert lines["mlp"]["TrainStep"] == [[8, 10.0, 8.182, 12.222], [512, 1.02, 0.835, 1.247]]
    assert "hand graph" not in lines["net"]


@pytest.mark.parametrize("name", ["steps", "sweep"])
def test_equal_numbers_give_equal_files(name, request, tmp_path):
    Image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    shown = plots.PLOTS[name](request.getfixturevalue(name))
    for file in ("a.png", "b.png"):
        plots.draw(shown, tmp_path / file)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert json.loads(Image.open(tmp_path / "a.png").text[plots.DATA]) == shown


def test_without_matplotlib_a_sentence_names_it(steps, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match="drawn with matplotlib: `pip install matplotlib`, or"):
        plots.draw(plots.steps(steps), tmp_path / "steps.png")
    assert not (tmp_path / "steps.png").exists()
