"""Text tables for people: aligned columns, or one block per row where the terminal is too narrow. Pure.

    stage         state   behind  blocked by        stage       shard:orders
    ------------  ------  ------  ----------        state       stuck
    shard:orders  stuck   1.0 s   node:n1           blocked by  node:n1

A cell is one line of printable characters: a control character of a value is shown as its escape, and is not sent to
the terminal. Wide characters count as two columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, time
from typing import Any, NamedTuple

from tidemill.cli.output.data_lines import Row

GAP = "  "
YEAR_9999_MS = 253_402_300_799_000
LEAST_WIDTH = 10
"""Width below which no column is folded."""
COLOURS = {"green": "32", "dim green": "2;32", "yellow": "33", "red": "31", "bold red": "1;31", "bold": "1"}
"""Select Graphic Rendition parameters (ECMA-48) of the styles that columns use."""


class Column(NamedTuple):
    """A column: its heading, and the key of its value or a function of the row. `right`: align to the right, also if
    the cells are text. `style`: a function of the row that returns a key of `COLOURS`."""

    heading: str
    value: str | Callable[[Row], Any] = ""
    right: bool = False
    style: Callable[[Row], str] | None = None

    def of(self, row: Row) -> Any:
        return self.value(row) if callable(self.value) else row.get(self.value or self.heading)


def format_table(
    columns: Sequence[Column], rows: Sequence[Row], *, width: int = 0, colour: bool = False, null: str = ""
) -> list[str]:
    """Return the lines of a table that is at most `width` columns wide; 0 = any width, one line per row."""
    values = [[column.of(row) for column in columns] for row in rows]
    cells = [[cell_text(value, null) for value in line] for line in values]
    headings = [printable(column.heading) for column in columns]
    natural = [max(map(cell_width, [heading, *(line[at] for line in cells)])) for at, heading in enumerate(headings)]
    widths = _fitting_widths(natural, width) if width else natural
    styles = [[column.style(row) if column.style and colour else "" for column in columns] for row in rows]
    if not widths:
        return _format_blocks(headings, cells, styles, width, colour)
    right = [column.right or _are_numbers([line[at] for line in values]) for at, column in enumerate(columns)]
    out = _format_line(headings, widths, right, ["bold" if colour else ""] * len(columns))
    out.append(GAP.join("-" * each for each in widths))
    for line, style in zip(cells, styles, strict=True):
        out += _format_line(line, widths, right, style)
    return out


def cell_text(value: Any, null: str = "") -> str:
    """Return a value as one line."""
    if value is None:
        return null
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return ", ".join(f"{cell_text(key)}={cell_text(part, null)}" for key, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(cell_text(part, null) for part in value)
    return printable(value.isoformat() if isinstance(value, date | datetime | time) else str(value))


def printable(text: str) -> str:
    """Return the text with control characters as escapes."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def cell_width(text: str) -> int:
    """Return the number of terminal columns of a text."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def fold(text: str, width: int) -> list[str]:
    """Return the text as lines of at most `width` columns, broken at spaces where possible."""
    lines, line, used, space = [], "", 0, -1
    for each in text:
        size = cell_width(each)
        if used + size > width and line:
            head, tail = (line[:space], line[space + 1 :]) if space > 0 else (line, "")
            lines.append(head)
            line, used, space = tail, cell_width(tail), -1
        if each == " ":
            if not line and lines:
                continue
            space = len(line)
        line, used = line + each, used + size
    return [*lines, line]


def _are_numbers(values: Sequence[Any]) -> bool:
    known = [value for value in values if value is not None]
    return bool(known) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in known)


def _fitting_widths(natural: Sequence[int], width: int) -> list[int]:
    """Return widths that fit, with the widest columns folded; [] if a column became too narrow to read."""
    widths, room = list(natural), width - len(GAP) * (len(natural) - 1)
    while (excess := sum(widths) - room) > 0:
        widest = max(widths)
        folded = [at for at, each in enumerate(widths) if each == widest]
        below = max((each for each in widths if each < widest), default=0)
        step = min(widest - below, -(-excess // len(folded)))
        if widest - step < LEAST_WIDTH:
            return []
        for at in folded:
            widths[at] -= step
    return widths


def _format_line(
    cells: Sequence[str], widths: Sequence[int], right: Sequence[bool], styles: Sequence[str]
) -> list[str]:
    parts = [fold(text, size) if cell_width(text) > size else [text] for text, size in zip(cells, widths, strict=True)]
    out = []
    for number in range(max(map(len, parts), default=0)):
        shown = []
        for at, lines in enumerate(parts):
            text = lines[number] if number < len(lines) else ""
            padding = " " * (widths[at] - cell_width(text))
            styled = _styled(text, styles[at])
            shown.append(padding + styled if right[at] else styled + padding)
        out.append(GAP.join(shown).rstrip())
    return out


def _format_blocks(
    headings: Sequence[str], cells: Sequence[Sequence[str]], styles: Sequence[Sequence[str]], width: int, colour: bool
) -> list[str]:
    """Return each row as a block of one line per column that has a value, with an empty line between rows."""
    margin = min(max(map(cell_width, headings), default=0), width // 2 - len(GAP))
    widths = [margin, max(1, width - margin - len(GAP))]
    out: list[str] = []
    for line, style in zip(cells, styles, strict=True):
        if out:
            out.append("")
        for heading, text, each in zip(headings, line, style, strict=True):
            if text:
                out += _format_line([heading, text], widths, [False, False], ["bold" if colour else "", each])
    return out or list(headings)


def _styled(text: str, style: str) -> str:
    return f"\x1b[{COLOURS[style]}m{text}\x1b[0m" if style and text else text


def format_time(time_ms: int) -> str:
    """Return a time in ms and, in parentheses, as a date."""
    if not 0 < time_ms < YEAR_9999_MS:
        return str(time_ms)
    return f"{time_ms} ({datetime.fromtimestamp(time_ms / 1000, UTC):%Y-%m-%d %H:%M:%S})"
