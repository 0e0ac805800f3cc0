from __future__ import annotations

import argparse
import io
import json
import re
import sys

import pytest

from codesign.cli import argument_types, output, tables
from codesign.cli.plan_result import _COLUMNS
from codesign.errors import InputError

QUIET = argparse.Namespace(json=False, quiet=True)
PLAIN = argparse.Namespace(json=False, quiet=False)
JSON = argparse.Namespace(json=True, quiet=False)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_folder_that_takes_no_files_is_said_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(argument_types.os, "access", lambda path, mode: path != f"{tmp_path}/")
    with pytest.raises(InputError, match=r"takes no files\. Name another: --report FILE$"):
        argument_types.out_file(f"{tmp_path}/new/r.html", "report.html", "--report")
    (tmp_path / "new").mkdir()
    assert (
        argument_types.out_file(f"{tmp_path}/new/r.html", "r.html") == tmp_path / "new" / "r.html"
    )


def test_emit_prints_the_text_or_one_json_object(capsys):
    output.emit(PLAIN, {"a": 1}, "one")
    output.emit(PLAIN, {"a": 1}, lambda: "two")
    assert capsys.readouterr().out == "one\ntwo\n"
    output.emit(JSON, {"a": float("nan")}, lambda: pytest.fail("text is not wanted"))
    assert json.loads(capsys.readouterr().out) == {"a": None}


def test_numbers_are_set_to_the_right_and_text_to_the_left():
    drawn = tables.table(["name", "n", "ms"], [["ab", 1234, 0.5], ["c", 5, None]], title="Title")
    assert drawn.split("\n") == [
        "Title",
        "name      n   ms",
        "ab    1,234  0.5",
        "c         5    -",
    ]


def test_a_wide_table_is_clipped_to_100_columns_widest_column_first():
    drawn = tables.table(["policy", "why"], [["chain", "x" * 300], ["tree", "short"]])
    lines = drawn.split("\n")
    assert max(map(len, lines)) == 100
    assert lines[1].startswith("chain")
    assert lines[1].endswith("x..")
    assert lines[2] == "tree    short"


def test_names_and_numbers_are_never_cut_however_wide_the_table():
    name = "async-batch-tree-16x2x8 on 2x3+1, batch 128"
    drawn = tables.table(["plan", *"abcdefgh"], [[name, *[1234.5678] * 7, "overloaded"]])
    assert drawn.split("\n")[1].split("  ") == [name, *["1,235"] * 7, "overloaded"]
    drawn = tables.table(["name", "note"], [[name * 2, "x" * 50]])
    assert drawn.split("\n")[1] == f"{name * 2}  {'x' * 18}.."


@pytest.fixture
def terminal(monkeypatch):
    """Make stdout a terminal of so many columns."""

    def of(columns: int) -> None:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "stdout", Terminal())

    return of


def shown_lines(drawn: str) -> list[str]:
    """The lines without their colours."""
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", drawn).split("\n")]


def test_a_terminal_of_80_columns_breaks_cells_between_words_only(terminal):
    terminal(80)
    label = "async-batch-tree-16x2x8 on 1+1, batch 2"
    row = [label, 25.69, 54.88, 1693.0, 25.78, 2.076, "backlogged", "100%"]
    lines = shown_lines(tables.table(_COLUMNS, [row]))
    assert max(map(len, lines)) <= 80
    words = " ".join(lines).split()
    assert {"tok/round", "backlogged", "async-batch-tree-16x2x8", "1,693"} <= set(words)


def test_a_terminal_too_narrow_for_the_words_folds_them_and_loses_none(terminal):
    terminal(24)
    drawn = tables.table(["name", "tokens/s", "load"], [["mooncake-twin", 1.5, "overloaded"]])
    lines = shown_lines(drawn)
    assert max(map(len, lines)) <= 24
    rule = next(index for index, line in enumerate(lines) if not line.isascii())
    cells = "".join(lines[rule + 1 :]).replace(" ", "")
    assert sorted(cells) == sorted("mooncake-twin1.5overloaded")


@pytest.mark.parametrize(("columns", "longest"), [(60, 60), (200, 100)])
def test_running_text_and_titles_are_as_wide_as_the_terminal_at_most_100(
    terminal, columns, longest
):
    terminal(columns)
    text = "word " * 60
    wide = [longest - 5 < len(line) <= longest for line in tables.wrapped("why", text)[:-1]]
    assert all(wide)
    assert max(map(len, shown_lines(tables.table(["a"], [["b"]], title=text)))) <= longest


def test_large_numbers_have_no_exponent():
    drawn = tables.table(["ms"], [[44_840.5], [9_999.96], [0.012345], [1e-7]])
    assert drawn.split() == ["ms", "44,840", "10,000", "0.01235", "1e-07"]


def test_a_table_without_rows_still_has_its_heads():
    assert tables.table(["a", "b"], []) == "a  b"


def test_rich_draws_the_table_on_a_terminal_only(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain = tables.table(["a"], [["[bold]x"]])
    monkeypatch.setattr(sys, "stdout", Terminal())
    drawn = tables.table(["a"], [["[bold]x"]])
    assert drawn != plain
    assert "[bold]x" in drawn
    monkeypatch.setenv("NO_COLOR", "1")
    assert tables.table(["a"], [["[bold]x"]]) == plain


def test_progress_in_a_pipe_is_a_line_each_ten_seconds_and_one_at_the_end(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    with output.progress(PLAIN) as report:
        for step in range(1, 26):
            now[0] += 1.0
            report("searching", step, 25)
    assert capsys.readouterr().err.splitlines() == [
        "searching: 10 of 25 (40%), 10 s so far, about 15 s left",
        "searching: 20 of 25 (80%), 20 s so far, about 5 s left",
        "done in 25 s",
    ]


def test_short_work_and_quiet_work_report_nothing(monkeypatch, capsys):
    with output.progress(PLAIN) as report:
        report("searching", 1, 1)
    now = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    with output.progress(QUIET) as report:
        now[0] += 100.0
        report("searching", 1, 1)
    assert capsys.readouterr() == ("", "")


def test_progress_on_a_terminal_is_a_bar_per_stage(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with output.progress(PLAIN) as report:
        report("measuring", 1, 2)
        report("fitting", 3, 3)
        report("measuring", 2, 2)
    assert "measuring" in screen.getvalue()
    assert "2/2" in screen.getvalue()
    assert "3/3" in screen.getvalue()


@pytest.mark.parametrize("text", ["-1", "1.5", "one", ""])
def test_a_seed_is_a_whole_number_of_0_or_above(text):
    assert argument_types.non_negative("0") == 0
    with pytest.raises(argparse.ArgumentTypeError, match=f"0 or above, not '{text}'"):
        argument_types.non_negative(text)


def test_a_number_that_no_file_holds_is_refused():
    """A plan with such a seed could not be read again."""
    assert argument_types.non_negative(str(2**63 - 1)) == 2**63 - 1
    with pytest.raises(argparse.ArgumentTypeError, match="below 2"):
        argument_types.non_negative(str(2**63))
