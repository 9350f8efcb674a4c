"""Result of a derived function: accepted with all of its columns, or rejected; its rows as commands, except omitted
ones. Pure.

A row whose key is null or not unique fails only that row: its key is absent, so that no old row stays as if it were
current, and `OmittedRows` reports it until a result of its group has no such row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from tidemill.base.errors import InvalidError
from tidemill.shards.api import ShardSchema
from tidemill.shards.parts.arrow_rows import Mask, combine_columns, format_scalar, to_mask
from tidemill.shards.parts.key_hash import normalize_keys
from tidemill.shards.parts.row_hash import U64, hash_rows
from tidemill.shards.parts.schema import conform_rows, contents_schema
from tidemill.spark.derived.group_mirror import groups_of
from tidemill.spark.merge.commands import Commands
from tidemill.spark.merge.diff import diff_commands
from tidemill.spark.merge.key_grouping import group_by_key
from tidemill.spark.merge.resolve import MirrorLookup

OMITTED = "rows of the result have no unique key"


def is_frame(result: Any) -> bool:
    """Return whether it is a Spark DataFrame, classic or Connect."""
    return hasattr(result, "schema") and hasattr(result, "toArrow")


def not_a_frame_error(table: str, result: Any) -> InvalidError:
    kind = type(result)
    return InvalidError(
        f"derived function returned no DataFrame: table={table} returned={kind.__module__}.{kind.__qualname__}.",
        fix="Return a Spark DataFrame; spark.createDataFrame(rows) makes one.",
    )


def stored_rows(table: str, rows: pa.Table, schema: ShardSchema) -> pa.Table:
    """Return the rows with the table's schema. Raises InvalidError if a column is unknown to the table or has another
    type."""
    known = {column.name for column in schema.columns}
    if more := [name for name in rows.column_names if name not in known]:
        raise InvalidError(
            f"derived function returned more columns than for empty inputs: table={table} more={','.join(more)[:300]}.",
            fix="Make its columns independent of the rows, e.g. by pivot with a list of values.",
        )
    return conform_rows(rows, contents_schema(schema))


class _Counts(NamedTuple):
    """Number of rows without a key, number of rows whose key is not unique, and one such key."""

    null: int = 0
    twice: int = 0
    example: str = ""


class OmittedRows:
    """Rows of a table's results without a unique key, by group: a round that computes some groups does not affect the
    others. A table without groups counts as one group."""

    def __init__(self, table: str, by: tuple[str, ...] = ()) -> None:
        self._table = table
        self._by = by
        self._of: dict[int, _Counts] = {}

    def record_round(self, groups: U64 | None, left_out: OmittedResult | None) -> None:
        """Record a round that computed `groups` (None = all) and omitted `left_out` from its result."""
        if groups is None:
            self._of.clear()
        for group in () if groups is None else groups.tolist():
            self._of.pop(group, None)
        if left_out is None:
            return
        for group, _, count in self._count_by_group(left_out.null):
            self._of[group] = _Counts(null=count)
        for group, first, count in self._count_by_group(left_out.twice):
            found = self._of.get(group, _Counts())
            self._of[group] = found._replace(twice=count, example=left_out.show_key(first))

    def _count_by_group(self, rows: pa.Table) -> list[tuple[int, int, int]]:
        """Return (group, its first row, its number of rows)."""
        groups = groups_of(rows, self._by) if self._by else np.zeros(rows.num_rows, dtype=np.uint64)
        found, firsts, counts = np.unique(groups, return_index=True, return_counts=True)
        return list(zip(found.tolist(), firsts.tolist(), counts.tolist(), strict=True))

    def forget(self) -> None:
        self._of.clear()

    def sentence(self) -> str:
        """Return the error text, or "" while every row has a unique key."""
        if not self._of:
            return ""
        found = self._of.values()
        null, twice = sum(one.null for one in found), sum(one.twice for one in found)
        example = next((one.example for one in found if one.example), "")
        return f"{OMITTED}: table={self._table} null={null} twice={twice}{example}"


class OmittedResult(NamedTuple):
    """Rows that were omitted from a result, and the key columns."""

    null: pa.Table
    twice: pa.Table
    key: tuple[str, ...]

    def show_key(self, at: int) -> str:
        return "".join(f" {name}={format_scalar(self.twice.column(name)[at]):.100}" for name in self.key)


def commands_for(
    schema: ShardSchema, wanted: pa.Table, now: MirrorLookup, time_ms: int
) -> tuple[Commands, OmittedResult | None]:
    """Return the commands that make the contents `now` equal to the rows at `time_ms`, and the omitted rows, if any."""
    try:
        return diff_commands(schema, wanted, now, time_ms), None
    except InvalidError:
        good, left_out = _split_by_unique_key(schema, wanted)
        return diff_commands(schema, good, now, time_ms), left_out


def _split_by_unique_key(schema: ShardSchema, rows: pa.Table) -> tuple[pa.Table, OmittedResult]:
    """Return the rows with a unique key, and the others."""
    null: Mask = np.zeros(rows.num_rows, dtype=bool)
    for name in schema.key:
        null |= to_mask(rows.column(name).is_null())
    keyed = combine_columns(normalize_keys(rows.filter(pa.array(~null)), schema.key))
    order, starts = group_by_key(keyed, hash_rows(keyed, schema.key), schema.key)
    groups = np.cumsum(starts) - 1
    twice = np.zeros(len(order), dtype=bool)
    twice[order] = np.bincount(groups, minlength=1)[groups] > 1
    left_out = OmittedResult(rows.filter(pa.array(null)), keyed.filter(pa.array(twice)), schema.key)
    return keyed.filter(pa.array(~twice)), left_out
