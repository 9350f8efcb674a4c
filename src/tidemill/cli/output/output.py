"""The options `-o/--output` and `--json`, and printing in the format that they choose.

    table    for people: a table, or sentences
    json     one JSON value, the last line of stdout
    jsonl    one JSON object per row and line
    csv      a header and one line per row

`json` is the whole answer; `jsonl` and `csv` are its rows, which are named like the fields of `json`.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer

from tidemill.base.errors import InvalidError, UnavailableError
from tidemill.cli.output.data_lines import Row, csv_line, csv_lines, to_json
from tidemill.cli.output.text_table import Column, format_table


class Form(StrEnum):
    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"
    CSV = "csv"


FormOption = Annotated[
    Form, typer.Option("--output", "-o", help="Format: a table; one JSON value; one JSON object per row; CSV.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Same as -o json.")]


@dataclass(frozen=True)
class Output:
    """Format of the output of a command, and the functions that print in it. A group of options."""

    output: FormOption = Form.TABLE
    as_json: JsonOption = False

    def __post_init__(self) -> None:
        if self.as_json and self.output not in (Form.TABLE, Form.JSON):
            raise InvalidError(
                f"two formats were given: --json and --output {self.output}.", fix="Give only one of them."
            )

    @property
    def form(self) -> Form:
        return Form.JSON if self.as_json else self.output

    @property
    def is_text(self) -> bool:
        """True if a person reads the output, so that sentences may be printed with tables."""
        return self.form is Form.TABLE

    def rows(
        self,
        rows: Sequence[Row],
        columns: Sequence[Column] = (),
        *,
        value: Any = None,
        fields: Sequence[str] = (),
        empty: str = "",
        null: str = "",
    ) -> None:
        """Print rows.

        `columns`: of the table; default: every field. `value`: the answer as JSON; default: the rows. `fields`: the
        keys of the rows, for a CSV header also without rows. `empty`: the sentence that takes the place of a table
        without rows. `null`: how the table shows None.
        """
        if self.form is Form.JSON:
            print_lines([to_json(rows if value is None else value)])
        elif self.form is Form.JSONL:
            print_lines(map(to_json, rows))
        elif self.form is Form.CSV:
            print_csv(csv_lines(rows, fields))
        elif rows or not empty:
            print_table(columns or [Column(name) for name in fields or (rows[0] if rows else ())], rows, null=null)
        else:
            print_lines([empty])

    def one(self, row: Row, sentence: str) -> None:
        """Print one result: as a sentence, or as one row."""
        if self.is_text:
            print_lines([sentence])
        else:
            self.rows([row], value=row)

    def begin_rows(self, fields: Sequence[str]) -> None:
        """Print the CSV header of an output without end."""
        if self.form is Form.CSV:
            print_csv([csv_line(fields)])

    def line(self, row: Row, text: str, fields: Sequence[str]) -> None:
        """Print one row of an output without end. JSON is then one object per line, like `jsonl`."""
        if self.is_text:
            print_lines([text])
        elif self.form is Form.CSV:
            print_csv([csv_line(row.get(field) for field in fields)])
        else:
            print_lines([to_json(row)])


TABLE = Output()
JSON = Output(Form.JSON)


def print_table(columns: Sequence[Column], rows: Sequence[Row], *, null: str = "") -> None:
    """Print a table as wide as the terminal. In a file or a pipe each row is one line of any length."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    print_lines(format_table(columns, rows, width=width, colour=has_colours(), null=null))


def has_colours() -> bool:
    """Return whether stdout is a terminal that shows colours. Source: https://no-color.org"""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") not in ("", "dumb")


def print_csv(lines: Iterable[str]) -> None:
    """Print lines of CSV in UTF-8, in any locale."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")
    print_lines(lines)


def print_lines(lines: Iterable[str]) -> None:
    """Print lines and flush them. Raises UnavailableError, and BrokenPipeError when the reader has ended."""
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UnavailableError(
            f"the output cannot be written: error={error.strerror}.", fix="Free disk space, or choose another file."
        ) from error


def flush_output() -> None:
    print_lines(())
