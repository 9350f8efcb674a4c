"""Updates of a shard, or commands of a topic, in a DuckDB file on disk, to be read back in key order.

DuckDB sums, sorts and spills. The module deliberately does not use the consolidation of `shards`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tidemill.base.errors import CorruptError
from tidemill.cli.verify.canonical_values import canonical_column, float_canonicalizer, ordered_columns
from tidemill.cli.verify.compare import Row
from tidemill.shards.api import DIFF, Column, ShardSchema
from tidemill.shards.nested.type_names import is_nested

MEMORY_LIMIT = "384MB"
CHUNK_ROWS = 20_000

_DUCK_TYPES = {
    "bool": "BOOLEAN",
    "int16": "SMALLINT",
    "int32": "INTEGER",
    "int64": "BIGINT",
    "float32": "DOUBLE",
    "float64": "DOUBLE",
    "string": "VARCHAR",
    "json": "VARCHAR",
    "binary": "BLOB",
    "date": "INTEGER",
    "timestamp": "BIGINT",
    "timestamp_ntz": "BIGINT",
}


def _duck_type(column: Column) -> str:
    return "VARCHAR" if is_nested(column.type) else _DUCK_TYPES.get(column.type, column.type)


class Spool:
    """DuckDB file in `directory`. Not for concurrent use; blocking work runs on a thread."""

    def __init__(self, directory: Path, name: str, schema: ShardSchema) -> None:
        import duckdb

        self._columns = ordered_columns(schema)
        self._keys = len(schema.key)
        self._fix = float_canonicalizer(self._columns)
        settings = {"memory_limit": MEMORY_LIMIT, "temp_directory": str(directory / f"{name}.tmp"), "threads": 2}
        self._duck: Any = duckdb.connect(str(directory / f"{name}.duckdb"), config=settings)
        fields = [f"c{i} {_duck_type(c)}" for i, c in enumerate(self._columns)]
        self._duck.execute(f"CREATE TABLE updates ({', '.join(fields)}, diff BIGINT)")
        self._duck.execute(
            f"CREATE TABLE commands ({', '.join(fields)}, live BOOLEAN, made BIGINT, part INTEGER, ord BIGINT)"
        )
        self._names = [f"c{i}" for i in range(len(self._columns))]

    async def add_updates(self, rows: pa.Table) -> None:
        """Add updates of the shard: its columns and `_diff`."""
        await asyncio.to_thread(self._insert, "updates", rows, [rows.column(DIFF)])

    async def add_commands(self, rows: pa.Table, live: Any, time: Any, partition: Any, order: Any) -> None:
        """Add upserts (`live`) and deletions of a topic. The newest by (time, order) decides each key."""
        await asyncio.to_thread(self._insert, "commands", rows, [live, time, partition, order])

    def _insert(self, into: str, rows: pa.Table, extra: Sequence[Any]) -> None:
        if rows.num_rows == 0:
            return
        arrays = [canonical_column(rows.column(c.name), c) for c in self._columns]
        names = [f"x{i}" for i in range(len(arrays) + len(extra))]
        table = pa.table([*arrays, *extra], names=names)
        self._duck.register("incoming", table)
        try:
            self._duck.execute(f"INSERT INTO {into} SELECT * FROM incoming")
        finally:
            self._duck.unregister("incoming")

    def contents(self) -> AsyncIterator[list[Row]]:
        """Yield the rows that the updates sum up to, in key order. Raises CorruptError on a negative multiplicity."""
        names = ", ".join(self._names)
        return self._stream(
            f"SELECT {names}, sum(diff)::BIGINT AS n FROM updates GROUP BY {names} HAVING sum(diff) <> 0"
            f" ORDER BY {self._order_by()}",
            counted=True,
        )

    def last_per_key(self, sequence: Sequence[str] = ()) -> AsyncIterator[list[Row]]:
        """Yield the live rows that the commands leave, in key order. `sequence`: columns that decide before the
        order of the commands."""
        names, keys = ", ".join(self._names), ", ".join(self._names[: self._keys])
        order = ", ".join(f"{value} DESC" for value in (*self._sequence_values(sequence), "made", "ord"))
        return self._stream(
            f"SELECT {names} FROM (SELECT *, row_number() OVER (PARTITION BY {keys} ORDER BY {order})"
            f" AS place FROM commands) WHERE place = 1 AND live ORDER BY {self._order_by()}",
            counted=False,
        )

    async def count_revived(self, sequence: Sequence[str], keep_ms: int) -> int:
        """Return the number of commands whose key was deleted with a greater sequence at least `keep_ms` earlier."""
        keys = " AND ".join(f"late.{name} = gone.{name}" for name in self._names[: self._keys])
        late, gone = (f"row({', '.join(self._sequence_values(sequence, of))})" for of in ("late.", "gone."))
        query = (
            f"SELECT count(*) FROM commands late SEMI JOIN commands gone ON {keys} AND NOT gone.live"
            f" AND late.made >= gone.made + {keep_ms} AND {late} < {gone}"
        )
        found = await asyncio.to_thread(lambda: self._duck.execute(query).fetchone())
        return int(found[0])

    def _sequence_values(self, sequence: Sequence[str], of: str = "") -> list[str]:
        names = {column.name: f"{of}c{i}" for i, column in enumerate(self._columns)}
        floats = {column.name for column in self._columns if column.type in ("float32", "float64")}
        return [f"{names[name]} + 0.0::DOUBLE" if name in floats else names[name] for name in sequence]  # no -0.0

    async def count(self) -> int:
        """Return an upper bound of the rows to come, for a progress bar."""
        found = await asyncio.to_thread(lambda: self._duck.execute("SELECT count(*) FROM updates").fetchone())
        return int(found[0])

    async def _stream(self, query: str, counted: bool) -> AsyncIterator[list[Row]]:
        cursor = self._duck.cursor()
        try:
            reader = await asyncio.to_thread(lambda: cursor.sql(query).to_arrow_reader(CHUNK_ROWS))
            while True:
                batch = await asyncio.to_thread(lambda: next(reader, None))
                if batch is None:
                    return
                yield self._batch_rows(batch, counted)
        finally:
            cursor.close()

    def _batch_rows(self, batch: pa.RecordBatch, counted: bool) -> list[Row]:
        if counted:
            counts = batch.column(batch.num_columns - 1).to_numpy()
            if (counts < 0).any():
                at = int(np.nonzero(counts < 0)[0][0])
                key = [batch.column(i)[at].as_py() for i in range(max(1, self._keys))]
                raise CorruptError(f"a row was retracted more often than inserted: key={key} count={int(counts[at])}.")
            if (counts != 1).any():
                batch = batch.take(pa.array(np.repeat(np.arange(len(counts)), counts)))
        rows: list[Row] = list(zip(*(batch.column(i).to_pylist() for i in range(len(self._columns))), strict=True))
        return rows if self._fix is None else [self._fix(r) for r in rows]

    def _order_by(self) -> str:
        """Return the sort order: by key, then by the rest, so that equal multisets give equal streams; null last, as in
        PostgreSQL."""
        return ", ".join(f"{n} ASC NULLS LAST" for n in self._names)

    async def aclose(self) -> None:
        await asyncio.to_thread(self._duck.close)
