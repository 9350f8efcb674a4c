"""A shape over a shard: the snapshot as its base, the shard's updates as its log.

Offsets are (time in ms, place within that time). A retraction and an insertion of one key at one time are
one update. Values are written as PostgreSQL would print them, so a client cannot tell a shard from a table;
a shard without a key is a multiset whose key is the whole row: it appears with its first copy, goes with its last.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tidemill.base.errors import Invalid, Unavailable
from tidemill.shapes.items import LogItem
from tidemill.shapes.live import LiveShape
from tidemill.shapes.offsets import LogOffset
from tidemill.shapes.rows import RowWriter
from tidemill.shapes.shape import LogMode, Replica
from tidemill.shapes.shard_text import text_columns
from tidemill.shapes.where import EvaluationError, Type, Where
from tidemill.shards.front import DIFF, TIME, Shard, ShardSchema

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, str | None]

_PG_NAMES = {
    "bool": "bool",
    "int16": "int2",
    "int32": "int4",
    "int64": "int8",
    "float32": "float4",
    "float64": "float8",
    "string": "text",
    "json": "json",
    "binary": "bytea",
    "date": "date",
    "timestamp": "timestamptz",
}
BASE_ROWS = 2_000
"""Rows rendered between two turns of the event loop."""
LOAD_ATTEMPTS = 5


def pg_name(type_name: str) -> str:
    """The PostgreSQL type a shard column is shown as."""
    if type_name.startswith("decimal"):
        return "numeric"
    return _PG_NAMES["timestamp" if type_name.startswith("timestamp") else type_name]


def shard_types(schema: ShardSchema) -> dict[str, Type]:
    return {column.name: Type(pg_name(column.type)) for column in schema.columns}


def shard_schema_json(schema: ShardSchema, shown: tuple[str, ...]) -> bytes:
    """The electric-schema header, ASCII."""
    key = {name: index for index, name in enumerate(schema.key)}
    out: dict[str, dict[str, object]] = {}
    for column in schema.columns:
        if shown and column.name not in shown:
            continue
        entry: dict[str, object] = {"type": pg_name(column.type), "dims": 0}
        if column.name in key:
            entry["pk_index"] = key[column.name]
        if column.type.startswith("decimal("):
            precision, scale = column.type[len("decimal(") : -1].split(",")
            entry |= {"precision": int(precision), "scale": int(scale)}
        out[column.name] = entry
    return json.dumps(out, separators=(",", ":")).encode()


class ShardFeed:
    """Feeds one shape from one shard. `load` once, then `follow` until cancelled."""

    def __init__(
        self, shard: Shard, where: Where | None, columns: tuple[str, ...], replica: Replica, log_mode: LogMode
    ) -> None:
        self._shard = shard
        self._where = where
        self._log_mode = log_mode
        schema = shard.schema
        self._names = tuple(column.name for column in schema.columns)
        self._shown = columns or self._names
        self._keyed = bool(schema.key)
        self._writer = RowWriter("shard", shard.name, self._shown, schema.key, (), replica)
        self._copies: Counter[str] = Counter()
        self._next = 0

    async def load(self, shape: LiveShape) -> None:
        """Base = contents at the newest final time; an empty shard has an empty base.

        Raises what the shard raises; Unavailable when its history is forgotten faster than it can be read.
        """
        for _ in range(LOAD_ATTEMPTS):
            since, upper = await self._shard.frontiers()
            if upper <= since:
                break
            try:
                table = await self._shard.snapshot(upper - 1)
            except Invalid:
                continue  # since passed the time in between: read at a newer one
            if self._log_mode == "full" or not self._keyed:
                await self._add_base(shape, table)
            break
        else:
            raise Unavailable(f"the shard's history is forgotten while it is read: shard={self._shard.name}.")
        self._next = upper
        shape.log.seal_base()
        shape.last_seen = max(upper - 1, 0)

    async def _add_base(self, shape: LiveShape, table: pa.Table) -> None:
        for start in range(0, table.num_rows, BASE_ROWS):
            rows: list[bytes] = []
            for row in _rows(table.slice(start, BASE_ROWS), self._names):
                if self._where is not None and not self._where.matches(row):
                    continue
                if not self._keyed and self._count(self._writer.key(row), 1) != 1:
                    continue
                rows.append(self._writer.base_row(row))
            if self._log_mode == "full":
                shape.log.add_base(rows)
                shape.rows_loaded += len(rows)
            await asyncio.sleep(0)

    def _count(self, key: str, change: int) -> int:
        self._copies[key] += change
        copies = self._copies[key]
        if copies <= 0:
            del self._copies[key]
        return copies

    async def follow(self, shape: LiveShape) -> None:
        """Append every later update until the shape is gone. Raises what the shard raises."""
        async for delta in self._shard.listen(self._next):
            if shape.gone:
                return
            self.apply(shape, delta.rows, delta.upper)

    def apply(self, shape: LiveShape, rows: pa.Table, upper: int) -> None:
        """One complete step of the shard: rows of times below `upper`, in any order."""
        items: list[LogItem] = []
        if rows is not None and rows.num_rows:
            try:
                for time_ms, at_time in _by_time(rows, self._names):
                    items.extend(self._items(time_ms, at_time))
            except EvaluationError as error:
                shape.drop(f"the where clause failed on a row: {error}")
                return
        shape.append(items, upper - 1)

    def _items(self, time_ms: int, updates: list[tuple[Row, int]]) -> list[LogItem]:
        """Items of one time: per key one insert, update or delete, in order of first appearance."""
        gone: dict[str, Row] = {}
        come: dict[str, Row] = {}
        net: Counter[str] = Counter()
        order: dict[str, None] = {}
        for row, diff in updates:
            if self._where is not None and not self._where.matches(row):
                continue
            key = self._writer.key(row)
            order.setdefault(key)
            net[key] += diff
            (gone if diff < 0 else come)[key] = row
        items: list[LogItem] = []
        headers: dict[str, object] = {"lsn": str(time_ms)}
        for key in order:
            offset = LogOffset(time_ms, 2 * len(items))
            if self._keyed:
                item = self._keyed_item(offset, gone.get(key), come.get(key), headers)
            else:
                item = self._counted_item(offset, key, net[key], gone.get(key) or come[key], headers)
            if item is not None:
                items.append(item)
        return items

    def _keyed_item(
        self, offset: LogOffset, old: Row | None, new: Row | None, headers: dict[str, object]
    ) -> LogItem | None:
        if new is None:
            return None if old is None else self._writer.delete(offset, old, headers)
        if old is None:
            return self._writer.insert(offset, new, headers)
        return self._writer.update(offset, old, new, headers)

    def _counted_item(
        self, offset: LogOffset, key: str, change: int, row: Row, headers: dict[str, object]
    ) -> LogItem | None:
        before = self._copies[key]
        after = self._count(key, change)
        if before <= 0 < after:
            return self._writer.insert(offset, row, headers)
        if before > 0 >= after:
            return self._writer.delete(offset, row, headers)
        return None


def _rows(table: pa.Table, names: tuple[str, ...]) -> Iterator[Row]:
    columns = text_columns(table, names)
    for values in zip(*columns, strict=True):
        yield dict(zip(names, values, strict=True))


def _by_time(table: pa.Table, names: tuple[str, ...]) -> Iterator[tuple[int, list[tuple[Row, int]]]]:
    """Groups of (row, diff) with one time, times ascending; order within a time is the table's."""
    times: list[Any] = table.column(TIME).to_pylist()
    diffs: list[Any] = table.column(DIFF).to_pylist()
    groups: dict[int, list[tuple[Row, int]]] = {}
    for time_ms, diff, row in zip(times, diffs, _rows(table, names), strict=True):
        groups.setdefault(time_ms, []).append((row, diff))
    for time_ms in sorted(groups):
        yield time_ms, groups[time_ms]
