"""Rows of a shard's Arrow tables as text, a few at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tidemill.shapes.shards.pg_text import text_columns

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, str | None]

SLICE_ROWS = 100
"""Rows converted to text together: one or two milliseconds for wide rows."""


def table_slices(table: pa.Table) -> Iterator[pa.Table]:
    for start in range(0, table.num_rows, SLICE_ROWS):
        yield table.slice(start, SLICE_ROWS)


def slice_rows(table: pa.Table, names: tuple[str, ...]) -> Iterator[Row]:
    """Yield the rows of a small table."""
    columns = text_columns(table, names)
    for values in zip(*columns, strict=True):
        yield dict(zip(names, values, strict=True))


def table_rows(table: pa.Table, names: tuple[str, ...]) -> Iterator[Row]:
    for part in table_slices(table):
        yield from slice_rows(part, names)
