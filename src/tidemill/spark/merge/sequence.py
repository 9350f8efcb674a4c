"""Order of a key's commands by a sequence, columns of the table, instead of by the log alone. Pure.

    state      of a key: the sequence of its row, or of its newest deletion: a tombstone
    effective  a command whose sequence is at least the state's; at equal sequences the later one in the log wins
    late       any other command: it changes nothing
    tombstone  counts for commands below its time + keep_ms; from there on the key has no state
    truncation deletes every row at that row's own sequence; its commands have no sequence

`filter_late` leaves only the effective commands, so that the rest of the step (resolve.py) is as without a sequence.

Invariant (deterministic): which commands are effective is a function of the commands of the key, in order of (time,
order, partition), and of its state below the step. Tombstones expire by the times of commands, never by a clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from tidemill.base.errors import InvalidError
from tidemill.shards.api import TIME, Column, ShardSchema
from tidemill.shards.parts.arrow_rows import Index, Mask, combine_columns, int64s, rows_at, to_mask
from tidemill.shards.parts.schema import contents_schema
from tidemill.spark.merge.commands import LIVE, ORDER, PARTITION
from tidemill.spark.merge.key_grouping import group_by_key
from tidemill.spark.merge.sequence_ranks import NO_RANK, rank_rows

if TYPE_CHECKING:
    from tidemill.spark.merge.resolve import HashRows, MirrorLookup

DELETED_MS = "_deleted_ms"
"""Column of a tombstone: the time of the deletion."""


class SequenceRule(msgspec.Struct, frozen=True):
    """`columns` of the table that order the commands of a key; `keep_ms`: how long a tombstone counts."""

    columns: tuple[str, ...]
    keep_ms: int


class Sequence(msgspec.Struct, frozen=True):
    """Rule of a table, and its tombstones below the step. A key of a row has none that counts."""

    rule: SequenceRule
    tombstones: MirrorLookup


class Effective(msgspec.Struct, frozen=True):
    """Effective commands of a step.

    tombstones: of the keys whose last effective command is a deletion, unless it has expired by the end of the step;
    late: the number of late commands; revived: the number of commands that a tombstone beat until it expired.
    """

    rows: pa.Table
    tombstones: pa.Table
    late: int
    revived: int


def tombstone_schema(schema: ShardSchema, rule: SequenceRule) -> ShardSchema:
    """Return the schema of a table's tombstones, by its key. Raises InvalidError."""
    names = (*schema.key, *rule.columns)
    if DELETED_MS in names:
        raise InvalidError(f"reserved column name: column={DELETED_MS}.", fix="Rename the column.")
    types = {column.name: column for column in schema.columns}
    return ShardSchema((*(types[name] for name in names), Column(DELETED_MS, "int64")), schema.key)


def filter_late(
    schema: ShardSchema, rows: pa.Table, mirror: MirrorLookup, sequence: Sequence, upper: int, hasher: HashRows
) -> Effective:
    """Return the effective commands among `rows`, all of a step that ends at `upper`."""
    rule, key = sequence.rule, list(schema.key)
    rows = combine_columns(rows)
    hashes = hasher(rows, schema.key)
    minor = (int64s(rows, TIME), int64s(rows, ORDER), int64s(rows, PARTITION))
    order, starts = group_by_key(rows, hashes, schema.key, *minor)
    firsts = order[starts]
    keys, key_hashes = rows_at(rows.select(key), firsts), hashes[firsts]
    live_rows, live_at = mirror.lookup(keys, key_hashes)
    dead_rows, dead_at = sequence.tombstones.lookup(keys, key_hashes)

    columns = list(rule.columns)
    pool = combine_columns(pa.concat_tables([t.select(columns) for t in (rows, live_rows, dead_rows)]))
    ranks = rank_rows(pool, columns)
    # A chain is the state of a key, or its absence, and then its commands in order.
    count, number = rows.num_rows, np.cumsum(starts) - 1
    places = np.arange(count, dtype=np.int64) + number + 1
    heads = np.flatnonzero(starts) + np.arange(len(firsts))
    source = np.full(count + len(firsts), -1, dtype=np.int64)
    source[places] = order
    dead_from = count + live_rows.num_rows
    source[heads] = np.where(live_at >= 0, count + live_at, np.where(dead_at >= 0, dead_from + dead_at, -1))
    times = np.zeros(len(source), dtype=np.int64)
    times[places] = minor[0][order]
    if dead_rows.num_rows:
        times[heads] = np.where(dead_at >= 0, int64s(dead_rows, DELETED_MS)[np.maximum(dead_at, 0)], 0)
    live = np.zeros(len(source), dtype=bool)
    live[places] = to_mask(rows.column(LIVE))[order]
    live[heads] = live_at >= 0
    starts_chain = np.zeros(len(source), dtype=bool)
    starts_chain[heads] = True
    rank = np.where(source >= 0, ranks[source], NO_RANK)
    # Another writer of the table may have left a sequence null: the least of all.
    rank[heads] = np.where(source[heads] >= 0, np.maximum(rank[heads], 0), NO_RANK)
    folded = fold_chains(_Chains(starts_chain, rank, times, live), rule.keep_ms)

    effective = folded.effective[places]
    kept = np.sort(order[effective])
    late = int(np.count_nonzero(~effective & (rank[places] != NO_RANK)))
    found = rows if len(kept) == count else rows_at(rows, kept)
    # The last effective command of each key, if it is a deletion that still counts when the step ends.
    ends = np.append(heads[1:], len(source)) - 1
    last = _last_before(folded.effective, ends)
    dead = (last > heads) & ~live[last] & (times[last] + rule.keep_ms > upper)
    at = last[dead]
    holders = np.where(rank[at] == NO_RANK, folded.holder[at], at)
    tombstones = pa.table(
        {name: rows_at(keys, np.flatnonzero(dead)).column(name) for name in key}
        | {name: rows_at(pool, source[holders]).column(name) for name in columns}
        | {DELETED_MS: pa.array(times[at])}
    )
    target = contents_schema(tombstone_schema(schema, rule))
    return Effective(found, tombstones.cast(target), late, int(np.count_nonzero(folded.revived)))


