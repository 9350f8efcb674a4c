"""Upsert commands: the output of decoding and the input of the operator.

    key and value columns   the shard's columns; for a deletion only the key columns count
    _time       int64       ms, from the binding
    _order      int64       the Kafka offset: the highest one wins within (key, time)
    _partition  int32       orders compare within one partition only
    _live       bool        False = null value: delete the key

    only if a command leaves columns unchanged (toast_fill.py)
    _tm.unchanged  binary   the names of its columns that have no value here, a JSON array; null = it has all
    _tm.key        binary   the key of its record, for a dead letter

A truncation deletes every key that is live at its place in the order of its partition. A truncation at BEFORE_ALL
precedes every record of its time: the topic begins there, and the table's contents come from an earlier topic.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidemill.shards.api import TIME, ShardSchema
from tidemill.shards.parts.arrow_rows import combine_columns, int64s
from tidemill.shards.parts.schema import contents_schema

ORDER = "_order"
PARTITION = "_partition"
LIVE = "_live"
UNCHANGED = "_tm.unchanged"
RECORD_KEY = "_tm.key"
BEFORE_ALL = -1


class Truncate(msgspec.Struct, frozen=True, order=True):
    time_ms: int
    partition: int
    order: int


class Commands(msgspec.Struct, frozen=True):
    rows: pa.Table
    truncates: tuple[Truncate, ...] = ()

    def __len__(self) -> int:
        return int(self.rows.num_rows) + len(self.truncates)


@lru_cache(maxsize=256)
def command_schema(schema: ShardSchema) -> pa.Schema:
    extra = [(TIME, pa.int64()), (ORDER, pa.int64()), (PARTITION, pa.int32()), (LIVE, pa.bool_())]
    found = contents_schema(schema)
    for name, kind in extra:
        found = found.append(pa.field(name, kind))
    return found


@lru_cache(maxsize=256)
def partial_command_schema(schema: ShardSchema) -> pa.Schema:
    """Return the schema of commands some of which leave columns unchanged."""
    return command_schema(schema).append(pa.field(UNCHANGED, pa.binary())).append(pa.field(RECORD_KEY, pa.binary()))


def concat_commands(tables: list[pa.Table]) -> pa.Table:
    """Concatenate rows of commands; with the columns for unchanged values if any of the tables has them."""
    alike = all(table.schema.equals(tables[0].schema) for table in tables)
    return pa.concat_tables(tables, promote_options="none" if alike else "default")


def no_commands(schema: ShardSchema) -> Commands:
    return Commands(command_schema(schema).empty_table())


def join_commands(schema: ShardSchema, parts: list[Commands]) -> Commands:
    """Join the commands of several inputs, in any order: order is a column, not a position."""
    parts = [part for part in parts if len(part)]
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return no_commands(schema)
    rows = combine_columns(concat_commands([p.rows for p in parts]))
    return Commands(rows, tuple(t for p in parts for t in p.truncates))


def times_of(commands: Commands) -> npt.NDArray[np.int64]:
    """Return the times of the rows, followed by those of the truncations."""
    rows = int64s(commands.rows, TIME)
    return np.concatenate([rows, np.array([t.time_ms for t in commands.truncates], dtype=np.int64)])


def filter_commands(commands: Commands, mask: npt.NDArray[np.bool_]) -> Commands:
    """Return the commands where `mask` (shape as `times_of`) is true."""
    if mask.all():
        return commands
    n = commands.rows.num_rows
    rows = commands.rows.filter(pa.array(mask[:n])) if not mask[:n].all() else commands.rows
    return Commands(rows, tuple(t for t, keep in zip(commands.truncates, mask[n:].tolist(), strict=True) if keep))
