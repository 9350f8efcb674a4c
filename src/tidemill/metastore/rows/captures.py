"""Captured databases.

capture    03 | "" | name text
           system_id, slot, publication, generation, snapshot_done, topics map, snapshot_lsn,
           snapshots map of maps, columns map of arrays of maps, restored
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
    """`type_name` is format_type's text; `key_index` its place in the primary key, -1 when not part of it."""

    name: str
    type_name: str
    key_index: int


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


CAPTURES = Family(0x03, "capture", CaptureRow, Column("name", Kind.TEXT), own_entity=False)
