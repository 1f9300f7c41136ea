# SPDX-License-Identifier: BSD-3-Clause
# The progress of tr.ab_test: a bar on a terminal where rich is installed, lines elsewhere, and in
# no case anything on stdout.
import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from comparing import by_hand, run

from torch_renaissance.ab import progress
from torch_renaissance.ab.progress import Bar, Lines, Silent, make_progress

ROOT = Path(__file__).resolve().parent.parent


class Terminal(io.StringIO):
    def isatty(self):
        return True


def as_terminal(monkeypatch):
    """Makes stderr a terminal that keeps what is written. Not a fixture, since pytest sets its own
    stderr after those."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    return sys.stderr


def tasks(bar):
    return [(t.description, t.completed, t.total, t.finished) for t in bar._bar.tasks]


# --- the bar --------------------------------------------------------------------------------------


def test_a_bar_goes_part_by_part_to_its_end(monkeypatch, capfd):
    pytest.importorskip("rich")
    terminal = as_terminal(monkeypatch)
    bar = make_progress(True)
    assert type(bar) is Bar
    bar.stage("check", 2)
    seen = []
    for name in ("eager", "mine"):
        bar.advance(name)
        seen += tasks(bar)
    assert seen == [("check: eager", 0, 2, False), ("check: mine", 1, 2, False)]
    bar.stage("time", 3)
    assert tasks(bar) == [("check: mine", 2, 2, True), ("time", 0, 3, False)]
    for _ in range(3):
        bar.advance("eager")
    assert tasks(bar)[1] == ("time: eager", 2, 3, False)
    bar.close()
    assert tasks(bar) == [("check: mine", 2, 2, True), ("time", 3, 3, True)]
    assert "2/2" in terminal.getvalue() and "3/3" in terminal.getvalue()
    assert capfd.readouterr().out == ""


def test_a_bar_that_is_cut_short_says_how_far_it_came(monkeypatch):
    pytest.importorskip("rich")
    as_terminal(monkeypatch)
    bar = make_progress(True)
    bar.stage("time", 9)
    bar.advance("eager")
    bar.close()
    assert tasks(bar) == [("time", 1, 9, False)]
    unused = make_progress(True)
    unused.close()
    assert tasks(unused) == []


def test_a_whole_comparison_reaches_the_end_of_its_bar(monkeypatch, capfd):
    pytest.importorskip("rich")
    as_terminal(monkeypatch)
    made = []
    monkeypatch.setattr(progress, "Bar", lambda: made.append(Bar()) or made[-1])
    run(["accelerate"], progress=True)
    ends = [(completed, total) for _, completed, total, _ in tasks(made[0])]
    assert ends == [(2, 2), (8, 8)]  # two variants, in four turns each
    assert made[0]._bar.finished and not made[0]._bar.live.is_started
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("name", ["mine [/]", "[bold]"])
def test_names_of_variants_are_no_markup(name, monkeypatch):
    pytest.importorskip("rich")
    terminal = as_terminal(monkeypatch)
    run([{name: by_hand()}], progress=True)
    assert f"check: {name}" in terminal.getvalue()


def test_what_a_user_prints_meanwhile_stays_on_stdout(monkeypatch, capsys):
    pytest.importorskip("rich")
    terminal = as_terminal(monkeypatch)
    bar = make_progress(True)
    bar.stage("check", 1)
    bar.advance("eager")
    print("a user's line")
    bar.close()
    assert capsys.readouterr().out == "a user's line\n"
    assert "a user's line" not in terminal.getvalue()


# --- elsewhere ------------------------------------------------------------------------------------


def test_without_rich_a_terminal_gets_lines(monkeypatch, capfd):
    terminal = as_terminal(monkeypatch)
    for name in [n for n in sys.modules if n.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert type(make_progress(True)) is Lines
    run(["accelerate"], progress=True)
    lines = [re.sub(r"^\[ *[\d.]+ s\] ", "", line) for line in terminal.getvalue().splitlines()]
    assert lines == ["check: eager", "check: accelerate", "time: eager", "time: accelerate"]
    assert capfd.readouterr().out == ""


def test_what_is_no_terminal_gets_lines_and_who_wants_none_gets_none(monkeypatch, capfd):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert type(make_progress(True)) is Lines
    assert type(make_progress(False)) is Silent
    run(["accelerate"], progress=True)
    assert "time: accelerate\n" in sys.stderr.getvalue() and "\x1b" not in sys.stderr.getvalue()
    assert capfd.readouterr().out == ""


def test_as_a_program_the_table_alone_is_on_stdout(tmp_path):
    """stderr is a terminal, stdout a pipe."""
    pytest.importorskip("rich")
    words = ["--model", "mlp", "--batch", "2", "--device", "cpu", "--variants", "accelerate"]
    mine, theirs = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    environment |= {"PYTHONPATH": str(ROOT), "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-m", "torch_renaissance", "ab", *words, "--steps", "2"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=environment,
        cwd=tmp_path,
    ) as program:
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(mine, 4096):
                shown += part
        except OSError:  # how a terminal ends
            pass
        out = program.stdout.read().decode()
    os.close(mine)
    assert program.returncode == 0, shown.decode()
    assert out.startswith("mlp, adamw, batch 2: ") and "\x1b" not in out
    assert "check" not in out.splitlines()[0] and "━" not in out
    assert b"2/2" in shown and b"4/4" in shown and b"x eager" not in shown