class _Chains(NamedTuple):
    """Chains one after the other. `rank` NO_RANK: the absence of a state, or a command of a truncation."""

    starts: Mask
    rank: Index
    times: Index
    live: Mask

    def at(self, places: Index) -> _Chains:
        return _Chains(self.starts[places], self.rank[places], self.times[places], self.live[places])


class Folded(NamedTuple):
    """`effective`: by place. `holder`: of a command without a sequence, the place with the sequence of the state before
    it. `revived`: commands that an expired tombstone no longer beats."""

    effective: Mask
    holder: Index
    revived: Mask


def fold_chains(chains: _Chains, keep_ms: int) -> Folded:
    """Fold each chain in order, by columns.

    A pass takes the running maximum of the ranks, as if no tombstone expired. The first command of a chain that a
    tombstone beat after its end begins the chain again, for the next pass over the chains that have one. An expiry
    takes `keep_ms`, so a chain has few of them in a step.
    """
    count = len(chains.rank)
    effective, revived = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
    holder = np.full(count, -1, dtype=np.int64)
    number = np.cumsum(chains.starts)
    places = np.arange(count, dtype=np.int64)
    while len(places):
        mine = chains.at(places)
        mine = mine._replace(starts=mine.starts | revived[places])
        now, held, expired = _fold_once(mine, keep_ms)
        effective[places] = now
        holder[places] = np.where(held >= 0, places[np.maximum(held, 0)], -1)
        _, first = np.unique(number[places[expired]], return_index=True)
        begins = places[expired][first]
        revived[begins] = True
        places = places[np.isin(number[places], number[begins])]
    return Folded(effective, holder, revived)


def _fold_once(chains: _Chains, keep_ms: int) -> tuple[Mask, Index, Mask]:
    """Return (effective; place of the state's sequence before each; beaten by a tombstone that has expired)."""
    starts, rank, times, live = chains
    segment = np.cumsum(starts)
    begins = np.flatnonzero(starts)[segment - 1]
    width = np.int64(rank.max(initial=0)) + 2
    codes = segment * width + rank + 1  # the ranks of a segment exceed all before it; NO_RANK is its least
    best = np.maximum.accumulate(codes)
    before = np.where(starts, segment * width, np.concatenate([best[:1], best[:-1]]))
    ranked = (rank != NO_RANK) & (codes >= before)
    no_sequence = (rank == NO_RANK) & ~starts
    held = _exclusive_last(ranked, begins)
    # A truncation is effective if the row before it is live, and was not deleted by a truncation since.
    truncates = no_sequence & (held >= 0) & live[held] & (_exclusive_last(no_sequence, begins) < held)
    effective = ranked | truncates
    state = _exclusive_last(effective, begins)
    beaten = (rank != NO_RANK) & ~ranked & (state >= 0) & ~live[state]
    expired = beaten & (times >= times[state] + keep_ms)
    return effective, held, expired


def _exclusive_last(mask: Mask, begins: Index) -> Index:
    """Return for each place the last one before it, in its segment, at which `mask` is true; otherwise -1."""
    last = np.maximum.accumulate(np.where(mask, np.arange(len(mask), dtype=np.int64), -1))
    last = np.concatenate([np.full(1, -1, dtype=np.int64), last[:-1]]) if len(last) else last
    return np.where(last >= begins, last, -1)


def _last_before(mask: Mask, ends: Index) -> Index:
    """Return for each of the places `ends` the last one up to it at which `mask` is true; otherwise 0."""
    last = np.maximum.accumulate(np.where(mask, np.arange(len(mask), dtype=np.int64), 0))
    return last[ends]
