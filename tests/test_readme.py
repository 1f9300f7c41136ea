# SPDX-License-Identifier: BSD-3-Clause
# The README: its tables and plots are what the kept records say, its Python blocks run, and it
# names all that is public.

import json
import re
import sys
from pathlib import Path

import pytest
from PIL import Image

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import plots
import report
import report_records

import torch_renaissance as tr
from torch_renaissance._ops import _C

TEXT = report.README.read_text()
DOCS = sorted((report.ROOT / "docs").glob("*.md"))
PUBLIC = [f"tr.{n}" for n in tr.__all__] + [f"tr.optim.{n}" for n in tr.optim.__all__]


RECORDS = report_records.load()
NUMBERED = ("Results", "When it does not help", "Honest remarks")


def test_the_tables_are_the_records():
    filled = report.fill(TEXT, report.tables(RECORDS), report.README)
    assert filled == TEXT, "run `python benchmarks/report.py --write`"


@pytest.mark.parametrize("title", NUMBERED)
def test_numbers_of_the_results_are_the_records(title):
    """Between the markers stands what records say; elsewhere in these parts stands no number."""
    text = re.search(rf"^## {title}\n(.*?)^## ", TEXT, re.DOTALL | re.MULTILINE)[1]
    for name in report.TABLES:
        text = re.sub(f"<!-- {name} -->.*<!-- /{name} -->", "", text, flags=re.DOTALL)
    text = re.sub(r"`[^`]+`|\]\([^)]+\)|\bL2\b", "", text)  # code, links, the cache
    assert not re.findall(r".*\d.*", text)


@pytest.mark.parametrize("name", plots.PLOTS)
def test_plots_show_the_records(name):
    """A PNG carries the numbers that it was drawn from."""
    path = plots.FOLDER / f"{name}.png"
    shown = f"]({path.relative_to(report.ROOT).as_posix()})" in TEXT
    assert shown == path.exists() == bool(RECORDS[name])
    if shown:
        found = json.loads(Image.open(path).text[plots.DATA])
        now = plots.PLOTS[name](RECORDS[name])
        assert found == now, "run `python benchmarks/report.py --write`"


def test_report_writes_tables_and_plots_and_nothing_else(tmp_path, monkeypatch, capsys):
    readme = tmp_path / "README.md"
    monkeypatch.setattr(report, "README", readme)
    monkeypatch.setattr(plots, "FOLDER", tmp_path / "plots")
    found = report.tables(RECORDS)
    for stale in ("", "some\nold table\n"):
        parts = (f"<!-- {name} -->\n{stale}<!-- /{name} -->\n" for name in found)
        readme.write_text("before\n" + "between\n".join(parts) + "after\n")
        report.main(["--write"])
        parts = (f"<!-- {name} -->\n{table}<!-- /{name} -->\n" for name, table in found.items())
        assert readme.read_text() == "before\n" + "between\n".join(parts) + "after\n"
    drawn = {path.stem for path in (tmp_path / "plots").iterdir()}
    assert drawn == {name for name in plots.PLOTS if RECORDS[name]}
    before = readme.read_text()
    report.main([])
    assert all(table in capsys.readouterr().out for table in [found["steps"]])
    assert readme.read_text() == before
    readme.write_text("no markers\n")
    with pytest.raises(SystemExit, match="no place for steps: <!-- steps --> and <!-- /steps -->"):
        report.main(["--write"])


@pytest.mark.filterwarnings("ignore:TrainStep runs eagerly")
def test_python_blocks_run_one_after_the_other():
    """Those of the documents after the README's, with its names."""
    namespace = {}
    for path in (report.README, *DOCS):
        blocks = re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
        assert blocks or path != report.README
        for block in blocks:
            exec(compile(block, path.name, "exec"), namespace)
    assert not tr.regions(namespace["optimizer"]).native


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_mentioned(name):
    assert re.search(rf"(?<![\w.]){re.escape(name)}\b", TEXT)


def test_limits_are_the_kernels():
    native = (report.ROOT / "docs" / "native.md").read_text()
    assert f"takes {_C.MAX_SLOTS:,} tensors or {_C.MAX_SEGMENTS} blocks" in native


@pytest.mark.parametrize("path", [report.README, *DOCS], ids=lambda p: p.name)
def test_files_it_names_exist(path):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target
