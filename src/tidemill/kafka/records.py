"""Looking into a record batch v2, which the produce and fetch paths never do: only ListOffsets by time.

    base offset int64 · batch length int32 · leader epoch int32 · magic int8 · crc uint32 · attributes int16
    last offset delta int32 · base timestamp int64 · max timestamp int64 · producer id int64 · epoch int16
    base sequence int32 · record count int32 · records (compressed as a whole, by attributes & 7)

    record: length varint · attributes int8 · timestamp delta varlong · offset delta varint · key, value, headers

Source: https://kafka.apache.org/documentation/#recordbatch
"""

from __future__ import annotations

import struct
from typing import Final

from tidemill.base.errors import Corrupt

HEADER: Final = struct.Struct(">qiibIhiqqqhii")
_LOG_APPEND_TIME: Final = 0x08
_SNAPPY_JAVA: Final = b"\x82SNAPPY\x00"


def first_at_or_after(batch: memoryview, timestamp_ms: int) -> tuple[int, int] | None:
    """(offset, timestamp) of the first record with timestamp ≥ timestamp_ms, or None. Raises Corrupt."""
    if len(batch) < HEADER.size:
        raise Corrupt(f"record batch shorter than its header: bytes={len(batch)}.")
    base_offset, _, _, _, _, attributes, _, base_ms, max_ms, _, _, _, count = HEADER.unpack_from(batch)
    if attributes & _LOG_APPEND_TIME:
        return (base_offset, max_ms) if max_ms >= timestamp_ms else None
    if max_ms < timestamp_ms:
        return None
    try:
        records = _decompress(batch[HEADER.size :], attributes & 7)
        position = 0
        for _ in range(count):
            length, position = _varint(records, position)
            timestamp_delta, inner = _varint(records, position + 1)
            if base_ms + timestamp_delta >= timestamp_ms:
                return base_offset + _varint(records, inner)[0], base_ms + timestamp_delta
            position += length
    except (IndexError, ValueError) as error:
        raise Corrupt(f"records of a batch cannot be read: base_offset={base_offset}.") from error
    return None


def _decompress(data: memoryview, codec: int) -> memoryview:
    """Raises ValueError."""
    import cramjam

    if codec == 0:
        return data
    try:
        if codec == 1:
            return memoryview(cramjam.gzip.decompress(data))
        if codec == 2:
            return memoryview(_snappy(bytes(data)))
        if codec == 3:
            return memoryview(cramjam.lz4.decompress(data))
        if codec == 4:
            return memoryview(cramjam.zstd.decompress(data))
    except cramjam.DecompressionError as error:
        raise ValueError(str(error)) from error
    raise ValueError(f"unknown codec: {codec}")


def _snappy(data: bytes) -> bytes:
    """Java clients frame snappy: magic, two int32 versions, then (int32 length, block)*; others send one raw block."""
    import cramjam

    if not data.startswith(_SNAPPY_JAVA):
        return bytes(cramjam.snappy.decompress_raw(data))
    out, position = bytearray(), 16
    while position < len(data):
        size = int.from_bytes(data[position : position + 4], "big")
        out += bytes(cramjam.snappy.decompress_raw(data[position + 4 : position + 4 + size]))
        position += 4 + size
    return bytes(out)


def _varint(view: memoryview, position: int) -> tuple[int, int]:
    """Zigzag; IndexError at the end of the view."""
    raw = shift = 0
    while True:
        byte = view[position]
        position += 1
        raw |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (raw >> 1) ^ -(raw & 1), position
        shift += 7
        if shift > 63:
            raise ValueError("varint too long")
