"""Footer of an SST: the offsets of its sections, and values that must match the manifest.

footer  filter_start, index_start, footer_start, blocks, rows  uint64 | min_seqno, max_seqno  int64
        | footer_bytes uint16 | format uint16 = 1 | 'TIDEMSST' | crc32c uint32 of the footer before it

Integers are little end first. The last 16 bytes keep their position and meaning in every later format, so that an
old program can distinguish a newer format from damage.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import crc32c

from tidemill.base.errors import InvalidError
from tidemill.metastore.lsm.block import corrupt_error

MAGIC = b"TIDEMSST"
FORMAT = 1
_FIELDS = struct.Struct("<QQQQQqq")
_TAIL = struct.Struct("<HH8sI")
FOOTER_BYTES = _FIELDS.size + _TAIL.size
_CRC_BYTES = 4


class Footer(NamedTuple):
    filter_start: int
    index_start: int
    footer_start: int
    blocks: int
    rows: int
    min_seqno: int
    max_seqno: int


def encode_footer(footer: Footer) -> bytes:
    body = _FIELDS.pack(*footer) + _TAIL.pack(FOOTER_BYTES, FORMAT, MAGIC, 0)[:-_CRC_BYTES]
    return body + int(crc32c.crc32c(body)).to_bytes(_CRC_BYTES, "little")


def decode_footer(data: bytes, end: int, name: str) -> Footer:
    """Decode the footer from the last bytes of a file of size `end`. Raises Corrupt; Invalid for a newer format."""
    if len(data) < _TAIL.size:
        raise corrupt_error(name, "footer", end - len(data), f"it ends after {len(data)} bytes")
    size, found, magic, stored = _TAIL.unpack_from(data, len(data) - _TAIL.size)
    offset = end - min(size, len(data))
    if magic != MAGIC or not _TAIL.size <= size <= len(data):
        raise corrupt_error(name, "footer", offset, "the file does not end with an SST footer")
    # The checksum is checked before the format: a flipped bit must not look like a newer format.
    computed = int(crc32c.crc32c(memoryview(data)[-size:-_CRC_BYTES]))
    if stored != computed:
        raise corrupt_error(name, "footer", offset, f"its checksum is {computed:08x}, not the stored {stored:08x}")
    if found > FORMAT:
        raise InvalidError(
            f"the file was written by a newer version of tidemill: file={name} format={found} supported={FORMAT}.",
            fix="Use the version of tidemill that wrote it, or a newer one.",
        )
    if size != FOOTER_BYTES:
        raise corrupt_error(name, "footer", offset, f"its length is {size} bytes, not {FOOTER_BYTES}")
    return Footer._make(_FIELDS.unpack_from(data, len(data) - size))
