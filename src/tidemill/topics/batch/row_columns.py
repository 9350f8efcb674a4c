"""The rows of a captured batch as columns of PostgreSQL's texts: the contents of its trailer (RFC 0015).

    Arrow stream, lz4    metadata   tm.version = version of the table's description
                         field 0    live: bool, False = the row is deleted, and has values of its key alone
                         field n    column n of the description: its text, null = NULL

The text is that of the output function of its type. A row has every value of its record: an unchanged TOAST value comes
from the old row, or its record is not in such a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from tidemill.objects.store import Buffer

MIN_ROWS = 400
"""Fewer rows of a batch are not worth their columns. For any number of rows, these take a kilobyte, and 0.1 ms both to
write and to read (`./dev bench decode`).
"""
VERSION = b"tm.version"
_LIVE = pa.field("live", pa.bool_(), nullable=False)
_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")


class RowColumns(NamedTuple):
    """`live` and the text of every column, by name in the order of the description."""

    version: int
    live: pa.BooleanArray
    texts: dict[str, pa.StringArray]


def build_row_columns(names: Sequence[str], version: int, live: Any, texts: Sequence[pa.StringArray]) -> pa.RecordBatch:
    """Return rows of a table: `live`, a mask, and the texts of each column. `version`: of its description."""
    schema = pa.schema([_LIVE, *(pa.field(name, pa.string()) for name in names)], {VERSION: b"%d" % version})
    return pa.RecordBatch.from_arrays([pa.array(live), *texts], schema=schema)


def encode_row_columns(ranges: Sequence[pa.RecordBatch]) -> tuple[bytes, int] | None:
    """Encode the rows of ranges, in order. Returns them with their size in memory, or None for ranges of several
    descriptions."""
    schema = ranges[0].schema
    if any(not schema.equals(each.schema, check_metadata=True) for each in ranges[1:]):
        return None
    whole = ranges[0] if len(ranges) == 1 else pa.concat_batches(ranges)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=_OPTIONS) as writer:
        writer.write_batch(whole)
    return bytes(sink.getvalue()), whole.nbytes


def decode_row_columns(data: Buffer) -> RowColumns | None:
    """Decode rows. Returns None for other bytes: then the records decide."""
    try:
        with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
            (batch,) = reader
        version = int((batch.schema.metadata or {}).get(VERSION, b""))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError, ValueError):
        return None
    live, *texts = batch.columns
    names = batch.schema.names[1:]
    if len(set(names)) != len(names) or live.type != pa.bool_() or any(text.type != pa.string() for text in texts):
        return None
    return RowColumns(version, live, dict(zip(names, texts, strict=True)))
