"""Decoder of record batches for our own consumers (Spark executors, tools): one pass, columns first."""

from __future__ import annotations

from itertools import islice
from operator import lt

import crc32c
import msgspec

from tidemill.objects.store import Buffer
from tidemill.topics.batch.codecs import decompress
from tidemill.topics.batch.header import APPEND_TIME, CRC_START, HEADER_BYTES, BatchHeader, parse_header
from tidemill.topics.batch.records import Headers, Record
from tidemill.topics.front import BadBatch, BatchRef, CorruptBatch

_INT64 = 2**63


class Columns(msgspec.Struct, frozen=True):
    """The records of one batch as parallel lists: what an Arrow batch wants."""

    offsets: list[int]
    timestamps_ms: list[int]
    keys: list[bytes | None]
    values: list[bytes | None]
    headers: list[Headers]


class DecodedBatch(msgspec.Struct, frozen=True):
    header: BatchHeader
    records: list[Record]


def decode_batch(buffer: Buffer, *, check_crc: bool = True, ref: BatchRef | None = None) -> DecodedBatch:
    """Header and records, offsets absolute. Raises BadBatch."""
    header, columns = decode_columns(buffer, check_crc=check_crc, ref=ref)
    rows = zip(columns.keys, columns.values, columns.headers, columns.timestamps_ms, columns.offsets, strict=True)
    return DecodedBatch(header, [Record(*row) for row in rows])


def decode_columns(
    buffer: Buffer, *, check_crc: bool = True, ref: BatchRef | None = None
) -> tuple[BatchHeader, Columns]:
    """Header and records as columns, offsets absolute and strictly ascending. Raises BadBatch and nothing else.

    `ref`, where the reader has one: the offsets that the partition's log gave this batch. The bytes must agree, and an
    error names that range however damaged they are.
    With append time set, every timestamp is the batch's max timestamp, as Kafka's clients read it.
    """
    first, last = (ref.base_offset, ref.base_offset + ref.record_count - 1) if ref is not None else (-1, -1)
    try:
        header = parse_header(buffer)
        if ref is None:
            first, last = header.base_offset, header.base_offset + max(header.last_offset_delta, 0)
        return header, _decode(buffer, header, first, last, check_crc=check_crc)
    except Exception as error:
        reason = error.message.rstrip(".") if isinstance(error, CorruptBatch) else f"{type(error).__name__}: {error}"
    # Whatever the bytes are, the harm is these offsets. Raised here, so that it holds no frame with what was decoded.
    raise BadBatch(reason, base_offset=first, last_offset=last)


def _decode(buffer: Buffer, header: BatchHeader, first: int, last: int, *, check_crc: bool) -> Columns:
    if header.magic != 2 or not HEADER_BYTES <= header.size_bytes <= len(buffer):
        raise CorruptBatch(f"not a record batch v2: magic={header.magic} batch_bytes={header.size_bytes}.")
    if (header.base_offset, header.base_offset + header.last_offset_delta) != (first, last):
        raise CorruptBatch(f"other offsets: header={header.base_offset}+{header.last_offset_delta}.")
    view = memoryview(buffer)[: header.size_bytes]
    if check_crc and crc32c.crc32c(view[CRC_START:]) != header.crc:
        raise CorruptBatch("record batch checksum mismatch.")
    columns = _columns(bytes(decompress(header.codec, view[HEADER_BYTES:])), header)
    offsets, timestamps = columns.offsets, columns.timestamps_ms
    if offsets and (offsets[0] < first or offsets[-1] > last or not all(map(lt, offsets, islice(offsets, 1, None)))):
        raise CorruptBatch(f"offsets of records do not ascend within the batch: first={offsets[0]} last={offsets[-1]}.")
    if timestamps and not (min(timestamps) >= -_INT64 and max(timestamps) < _INT64):
        raise CorruptBatch("a timestamp has more than 64 bits.")
    return columns


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, next position). Raises IndexError past the end, CorruptBatch past 64 bits."""
    byte = data[at]
    at += 1
    zigzag = byte & 0x7F
    shift = 7
    while byte > 0x7F:
        byte = data[at]
        at += 1
        zigzag |= (byte & 0x7F) << shift
        shift += 7
        if shift > 70:
            raise CorruptBatch("a variable-length integer is longer than 64 bits.")
    return (zigzag >> 1) ^ -(zigzag & 1), at


def _field(data: bytes, at: int) -> tuple[bytes | None, int]:
    """A length-prefixed byte string; length −1 is null."""
    byte = data[at]
    if byte < 0x80 and not byte & 1:
        at += 1
        length = byte >> 1
    else:
        length, at = _varint(data, at)
        if length < 0:
            return None, at
    end = at + length
    if end > len(data):
        raise IndexError("a field passes the end of the batch")
    return data[at:end], end


def _columns(data: bytes, header: BatchHeader) -> Columns:
    base_offset, base_ms = header.base_offset, header.base_timestamp_ms
    fixed_ms = header.max_timestamp_ms if header.attributes & APPEND_TIME else None
    offsets: list[int] = []
    timestamps: list[int] = []
    keys: list[bytes | None] = []
    values: list[bytes | None] = []
    all_headers: list[Headers] = []
    at = 0
    for _ in range(header.record_count):
        length, at = _varint(data, at)
        end = at + length
        if length < 0 or end > len(data):
            raise IndexError("a record passes the end of the batch")
        delta_ms, at = _varint(data, at + 1)
        delta, at = _varint(data, at)
        key, at = _field(data, at)
        value, at = _field(data, at)
        count = data[at]
        if count == 0:
            headers: Headers = ()
            at += 1
        else:
            headers, at = _headers(data, at)
        if at != end:
            raise IndexError("a record's length and content disagree")
        offsets.append(base_offset + delta)
        timestamps.append(base_ms + delta_ms if fixed_ms is None else fixed_ms)
        keys.append(key)
        values.append(value)
        all_headers.append(headers)
    if at != len(data):
        raise IndexError("bytes after the last record")
    return Columns(offsets, timestamps, keys, values, all_headers)


def _headers(data: bytes, at: int) -> tuple[Headers, int]:
    count, at = _varint(data, at)
    if count < 0:
        raise IndexError("negative header count")
    headers = []
    for _ in range(count):
        name, at = _field(data, at)
        if name is None:
            raise IndexError("a header without a name")
        content, at = _field(data, at)
        headers.append((name.decode(errors="replace"), content))
    return tuple(headers), at
