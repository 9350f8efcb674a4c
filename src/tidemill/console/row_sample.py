"""Some rows of a table at one time, read with bounded work.

A small table is read whole: its rows are sorted by the key, and their number is exact. Of a large one, only a range of
hashes is read that has about RANGE_ROWS updates: rows without order, and no number. One read fetches at most
READ_BYTES_MAX, decodes on a thread, and waits at most READ_TIMEOUT_S.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tidemill.base.errors import InvalidError, MissingError, UnavailableError
from tidemill.base.limits import MIB
from tidemill.objects.store import Buffer, ObjectStore
from tidemill.shards.api import Batch, Part, ShardSchema
from tidemill.shards.handle import LogShard
from tidemill.shards.read.hash_ranges import HASH_MAX, range_between, read_range
from tidemill.shards.read.part_reader import read_part_bytes

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_MAX = 500
VALUE_CHARS_MAX = 400
"""Longest text of one value; a longer one is cut, and ends in …"""
WHOLE_ROWS = 50_000
WHOLE_BYTES = 8 * MIB
"""Updates and bytes up to which a table is read whole."""
RANGE_ROWS = 5_000
READ_BYTES_MAX = 48 * MIB
READ_TIMEOUT_S = 8.0


class RowSample(msgspec.Struct, frozen=True):
    """Rows as text (None = NULL), as PostgreSQL prints them. `total` is None if only some rows were read."""

    table: str
    as_of_ms: int
    since_ms: int
    upper_ms: int
    key: tuple[str, ...]
    columns: dict[str, str]
    rows: list[list[str | None]]
    total: int | None


async def sample_rows(shard: LogShard, objects: ObjectStore, as_of_ms: int | None, limit: int) -> RowSample:
    """Return at most `limit` rows at `as_of_ms` (None = the newest time).

    Raises HistoryLostError below since, UnavailableError for a time that is not final yet or a slow bucket,
    InvalidError if too many bytes would have to be read.
    """
    since, upper = await shard.frontiers()
    at = upper - 1 if as_of_ms is None else as_of_ms
    schema = shard.schema
    names = [column.name for column in schema.columns]
    rows, total = list[list[str | None]](), 0 if upper == 0 else None
    if upper > 0:
        batches = await shard.batches_until(at, 0)
        fetch = _bounded_fetch(objects, asyncio.get_running_loop())
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                rows, total = await asyncio.to_thread(_read, schema, batches, at, fetch, names, limit)
        except MissingError as error:
            raise await shard.explain_missing(error, batches) from error
        except TimeoutError as error:
            raise UnavailableError(
                f"the rows could not be read in time: table={shard.name} waited_s={READ_TIMEOUT_S:g}.",
                fix="Check the bucket: tidemill doctor.",
            ) from error
    types = {column.name: column.type for column in schema.columns}
    return RowSample(shard.name, at, since, upper, tuple(schema.key), types, rows, total)


def _read(
    schema: ShardSchema,
    batches: Sequence[Batch],
    at: int,
    fetch: Callable[[Part], Buffer],
    names: Sequence[str],
    limit: int,
) -> tuple[list[list[str | None]], int | None]:
    """Return (rows as text, number of all rows or None). Runs on a thread."""
    import pyarrow as pa

    updates = sum(part.rows for batch in batches for part in batch.parts)
    size = sum(part.size_bytes for batch in batches for part in batch.parts)
    is_whole = updates <= WHOLE_ROWS and size <= WHOLE_BYTES
    high = HASH_MAX if is_whole else max(1, int(HASH_MAX * RANGE_ROWS / max(updates, 1)))
    chosen = range_between(batches, 0, min(high, HASH_MAX))
    found = list(read_range(schema, chosen, at, fetch, names)) if chosen.batches else []
    if not found:
        return [], 0 if is_whole else None
    table = pa.concat_tables(found)
    total = table.num_rows if is_whole else None
    sortable = [name for name in schema.key if not pa.types.is_nested(table.schema.field(name).type)]
    if is_whole and sortable:
        table = table.sort_by([(name, "ascending") for name in sortable])
    return _as_text(table.slice(0, limit), names), total


def _as_text(table: pa.Table, names: Sequence[str]) -> list[list[str | None]]:
    from tidemill.shapes.shards.pg_text import text_columns

    columns = text_columns(table, names)
    return [[_cut(value) for value in row] for row in zip(*columns, strict=True)]


def _cut(value: str | None) -> str | None:
    return value if value is None or len(value) <= VALUE_CHARS_MAX else value[:VALUE_CHARS_MAX] + "…"


def _bounded_fetch(objects: ObjectStore, loop: asyncio.AbstractEventLoop) -> Callable[[Part], Buffer]:
    """Return a function for a thread that reads parts through the loop, READ_BYTES_MAX of them in all."""
    left_bytes = READ_BYTES_MAX

    def fetch(part: Part) -> Any:
        nonlocal left_bytes
        if not part.object_key:
            return part.inline
        left_bytes -= part.size_bytes
        if left_bytes < 0:
            raise InvalidError(
                f"the rows are in too many parts to be shown here: limit_bytes={READ_BYTES_MAX}.",
                fix="Use `tidemill sql`, or tidemill.connect().",
            )
        return asyncio.run_coroutine_threadsafe(read_part_bytes(objects, part), loop).result(READ_TIMEOUT_S)

    return fetch
