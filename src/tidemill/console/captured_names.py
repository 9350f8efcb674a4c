"""Lookup of captured tables by a user's name, and the note of `why` for a captured table without a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tidemill.base.errors import InvalidError, MissingError, nearest_name
from tidemill.base.status.freshness import SHARD
from tidemill.base.status.status import DerivedStatus
from tidemill.capture.naming import split_name, table_name
from tidemill.console.views.captures import shown_state
from tidemill.metastore.catalogue import CaptureTableRow, PipelineRow


def matching_tables(rows: Iterable[CaptureTableRow], name: str, capture: str = "") -> list[CaptureTableRow]:
    """Return the captured tables of this name, with or without its schema, in any capture or in one.

    Raises InvalidError for text that is not a table's name.
    """
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


def maintaining_tables(row: CaptureTableRow, pipelines: Iterable[PipelineRow]) -> dict[str, str]:
    """Return the tables that pipelines maintain of a captured table, each with its pipeline."""
    fed_by = f"capture:{row.capture}:{row.table}"
    return {table: each.name for each in pipelines for table, source in each.tables.items() if source == fed_by}


def captured_table_stage(
    marks: Mapping[str, DerivedStatus],
    rows: Iterable[CaptureTableRow],
    pipelines: Iterable[PipelineRow],
    name: str,
) -> tuple[str, str]:
    """Return the stage that stands for a captured table without a stage, and a note about the table: the name under
    which a pipeline maintains it, or that none does.

    Raises MissingError: the table is not captured, with the reason, or nothing has that name.
    """
    for row in tables_of_any_name(rows, name):
        stage = f"capture:{row.capture}/topics"
        if row.state != "captured":
            state = f"the table is {shown_state(row)}: capture={row.capture} table={row.table}"
            raise MissingError(f"{state} reason: {row.reason}", fix=row.fix)
        for table, pipeline in maintaining_tables(row, pipelines).items():
            if SHARD + table in marks:
                return SHARD + table, f"{row.table} is maintained as table {table} by pipeline {pipeline}."
        if stage in marks:
            note = (
                f"{row.table} is {shown_state(row)} by {row.capture} into topic {row.topic}; no pipeline maintains it."
            )
            return stage, f"{note} To maintain it as a table, add to a pipeline: {maintain_line(row)}"
    near = nearest_name(name, [*marks, *(mark.partition(":")[2] for mark in marks)])
    hint = f"Did you mean {near}? " if near else ""
    raise MissingError(f"no such stage or table: name={name!r}.", fix=f"{hint}List them with: tidemill status")
