"""Ownership of tables: decide which of its tables a pipeline may maintain. A shard has one source, independent of its
writers.

Writers of one shard act as one writer if the same source feeds them (any number of identical drivers). If different
sources feed them, each skips what the other has written. So a table is refused, and the refusal is reported, if

    another pipeline's row in the catalogue maintains the shard from another source, or
    this pipeline's own row names another source for the shard, which exists: the file was changed.

So it is if the source is the same topic, whose records are read in another format.

Refused tables are checked again: a table is free when the other pipeline's row is deleted or changed, or the shard is
dropped.

Invariant (no refused table in a row): a row names no refused table, except with the former source of its shard.
Invariant (put, then read): before a pipeline maintains a table, it has put its row and read the others' rows
afterwards. Of two that start at the same time, the one that put its row last sees the other's and yields; if both
yield, one is first at the next check.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from tidemill.base.errors import AS_RETAINED, drop_table_command
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.metastore.catalogue import PipelineRow
from tidemill.shards.registry import shard_exists
from tidemill.spark.formats.record_format import format_difference
from tidemill.spark.stores import Stores

DERIVED = "derived"


class TableOwnership:
    """Ownership check of one pipeline. `find_refused`: {table: a sentence}; empty before `looked` is set. One thread
    calls `refresh`, any may call `wait_ownership`."""

    def __init__(self, wanted: PipelineRow) -> None:
        self.wanted = wanted
        self.refused: dict[str, str] = {}
        self.looked = threading.Event()

    def wait_ownership(self, table: str, ending: threading.Event, pause_s: float = 0.2) -> bool:
        """Wait until the pipeline may maintain the table; False if the pipeline ends first."""
        while not self.looked.is_set() or table in self.refused:
            if ending.wait(pause_s):
                return False
        return True

    def refresh(self, portal: BlockingPortal, stores: Stores) -> None:
        """Put this pipeline's row if it is missing, and update `find_refused`. Raises as storage."""
        catalogue = stores.catalogue
        if self.looked.is_set() and not self.refused:
            if portal.call(catalogue.get(PipelineRow, self.wanted.name)) is None:
                portal.call(catalogue.put(self.wanted))
            return
        begun = self.wanted.tables.keys() - self.refused.keys() if self.looked.is_set() else set[str]()
        rows = portal.call(catalogue.list(PipelineRow))
        own = next((row for row in rows if row.name == self.wanted.name), None)
        changed = changed_tables(self.wanted, own) if own is not None else ()
        shards = {table for table in changed if portal.call(shard_exists(stores.consensus, table))}
        found = find_refused(self.wanted, own, rows, shards, begun)
        portal.call(
            catalogue.put(row_without_refused(self.wanted, own, found, shards))
        )  # put does not rewrite an equal row
        rows = portal.call(catalogue.list(PipelineRow))
        late = find_refused(self.wanted, None, rows, shards, begun)
        if late.keys() - found.keys():
            found |= late
            portal.call(catalogue.put(row_without_refused(self.wanted, own, found, shards)))
        self.refused = found
        self.looked.set()


def changed_tables(wanted: PipelineRow, own: PipelineRow) -> list[str]:
    """Return the tables for which the pipeline's former row has another source, or another format of its records."""
    return [
        table
        for table, fed_by in sorted(wanted.tables.items())
        if own.tables.get(table) != fed_by or _format_change(own, wanted, table)
    ]


def _format_change(before: PipelineRow, now: PipelineRow, table: str) -> str:
    return format_difference(before.formats.get(table, ""), now.formats.get(table, ""))


def find_refused(
    wanted: PipelineRow,
    own: PipelineRow | None,
    rows: Sequence[PipelineRow],
    shards: Collection[str],
    begun: Collection[str] = (),
) -> dict[str, str]:
    """Return {table: why it may not be maintained}.

    `own`: the row that an earlier process of this pipeline put; `shards`: existing shards of the tables that changed
    since that row; `begun`: tables that this process maintains already.
    """
    out = {}
    for table in wanted.tables.keys() - begun:
        other = next((row for row in rows if row.name != wanted.name and _has_other_source(wanted, row, table)), None)
        before = own.tables.get(table) if own is not None else None
        if other is not None:
            out[table] = (
                f"another pipeline maintains this table from another source: table={table} pipeline={other.name}"
                f" from={other.tables[table]} here={wanted.tables[table]}. Rename the table; or remove it from the"
                f" file of {other.name} and restart that pipeline: tidemill pipeline restart {other.name}; or, if it is"
                f" no longer needed: tidemill pipeline delete {other.name}."
            )
            if other.tables[table] == wanted.tables[table] and (change := _format_change(other, wanted, table)):
                out[table] = (
                    f"another pipeline reads the topic of this table in another format: table={table}"
                    f" pipeline={other.name} difference=[{change}]. Declare the same format, or rename the table."
                )
        elif before is not None and table in shards and wanted.tables[table] not in (before, DERIVED):
            out[table] = (
                f"the table had another source before: table={table} before={before} now={wanted.tables[table]}."
                f" Rename the table, or re-create it from the new source, {AS_RETAINED}: {drop_table_command(table)}"
            )
        elif (
            own is not None
            and before is not None
            and table in shards
            and (change := _format_change(own, wanted, table))
        ):
            out[table] = (
                f"the records of the table were read in another format before: table={table} difference=[{change}]."
                f" Rename the table, or re-create it from the topic, {AS_RETAINED}: {drop_table_command(table)}"
            )
    return out


def row_without_refused(
    wanted: PipelineRow, own: PipelineRow | None, refused: Mapping[str, str], shards: Collection[str]
) -> PipelineRow:
    """Return the row of a pipeline without the refused tables, which keep at most their former source."""
    tables, formats = {}, {}
    for table, fed_by in wanted.tables.items():
        row = wanted
        if table in refused:
            if own is None or table not in shards or table not in own.tables:
                continue
            if own.tables[table] == fed_by and not _format_change(own, wanted, table):
                continue
            row = own
        tables[table] = row.tables[table]
        if table in row.formats:
            formats[table] = row.formats[table]
    derived = {table: inputs for table, inputs in wanted.derived.items() if table not in refused}
    return replace(wanted, tables=tables, derived=derived, formats=formats)


def _has_other_source(wanted: PipelineRow, other: PipelineRow, table: str) -> bool:
    """Return whether the other pipeline maintains the table from another source; derived tables compare by their
    inputs."""
    if table not in other.tables:
        return False
    if wanted.tables[table] != other.tables[table] or _format_change(other, wanted, table):
        return True
    here, there = wanted.derived.get(table), other.derived.get(table)
    return here is not None and there is not None and here != there
