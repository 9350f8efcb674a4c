"""Changes of a table → changes of its versions (slowly changing dimension of type 2), by columns. Pure.

    insertion                          opens a version, from its time on
    change of a tracked column         closes the current version and opens one
    change of other columns            changes the current version in place
    deletion                           closes the current version

Invariant (current version): the columns of a key's current version are those of its live row in the table. So only the
time from which on it is valid has to be known; all other values are in the retraction.
Invariant (one change per time): a table has at most one retraction and one insertion of a key at one time, so a version
is never empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidemill.base.errors import CorruptError, InvalidError
from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.shards.parts.arrow_rows import Index, Mask, combine_columns, int64s, rows_at, rows_equal
from tidemill.shards.parts.row_hash import hash_rows
from tidemill.shards.parts.schema import arrow_type, check_schema, contents_schema, update_schema
from tidemill.spark.merge.key_grouping import group_by_key
from tidemill.spark.merge.resolve import MirrorLookup

VALID_FROM, VALID_TO, IS_CURRENT = "valid_from", "valid_to", "is_current"
_TIMESTAMP = arrow_type("timestamp")


class _Changes(NamedTuple):
    """Changes of keys at times, by key and time. `old`, `new`: rows in `rows`, or −1; `first`: of its key; `opens`: it
    opens a version."""

    rows: pa.Table
    hashes: npt.NDArray[np.uint64]
    old: Index
    new: Index
    first: Mask
    opens: Mask
    at_ms: Index


def history_schema(table: str, schema: ShardSchema) -> ShardSchema:
    """Return the schema of the versions of a table, with the defaults of its columns. Raises InvalidError (no key, a
    column of that name)."""
    taken = {VALID_FROM, VALID_TO, IS_CURRENT} & {column.name for column in schema.columns}
    if taken or not schema.key:
        why = f"has a column {min(taken)}" if taken else "has no key"
        raise InvalidError(f"a table that {why} can have no history: table={table}.", fix="Derive another table first.")
    own = tuple(Column(column.name, column.type, column.default) for column in schema.columns)
    added = Column(VALID_FROM, "timestamp"), Column(VALID_TO, "timestamp"), Column(IS_CURRENT, "bool")
    return check_schema(ShardSchema((*own, *added), (*schema.key, VALID_FROM)), defaults=True)


def current_schema(schema: ShardSchema) -> ShardSchema:
    """Return the schema of key → start of its current version. `schema`: of the table."""
    keys = tuple(Column(column.name, column.type) for column in schema.columns if column.name in schema.key)
    return ShardSchema((*keys, Column(VALID_FROM, "timestamp")), schema.key)


def tracked_columns(table: str, schema: ShardSchema, track: Sequence[str]) -> list[str]:
    """Return the columns whose changes begin a version; without `track` all but the key. Raises InvalidError."""
    names = [column.name for column in schema.columns]
    for name in track:
        if name not in names or name in schema.key:
            why = "is in the key" if name in schema.key else "does not exist"
            raise InvalidError(f"a tracked column {why}: table={table} column={name}.", fix="Correct track=….")
    return list(track) or [name for name in names if name not in schema.key]


def first_versions(output: ShardSchema, rows: pa.Table, time_ms: int) -> pa.Table:
    """Return the insertions of the first version of each row, valid from `time_ms` on."""
    times = np.full(rows.num_rows, time_ms, dtype=np.int64)
    return _versions(output, rows, times * 1000, None, times, 1)


def version_updates(
    schema: ShardSchema, output: ShardSchema, track: Sequence[str], updates: pa.Table, current: MirrorLookup
) -> pa.Table:
    """Return the updates of the history for updates of the table, all of an interval.

    `schema`: of the table; `current`: key → start of its current version, before the interval. Raises CorruptError if
    the two do not match.
    """
    if not updates.num_rows:
        return update_schema(output).empty_table()
    rows, key = combine_columns(updates), schema.key
    hashes, times, diffs = hash_rows(rows, key), int64s(rows, TIME), int64s(rows, DIFF)
    order, starts = group_by_key(rows, hashes, key, times, diffs)
    begins: Mask = starts.copy()
    begins[1:] |= times[order][1:] != times[order][:-1]
    change = np.cumsum(begins) - 1  # of each row, the change (key, time) that it belongs to
    count = int(change[-1]) + 1
    old, new = (_row_of_each(change, order, diffs[order] == diff, count) for diff in (-1, 1))
    if (np.abs(diffs) != 1).any() or np.count_nonzero(old >= 0) + np.count_nonzero(new >= 0) != len(order):
        raise CorruptError("a key changes twice at one time.")
    at_ms, first = times[order][begins], starts[begins]

    same = np.zeros(count, dtype=bool)
    (both,) = np.nonzero((old >= 0) & (new >= 0))
    same[both] = rows_equal(rows, old[both], rows, new[both], track)
    opens, closes, in_place = (new >= 0) & ~same, (old >= 0) & ~same, same
    changes = _Changes(rows, hashes, old, new, first, opens, at_ms)
    since_us = _starts_before(schema, changes, current)
    pieces = [
        (old, closes | in_place, since_us, None, -1),
        (old, closes, since_us, at_ms, 1),
        (new, in_place, since_us, None, 1),
        (new, opens, at_ms * 1000, None, 1),
    ]
    out = []
    for source, chosen, valid_from, valid_to, diff in pieces:
        some = rows_at(rows, source[chosen])
        ends = None if valid_to is None else valid_to[chosen] * 1000
        out.append(_versions(output, some, valid_from[chosen], ends, at_ms[chosen], diff))
    return pa.concat_tables(out)


def current_changes(current: ShardSchema, updates: pa.Table) -> pa.Table:
    """Return the updates of key → start of its current version, from updates of the history.

    A change in place yields none: it opens and closes no version.
    """
    is_current = np.asarray(updates.column(IS_CURRENT).to_numpy(), dtype=bool)
    times, inserts = int64s(updates, TIME), int64s(updates, DIFF) > 0
    started = np.asarray(updates.column(VALID_FROM).cast(pa.int64()).to_numpy(), dtype=np.int64)
    opens, closes = inserts & is_current & (started == times * 1000), inserts & ~is_current
    chosen = opens | closes
    rows = updates.filter(pa.array(chosen)).select([*contents_schema(current).names, TIME])
    return rows.append_column(DIFF, pa.array(np.where(closes[chosen], np.int64(-1), np.int64(1))))


def _row_of_each(change: Index, order: Index, mask: Mask, count: int) -> Index:
    """Return for each change its row where `mask`, or -1."""
    out = np.full(count, -1, dtype=np.int64)
    out[change[mask]] = order[mask]
    return out


def _starts_before(schema: ShardSchema, changes: _Changes, current: MirrorLookup) -> Index:
    """Return for each change the start (µs) of the version before it, where there is one.

    It is the time of the last change of the key that opened a version, or else that in `current`.
    """
    first, had = changes.first, changes.old >= 0
    asked = np.where(had, changes.old, changes.new)[first]
    found_rows, found = current.lookup(rows_at(changes.rows.select(list(schema.key)), asked), changes.hashes[asked])
    if ((found >= 0) != had[first]).any():
        raise CorruptError(
            "the history does not continue the table.", fix="Drop the history; the pipeline re-creates it."
        )
    known = np.asarray(found_rows.column(VALID_FROM).cast(pa.int64()).to_numpy(), dtype=np.int64)
    before = np.zeros(len(asked), dtype=np.int64)
    before[found >= 0] = known[found[found >= 0]]
    places = np.arange(len(first))
    begin = np.maximum.accumulate(np.where(first, places, 0))
    opened = np.concatenate([[-1], np.maximum.accumulate(np.where(changes.opens, places, -1))[:-1]])
    number = np.cumsum(first) - 1
    out: Index = np.where(opened >= begin, changes.at_ms[np.maximum(opened, 0)] * 1000, before[number])
    return out


def _versions(
    output: ShardSchema, rows: pa.Table, from_us: Index, to_us: Index | None, at_ms: Index, diff: int
) -> pa.Table:
    count = rows.num_rows
    extra: dict[str, Any] = {
        VALID_FROM: pa.array(from_us, pa.int64()).cast(_TIMESTAMP),
        VALID_TO: pa.nulls(count, _TIMESTAMP) if to_us is None else pa.array(to_us, pa.int64()).cast(_TIMESTAMP),
        IS_CURRENT: pa.array(np.full(count, to_us is None)),
        TIME: pa.array(at_ms, pa.int64()),
        DIFF: pa.array(np.full(count, diff, dtype=np.int64)),
    }
    target = update_schema(output)
    return pa.Table.from_arrays(
        [extra[f.name] if f.name in extra else rows.column(f.name) for f in target], schema=target
    )
