"""`tidemill logs [NAME]`: the logs of the supervised processes of this machine, merged and readable.

    <node.data>/logs/node.log, pipeline-shop.log, …    one file per process; .1 is the file before the last rotation

A log line is a JSON object of ours, shown as `time level name event key=value`, or text of a library such as Spark.
A file that is rotated (copied and truncated) or appears later is followed from its beginning.
"""

from __future__ import annotations

import heapq
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tidemill.base.config.config import load
from tidemill.base.errors import MissingError, unknown_name_fix
from tidemill.base.runtime.private_directories import list_files
from tidemill.cli.context import ConfigOption
from tidemill.cli.output.output import TABLE, Form, Output

POLL_S = 0.25
BLOCK_BYTES = 1 << 16
FIELDS = ("timestamp", "level", "event")
COLUMNS = ("process", *FIELDS, "more")
"""Columns of CSV. `more` holds the other fields as JSON."""

Name = Annotated[
    list[str] | None,
    typer.Argument(help="node, or a pipeline such as shop or shop:2; repeatable. Default: every process."),
]


def logs(
    name: Name = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue with new lines until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Show this many last lines of each log.")] = 20,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """Show the logs of the node and of the drivers on this machine.

    With -o json or jsonl each line is an object with the name of its process.
    """
    directory = Path(load(config).node.data) / "logs"
    files = {path.stem: path for path in list_files(directory, ".log")}
    if not files:
        raise MissingError(f"no process has run here: directory={directory}.", fix="Start one: tidemill up.")
    wanted = [_log_name(each, files) for each in name or ()] or list(files)
    tails = [LogTail(each, files[each], lines) for each in wanted]
    merged = heapq.merge(*map(_timed_lines, tails), key=lambda each: each[0])
    out.begin_rows(COLUMNS)
    for _, owner, line in merged:
        _print_line(owner, line, out)
    pause = threading.Event()
    while follow:
        for tail in tails:
            for line in tail.read():
                _print_line(tail.name, line, out)
        pause.wait(POLL_S)


def _log_name(name: str, files: dict[str, Path]) -> str:
    """Return the log of a process. Raises MissingError."""
    plain = name.removeprefix("pipeline:").replace(":", "-")
    for candidate in (plain, f"pipeline-{plain}"):
        if candidate in files:
            return candidate
    known = [each.removeprefix("pipeline-") for each in files]
    raise MissingError(f"no such log: name={name}.", fix=unknown_name_fix(name, known))


class LogTail:
    """The last lines of one log, and then what is appended."""

    def __init__(self, name: str, path: Path, lines: int) -> None:
        self.name = name
        self._path = path
        self._part = b""
        self._offset = self._start_of_last(lines)

    def _start_of_last(self, lines: int) -> int:
        """Return the offset of the `lines`-th last line, reading backwards."""
        with self._path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            start, block = end, b""
            while start > 0 and block.count(b"\n") <= lines:
                start = max(0, start - BLOCK_BYTES)
                file.seek(start)
                block = file.read(end - start)
        return end - len(b"\n".join(block.split(b"\n")[-lines - 1 :]))

    def read(self) -> Iterator[str]:
        """Yield the complete lines since the last call."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._offset:
                    self._offset, self._part = 0, b""  # it was rotated
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        self._offset += len(data)
        *complete, self._part = (self._part + data).split(b"\n")
        for line in complete:
            yield line.decode(errors="replace")


def _timed_lines(tail: LogTail) -> Iterator[tuple[str, str, str]]:
    """Yield (time, process, line). A line without a time, as of a traceback, belongs to the one before it."""
    at = ""
    for line in tail.read():
        at = max(at, str(_fields_of(line).get("timestamp", "")) or (line[:24] if line[:2] == "20" else ""))
        yield at, tail.name, line


def _fields_of(line: str) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _print_line(name: str, line: str, out: Output) -> None:
    fields = _fields_of(line)
    if out.form is Form.CSV:
        more = {key: value for key, value in fields.items() if key not in FIELDS}
        row = {"process": name, **(fields or {"event": line}), "more": more or None}
    else:
        row = {"process": name, **(fields or {"event": line})}
    out.line(row, _format_line(name, fields, line), COLUMNS)


def _format_line(name: str, fields: dict[str, Any], line: str) -> str:
    if not fields:
        return f"{name}  {line}"
    time_text, level, event = (str(fields.get(field, "")) for field in FIELDS)
    more = "  ".join(f"{key}={value}" for key, value in fields.items() if key not in (*FIELDS, "exception"))
    exception = f"\n{fields['exception']}" if "exception" in fields else ""
    return f"{time_text[:23]} {level:7} {name}  {event}{'  ' + more if more else ''}{exception}"
