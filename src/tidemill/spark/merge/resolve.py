"""One step of the upsert, pure: commands at times [lower, upper) against the mirror as of `lower` → updates.

Invariant (one live row): a key has at most one live row at every time.

    winner     per (key, time) the command of highest order; the commands that it beats are never visible
    chain      several times of one key are resolved in time order, each against the one before
    deletion   of an absent key: nothing
    no-op      a value equal to the live one: nothing, for every writer alike
    truncation a deletion of every key at its place in the order (truncations.py)
    unchanged  a column without a value keeps that of the row before; without that row the command is lost (toast_fill)
    sequence   if the table has one, late commands are left out first (sequence.py)

Invariant (deterministic): the result is a function of the commands and the contents below `lower` alone. Batch
boundaries, writers and retries do not influence it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from tidemill.shards.api import DIFF, TIME, ShardSchema
from tidemill.shards.parts.arrow_rows import (
    Index,
    Mask,
    combine_columns,
    int64s,
    rows_at,
    rows_equal,
    to_mask,
)
from tidemill.shards.parts.row_hash import U64, hash_rows
from tidemill.shards.parts.schema import contents_schema, update_schema
from tidemill.spark.merge.commands import LIVE, ORDER, PARTITION, Commands
from tidemill.spark.merge.key_grouping import group_by_key
from tidemill.spark.merge.sequence import Sequence, filter_late
from tidemill.spark.merge.toast_fill import LostCommand, RejectedCommand, fill_unchanged, has_unchanged
from tidemill.spark.merge.truncations import expand_truncations
from tidemill.spark.predicates.expectations import ExpectationCheck

HashRows = Callable[[pa.Table, tuple[str, ...]], U64]


class MirrorLookup(Protocol):
    """Part of the mirror that `resolve` uses."""

    def lookup(self, keys: pa.Table, hashes: U64) -> tuple[pa.Table, Index]:
        """Return (live rows found, for each given key its row in them or -1). Keys are distinct, sorted by hash."""
        ...

    def live_rows(self, columns: tuple[str, ...] | None = None) -> pa.Table:
        """Return all live rows, sorted by hash. `columns`: only these, which include the key's."""
        ...

    @property
    def empty(self) -> bool:
        """True only if nothing is live."""
        ...


class KeyChanges(msgspec.Struct, frozen=True):
    """Last state of every key that changed, sorted by hash: the form of a run of the mirror. `path` is the file that
    they are mapped from, if the mirror stored them (Mirror.store)."""

    rows: pa.Table
    hashes: U64
    live: Mask
    path: Path | None = None


class Resolved(msgspec.Struct, frozen=True):
    """Result of a step.

    updates: the shard's columns, _time, _diff, for times in [lower, upper); changes: the mirror's next run;
    lost: commands whose values are not all known; each becomes a dead letter before the updates are appended;
    rejected: commands whose row, known only now, violates an expectation;
    tombstones: of a table with a sequence, to be stored before the updates are appended;
    late, revived: numbers of commands, see `Effective`.
    """

    lower: int
    upper: int
    updates: pa.Table
    changes: KeyChanges
    lost: tuple[LostCommand, ...] = ()
    rejected: tuple[RejectedCommand, ...] = ()
    tombstones: pa.Table | None = None
    late: int = 0
    revived: int = 0


def no_changes(schema: ShardSchema) -> KeyChanges:
    return KeyChanges(contents_schema(schema).empty_table(), np.zeros(0, np.uint64), np.zeros(0, bool))


def resolve(
    schema: ShardSchema,
    commands: Commands,
    mirror: MirrorLookup,
    lower: int,
    upper: int,
    hasher: HashRows = hash_rows,
    check: ExpectationCheck | None = None,
) -> Resolved:
    """Resolve commands. All must be AT for (lower, upper): the caller classifies. `check`: of commands that leave
    columns unchanged; all others were checked when they were decoded."""
    rows = expand_truncations(schema, commands, mirror, hasher)
    lost: tuple[LostCommand, ...] = ()
    rejected: tuple[RejectedCommand, ...] = ()
    if has_unchanged(rows):
        filled = fill_unchanged(schema, rows, mirror, hasher, check)
        rows, lost, rejected = filled.rows, filled.lost, filled.rejected
    return replace(_resolve_rows(schema, rows, mirror, lower, upper, hasher), lost=lost, rejected=rejected)


