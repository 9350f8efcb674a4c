"""Control batches: the markers that end transactions (KIP-98).

one record   key    version int16 = 0 · type int16: 0 abort, 1 commit
             value  version int16 = 0 · coordinator epoch int32
header       attributes transactional and control, the producer's id and epoch, no sequence
"""

from __future__ import annotations

import struct

import crc32c

from tidemill.objects.store import Buffer
from tidemill.topics.api import Marker
from tidemill.topics.batch.encode import encode_batch
from tidemill.topics.batch.header import CONTROL, CRC_START, TRANSACTIONAL
from tidemill.topics.batch.records import Record
from tidemill.topics.batch.varint import read_varint

_KEY = struct.Struct(">hh")
_VALUE = struct.Struct(">hi")
_ATTRIBUTES = struct.Struct(">h")
_CRC = struct.Struct(">I")
_ATTRIBUTES_AT, _CRC_AT = 21, 17


def encode_marker(marker: Marker, at_ms: int) -> bytes:
    key = _KEY.pack(0, int(marker.commit))
    value = _VALUE.pack(0, marker.coordinator_epoch)
    batch = bytearray(
        encode_batch(
            [Record(key, value, timestamp_ms=at_ms)],
            producer_id=marker.producer_id,
            producer_epoch=marker.producer_epoch,
        )
    )
    _ATTRIBUTES.pack_into(batch, _ATTRIBUTES_AT, TRANSACTIONAL | CONTROL)
    _CRC.pack_into(batch, _CRC_AT, crc32c.crc32c(memoryview(batch)[CRC_START:]))
    return bytes(batch)


def is_commit_marker(records: Buffer) -> bool:
    """Return whether the record of a control batch is a commit marker."""
    return _parse_marker_key(records) == (0, 1)


def is_abort_marker(records: Buffer) -> bool:
    """Return whether the record of a control batch is an abort marker."""
    return _parse_marker_key(records) == (0, 0)


def _parse_marker_key(records: Buffer) -> tuple[int, int] | None:
    """Parse (version, type), or return None. The bytes are not trusted."""
    data = memoryview(records)
    try:
        at = read_varint(data, 0)[1] + 1  # Past the length and the attributes.
        at = read_varint(data, read_varint(data, at)[1])[1]
        size, at = read_varint(data, at)
        version, kind = _KEY.unpack_from(data, at)
        return (version, kind) if size == _KEY.size else None
    except (IndexError, ValueError, struct.error):
        return None


def as_transactional(batch: bytes) -> bytes:
    """Return the same batch with the transactional attribute set."""
    out = bytearray(batch)
    _ATTRIBUTES.pack_into(out, _ATTRIBUTES_AT, _ATTRIBUTES.unpack_from(batch, _ATTRIBUTES_AT)[0] | TRANSACTIONAL)
    _CRC.pack_into(out, _CRC_AT, crc32c.crc32c(memoryview(out)[CRC_START:]))
    return bytes(out)
