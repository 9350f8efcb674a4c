"""Bounds and null counts of a part's columns, from its footer: by them readers skip files.

Parts have statistics of their key columns, except floats (readers order NaN differently). A column without statistics
in any row group has no bounds, nor has a nested column. A column that was widened since has the bounds in its present
type.

Invariant (superset): the bounds contain every value of the file, also of rows that do not count.

Source: the table specification, "Binary single-value serialization".
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from tidemill.lake.format.schema import iceberg_type
from tidemill.shards.api import ShardSchema
from tidemill.shards.nested.field_ids import FIRST_ID
from tidemill.shards.nested.type_names import is_nested
from tidemill.shards.parts.stored_types import chunk_places

TEXT_BYTES: Final = 64
"""Limit for bounds of text and bytes, of which a manifest has two per file: a longer lower one is cut, a longer upper
one omitted."""


class Bounds(msgspec.Struct, frozen=True):
    """Values and nulls by column id, and bounds in Iceberg's serialization."""

    lower: Mapping[int, bytes]
    upper: Mapping[int, bytes]
    values: Mapping[int, int]
    nulls: Mapping[int, int]


def bounds_of(schema: ShardSchema, footer: Any) -> Bounds:
    """Return the bounds of the columns of `schema` in the file with this footer (`pyarrow.parquet.FileMetaData`)."""
    places = chunk_places(footer.schema.to_arrow_schema())
    groups = [footer.row_group(at) for at in range(footer.num_row_groups)]
    lower: dict[int, bytes] = {}
    upper: dict[int, bytes] = {}
    values: dict[int, int] = {}
    nulls: dict[int, int] = {}
    for number, column in enumerate(schema.columns, FIRST_ID):
        if column.name not in places or is_nested(column.type):
            continue
        chunks = [group.column(places[column.name].start) for group in groups]
        stats = [chunk.statistics for chunk in chunks]
        if any(each is None or not each.has_null_count for each in stats):
            continue
        values[number] = sum(chunk.num_values for chunk in chunks)
        nulls[number] = sum(each.null_count for each in stats)
        kind = iceberg_type(column.type)
        decode, encode = _codec(kind)
        known = [each for each, chunk in zip(stats, chunks, strict=True) if each.null_count < chunk.num_values]
        if decode is None or not known or not all(each.has_min_max for each in known):
            continue
        low = encode(min(decode(each.min_raw) for each in known))
        high = encode(max(decode(each.max_raw) for each in known))
        lower[number] = _cut(low) if kind == "string" else low[:TEXT_BYTES]
        if len(high) <= TEXT_BYTES:
            upper[number] = high
    return Bounds(lower, upper, values, nulls)


_Codec = tuple[Callable[[Any], Any] | None, Callable[[Any], bytes]]


def _codec(kind: str) -> _Codec:
    """Return (raw statistic → comparable value, that value → bytes); None for a type without bounds."""
    if kind == "boolean":
        return bool, lambda value: b"\x01" if value else b"\x00"
    if kind in ("int", "date"):
        return int, struct.Struct("<i").pack
    if kind in ("long", "timestamp", "timestamptz"):
        return int, struct.Struct("<q").pack
    if kind in ("string", "binary"):
        return bytes, bytes
    if kind.startswith("decimal"):
        return _signed, _shortest
    return None, bytes


def _signed(raw: bytes) -> int:
    return int.from_bytes(raw, "big", signed=True)


def _shortest(value: int) -> bytes:
    """Return the two's complement in as few bytes as possible, big-endian."""
    return value.to_bytes(((value + (value < 0)).bit_length() + 8) // 8, "big", signed=True)


def _cut(text: bytes) -> bytes:
    """Return at most TEXT_BYTES bytes of UTF-8, a prefix of whole characters."""
    return text[:TEXT_BYTES].decode(errors="ignore").encode() if len(text) > TEXT_BYTES else text
