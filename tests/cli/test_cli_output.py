"""`-o table|json|jsonl|csv`: the four formats, in a terminal of any width, a pipe that is closed, and a full disk."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import pty
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from support.cli.commands import EVERY
from support.cli.process import run_tidemill
from support.waiting import DEADLINE_S
from tidemill.base.errors import InvalidError, UnavailableError
from tidemill.cli.cluster.logs import COLUMNS
from tidemill.cli.output.data_lines import csv_lines, to_json
from tidemill.cli.output.output import Form, Output, has_colours, print_lines
from tidemill.cli.output.text_table import Column, cell_width, fold, format_table
from tidemill.cli.sql import print_result

ROWS: list[dict[str, Any]] = [
    {"name": "plain", "note": None, "count": 1},
    {"name": "", "note": 'a "quoted", one\nin two lines', "count": 23},
    {"name": "東京 🎈", "note": " spaces ", "count": None},
]
WITHOUT_ROWS = {"up", "pipeline run", "topic produce"}
"""Commands that run until Ctrl-C, or print nothing to stdout."""


@pytest.mark.parametrize("name", EVERY)
def test_every_command_that_prints_takes_the_format(name: str) -> None:
    options = {option: param.name for param in EVERY[name].params for option in param.opts}
    if name in WITHOUT_ROWS:
        assert "-o" not in options
    else:
        assert options["-o"] == options["--output"] == "output" and options["--json"] == "as_json"


def test_csv_of_nulls_newlines_and_wide_characters_is_read_back() -> None:
    text = "\n".join(csv_lines(ROWS)) + "\n"
    header, *read = csv.reader(io.StringIO(text, newline=""))
    assert header == ["name", "note", "count"]
    assert read == [["plain", "", "1"], ["", 'a "quoted", one\nin two lines', "23"], ["東京 🎈", " spaces ", ""]]
    lines = text.splitlines()
    assert lines[1] == "plain,,1" and lines[2].startswith('"",'), "null is empty, and the empty string is quoted"


def test_csv_of_nested_values_holds_json_and_a_header_also_without_rows() -> None:
    assert list(csv_lines([{"a": [1, None], "b": {"k": "v"}}, {"c": True}])) == [
        "a,b,c", '"[1, null]","{""k"": ""v""}",', ",,true",
    ]  # fmt: skip
    assert list(csv_lines([], ["k", "v"])) == ["k,v"] and list(csv_lines([])) == []


def test_json_has_no_number_that_other_programs_reject() -> None:
    assert json.loads(to_json([math.nan, math.inf, -math.inf, {"x": (math.nan,)}, 1.5])) == [
        "NaN", "Infinity", "-Infinity", {"x": ["NaN"]}, 1.5,
    ]  # fmt: skip
    assert json.loads(to_json({(1, 2): b"\xff"})) == {"(1, 2)": "b'\\xff'"}


def test_a_table_is_aligned_by_the_width_that_a_terminal_gives_its_characters() -> None:
    lines = format_table([Column("name"), Column("count"), Column("note")], ROWS)
    assert lines == [
        "name     count  note",
        "-------  -----  -----------------------------",
        "plain        1",
        '            23  a "quoted", one\\nin two lines',
        "東京 🎈          spaces",
    ]  # fmt: skip


def test_a_value_sends_no_control_character_to_the_terminal() -> None:
    (*_, line) = format_table([Column("v")], [{"v": "\x1b[2J\x07red\r\n\u202e"}])
    assert line == "\\x1b[2J\\x07red\\r\\n\\u202e"


@pytest.mark.parametrize("width", [20, 40, 80, 400])
def test_no_line_is_wider_than_the_terminal_and_nothing_is_lost(width: int) -> None:
    columns = [Column(name) for name in ("stage", "state", "behind", "age", "blocked by")]
    cells = ["shard:orders", "stuck", "12.0 s", "1.5 s", "node:a " * 20]
    row = {column.heading: cell for column, cell in zip(columns, cells, strict=True)}
    lines = format_table(columns, [row, row], width=width)
    assert max(map(cell_width, lines)) <= width
    found = " ".join("".join(lines).replace("-", " ").split())
    assert found.count("node:a") == 40 and "12.0 s" in found and "stuck" in found


def test_folding_counts_wide_characters_and_breaks_at_spaces() -> None:
    assert fold("one two three", 8) == ["one two", "three"]
    assert fold("東京東京", 5) == ["東京", "東京"]
    assert fold("x" * 7, 3) == ["xxx", "xxx", "x"]


@pytest.mark.parametrize(
    ("environ", "colours"),
    [({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({}, False)],
)
def test_colours_are_for_terminals_that_show_them(environ: dict[str, str], colours: bool) -> None:
    with mock.patch.dict(os.environ, environ, clear=True), mock.patch.object(sys, "stdout") as stdout:
        stdout.isatty.return_value = True
        assert has_colours() is colours
        stdout.isatty.return_value = False
        assert not has_colours()


def test_styles_do_not_move_columns() -> None:
    columns = [Column("state", style=lambda row: "bold red"), Column("x")]
    plain, coloured = (format_table(columns, [{"state": "stuck", "x": 1}], colour=colour) for colour in (False, True))
    assert coloured[-1] == plain[-1].replace("stuck", "\x1b[1;31mstuck\x1b[0m")


def test_a_result_of_sql_in_each_format() -> None:
    def shown(form: Form, rows: list[Any]) -> str:
        out = io.StringIO()
        with redirect_stdout(out):
            print_result(["a", "a", "b"], rows, 7, Output(form))
        return out.getvalue()

    assert json.loads(shown(Form.JSON, [(1, None, "x")])) == {
        "as_of_ms": 7, "columns": ["a", "a", "b"], "rows": [[1, None, "x"]],
    }  # fmt: skip
    assert shown(Form.JSONL, [(1, None, "x")]) == '{"a": 1, "a_2": null, "b": "x"}\n'
    assert shown(Form.CSV, [(1, None, "")]) == 'a,a_2,b\n1,,""\n' and shown(Form.CSV, []) == "a,a_2,b\n"
    assert shown(Form.TABLE, [(1, None, "")]).splitlines() == ["a  a     b", "-  ----  -", "1  NULL", "as of 7"]


def test_two_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="two formats were given: --json and --output csv"):
        Output(Form.CSV, True)
    for line in ("version --json -o csv", "-o csv --json version"):
        done = run_tidemill(line, cwd=tmp_path)
        assert (done.exit_code, done.output) == (2, "") and "two formats" in done.errors
    assert run_tidemill("-o csv version -o jsonl", cwd=tmp_path).output.startswith('{"name": "tidemill"')
    assert run_tidemill("-o csv version", cwd=tmp_path).output.startswith("name,version\ntidemill,")
    wrong = run_tidemill("version -o yaml", cwd=tmp_path)
    assert wrong.exit_code == 2 and "yaml" in wrong.errors


def test_logs_as_csv_have_one_set_of_columns(tmp_path: Path) -> None:
    directory = tmp_path / ".tidemill" / "logs"
    directory.mkdir(parents=True)
    line = '{"timestamp": "2026-01-01T00:00:00Z", "level": "info", "event": "started", "port": 1}'
    (directory / "node.log").write_text(f"{line}\nplain text, of a library\n")
    done = run_tidemill("logs -o csv", cwd=tmp_path)
    assert list(csv.reader(io.StringIO(done.output))) == [
        list(COLUMNS),
        ["node", "2026-01-01T00:00:00Z", "info", "started", '{"port": 1}'],
        ["node", "", "", "plain text, of a library", ""],
    ]
    assert [json.loads(each)["event"] for each in run_tidemill("logs --json", cwd=tmp_path).output.splitlines()] == [
        "started", "plain text, of a library",
    ]  # fmt: skip


def test_a_full_disk_is_one_sentence() -> None:
    with open("/dev/full", "w") as full, redirect_stdout(full):
        with pytest.raises(UnavailableError, match="the output cannot be written: error=No space left"):
            print_lines(["x"])
        full.close = lambda: None  # type: ignore[method-assign]


def tidemill(*arguments: str, **more: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "tidemill", *arguments], stderr=subprocess.PIPE, **more)


def test_a_reader_that_ends_early_is_no_error(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)  # as of `| head -1` that has ended
    try:
        with tidemill("version", "-o", "jsonl", cwd=tmp_path, stdout=writing) as process:
            _, errors = process.communicate(timeout=DEADLINE_S)
    finally:
        os.close(writing)
    assert (process.returncode, errors) == (0, b"")


def test_a_terminal_of_40_columns_gets_lines_of_40_columns(tmp_path: Path) -> None:
    terminal, inner = pty.openpty()
    environ = {**os.environ, "COLUMNS": "40", "TERM": "xterm", "NO_COLOR": "1"}
    try:
        with tidemill("version", cwd=tmp_path, stdout=inner, env=environ) as process:
            process.wait(DEADLINE_S)
        shown = os.read(terminal, 1 << 16).decode()
    finally:
        os.close(terminal)
        os.close(inner)
    assert "tidemill" in shown and "\x1b[" not in shown
    assert max(len(line) for line in shown.splitlines()) <= 40, shown


def test_a_locale_without_utf_8_ends_no_command(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    with tidemill("logs", "tö", cwd=tmp_path, stdout=subprocess.PIPE, env=environ) as process:
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2 and b"Traceback" not in errors
