"""Metadata of records as columns of a table: `include` of a topic.

timestamp   of the producer or of the log, as the topic says; null if the record has none
key         the bytes in the record, with a frame if it has one; text must be UTF-8
headers     [{"key": "trace", "value": "…"}, …] in order; the value in base64, as `base64`, if it is not UTF-8
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from tidemill.shards.api import Column, ShardSchema
from tidemill.shards.parts.schema import arrow_type
from tidemill.spark.decode.block_decoder import Block
from tidemill.spark.decode.records import Records
from tidemill.spark.decode.row_decoder import values_to_columns
from tidemill.spark.formats.avro.reader import Dead
from tidemill.spark.formats.conversion import SourceType, find_conversion
from tidemill.spark.formats.record_format import RecordFormat


class RecordMetadata:
    """Columns of metadata of one table."""

    def __init__(self, schema: ShardSchema, record_format: RecordFormat) -> None:
        types = {column.name: column for column in schema.columns}
        self._columns = [types[name] for _, name in record_format.include if name in types]
        self._kinds = {name: meta for meta, name in record_format.include}

    def add_to(self, block: Block, records: Records, dead: Dead) -> Block:
        """Add the columns to rows, or to keys of deletions; rows that cannot have them are added to `dead`."""
        if not self._columns:
            return block
        places = block.places.tolist()
        values = [self._values(self._kinds[column.name], records, block, places) for column in self._columns]
        arrays, kept = values_to_columns(self._columns, values, places, dead, self._to_arrow)
        if len(kept) < len(places):
            block = keep_rows(block, np.isin(block.places, np.array(kept, dtype=np.int64)))
        return Block(block.places, block.arrays | arrays)

    @staticmethod
    def _values(kind: str, records: Records, block: Block, places: Sequence[int]) -> pa.Array:
        columns = records.columns
        if kind == "timestamp":
            found = columns.timestamps_ms[block.places]
            return pa.array(found, mask=found < 0)
        if kind == "offset":
            return pa.array(records.offsets[block.places])
        if kind == "partition":
            return pa.array(records.partitions_at(block.places))
        if kind == "key":
            return pa.array([columns.key(at) for at in places], pa.binary())
        return pa.array([_headers_text(columns.headers_of(at)) for at in places], pa.string())

    def _to_arrow(self, values: pa.Array, column: Column) -> pa.Array:
        if column.type == "timestamp":
            convert = find_conversion(SourceType("millis"), column)
            assert convert is not None
            return convert(values)
        return values.cast(arrow_type(column.type))


def keep_rows(block: Block, mask: np.ndarray[Any, np.dtype[np.bool_]]) -> Block:
    """Return the rows of a block in `mask`."""
    kept = pa.array(mask)
    return Block(block.places[mask], {name: array.filter(kept) for name, array in block.arrays.items()})


def _headers_text(headers: Sequence[tuple[str, bytes | None]]) -> str:
    return msgspec.json.encode([_header(name, value) for name, value in headers]).decode() if headers else "[]"


def _header(name: str, value: bytes | None) -> dict[str, str | None]:
    if value is None:
        return {"key": name, "value": None}
    try:
        return {"key": name, "value": value.decode()}
    except UnicodeDecodeError:
        return {"key": name, "base64": base64.b64encode(value).decode()}
