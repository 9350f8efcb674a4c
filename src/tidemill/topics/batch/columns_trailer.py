"""The columns trailer of a stored batch: its rows a second time, as columns, behind its records (RFC 0015).

    batch      record batch v2: byte 8 has its length, so that readers of records stop before the trailer
    trailer    'TMC1' | size uint32 of the whole trailer | record count uint32 | size uint32 of the columns in memory
               | crc32c uint32 of the trailer without this field | columns, opaque here

All integers of a trailer are little-endian. The byte range of a batch in a log or an index includes its trailer. Row i
of the columns is record i of the batch.

Invariant (records first): a trailer only repeats records. A reader that finds none, or a damaged one, reads the
records.

Invariant (no mistake): the next batch never begins like a trailer. 'TMC1' would be a base offset above 6 · 10¹⁸.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import crc32c

from tidemill.objects.store import Buffer
from tidemill.topics.batch.header import LENGTH_FIELD_END

MAGIC = b"TMC1"
_HEAD = struct.Struct("<4sIII")
_CRC = struct.Struct("<I")
_HEAD_BYTES = _HEAD.size + _CRC.size
_LENGTH = struct.Struct(">i")


class ColumnsTrailer(NamedTuple):
    """`memory_bytes`: size of the columns once they are read."""

    columns: memoryview
    memory_bytes: int


def encode_trailer(columns: Buffer, record_count: int, memory_bytes: int) -> bytes:
    """Return the trailer of a batch of `record_count` records."""
    head = _HEAD.pack(MAGIC, _HEAD_BYTES + len(columns), record_count, memory_bytes)
    return b"".join((head, _CRC.pack(crc32c.crc32c(columns, crc32c.crc32c(head))), columns))


def without_trailer(batch: Buffer) -> Buffer:
    """Return the record batch alone, as a client gets it; damaged bytes are returned unchanged."""
    if len(batch) < LENGTH_FIELD_END:
        return batch
    end = _LENGTH.unpack_from(batch, 8)[0] + LENGTH_FIELD_END
    return batch if not LENGTH_FIELD_END <= end < len(batch) else memoryview(batch)[:end]


def trailer_bytes(data: Buffer, at: int) -> int:
    """Return the size of the trailer that begins at byte `at` of `data`, or 0 if none begins there."""
    if len(data) - at < _HEAD_BYTES:
        return 0
    magic, size, _, _ = _HEAD.unpack_from(data, at)
    return int(size) if magic == MAGIC else 0


def read_trailer(batch: Buffer, record_count: int) -> ColumnsTrailer | None:
    """Return the trailer of a batch of `record_count` records, or None if it has none that is intact."""
    view, end = memoryview(batch), len(without_trailer(batch))
    if trailer_bytes(view, end) != len(view) - end or end == len(view):
        return None
    _, _, count, memory_bytes = _HEAD.unpack_from(view, end)
    (crc,) = _CRC.unpack_from(view, end + _HEAD.size)
    columns = view[end + _HEAD_BYTES :]
    if count != record_count or crc32c.crc32c(columns, crc32c.crc32c(view[end : end + _HEAD.size])) != crc:
        return None
    return ColumnsTrailer(columns, memory_bytes)
