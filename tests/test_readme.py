# SPDX-License-Identifier: BSD-3-Clause
# The README: its table is what the kept record says, its Python blocks run, and it names all that
# is public.

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import report
import report_steps

import torch_renaissance as tr
from torch_renaissance._ops import _C

TEXT = report.README.read_text()
DOCS = sorted((report.ROOT / "docs").glob("*.md"))
PUBLIC = [f"tr.{n}" for n in tr.__all__] + [f"tr.optim.{n}" for n in tr.optim.__all__]


def test_the_table_is_the_records():
    record = json.loads(report.RECORD.read_text())
    found = TEXT.split(f"{report.BEGIN}\n")[1].split(f"\n{report.END}")[0]
    assert found == report.report(record), "run `python benchmarks/report.py --write`"


def test_the_tables_of_steps_are_the_records():
    found = TEXT.split(f"{report_steps.BEGIN}\n")[1].split(f"\n{report_steps.END}")[0]
    assert found == report_steps.report_steps(), "run `python benchmarks/report_steps.py --write`"


def test_report_writes_the_table_and_nothing_else(tmp_path, monkeypatch, capsys):
    readme = tmp_path / "README.md"
    monkeypatch.setattr(report, "README", readme)
    for stale in ("", "some\nold table\n"):
        readme.write_text(f"before\n{report.BEGIN}\n{stale}{report.END}\nafter\n")
        report.main(["--write"])
        report.main([])
        table = capsys.readouterr().out
        assert readme.read_text() == f"before\n{report.BEGIN}\n{table}{report.END}\nafter\n"
    readme.write_text("no markers\n")
    with pytest.raises(SystemExit, match="no place for the table"):
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
