"""Columns of a paused table that a schema change left alone: shapes of these columns continue from the stream. Pure.

A topic and a shard have all columns of a table, so a change of any column pauses them. A shape of some columns needs
the stream only, which carries the table's new rows whether the table is paused, re-snapshotted, or neither. The shape
stays exact if each of its columns is the same column as before and its stored values did not change.

Invariant (unchanged column): a column is unchanged if its row in pg_attribute is (number, name, type, and the
transaction that last wrote that row), and if the types that it consists of are read as before. Renaming a column,
re-creating it, or changing its values by ALTER TYPE … USING writes that row, even if the change is reversed
immediately. Rewriting rows because of another column does not.

Invariant (key and partitions): the key and the partitions must be unchanged, because rows come and go with a partition
without a message in the stream.

Invariant (valid baseline): the description that a column is compared with was read while the catalogue described the
table as its row does.

Invariant (no missing change): the table is published by the same publication rows under which it was paused, and the
slot is not confirmed beyond what a session of this process reported to PostgreSQL. In doubt the stream ends for all
shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import msgspec
from msgspec.structs import replace

from tidemill.capture.catalog.columns import TableAttributes
from tidemill.capture.catalog.schema_versions import (
    describe_altered_types,
    describe_recreated_columns,
    targets_of_attributes,
)
from tidemill.capture.catalog.type_dependencies import is_compatible_type, serialize_type
from tidemill.metastore.catalogue import CaptureTableRow


class FollowedTable(msgspec.Struct, frozen=True):
    """A table that is paused, or was re-snapshotted since. `publication`: as in CaptureTableRow. `columns`: the
    unchanged ones.
    """

    table: str
    before: TableAttributes
    publication: tuple[int, ...]
    columns: frozenset[str]


def find_unaltered_columns(before: TableAttributes, now: TableAttributes | None) -> frozenset[str]:
    """Return the names of the unchanged columns; empty if the key or the partitions changed."""
    if now is None or now.leaves != before.leaves or now.key != before.key:
        return frozenset()
    found = now.by_name
    same = frozenset(
        column.name
        for column in before.columns
        if column.name in found
        and _column_identity(before, column.name) == _column_identity(now, column.name)
        and _is_type_unchanged(before, now, column.type_oid)
    )
    return same if same.issuperset(before.key) else frozenset()


def _column_identity(attributes: TableAttributes, name: str) -> tuple[int, int, int, int, str]:
    column = attributes.by_name[name]
    return column.attnum, column.type_oid, column.type_mod, column.key_index, column.written


def _is_type_unchanged(before: TableAttributes, now: TableAttributes, type_oid: int) -> bool:
    if type_oid not in before.types:
        return True
    return type_oid in now.types and is_compatible_type(serialize_type(before.types[type_oid]), now.types[type_oid])


def is_valid_baseline(row: CaptureTableRow, found: TableAttributes) -> bool:
    """Return whether the database describes the table as its row does, which makes `found` a valid baseline."""
    if describe_recreated_columns(row, found) or describe_altered_types(row, found):
        return False
    key = [c.name for c in sorted((c for c in row.columns if c.key_index >= 0), key=lambda c: c.key_index)]
    ours = [(c.name, c.type_oid, c.type_mod) for c in row.columns]
    return found.key == key and ours == [(t.name, t.type_oid, t.type_mod) for t in targets_of_attributes(found)]


class FollowedTables:
    """Paused tables of one capture that shapes follow, over all its sessions.

    `on_narrow(oid, reason, columns)`: of the shapes that follow a table, only those of these columns remain; returns
    whether there are any. Synchronous; each session sets it.
    """

    def __init__(self) -> None:
        self.on_narrow: Callable[[int, str, frozenset[str]], bool] = lambda *_: False
        self._described: dict[int, TableAttributes] = {}
        self._followed: dict[int, FollowedTable] = {}
        self._confirmed_lsn = -1

    @property
    def oids(self) -> frozenset[int]:
        return frozenset(self._followed)

    def get(self, oid: int) -> FollowedTable | None:
        return self._followed.get(oid)

    def columns(self, oid: int) -> frozenset[str]:
        """Return the columns whose shapes continue; empty if the table is not followed."""
        followed = self._followed.get(oid)
        return followed.columns if followed is not None else frozenset()

    def store_baseline(self, row: CaptureTableRow, found: TableAttributes) -> None:
        """Store the database's description of a table that flows, if it is a valid baseline."""
        if row.is_streaming and is_valid_baseline(row, found):
            self._described[row.oid] = found

    def columns_to_follow(self, row: CaptureTableRow, found: TableAttributes | None) -> frozenset[str]:
        """Return the columns whose shapes may continue, for a table that flows, or that is now paused at a lower
        position.
        """
        if found is not None and row.oid in self._followed:
            return self.narrow_columns(row.oid, found)
        before = self._described.get(row.oid)
        return find_unaltered_columns(before, found) if before is not None and row.is_streaming else frozenset()

    def record_pause(self, row: CaptureTableRow, columns: frozenset[str], followed: bool) -> None:
        """Note whether shapes of only these columns follow the table."""
        if not followed or not columns:
            self.end(row.oid)
        elif row.oid not in self._followed:
            self._followed[row.oid] = FollowedTable(row.table, self._described[row.oid], row.publication, columns)

    def narrow_columns(self, oid: int, found: TableAttributes | None) -> frozenset[str]:
        """Reduce the columns of a followed table to those that are still unchanged, and return them."""
        followed = self._followed[oid]
        columns = followed.columns & find_unaltered_columns(followed.before, found)
        self._followed[oid] = replace(followed, columns=columns)
        return columns

    def update_columns(
        self, oid: int, found: TableAttributes | None, reason: str = "its table's definition changed"
    ) -> None:
        """Update the unaffected columns of a followed table from the database's description; None = the stream lacks
        changes.
        """
        if oid in self._followed:
            self.narrow_columns(oid, found)
            self.end_if_unfollowed(oid, reason)

    def end_if_unfollowed(self, oid: int, reason: str = "") -> None:
        """Stop following a table that no shape follows any more, so that it is paused like any other."""
        if not self.on_narrow(oid, reason, self.columns(oid)):
            self.end(oid)

    def end(self, oid: int) -> None:
        self._followed.pop(oid, None)

    def forget_others(self, oids: Collection[int]) -> None:
        """Forget all other tables, so that dropped ones do not accumulate in a long session."""
        for oid in self._described.keys() - oids:
            del self._described[oid]

    # sessions -------------------------------------------------------------------------------------
    def record_confirmed(self, lsn: int) -> None:
        """Note that a session ends and has confirmed at most this LSN (inclusive) to PostgreSQL."""
        self._confirmed_lsn = max(self._confirmed_lsn, lsn)

    def begin_session(
        self,
        rows: Collection[CaptureTableRow],
        found: Mapping[int, TableAttributes],
        published: Mapping[int, tuple[int, ...]],
        confirmed_lsn: int,
    ) -> dict[int, frozenset[str]]:
        """Begin a session and return the columns whose shapes continue, by oid. A table that flows again is no longer
        followed.
        """
        by_oid = {row.oid: row for row in rows if row.oid}
        goes_on: dict[int, frozenset[str]] = {}
        for oid, followed in list(self._followed.items()):
            row = by_oid.get(oid)
            whole = published.get(oid) == followed.publication and confirmed_lsn <= self._confirmed_lsn
            if whole and row is not None and row.table == followed.table and self.narrow_columns(oid, found.get(oid)):
                goes_on[oid] = self.columns(oid)
            else:
                self.end(oid)
            if row is not None and row.is_streaming:
                self.end(oid)
        self.forget_others(by_oid.keys())
        for oid, attributes in found.items():
            if oid in by_oid:
                self.store_baseline(by_oid[oid], attributes)
        return goes_on