def resolve_in_sequence(
    schema: ShardSchema,
    commands: Commands,
    mirror: MirrorLookup,
    lower: int,
    upper: int,
    sequence: Sequence,
    hasher: HashRows = hash_rows,
) -> Resolved:
    """Resolve commands of a table with a sequence, as `resolve`. None of them leaves columns unchanged."""
    rows = expand_truncations(schema, commands, mirror, hasher)
    if rows.num_rows == 0:
        return _resolve_rows(schema, rows, mirror, lower, upper, hasher)
    found = filter_late(schema, rows, mirror, sequence, upper, hasher)
    resolved = _resolve_rows(schema, found.rows, mirror, lower, upper, hasher)
    return replace(resolved, tombstones=found.tombstones, late=found.late, revived=found.revived)


def _resolve_rows(
    schema: ShardSchema, rows: pa.Table, mirror: MirrorLookup, lower: int, upper: int, hasher: HashRows
) -> Resolved:
    """Resolve commands that have all values."""
    if rows.num_rows == 0:
        return Resolved(lower, upper, update_schema(schema).empty_table(), no_changes(schema))
    key = schema.key
    hashes = hasher(rows, key)
    # The partition only breaks ties between equal offsets of a key that arrived through two partitions.
    minor = (int64s(rows, TIME), int64s(rows, ORDER), int64s(rows, PARTITION))
    order, starts = group_by_key(rows, hashes, key, *minor)
    times = int64s(rows, TIME)[order]

    # A row wins if the next one, in (key, time, order), has another key or another time.
    wins = np.ones(len(order), dtype=bool)
    wins[:-1] = starts[1:] | (times[1:] != times[:-1])
    # The first winner of a key: its key starts after the previous winner and not after this one.
    key_number = np.cumsum(starts)[wins]
    first = np.ones(len(key_number), dtype=bool)
    first[1:] = key_number[1:] != key_number[:-1]

    winners = rows_at(rows, order[wins])
    times, hashes = times[wins], hashes[order][wins]
    live = to_mask(winners.column(LIVE))
    columns = contents_schema(schema).names
    values = [name for name in columns if name not in key]
    contents = winners.select(columns)

    firsts = np.nonzero(first)[0]
    found_rows, found = mirror.lookup(rows_at(contents.select(list(key)), firsts), hashes[firsts])
    pool = pa.concat_tables([contents, found_rows.select(columns)]) if found_rows.num_rows else contents
    pool = combine_columns(pool)
    n = len(times)
    prior = np.arange(n, dtype=np.int64) - 1
    prior[firsts] = np.where(found >= 0, n + found, 0)
    prior_live = np.zeros(n, dtype=bool)
    prior_live[1:] = live[:-1]
    prior_live[firsts] = found >= 0

    changed = prior_live | live
    both = np.nonzero(prior_live & live)[0]
    if len(both):
        changed[both] = ~rows_equal(pool, both, pool, prior[both], values)
    # In the order of a part, so that no sort is needed later: by hash, then time, a retraction before its insertion.
    retract_or_insert = np.stack([changed & prior_live, changed & live], axis=1).ravel()
    chosen = np.flatnonzero(retract_or_insert)
    number, inserts = chosen >> 1, (chosen & 1).astype(bool)
    updates = rows_at(pool, np.where(inserts, number, prior[number]))
    updates = updates.append_column(TIME, pa.array(times[number]))
    updates = updates.append_column(DIFF, pa.array(np.where(inserts, np.int64(1), np.int64(-1))))
    keep = _changed_keys(pool, values, live, changed, first, found)
    changes = KeyChanges(rows_at(contents, keep), hashes[keep], live[keep])
    target = update_schema(schema)
    return Resolved(lower, upper, updates if updates.schema.equals(target) else updates.cast(target), changes)


def _changed_keys(pool: pa.Table, values: list[str], live: Mask, changed: Mask, first: Mask, found: Index) -> Index:
    """Return the last winner of each key whose state differs from the mirror's. `pool`: the contents of the winners,
    then the rows of the mirror; `first`: the winner is its key's first.
    """
    lasts = np.append(np.nonzero(first)[0][1:], len(first)) - 1
    differs = changed[lasts]
    # A key with one winner was compared with the mirror already; a key with several only with its own chain.
    several = ~first[lasts]
    if several.any():
        was_live, is_live = found >= 0, live[lasts]
        differs[several] = (was_live | is_live)[several]
        both = np.nonzero(several & was_live & is_live)[0]
        if len(both):
            differs[both] = ~rows_equal(pool, lasts[both], pool, len(live) + found[both], values)
    keep: Index = lasts[differs]
    return keep
