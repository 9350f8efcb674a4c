"""Tombstones of a table with a sequence: the sequences of deleted keys, in a shard next to the table (RFC 0013).

    TABLE.tombstones.ID    the key, the sequence, and _deleted_ms: the time of the deletion

ID is that of the table's shard, so that a table that is created again has others.

Invariant (tombstones first): for every key that is deleted below the table's upper, the tombstone is stored before the
table's append. After a crash in between, the next writer finds tombstones at or above the upper: it ignores them until
the table has passed their times. It computes the same tombstones again, and appends only the missing ones.
Invariant (nothing that counts is removed): only tombstones that no command from the table's upper on can meet are
retracted: expired ones, and those of a key with a newer one below the upper.
Invariant (no stale writer): tombstones are appended by compare-and-append at an upper of their shard at which the table
was still at the step's lower. A writer that lacked tombstones finds that it has lost the table.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from tidemill.base.errors import ConflictError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.metastore.backup.restore import attempt_of
from tidemill.shards.api import DIFF, TIME, HistoryLostError, ShardSchema
from tidemill.shards.handle import LogShard
from tidemill.shards.parts.arrow_rows import Index, Mask, combine_columns, int64s, rows_at
from tidemill.shards.parts.row_hash import U64, hash_rows
from tidemill.shards.parts.schema import contents_schema, update_schema
from tidemill.shards.registry import list_tombstones, table_of_tombstones, tombstones_name
from tidemill.shards.state.restore import restored_shard_id
from tidemill.shards.state.stream_registers import is_restored
from tidemill.spark.merge.key_grouping import group_by_key
from tidemill.spark.merge.mirror import Mirror
from tidemill.spark.merge.resolve import KeyChanges
from tidemill.spark.merge.sequence import DELETED_MS, Sequence, SequenceRule, tombstone_schema
from tidemill.spark.stores import Stores

DIRECTORY = "tombstones"
SWEEP_PAUSE_S = 10.0
"""Shortest pause between two sweeps of one process, which read all tombstones of the table."""


class Tombstones:
    """Tombstones of one table, for one thread at a time. Raises as reading and appending to a shard."""

    def __init__(
        self, portal: BlockingPortal, stores: Stores, table: LogShard, rule: SequenceRule, mirror_dir: Path | None
    ) -> None:
        """Open the shard of tombstones, and create it if absent. `mirror_dir`: of the table's mirror; None keeps large
        ones in memory."""
        self.rule = rule
        self._portal = portal
        self._stores = stores
        self._table = table
        self._schema = tombstone_schema(table.schema, rule)
        self._directory = mirror_dir / DIRECTORY if mirror_dir is not None else None
        key = (*self._schema.key, DELETED_MS)
        self._shard = portal.call(
            stores.shard(tombstones_name(table.name, table.shard_id), ShardSchema(self._schema.columns, key))
        )
        self._seen = 0
        """Upper of the shard up to which it was read."""
        self._below = 0
        """Upper of the table: tombstones below it are in the mirror."""
        self._ahead = contents_schema(self._schema).empty_table()
        """Tombstones at or above it, of steps that are not in the table yet."""
        self._mirror = self._empty_mirror()
        self._swept_ms = 0
        self._swept_s: float | None = None
        self._adopt_restored()

    def _adopt_restored(self) -> None:
        """Copy the tombstones that the table had before a restore, which gave it a new id, by one append.

        The former shard stays: until the next checkpoint, a further restore needs it.
        """
        consensus, table, call = self._stores.consensus, self._table, self._portal.call
        if call(self._shard.frontiers())[1] or not call(is_restored(consensus, table.shard_id)):
            return
        attempt = call(attempt_of(consensus))
        found: list[tuple[bool, int, pa.Table]] = []
        for created in call(list_tombstones(consensus, table.name, but=table.shard_id)):
            before = call(self._stores.shard(created.name))
            try:
                _, upper = call(before.frontiers())
                if upper and call(is_restored(consensus, before.shard_id)):
                    direct = restored_shard_id(table_of_tombstones(created.name)[1], attempt) == table.shard_id
                    found.append((direct, upper, call(before.snapshot(upper - 1))))
            finally:
                call(before.aclose())
        # Of the id before this restore, or before an earlier one after which no driver ran.
        _, _, rows = max(found, key=lambda each: each[:2], default=(False, 0, None))
        if rows is not None and rows.num_rows:
            self._append(rows.select(contents_schema(self._schema).names), 1)
            self._forget()

    def _empty_mirror(self) -> Mirror:
        mirror = Mirror(self._schema, directory=self._directory)
        mirror.sweep()
        return mirror

    def close(self) -> None:
        self._portal.call(self._shard.aclose())

    @property
    def sequence(self) -> Sequence:
        return Sequence(self.rule, self)

    def lookup(self, keys: pa.Table, hashes: U64) -> tuple[pa.Table, Index]:
        """Return the newest tombstones of the keys, as Mirror.lookup. They may have expired."""
        return self._mirror.lookup(keys, hashes)

    def live_rows(self, columns: tuple[str, ...] | None = None) -> pa.Table:
        return self._mirror.live_rows(columns)

    @property
    def empty(self) -> bool:
        return self._mirror.empty

    # reading ----------------------------------------------------------------------------------------
    def follow(self, upper: int) -> None:
        """Read what any writer appended. `upper`: of the table's mirror, which was brought up to date before."""
        _, end = self._portal.call(self._shard.frontiers())
        if end > self._seen:
            try:
                self._read(end)
            except HistoryLostError:
                self._forget()
                self._read(end)
        self._advance(upper)

    def _read(self, end: int) -> None:
        shard = self._shard
        if not self._seen:
            self._add(self._portal.call(shard.snapshot(end - 1)))
        batches = self._portal.call(shard.batches(self._seen)) if self._seen else []
        for batch in batches:
            rows = self._portal.call(shard.read_batch(batch, self._seen, batch.upper))
            # A retracted tombstone has no effect on later steps, so retractions need not be read.
            self._add(rows.filter(pa.array(int64s(rows, DIFF) > 0)))
        self._seen = max([end, *(batch.upper for batch in batches)])

    def _forget(self) -> None:
        self._seen = 0
        self._mirror.runs = []
        self._mirror = self._empty_mirror()
        self._ahead = self._ahead.slice(0, 0)

    def _add(self, rows: pa.Table) -> None:
        target = contents_schema(self._schema)
        rows = combine_columns(rows.select(target.names).cast(target))
        ahead = int64s(rows, DELETED_MS) >= self._below
        self._ahead = combine_columns(pa.concat_tables([self._ahead, rows.filter(pa.array(ahead))]))
        self._mirror_newest(rows.filter(pa.array(~ahead)))

    def _advance(self, upper: int) -> None:
        """Move the tombstones below `upper` into the mirror."""
        self._below = max(self._below, upper)
        passed = int64s(self._ahead, DELETED_MS) < self._below
        if passed.any():
            rows = self._ahead.filter(pa.array(passed))
            self._ahead = combine_columns(self._ahead.filter(pa.array(~passed)))
            self._mirror_newest(rows)

    def _mirror_newest(self, rows: pa.Table) -> None:
        """Add tombstones to the mirror, which has the newest of each key."""
        if not rows.num_rows:
            return
        rows = combine_columns(rows)
        key = list(self._schema.key)
        newest = _newest_per_key(self._schema, rows)
        rows = rows_at(rows, newest)
        hashes = hash_rows(rows, self._schema.key)
        found, at = self._mirror.lookup(rows.select(key), hashes)
        newer = at < 0
        if found.num_rows:
            newer |= int64s(rows, DELETED_MS) > int64s(found, DELETED_MS)[np.maximum(at, 0)]
        changes = KeyChanges(rows.filter(pa.array(newer)), hashes[newer], np.ones(int(newer.sum()), dtype=bool))
        self._mirror.advance(changes, self._mirror.upper, self._mirror.upper)

    # writing ----------------------------------------------------------------------------------------
    def put(self, new: pa.Table, lower: int) -> bool:
        """Store those of the tombstones of a step from `lower` that are not stored yet.

        False if the table is not at `lower` any more: a peer was first, and the step must be computed again.
        """
        while new.num_rows:
            self.follow(lower)
            if self._portal.call(self._table.frontiers())[1] != lower:
                return False
            missing = new.filter(pa.array(self._is_missing(new)))
            if not missing.num_rows or self._append(missing, 1):
                break
        return True

    def _is_missing(self, new: pa.Table) -> Mask:
        both = combine_columns(pa.concat_tables([self._ahead, new]))
        key = (*self._schema.key, DELETED_MS)
        order, starts = group_by_key(both, hash_rows(both, key), key)
        first = np.zeros(both.num_rows, dtype=bool)
        first[order[starts]] = True  # the sort is stable: of equal rows, one that is stored comes first
        return first[self._ahead.num_rows :]

    def _append(self, rows: pa.Table, diff: int) -> bool:
        """Append tombstones, or their retractions; False if a peer appended first."""
        lower, count = self._seen, rows.num_rows
        at = max(lower, int(int64s(rows, DELETED_MS).max()))
        updates = rows.append_column(TIME, pa.array(np.full(count, at, dtype=np.int64)))
        updates = updates.append_column(DIFF, pa.array(np.full(count, diff, dtype=np.int64)))
        updates = updates.cast(update_schema(self._shard.schema))

        async def run() -> None:
            part = await self._shard.write_part(updates)
            await self._shard.compare_and_append(lower, at + 1, (part,), self._stores.rand.nonce())

        try:
            self._portal.call(run())
        except ConflictError:
            return False
        self._seen = at + 1
        if diff > 0:
            self._add(rows)
        return True

    def sweep(self, upper: int) -> None:
        """Retract the tombstones that no command from the table's `upper` on can meet, from time to time.

        They stay for a quarter of their time more: a checkpoint reads a table before its tombstones, and a restored
        table needs the tombstones at its upper.
        """
        clock_s = self._stores.clock.monotonic_s()
        due = upper - self._swept_ms >= self.rule.keep_ms // 4
        if not due or (self._swept_s is not None and clock_s - self._swept_s < SWEEP_PAUSE_S):
            return
        self._swept_ms, self._swept_s = upper, clock_s
        self.follow(upper)
        if not self._seen:
            return
        columns = contents_schema(self._schema).names
        stored = combine_columns(self._portal.call(self._shard.snapshot(self._seen - 1)).select(columns))
        deleted = int64s(stored, DELETED_MS)
        horizon = upper - self.rule.keep_ms // 4
        gone = deleted + self.rule.keep_ms <= horizon
        (below,) = np.nonzero(deleted < horizon)
        newest = below[_newest_per_key(self._schema, rows_at(stored, below))]
        gone[np.setdiff1d(below, newest)] = True
        if gone.any() and self._append(stored.filter(pa.array(gone)), -1):
            seen = self._seen
            self._forget()
            self._add(stored.filter(pa.array(~gone)))
            self._seen = seen


def _newest_per_key(schema: ShardSchema, rows: pa.Table) -> Index:
    """Return the newest row of each key, sorted by hash."""
    hashes = hash_rows(rows, schema.key)
    order, starts = group_by_key(rows, hashes, schema.key, int64s(rows, DELETED_MS))
    return order[np.append(np.flatnonzero(starts)[1:], len(order)) - 1] if len(order) else order
