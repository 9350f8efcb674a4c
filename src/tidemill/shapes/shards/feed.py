"""Feeds a shape from a shard: the shard's snapshot is the base, its updates are the log.

Offsets are (time in ms, position within that time). A retraction and an insertion of one key at one time are one
update. Values are written as PostgreSQL would print them, so a client cannot distinguish a shard from a table. A shard
without a key is a multiset whose key is the whole row: a row appears with its first copy, and is deleted with its last.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tidemill.base.errors import InvalidError, UnavailableError
from tidemill.shapes.definition.definition import LogMode, Replica
from tidemill.shapes.live_shape import LiveShape
from tidemill.shapes.log.items import LogItem
from tidemill.shapes.log.log_offset import FIRST_OP, LogOffset
from tidemill.shapes.log.row_writer import RowWriter
from tidemill.shapes.loop_share import LoopShare, Turn
from tidemill.shapes.shards.pg_text import Row, slice_rows, table_slices
from tidemill.shapes.tables.change_translator import row_failure_error
from tidemill.shapes.where import EvaluationError, Type, Where
from tidemill.shards.api import DIFF, TIME, HistoryLostError, Shard, ShardSchema
from tidemill.shards.nested.type_names import is_nested
from tidemill.shards.parts.schema import canonical_type

if TYPE_CHECKING:
    import pyarrow as pa

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
    "timestamp_ntz": "timestamp",
}
MAX_STORED_BYTES = 64 << 20
"""Largest stored size (history included) of a shard that a shape may be over. The shard is read completely, and is
several times as large in memory; the table counts against the shapes' memory while it is processed."""
LOAD_ATTEMPTS = 5


def pg_type_name(type_name: str) -> str:
    """Return the PostgreSQL type that a shard column is shown as; nested values are shown as JSON."""
    if is_nested(type_name):
        return "json"
    if type_name.startswith("decimal"):
        return "numeric"
    return _PG_NAMES[canonical_type(type_name)]


def shard_where_types(schema: ShardSchema) -> dict[str, Type]:
    return {column.name: Type(pg_type_name(column.type)) for column in schema.columns}


def shard_schema_json(schema: ShardSchema, shown: tuple[str, ...]) -> bytes:
    """Return the electric-schema header, ASCII."""
    key = {name: index for index, name in enumerate(schema.key)}
    out: dict[str, dict[str, object]] = {}
    for column in schema.columns:
        if shown and column.name not in shown:
            continue
        entry: dict[str, object] = {"type": pg_type_name(column.type), "dims": 0}
        if column.name in key:
            entry["pk_index"] = key[column.name]
        if column.type.startswith("decimal("):
            precision, scale = column.type[len("decimal(") : -1].split(",")
            entry |= {"precision": int(precision), "scale": int(scale)}
        out[column.name] = entry
    return json.dumps(out, separators=(",", ":")).encode()


