"""Captured tables by the name that a user gives, and the line that makes a pipeline maintain one."""

from __future__ import annotations

from collections.abc import Iterable

from tidemill.base.errors import InvalidError
from tidemill.metastore.catalogue import CaptureTableRow


def matching_tables(rows: Iterable[CaptureTableRow], name: str, capture: str = "") -> list[CaptureTableRow]:
    """Return the captured tables of this name, with or without its schema, in any capture or in one.

    Raises InvalidError for text that is not a table's name.
    """
    from tidemill.capture.naming import split_name, table_name

    full = table_name(*split_name(name))
    return [row for row in rows if row.table in (full, name) and capture in ("", row.capture)]


def tables_of_any_name(rows: Iterable[CaptureTableRow], name: str) -> list[CaptureTableRow]:
    """Return the captured tables of this name; none for text that is not a table's name, such as a stage's."""
    try:
        return matching_tables(rows, name)
    except InvalidError:
        return []


def maintain_line(row: CaptureTableRow) -> str:
    """Return the line of a pipeline that maintains this captured table under its own name."""
    name = row.table.rpartition(".")[2].strip('"')
    return f'p.table("{name}", p.capture("{row.capture}").table("{row.table}"))'
