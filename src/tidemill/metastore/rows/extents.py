"""Extents of batches not in L1: the bytes of an object that hold a range of a partition's offsets.

    extent     11 | topic_id text | partition u32 | base_offset u64
               last_offset, max_timestamp_ms, object_key, first_byte, size_bytes, record_count, batches bytes

An extent is one batch, or several that are contiguous in one object. `batches` belongs to `topics`, the only reader.
It locates each batch, so that every placeholder can be written again unchanged:

    batches    empty (the extent is one batch), or
               msgpack array of [base_offset, first_byte, size_bytes, max_timestamp_ms], by base offset;
               a batch's record count is the distance to the next base, the last one's to last_offset + 1
"""

from __future__ import annotations

import msgspec

from tidemill.metastore.rows.key_encoding import Column, Kind
from tidemill.metastore.rows.row_family import Family


class ExtentRow(msgspec.Struct, frozen=True):
    """One extent: offsets base_offset to last_offset, both inclusive; `first_byte` and `size_bytes` within the
    object."""

    topic_id: str
    partition: int
    base_offset: int
    last_offset: int
    max_timestamp_ms: int
    object_key: str
    first_byte: int
    size_bytes: int
    record_count: int
    batches: bytes = b""


EXTENTS = Family(
    0x11,
    "extent",
    ExtentRow,
    Column("topic_id", Kind.TEXT),
    Column("partition", Kind.U32),
    Column("base_offset", Kind.U64),
)
