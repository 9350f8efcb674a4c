"""The columns trailer of a stored batch: its rows a second time, as columns, behind its records (RFC 0015).

    batch      record batch v2: byte 8 has its length, so that readers of records stop before the trailer
    trailer    'TMC1' | size uint32 of the whole trailer | record count uint32 | crc32c uint32 of the columns
               | columns, opaque here

All integers of a trailer are little-endian. The byte range of a batch in a log or an index includes its trailer. Row i
of the columns is record i of the batch.

Invariant (records first): a trailer only repeats records. A reader that finds none, or a damaged one, reads the
records.

Invariant (no mistake): the next batch never begins like a trailer. 'TMC1' would be a base offset above 6 · 10¹⁸.
"""

from __future__ import annotations

import struct

import crc32c

from tidemill.objects.store import Buffer
from tidemill.topics.batch.header import LENGTH_FIELD_END

MAGIC = b"TMC1"
_HEAD = struct.Struct("<4sIII")
_LENGTH = struct.Struct(">i")


def encode_trailer(columns: Buffer, record_count: int) -> bytes:
    """Return the trailer of a batch of `record_count` records."""
    head = _HEAD.pack(MAGIC, _HEAD.size + len(columns), record_count, crc32c.crc32c(columns))
    return b"".join((head, columns))


def without_trailer(batch: Buffer) -> Buffer:
    """Return the record batch alone, as a client gets it; damaged bytes are returned unchanged."""
    if len(batch) < LENGTH_FIELD_END:
        return batch
    end = _LENGTH.unpack_from(batch, 8)[0] + LENGTH_FIELD_END
    return batch if not LENGTH_FIELD_END <= end < len(batch) else memoryview(batch)[:end]


def trailer_bytes(data: Buffer, at: int) -> int:
    """Return the size of the trailer that begins at byte `at` of `data`, or 0 if none begins there."""
    if len(data) - at < _HEAD.size:
        return 0
    magic, size, _, _ = _HEAD.unpack_from(data, at)
    return int(size) if magic == MAGIC else 0


def read_trailer(batch: Buffer, record_count: int) -> memoryview | None:
    """Return the columns behind a batch of `record_count` records, or None if it has none that is intact."""
    end = len(without_trailer(batch))
    if len(batch) - end < _HEAD.size:
        return None
    magic, size, count, crc = _HEAD.unpack_from(batch, end)
    if magic != MAGIC or size != len(batch) - end or count != record_count:
        return None
    columns = memoryview(batch)[end + _HEAD.size :]
    return columns if crc32c.crc32c(columns) == crc else None
