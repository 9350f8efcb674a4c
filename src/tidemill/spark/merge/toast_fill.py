"""Commands that leave columns unchanged (TOAST): fill in the values from the previous row. Pure.

    before   the previous command of the same key, in (time, order); for the first of a key, the mirror's row
    absent   there is no previous row, or it is deleted, or it is itself absent: then this row is absent too. Its key
             is absent from here on, as after a deletion, until a command has every value; and the command is
             `LostCommand`
    check    a row that violates an expectation once it is filled is absent from here on, too; the command is
             `RejectedCommand`

Invariant (all commands in order): every command is processed in order, even one that a later command of the same time
beats, because it may hold the values that the later one left unchanged.
Invariant (deterministic): the values of a command, and whether it is lost, depend only on the earlier commands of its
key and the contents below them; not on an interval, a writer or a retry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.shards.api import TIME, ShardSchema
from tidemill.shards.parts.arrow_rows import Index, Mask, combine_columns, int64s, rows_at, to_mask, values_at
from tidemill.spark.merge.commands import LIVE, ORDER, PARTITION, RECORD_KEY, UNCHANGED, command_schema
from tidemill.spark.merge.key_grouping import group_by_key
from tidemill.spark.predicates.expectations import ExpectationCheck

if TYPE_CHECKING:
    from tidemill.spark.merge.resolve import HashRows, MirrorLookup


class LostCommand(msgspec.Struct, frozen=True):
    """Command whose previous row is absent. `key`: of its record; `columns`: those that it left unchanged."""

    time_ms: int
    partition: int
    order: int
    key: bytes
    columns: tuple[str, ...]


class RejectedCommand(msgspec.Struct, frozen=True):
    """Command that leaves columns unchanged, and whose filled row violates the expectations `rules`."""

    time_ms: int
    partition: int
    order: int
    key: bytes
    rules: tuple[int, ...]


class Filled(msgspec.Struct, frozen=True):
    """Commands with all values; the lost and the rejected ones are among them as deletions of their keys."""

    rows: pa.Table
    lost: tuple[LostCommand, ...]
    rejected: tuple[RejectedCommand, ...] = ()


def has_unchanged(rows: pa.Table) -> bool:
    """Return whether any command leaves a column unchanged."""
    return UNCHANGED in rows.column_names and rows.column(UNCHANGED).null_count < rows.num_rows


def fill_unchanged(
    schema: ShardSchema,
    rows: pa.Table,
    mirror: MirrorLookup,
    hasher: HashRows,
    check: ExpectationCheck | None = None,
) -> Filled:
    """Fill in all values; with `check`, reject the partial commands whose rows violate an expectation.

    The first such command of a chain, which a command with every value begins, makes its key absent: the partial ones
    after it are lost. So two passes suffice for a chain of any length.
    """
    rows = combine_columns(rows)
    out, lost, chains = _fill(schema, rows, mirror, hasher)
    if check is None:
        return Filled(out, lost)
    partial = to_mask(rows.column(UNCHANGED).is_valid()) & to_mask(out.column(LIVE))
    (at,) = np.nonzero(partial)
    violated = check.violated(rows_at(out, at))
    bad = np.zeros(rows.num_rows, dtype=bool)
    bad[at[violated.any(axis=0)]] = True
    if not bad.any():
        return Filled(out, lost)
    places, chain = chains
    mine = bad[places]
    _, first = np.unique(chain[mine], return_index=True)
    rejected = np.sort(places[mine][first])
    some = rows_at(rows.select([TIME, PARTITION, ORDER, RECORD_KEY]), rejected).to_pylist()
    rules = check.violated(rows_at(out, rejected))
    commands = tuple(
        RejectedCommand(
            row[TIME], row[PARTITION], row[ORDER], row[RECORD_KEY] or b"", tuple(np.flatnonzero(rules[:, n]).tolist())
        )
        for n, row in enumerate(some)
    )
    out, lost, _ = _fill(schema, _as_deletions(rows, rejected), mirror, hasher)
    return Filled(out, lost, commands)


def _as_deletions(rows: pa.Table, at: Index) -> pa.Table:
    dead = np.zeros(rows.num_rows, dtype=bool)
    dead[at] = True
    live = to_mask(rows.column(LIVE)) & ~dead
    left = pc.if_else(pa.array(dead), pa.scalar(None, pa.binary()), rows.column(UNCHANGED))
    rows = rows.set_column(rows.column_names.index(LIVE), LIVE, pa.array(live))
    return combine_columns(rows.set_column(rows.column_names.index(UNCHANGED), UNCHANGED, left))


def _fill(
    schema: ShardSchema, rows: pa.Table, mirror: MirrorLookup, hasher: HashRows
) -> tuple[pa.Table, tuple[LostCommand, ...], tuple[Index, Index]]:
    """Return the filled commands, the lost ones, and (commands of keys with partial ones, in order; chain of each)."""
    key = list(schema.key)
    hashes = hasher(rows, schema.key)
    leaves = to_mask(rows.column(UNCHANGED).is_valid())
    # Only the keys of commands with unchanged columns are processed.
    (mine,) = np.nonzero(np.isin(hashes, np.unique(hashes[leaves])))
    keys, hashes = rows_at(rows.select(key), mine), hashes[mine]
    minor = (int64s(rows, TIME)[mine], int64s(rows, ORDER)[mine], int64s(rows, PARTITION)[mine])
    order, starts = group_by_key(keys, hashes, schema.key, *minor)
    at: Index = mine[order]  # the commands, by key and in order
    leaves = leaves[at]
    places = np.arange(len(at))
    begins = np.maximum.accumulate(np.where(starts, places, 0))  # of each command, the first one of its key

    # The mirror's row of each key whose first command leaves a column unchanged; -1 elsewhere.
    (asks,) = np.nonzero(starts & leaves)
    kept, found = mirror.lookup(rows_at(keys, order[asks]), hashes[order[asks]])
    mirrored = np.full(len(at), -1, dtype=np.int64)
    mirrored[asks] = found

    live = to_mask(rows.column(LIVE))
    whole = np.maximum.accumulate(np.where(leaves, -1, places))  # the last command that leaves no column unchanged
    after = whole >= begins
    there: Mask = np.where(after, live[at[np.maximum(whole, 0)]], mirrored[begins] >= 0)
    lost = leaves & ~there

    leaving = pc.dictionary_encode(rows.column(UNCHANGED).combine_chunks())
    codes = np.asarray(pc.fill_null(leaving.indices, -1).to_numpy(zero_copy_only=False), dtype=np.int64)[at]
    names = [unchanged_columns(blob.as_py()) for blob in leaving.dictionary]
    arrays = {}
    for column in {name for some in names for name in some}:
        leave_it = np.isin(codes, [code for code, some in enumerate(names) if column in some])
        valued = np.maximum.accumulate(np.where(leave_it, -1, places))  # the last command that has a value for it
        source = np.where(valued >= begins, at[np.maximum(valued, 0)], rows.num_rows + mirrored[begins])
        take = np.arange(rows.num_rows, dtype=np.int64)
        fill = leave_it & there
        take[at[fill]] = source[fill]
        arrays[column] = values_at(pa.chunked_array([*_chunks(rows, column), *_chunks(kept, column)]), take)
    gone = live.copy()
    gone[at[lost]] = False
    arrays[LIVE] = pa.array(gone)
    target = command_schema(schema)
    out = pa.Table.from_arrays([arrays.get(f.name, rows.column(f.name)) for f in target], schema=target)
    commands = _lost_commands(rows, at[lost], [names[code] for code in codes[lost].tolist()])
    return combine_columns(out), commands, (at, np.maximum(begins, whole))


def unchanged_columns(blob: bytes) -> tuple[str, ...]:
    """Return the column names in the header of a record. Raises msgspec.MsgspecError."""
    return msgspec.json.decode(blob, type=tuple[str, ...])


def _chunks(table: pa.Table, column: str) -> list[pa.Array]:
    return list(table.column(column).chunks)


def _lost_commands(rows: pa.Table, at: Index, names: list[tuple[str, ...]]) -> tuple[LostCommand, ...]:
    if not len(at):
        return ()
    some = rows_at(rows.select([TIME, PARTITION, ORDER, RECORD_KEY]), at).to_pylist()
    return tuple(
        LostCommand(row[TIME], row[PARTITION], row[ORDER], row[RECORD_KEY] or b"", columns)
        for row, columns in zip(some, names, strict=True)
    )
