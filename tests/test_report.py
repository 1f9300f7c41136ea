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
import report_data
import report_losses
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
    assert (
        "precision: `TrainStep` is 8.0 times as fast as PyTorch's eager loop (1 model) and 1.2 to "
        "2.0 times as fast as the same stock step in a graph captured by hand (2 models)." in text
    )
    assert "| mlp, batch 200 | 80.0 ±10 % | 20.0 ±10 % | 10.0 ±10 % | 8.00 | – |" in text
    assert "| net, batch 8 | – | 6.0 ±10 % | 5.0 ±10 % | – | – |" in text
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


def test_both_forms_of_train_step_have_a_column_and_ranges_of_their_own(steps):
    """The faster one doesn't stand for both."""
    steps[0]["cases"]["mlp"]["variants"] |= variants(TrainStep_compile=4)
    text = "\n".join(report_steps.steps(steps))
    assert "| × eager: TrainStep | × eager: TrainStep compile |" in text
    assert (
        "| mlp, batch 200 | 80.0 ±10 % | 20.0 ±10 % | 10.0 ±10 % | 4.0 ±10 % | 8.00 | 20.00 |"
        in text
    )
    assert "| net, batch 8 | – | 6.0 ±10 % | 5.0 ±10 % | – | – | – |" in text
    assert "`TrainStep` is 8.0 times" in text
    assert "; `TrainStep compile` is 20.0 times as fast as PyTorch's eager loop (1 model)" in text


def test_gain_is_split(steps):
    steps[0]["cases"]["mlp"]["variants"] |= variants(TrainStep_compile=4)
    head, _, mlp, net, _, note = report_steps.split(steps)
    assert "| both (eager → TrainStep) |" in head
    assert head.endswith("| all three (eager → TrainStep compile) |")
    ratios = ("4.00", "2.00", "8.00", "2.50", "20.00")
    assert mlp == f"| mlp, batch 200 | {' | '.join(f'{r} ±20 %' for r in ratios)} |"
    assert net == "| net, batch 8 | – | 1.20 ±20 % | – | – | – |"
    assert "opposite quartiles" in note


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
    text = "\n".join(report_data.data([record]))
    assert "as a share of a copy's bandwidth: mnist_8 81 %." in text
    assert "| augment/mnist_8, b2b: torchvision | 5.0 ±0 % | 800,000 | 2.50 |" in text


def test_recipe_has_each_backends_trainings():
    def run(speed, *accuracy):
        seconds = [9.0, 9.0, *[0.020, 0.021, 0.022][: len(accuracy) - 2]]
        found = {"accuracy": accuracy, "epochs_per_second": speed, "seed": 3}
        return found | {"seconds": seconds[: len(accuracy)]}

    taken = {"images": 60_000, "ours": [run(40.0, 0, 0, 0, 0, 0.99)]}
    taken["ours"].append(run(44.0, 0, 0, 0, 0, 0.97))
    taken["native"] = [run(0.25, 0.2, 0.5)]
    record = {"environment": ENVIRONMENT, "cases": {"mnist": taken}}
    text = "\n".join(report_data.recipe([record]))
    assert "on 60,000 images." in text and "`python benchmarks/bench_x.py`" in text
    assert (
        "| ours | 2 of 5 epochs | 42.00 (40.00 to 44.00) | 98.00 (97.00 to 99.00) |\n"
        "| native | 1 of 2 epochs | 0.25 (one) | 50.00 (one) |" in text
    )
    assert "| ours, seed 3 | 21.0 ±2 % |" in text and "| native, seed 3 | 9,000 (one) |" in text
    taken["native"] = []
    assert "native" not in "\n".join(report_data.recipe([record])).split("images.")[1]


def test_losses_are_ours_alone():
    ratios = {"a/flat": 0.9, "a/gather": 1.0, "b/eager fused over hand graph": 0.5}
    rows = report_losses.losses([{"ratios": ratios, "cases": {}}])
    assert [row for row in rows if row.startswith("| `")] == ["| `a/flat` | 0.90 | – | – |"]


@pytest.mark.parametrize(
    "key, case, taken",
    [
        ("cuda/sgd/mlp/b2b/flat", "mlp", {"us": {"b2b": {"timm": us(1.0), "flat": us(2.0)}}}),
        (
            "cuda/8x3/plain/host",
            "cuda/8x3/plain",
            {"us": {"host": {"torch": us(1), "ours": us(2)}}},
        ),
        (
            "k/augment/a/graph/copy over ours",
            "augment/a",
            {"us": {"graph": {"copy": us(1), "ours": us(2)}}},
        ),
        ("k/mlp/8/compile over TrainStep", "mlp/8", {"variants": variants(compile=1, TrainStep=2)}),
        ("k/chained/stock over ours", "chained", {"variants": variants(stock=1, ours=2)}),
    ],
)
def test_losses_have_both_times_of_every_kind_of_ratio(key, case, taken):
    cases = {"other": {"us": {}}, case: taken}
    record = {"ratios": {key: 0.5}, "reference": "timm"}
    record |= {"cases": {}, "chain": cases} if case == "chained" else {"cases": cases}
    above, below = report_losses.times_of(record, key)
    assert (above["median"], below["median"]) == (1.0, 2.0)
    row = report_losses.losses([record])[-3]
    assert row.startswith(f"| `{key}` | 0.50 | 1.0 ±") and "| 2.0 ±" in row


