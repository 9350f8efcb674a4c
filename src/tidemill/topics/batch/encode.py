"""Encoder of record batches for internal producers (capture, tests, tools): record by record, or by columns, where each
step is one call over all records. Both give the same bytes.

record:  length varint | attributes int8 | timestamp delta varint | offset delta varint
         | key length varint (−1 = null) | key | value length varint (−1 = null) | value
         | header count varint | { key length varint | key | value length varint | value }*
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.base.errors import InvalidError
from tidemill.objects.store import Buffer
from tidemill.topics.batch.compression import codec_number, compress
from tidemill.topics.batch.header import CODEC_MASK, CRC_START, HEADER, HEADER_BYTES, LENGTH_FIELD_END, BatchHeader
from tidemill.topics.batch.records import Record
from tidemill.topics.batch.varint import NULL_LENGTH, Int64s, encode_varint, encode_varints

_EMPTY = pa.scalar(b"")


def encode_batch(
    records: Sequence[Record],
    *,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    base_offset: int = 0,
    compression: str = "none",
) -> bytes:
    """Encode one batch of all `records`. Their offsets are ignored; the base timestamp is the first record's.

    Raises InvalidError without records, or for an unknown compression.
    """
    if not records:
        raise InvalidError("a record batch needs at least one record.")
    codec = codec_number(compression)
    first_ms, max_ms = records[0].timestamp_ms, max(record.timestamp_ms for record in records)
    payload = compress(codec, encode_records(records, 0, first_ms))
    fields = (codec, len(records) - 1, first_ms, max_ms, producer_id, producer_epoch, base_sequence, len(records))
    return bytes(_frame_payload(payload, base_offset, -1, fields))


def encode_records(records: Sequence[Record], first: int, first_ms: int) -> bytes:
    """Encode records with the offset deltas `first`, `first` + 1, … of a batch whose first timestamp is `first_ms`."""
    parts: list[bytes] = []
    for delta, record in enumerate(records, first):
        key, value, headers = record.key, record.value, record.headers
        body = [b"\x00", encode_varint(record.timestamp_ms - first_ms), encode_varint(delta)]
        body += (NULL_LENGTH,) if key is None else (encode_varint(len(key)), key)
        body += (NULL_LENGTH,) if value is None else (encode_varint(len(value)), value)
        body.append(encode_varint(len(headers)))
        for name, content in headers:
            encoded = name.encode()
            body += (encode_varint(len(encoded)), encoded)
            body += (NULL_LENGTH,) if content is None else (encode_varint(len(content)), content)
        joined = b"".join(body)
        parts.append(encode_varint(len(joined)))
        parts.append(joined)
    return b"".join(parts)


def encode_record_columns(first: int, time_deltas: Int64s, rests: list[Any]) -> memoryview:
    """Encode records with the offset deltas `first`, `first` + 1, …; `rests`: the adjacent columns of each record."""
    count = len(time_deltas)
    heads = [encode_varints(time_deltas), encode_varints(np.arange(first, first + count))]
    sizes = 1 + sum(value_sizes(column) for column in (*heads, *rests))
    out = join_fields(encode_varints(np.asarray(sizes, np.int64)), b"\x00", *heads, *rests)
    offsets = np.frombuffer(out.buffers()[1], np.int32)[out.offset : out.offset + count + 1]
    return memoryview(out.buffers()[2])[int(offsets[0]) : int(offsets[-1])]


def value_sizes(column: Any) -> Int64s:
    """Return the size of each value of a binary column without nulls, in bytes."""
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    return np.diff(offsets).astype(np.int64)


def join_fields(*columns: Any) -> Any:
    """Join columns element by element; constants are bytes."""
    return pc.binary_join_element_wise(*columns, _EMPTY)


def frame_records(
    payload: Buffer,
    count: int,
    first_ms: int,
    max_ms: int,
    *,
    producer_id: int,
    producer_epoch: int,
    base_sequence: int,
) -> bytes:
    """Frame one uncompressed batch of `count` encoded records, with the same bytes as `encode_batch`."""
    fields = (0, count - 1, first_ms, max_ms, producer_id, producer_epoch, base_sequence, count)
    return bytes(_frame_payload(payload, 0, -1, fields))


def recompress_batch(header: BatchHeader, records: Buffer, codec: int) -> bytearray:
    """Rebuild the batch of `header` with its uncompressed `records` compressed by `codec`.

    Long work: never call it on the event loop.
    """
    attributes = header.attributes & ~CODEC_MASK | codec
    h = header
    times = (h.base_timestamp_ms, h.max_timestamp_ms)
    fields = (attributes, h.last_offset_delta, *times, h.producer_id, h.producer_epoch, h.base_sequence, h.record_count)
    return _frame_payload(compress(codec, bytes(records)), h.base_offset, h.leader_epoch, fields)


def _frame_payload(payload: Buffer, base_offset: int, leader_epoch: int, fields: tuple[int, ...]) -> bytearray:
    """Put a header before `payload`. `fields`: the header fields after the checksum."""
    batch = bytearray(HEADER_BYTES)
    batch += payload
    length = len(batch) - LENGTH_FIELD_END
    HEADER.pack_into(batch, 0, base_offset, length, leader_epoch, 2, 0, *fields)
    crc = crc32c.crc32c(memoryview(batch)[CRC_START:])
    HEADER.pack_into(batch, 0, base_offset, length, leader_epoch, 2, crc, *fields)
    return batch
