"""Pipelines for a terminal: their state read from the stores, and its lines of text."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tidemill.base.status.drivers import driver_reports
from tidemill.base.status.status import StatusReport
from tidemill.cli.context import OpenStores
from tidemill.cli.output.data_lines import Row
from tidemill.cli.output.text_table import Column
from tidemill.consensus.status.board import StatusBoard
from tidemill.console.views.pipelines import PipelineView, pipeline_views
from tidemill.metastore.catalogue import PipelineRow

if TYPE_CHECKING:
    from tidemill.shards.state.state import ShardState


def read_driver_reports(opened: OpenStores, name: str) -> list[StatusReport]:
    return driver_reports(opened.portal.call(StatusBoard(opened.consensus, opened.rand).reports()), name)


def read_pipeline_views(opened: OpenStores, counted: str = "") -> dict[str, PipelineView]:
    """Return the view of every pipeline; the tables of `counted` get their number of rows. Raises the errors of the
    stores."""
    from tidemill.shards.registry import read_shards

    portal = opened.portal
    files = {name: section.file for name, section in opened.config.pipeline.items()}
    shards = {state.name: state for state in portal.call(read_shards(opened.consensus))}
    views = pipeline_views(
        files,
        {row.name: row for row in portal.call(opened.catalogue.list(PipelineRow))},
        shards,
        portal.call(StatusBoard(opened.consensus, opened.rand).reports()),
        opened.clock.now_ms(),
        {name: _file_modified_ms(file) for name, file in files.items()},
    )
    for view in views.values():  # a replay removes letters by further updates
        if view.dead_letters:
            view.dead_letters = _count_letters(opened, shards[view.letters])
    for table in views[counted].tables if counted in views else ():
        table["rows"] = known_row_count(shards.get(table["table"]))
    return views


def _count_letters(opened: OpenStores, state: ShardState) -> int:
    from tidemill.console.dead_letter_read import read_letters
    from tidemill.spark.decode.dead_letter_rows import EXPIRED
    from tidemill.spark.stored_letters import letters_at

    shard, count = opened.shard(state.name), known_row_count(state)
    if count is None:
        return opened.portal.call(read_letters(shard, 0)).total
    expired: int = letters_at(opened.portal, shard, [EXPIRED]).num_rows
    return count - expired  # one row is the number of expired letters


def known_row_count(state: ShardState | None) -> int | None:
    """Return the number of rows of a table at its newest time, computed without any object; None if that takes a read.

    A merge leaves one update for each row of a keyed table. Small parts are stored in the state itself.
    """
    if state is None or not state.upper:
        return None
    first, count, rest = state.batches[:1], 0, state.batches
    if first and state.schema.key and first[0].summed_to >= first[0].upper - 1:
        count, rest = sum(part.rows for part in first[0].parts), state.batches[1:]
    if any(part.object_key for batch in rest for part in batch.parts):
        return None
    from tidemill.shards.read.hash_ranges import count_rows

    return count + count_rows(rest, state.upper - 1, lambda part: part.inline)


def _file_modified_ms(file: str) -> int:
    """Return when the pipeline's file was last written, if this machine has the file; otherwise 0."""
    try:
        return os.stat(file).st_mtime_ns // 1_000_000 if file else 0
    except OSError:
        return 0


def format_derived_table(table: dict[str, Any]) -> str:
    """Describe how a derived table is maintained, and why."""
    groups, because = table["last_groups"], table["last_whole_why"]
    last = "" if groups is None else f"; last round {'whole' if groups < 0 else f'{groups:,} groups'}"
    return f"{table['maintained']}: {table['maintained_why']}{last}" + (f", because {because}" if because else "")


def format_count(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}"


def format_lag(lag_ms: int | None) -> str:
    return "unknown" if lag_ms is None else f"{lag_ms} ms"


def format_blocker(table: Row) -> str:
    """Return what blocks a table, and why."""
    return ": ".join(part for part in (table["held_by"], table["reason"]) if part)


TABLE_COLUMNS = (
    Column("table"),
    Column("from", lambda table: list(table["inputs"]) if "inputs" in table else table["input"]),
    Column("upper"),
    Column("state", lambda table: table["state"] or "not reported"),
    Column("lag", lambda table: format_lag(table["lag_ms"]), right=True),
    Column("rows", lambda table: format_count(table["rows"]), right=True),
    Column("written", lambda table: format_count(table["written"]), right=True),
    Column("updates", lambda table: f"{table['updates']:,}", right=True),
    Column("seats", lambda table: len(table["seats"])),
    Column("blocked by", format_blocker),
)


def format_driver_note(instance: Row) -> str:
    """Return the pipelines that share the driver, and whether it is older than its file."""
    shared = f"shared with {', '.join(instance['with'])}" if instance["with"] else ""
    older = "older than its file: restart it with `tidemill pipeline restart`" if instance["older_than_file"] else ""
    return "; ".join(part for part in (shared, older) if part)


def format_driver_state(instance: Row) -> str:
    silent = f" for {instance['report_age_ms'] // 1000} s" if instance["state"] == "silent" else ""
    return f"{instance['state']}{silent}"


DRIVER_COLUMNS = (
    Column("driver", "process"),
    Column("state", format_driver_state),
    Column("pid"),
    Column("host"),
    Column("age", lambda each: "" if each["age_s"] is None else f"{each['age_s']} s", right=True),
    Column("tables"),
    Column("master"),
    Column("note", format_driver_note),
)