# --- tables of ratios have their spread -----------------------------------------------------------


def test_lars_and_loss_have_their_times_folded_beside_them():
    pair = {"timm": us(8.0, 0.8), "gather": us(2.0)}
    timers = dict.fromkeys(("b2b", "single", "graph"), pair)
    taken = {"tensors": 2, "parameters": 3, "us": timers, "percent_of_copy": {"gather": 50.0}}
    record = {"environment": ENVIRONMENT, "cases": {"mlp": taken}}
    shown, folded = "\n".join(report_parts.lars([record])).split("Times and spread")
    assert "| 4.00 | 4.00 | 4.00 | – |" in shown
    for timer in ("back to back", "single step", "CUDA graph"):
        assert f"| mlp, {timer} | 8.0 ±10 % | – | 2.0 ±0 % |" in folded
    us_of = {"graph": {"torch": us(6.0, 0.6), "ours": us(3.0)}}
    taken = {"us": us_of, "peak_bytes": {"torch": 4, "ours": 1}}
    cases = {"cuda/float32/8x3/plain": taken, "cuda/float32/8x3/smooth": taken}
    record = {"environment": ENVIRONMENT, "cases": cases}
    shown, folded = "\n".join(report_parts.loss([record])).split("Times and spread")
    assert "| 8x3, float32 | 2.00 | 0.25 | 2.00 | 0.25 |" in shown
    assert "| 8x3, float32, smooth | 6.0 ±10 % | 3.0 ±0 % |" in folded


@pytest.mark.parametrize("name", report.TABLES)
def test_every_kept_table_of_the_readme_shows_its_spread(name):
    text = report.tables(report_records.load())[name]
    assert not text or "±" in text


# --- what is the data's ---------------------------------------------------------------------------


@pytest.fixture
def loader():
    """DataLoader bound: a step alone gains little."""
    medians = (100e3, 80e3, 50e3, 10e3, 4e3, 2e3)
    times = {way: us(t, t / 10) for way, t in zip(report_data.WAYS, medians, strict=True)}
    taken = {"images": 20_000, "batch": 200, "workers": 8, "us": {"epoch": times}}
    cases = {"loader/mnist": taken, "augment/mnist_200": {"images": 1, "us": {}}}
    return {"environment": ENVIRONMENT, "settings": {"precision": "fp16"}, "cases": cases}


def test_loaders_tell_the_steps_gain_from_the_datas(loader):
    text = "\n".join(report_data.loader([loader]))
    assert "`DataLoader` with 8 workers" in text and "fp16. On one a GPU" in text
    assert "`TrainStep` makes them 1.2 times as fast as eager" in text  # 1.25
    assert "make them another 40.0 times as fast" in text
    row = "100 ±10 % | 80.0 ±10 % | 50.0 ±10 % | 10.0 ±10 % | 4.0 ±10 % | 2.0 ±10 % |"
    assert f"| mnist, 20,000 images, batch 200 | {row}" in text
    factors = ("1.25", "40.00", "50.00", "1.60", "8.00", "20.00")
    cells = " | ".join(f"{factor} ±20 %" for factor in factors)
    assert f"| mnist, 20,000 images, batch 200 | {cells} |" in text
    assert "mnist_200" not in text and "`python benchmarks/bench_x.py`" in text


def test_a_way_that_was_not_taken_is_an_empty_cell(loader):
    del loader["cases"]["loader/mnist"]["us"]["epoch"][report_data.PREFETCHED]
    rows = [r for r in report_data.loader([loader]) if r.startswith("| mnist")]
    assert rows[0].split(" | ")[3] == "–" == rows[1].split(" | ")[4]


def test_without_cases_of_loaders_their_table_is_left_out(loader, tmp_path):
    path = tmp_path / "loader_h200.json"
    path.write_text(json.dumps(loader | {"ratios": {}}))
    assert "### What is the data's" in report.tables(report_records.load(tmp_path))["loader"]
    del loader["cases"]["loader/mnist"]
    path.write_text(json.dumps(loader | {"ratios": {}}))
    assert report.tables(report_records.load(tmp_path))["loader"] == ""
    path.unlink()
    assert report.tables(report_records.load(tmp_path))["loader"] == ""


# --- records, ranges and plots --------------------------------------------------------------------


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