class ShardFeed:
    """Feeds one shape from one shard: call `load` once, then `follow` until cancelled. Rows are processed in
    `share`."""

    def __init__(
        self,
        shard: Shard,
        where: Where | None,
        columns: tuple[str, ...],
        replica: Replica,
        log_mode: LogMode,
        share: LoopShare,
    ) -> None:
        self._shard = shard
        self._where = where
        self._log_mode = log_mode
        self._share = share
        schema = shard.schema
        self._names = tuple(column.name for column in schema.columns)
        self._shown = columns or self._names
        self._keyed = bool(schema.key)
        self._writer = RowWriter("shard", shard.name, self._shown, schema.key, (), replica)
        self._copies: Counter[str] = Counter()
        self._next = 0

    async def load(self, shape: LiveShape) -> None:
        """Fill the base with the contents at the newest final time; an empty shard has an empty base.

        Raises what the shard raises; UnavailableError if its history is forgotten faster than it can be read;
        InvalidError if it is too large, or the where clause fails on a row; OverBudgetError.
        """
        if self._log_mode == "full" or not self._keyed:
            table, self._next = await read_contents(self._shard)
            if table is not None:
                await self._process_table(shape, table, self._add_base_rows)
        else:  # changes of a keyed table name their rows: its contents are not needed, and it may have any size
            _, self._next = await self._shard.frontiers()
        shape.log.seal_base()
        shape.last_seen = max(self._next - 1, 0)

    async def resume(self, shape: LiveShape, seen_ms: int) -> None:
        """Continue a log that has every change up to `seen_ms`, instead of `load`.

        Raises HistoryLostError if the shard no longer distinguishes the changes after that time, and what `load`
        raises.
        """
        since, upper = await self._shard.frontiers()
        if not since <= seen_ms < upper:
            raise HistoryLostError(
                f"the table's history does not reach back to the log: since={since} seen={seen_ms} upper={upper}."
            )
        if not self._keyed:
            await _check_size(self._shard, seen_ms)
            await self._process_table(shape, await self._shard.snapshot(seen_ms), self._count_rows)
        self._next = seen_ms + 1
        shape.last_seen = seen_ms

    async def _process_table(
        self, shape: LiveShape, table: pa.Table, work: Callable[[LiveShape, pa.Table], Iterator[None]]
    ) -> None:
        """Process a table like `_run_in_slices`, but no faster than the log can store the result."""
        size = table.nbytes
        shape.log.budget.reserve(size)
        try:
            for part in table_slices(table):
                await self._run_in_slices(shape, part, work(shape, part))
                await shape.log.wait_for_room()
                if shape.has_ended:
                    return
        finally:
            shape.log.budget.release(size)

    def _count_rows(self, shape: LiveShape, part: pa.Table) -> Iterator[None]:
        for row in slice_rows(part, self._names):
            yield
            if self._where is None or self._where.matches(row):
                self._add_copies(self._writer.key(row), 1)

    async def _run_in_slices(self, shape: LiveShape, table: pa.Table, work: Iterator[None]) -> None:
        """Run `work` in turns; the memory of `table` is counted during that time. Raises OverBudgetError,
        InvalidError."""
        size = table.nbytes

        def step(turn: Turn) -> bool:
            for _ in work:
                if turn.is_over:
                    return not shape.has_ended
            return False

        shape.log.budget.reserve(size)
        try:
            await self._share.run_step(step)
        except EvaluationError as error:
            raise row_failure_error(shape.definition.where, error) from error
        finally:
            shape.log.budget.release(size)

    def _add_base_rows(self, shape: LiveShape, part: pa.Table) -> Iterator[None]:
        rows: list[bytes] = []
        for row in slice_rows(part, self._names):
            yield
            if self._where is not None and not self._where.matches(row):
                continue
            if not self._keyed and self._add_copies(self._writer.key(row), 1) != 1:
                continue
            rows.append(self._writer.render_base_row(row))
        if self._log_mode == "full":
            shape.log.add_base(rows)
            shape.rows_loaded += len(rows)

    def _add_copies(self, key: str, change: int) -> int:
        self._copies[key] += change
        copies = self._copies[key]
        if copies <= 0:
            del self._copies[key]
        return copies

    async def follow(self, shape: LiveShape, seen: Callable[[int], None] = lambda _: None) -> None:
        """Append every later update until the shape has ended. `seen` is called with the time up to which the log is
        complete.

        Raises what the shard and `apply` raise.
        """
        async for delta in self._shard.listen(self._next):
            if shape.has_ended:
                return
            await self.apply(shape, delta.rows, delta.upper)
            seen(delta.upper - 1)

    async def apply(self, shape: LiveShape, rows: pa.Table, upper: int) -> None:
        """Apply one step of the shard, published as a whole: rows with times below `upper`, in any order.

        Raises InvalidError, OverBudgetError.
        """
        if rows is not None and rows.num_rows:
            await self._run_in_slices(shape, rows, self._stage_updates(shape, rows))
        shape.publish(upper - 1)

    def _stage_updates(self, shape: LiveShape, rows: pa.Table) -> Iterator[None]:
        """Stage the items of all times, in ascending order; the order within a time is that of the keys."""
        groups: dict[int, deque[tuple[Row, int]]] = {}
        for part in table_slices(rows):
            times: list[Any] = part.column(TIME).to_pylist()
            diffs: list[Any] = part.column(DIFF).to_pylist()
            for time_ms, diff, row in zip(times, diffs, slice_rows(part, self._names), strict=True):
                yield
                if self._where is None or self._where.matches(row):
                    groups.setdefault(time_ms, deque()).append((row, diff))
        for time_ms in sorted(groups):
            for item in self._items_of_time(time_ms, groups.pop(time_ms)):
                yield
                if item is not None:
                    shape.stage(item)

    def _items_of_time(self, time_ms: int, updates: deque[tuple[Row, int]]) -> Iterator[LogItem | None]:
        """Yield the items of one time: one insert, update or delete per key, in the order of the keys, so that offsets
        do not depend on how the time was read. None: no item, but a place to pause.

        Rows are released one by one: freeing many at a time takes as long as creating them.
        """
        gone: dict[str, Row] = {}
        come: dict[str, Row] = {}
        net: Counter[str] = Counter()
        order: set[str] = set()
        while updates:
            row, diff = updates.popleft()
            yield None
            key = self._writer.key(row)
            order.add(key)
            net[key] += diff
            (gone if diff < 0 else come)[key] = row
        made = 0
        headers: dict[str, object] = {"lsn": str(time_ms), "txids": [time_ms]}
        for key in sorted(order):
            offset = LogOffset(time_ms, FIRST_OP + 2 * made)
            old, new = gone.pop(key, None), come.pop(key, None)
            if self._keyed:
                item = self._keyed_item(offset, old, new, headers)
            else:
                any_row = old or new
                assert any_row is not None
                item = self._counted_item(offset, key, net[key], any_row, headers)
            made += item is not None
            yield item

    def _keyed_item(
        self, offset: LogOffset, old: Row | None, new: Row | None, headers: dict[str, object]
    ) -> LogItem | None:
        if new is None:
            return None if old is None else self._writer.delete(offset, old, headers)
        if old is None:
            return self._writer.insert_item(offset, new, headers)
        return self._writer.update_item(offset, old, new, headers)

    def _counted_item(
        self, offset: LogOffset, key: str, change: int, row: Row, headers: dict[str, object]
    ) -> LogItem | None:
        before = self._copies[key]
        after = self._add_copies(key, change)
        if before <= 0 < after:
            return self._writer.insert_item(offset, row, headers)
        if before > 0 >= after:
            return self._writer.delete(offset, row, headers)
        return None


async def read_contents(shard: Shard) -> tuple[pa.Table | None, int]:
    """Return (rows at the newest final time, the next time); no rows if no time is final yet.

    Raises what the shard raises; UnavailableError if its history is forgotten faster than it can be read; InvalidError
    if it is too large.
    """
    for _ in range(LOAD_ATTEMPTS):
        since, upper = await shard.frontiers()
        if upper <= since:
            return None, upper
        try:
            await _check_size(shard, upper - 1)
            return await shard.snapshot(upper - 1), upper
        except HistoryLostError:
            continue  # since has passed this time: read a newer one
    raise UnavailableError(f"the table's history is forgotten while it is read: table={shard.name}.")


async def _check_size(shard: Shard, as_of: int) -> None:
    batches = await shard.batches_until(as_of)
    size = sum(part.size_bytes for batch in batches for part in batch.parts)
    if size > MAX_STORED_BYTES:
        raise InvalidError(
            f"the table is too large for a shape: table={shard.name} bytes={size} limit={MAX_STORED_BYTES}.",
            fix="Derive a smaller table from it, and use a shape over that table.",
        )
