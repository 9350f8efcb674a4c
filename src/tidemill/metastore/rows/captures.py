"""Captured databases and their tables, one row a table: no row grows with the number of something else.

capture         03 | "" | name text
                system_id, slot, publication, generation, snapshot_done, topics map, snapshot_lsn,
                snapshots map of maps, columns map of arrays of maps, restored
captured table  07 | "" | capture text | table text
                topic, state, reason, fix, parked_lsn, since_ms, oid, generation, snapshot map or nil,
                columns array of maps, recopy, partitions array or nil

The three maps of a capture's row are of the time before its tables had rows of their own: `of_old` reads them, and
the next session of the capture writes them apart and empties them.
"""

from __future__ import annotations

import msgspec

from tidemill.metastore.rows.family import Family
from tidemill.metastore.rows.keys import Column, Kind


class TableSnapshot(msgspec.Struct, frozen=True):
    """One captured table's finished initial snapshot: what the stream must skip, and where its topic began.

    xmin, xmax, xip     pg_current_snapshot() of the copying transaction (64-bit xids)
    lsn                 WAL insert position right after that snapshot: a later commit is never in it
    offsets             next offset per partition of the topic when the copy ended
    """

    xmin: int
    xmax: int
    xip: tuple[int, ...]
    lsn: int
    rows: int
    offsets: tuple[int, ...]


class CapturedColumn(msgspec.Struct, frozen=True):
    """`type_name` is format_type's text; `key_index` its place in the primary key, -1 when not part of it.

    `type_oid` and `type_mod` are what the stream says of the type; 0 = not known (a row of an older version).
    """

    name: str
    type_name: str
    key_index: int
    type_oid: int = 0
    type_mod: int = -1


class CaptureRow(msgspec.Struct, frozen=True):
    """A captured database: its tables and the topic of each. `generation` grows when a snapshot starts over."""

    name: str
    system_id: str
    slot: str
    publication: str
    generation: int
    snapshot_done: bool
    topics: dict[str, str] = {}
    """schema.table → topic name"""
    snapshot_lsn: int = 0
    snapshots: dict[str, TableSnapshot] = {}
    """schema.table → its finished snapshot; a table that is captured but absent here starts over"""
    columns: dict[str, tuple[CapturedColumn, ...]] = {}
    """schema.table → its columns as of its snapshot, in table order: what a pipeline makes its shard of"""
    restored: bool = False
    """Written by a restore: the slot may be ahead of what came back. The next session compares, and clears it."""


class CaptureTableRow(msgspec.Struct, frozen=True):
    """One table of a captured database, by its name (capture.naming): what the stream carries of it, or why nothing.

    state        reason, fix                    parked_lsn
    captured     -                              0                    it flows, or is being copied (no `snapshot` yet)
    parked       the difference; the way out    first commit not     the topic holds every commit below, none from
                                                carried              there on: only a new copy heals it
    dropped      that it is gone                same                 gone from the source, or not wanted any more
    refused      why; what to change            0                    cannot be captured as it is; tried again
    left         why; what to change            0                    a pattern names it, but it is of no such kind

    `columns`: as of its snapshot, in table order: what a pipeline makes its shard of. `generation` grows when the
    table is copied again, into a new topic. `recopy`: an operator asked for that.
    """

    capture: str
    table: str
    topic: str = ""
    state: str = "captured"
    reason: str = ""
    fix: str = ""
    parked_lsn: int = 0
    since_ms: int = 0
    oid: int = 0
    generation: int = 0
    snapshot: TableSnapshot | None = None
    columns: tuple[CapturedColumn, ...] = ()
    recopy: bool = False
    partitions: tuple[int, ...] | None = None
    """Oids of the partitions whose rows its topic has; None = not known"""

    @property
    def flows(self) -> bool:
        """Its topic holds it as of now, but for what is under way."""
        return self.state == "captured" and self.snapshot is not None


CAPTURES = Family(0x03, "capture", CaptureRow, Column("name", Kind.TEXT), own_entity=False)
CAPTURE_TABLES = Family(
    0x07, "captured table", CaptureTableRow, Column("capture", Kind.TEXT), Column("table", Kind.TEXT), own_entity=False
)


def of_old(row: CaptureRow) -> list[CaptureTableRow]:
    """The tables that an older version kept within the capture's row."""
    return [
        CaptureTableRow(
            row.name, table, topic, generation=row.generation, snapshot=row.snapshots.get(table),
            columns=row.columns.get(table, ()),
        )
        for table, topic in row.topics.items()
    ]  # fmt: skip
