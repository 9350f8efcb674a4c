"""The 61-byte header of a record batch v2, read and patched in place.

byte  field                  type
   0  base offset            int64    patched at commit: the batch's first Kafka offset
   8  batch length           int32    bytes after this field
  12  partition leader epoch int32    patched at commit
  16  magic                  int8     2
  17  crc                    uint32   CRC-32C of byte 21 to the end
  21  attributes             int16    0-2 codec · 3 append time · 4 transactional · 5 control
  23  last offset delta      int32    record count − 1
  27  base timestamp         int64    ms
  35  max timestamp          int64    ms
  43  producer id            int64    −1 = none
  51  producer epoch         int16
  53  base sequence          int32
  57  record count           int32
  61  records
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import crc32c
import msgspec

from tidemill.objects.store import Buffer
from tidemill.topics.api import CorruptBatchError

HEADER = struct.Struct(">qiibIhiqqqhii")
HEADER_BYTES = HEADER.size
LENGTH_FIELD_END = 12
CRC_START = 21
MAX_SEQUENCE = 2**31 - 1

CODEC_MASK = 0x07
APPEND_TIME = 0x08
TRANSACTIONAL = 0x10
CONTROL = 0x20
LAST_CODEC = 4

_BASE_OFFSET = struct.Struct(">q")
_LEADER_EPOCH = struct.Struct(">i")
_LENGTH = struct.Struct(">i")
_ATTRIBUTES = struct.Struct(">h")
_MAX_TIMESTAMP = struct.Struct(">q")
_CRC = struct.Struct(">I")


class BatchHeader(msgspec.Struct, frozen=True):
    base_offset: int
    size_bytes: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def codec(self) -> int:
        return self.attributes & CODEC_MASK

    @property
    def last_sequence(self) -> int:
        """Last sequence, inclusive; wraps from 2³¹−1 to 0."""
        return add_sequence(self.base_sequence, self.record_count - 1)

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.last_offset_delta + 1


def add_sequence(sequence: int, delta: int) -> int:
    """Add to a sequence as in KIP-98: non-negative int32 that wraps to 0."""
    return (sequence + delta) & MAX_SEQUENCE


def parse_header(buffer: Buffer, at: int = 0) -> BatchHeader:
    """Read the header that starts at byte `at`. Raises CorruptBatchError if the bytes are too few."""
    try:
        offset, length, *rest = HEADER.unpack_from(buffer, at)
    except struct.error:
        raise CorruptBatchError(f"the bytes end inside a batch header: bytes={len(buffer) - at}.") from None
    return BatchHeader(offset, length + LENGTH_FIELD_END, *rest)


def base_offset_at(buffer: Buffer, at: int) -> int:
    return int(_BASE_OFFSET.unpack_from(buffer, at)[0])


def patch_base_offset(buffer: bytearray | memoryview, at: int, base_offset: int, leader_epoch: int = -1) -> None:
    """Write base offset and leader epoch of the batch at byte `at`; both are outside the CRC."""
    _BASE_OFFSET.pack_into(buffer, at, base_offset)
    _LEADER_EPOCH.pack_into(buffer, at + LENGTH_FIELD_END, leader_epoch)


def is_patched(buffer: Buffer, at: int, base_offset: int) -> bool:
    """Return whether `patch_base_offset` would change nothing."""
    found = _LEADER_EPOCH.unpack_from(buffer, at + LENGTH_FIELD_END)[0]
    return found == -1 and base_offset_at(buffer, at) == base_offset


def is_intact(batch: Buffer) -> bool:
    """Return whether the batch matches its checksum. The batch must fill the buffer.

    The checksum does not cover base offset, length, leader epoch and magic; length and magic are checked separately.
    """
    view = memoryview(batch)
    if len(view) <= CRC_START or view[16] != 2 or _LENGTH.unpack_from(view, 8)[0] != len(view) - LENGTH_FIELD_END:
        return False
    return bool(crc32c.crc32c(view[CRC_START:]) == _CRC.unpack_from(view, 17)[0])


def set_append_time(buffer: Buffer, append_time_ms: int) -> None:
    """Set append time in the batch in the writable `buffer`, and update its checksum."""
    view = memoryview(buffer)
    _ATTRIBUTES.pack_into(view, CRC_START, _ATTRIBUTES.unpack_from(view, CRC_START)[0] | APPEND_TIME)
    _MAX_TIMESTAMP.pack_into(view, 35, append_time_ms)
    _CRC.pack_into(view, 17, crc32c.crc32c(view[CRC_START:]))


def split_batches(buffer: Buffer) -> Iterator[memoryview]:
    """Yield the whole batches that are adjacent in `buffer` (a Fetch or Produce records field), without copying.

    Bytes after the last whole batch are ignored, as clients do.
    """
    view = memoryview(buffer)
    at = 0
    while at + LENGTH_FIELD_END <= len(view):
        end = at + LENGTH_FIELD_END + _LENGTH.unpack_from(view, at + 8)[0]
        if end > len(view) or end < at + HEADER_BYTES:
            return
        yield view[at:end]
        at = end
