"""Truncations as deletions of keys, by columns. Pure.

    key with commands     belongs to the partition of its last command; only truncations of that partition apply to it
    key of the mirror     without commands: every truncation applies, as no command of the step competes with it
    first of several      between two commands of a key only the first truncation is a deletion: after it the key is
                          absent already
    after a deletion      it is one too: in a table with a sequence the deletion before it may be late, and the row live

Invariant (bounded expansion): a step has at most one deletion per command and one per live row of the mirror, however
many truncations it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from tidemill.shards.api import TIME, ShardSchema
from tidemill.shards.parts.arrow_rows import Index, combine_columns, int64s, values_at
from tidemill.spark.merge.commands import BEFORE_ALL, LIVE, ORDER, PARTITION, Commands, command_schema, concat_commands
from tidemill.spark.merge.key_grouping import group_by_key

if TYPE_CHECKING:
    from tidemill.spark.merge.resolve import HashRows, MirrorLookup


def expand_truncations(schema: ShardSchema, commands: Commands, mirror: MirrorLookup, hasher: HashRows) -> pa.Table:
    """Return the commands, followed by the deletions of the keys that a truncation applies to."""
    rows, key = commands.rows, list(schema.key)
    if not commands.truncates or (mirror.empty and _begin_everything(commands)):
        return rows
    keys = combine_columns(pa.concat_tables([rows.select(key), mirror.live_rows(schema.key)]))
    if not keys.num_rows:
        return rows
    places = _Places(commands)
    at, truncation = _find_deletions(schema, keys, rows.num_rows, places, hasher)
    if not len(at):
        return rows
    extra: dict[str, Any] = {
        TIME: places.times[truncation],
        ORDER: places.orders[truncation],
        PARTITION: places.partitions[truncation].astype(np.int32),
        LIVE: np.zeros(len(at), dtype=bool),
    }
    target = command_schema(schema)
    arrays = [
        pa.array(extra[field.name])
        if field.name in extra
        else values_at(keys.column(field.name), at)
        if field.name in key
        else pa.nulls(len(at), field.type)
        for field in target
    ]
    return combine_columns(concat_commands([rows, pa.Table.from_arrays(arrays, schema=target)]))


def _begin_everything(commands: Commands) -> bool:
    """Return whether every truncation precedes every command."""
    first_ms = int(int64s(commands.rows, TIME).min()) if commands.rows.num_rows else None
    return all(t.order == BEFORE_ALL and (first_ms is None or t.time_ms <= first_ms) for t in commands.truncates)


class _Places:
    """Places of the truncations, ascending, and of all commands in one order: by time, order, partition.

    `ranks` of the commands and `truncation_ranks` are dense and comparable. A truncation is after a command of the same
    rank.
    """

    def __init__(self, commands: Commands) -> None:
        some = sorted({(t.time_ms, t.order, t.partition) for t in commands.truncates})
        truncations = np.array(some, dtype=np.int64).reshape(-1, 3)
        self.times, self.orders, self.partitions = truncations.T
        rows = commands.rows
        self.minor = int64s(rows, TIME), int64s(rows, ORDER), int64s(rows, PARTITION)
        columns = [np.concatenate(pair) for pair in zip(self.minor, truncations.T, strict=True)]
        order = np.lexsort(columns[::-1])
        rises = np.zeros(len(order), dtype=bool)
        for column in columns:
            rises[1:] |= column[order[1:]] != column[order[:-1]]
        ranks = np.empty(len(order), dtype=np.int64)
        ranks[order] = np.cumsum(rises)
        self.ranks, self.truncation_ranks = ranks[: rows.num_rows], ranks[rows.num_rows :]


def _find_deletions(
    schema: ShardSchema, keys: pa.Table, count: int, places: _Places, hasher: HashRows
) -> tuple[Index, Index]:
    """Return the deletions as (rows of `keys`, truncations). The first `count` keys are those of the commands, the
    others those of the mirror."""
    # A key's row of the mirror is before its commands.
    rank = np.concatenate([places.ranks, np.full(keys.num_rows - count, -1, dtype=np.int64)])
    order, starts = group_by_key(keys, hasher(keys, schema.key), schema.key, rank)
    rank = rank[order]
    ends = np.append(starts[1:], True)
    last = order[ends][np.cumsum(starts) - 1]
    mirror_only = last >= count
    partition = np.full(len(order), -1, dtype=np.int64)
    partition[~mirror_only] = places.minor[2][last[~mirror_only]]

    # Codes order the truncations by partition, then by rank; no code of a partition reaches the next partition's.
    width = np.int64(len(places.ranks) + len(places.truncation_ranks) + 1)
    known, number = np.unique(places.partitions, return_inverse=True)
    codes = number.reshape(-1).astype(np.int64) * width + places.truncation_ranks
    by_code = np.argsort(codes)
    codes = codes[by_code]
    mine = np.minimum(np.searchsorted(known, partition), len(known) - 1)
    # The first truncation from a row on, unless it is after the key's next row.
    following = np.append(rank[1:], 0)
    following[ends] = width - 1
    found = np.searchsorted(codes, mine * width + np.maximum(rank, 0))
    within = codes[np.minimum(found, len(codes) - 1)] < mine * width + following
    deleted = within & (found < len(codes)) & (known[mine] == partition)
    truncation = by_code[np.minimum(found, len(codes) - 1)]
    truncation[mirror_only] = 0  # the first of all
    at = np.flatnonzero(deleted | mirror_only)
    return order[at], truncation[at]
