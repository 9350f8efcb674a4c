"""Format of an L0 object, little-endian.

    regions   the record batches of each partition back to back, partitions in order of first arrival; each batch is
              followed by its trailer (batch/columns_trailer.py)
    footer    'TML0' | version uint8 = 1 | region count uint32
              { topic id length uint8 | topic id utf-8 | partition uint32 | position uint64 | length uint64 }*
              | crc32c uint32 of the footer before it
    tail      footer size uint32, its crc included

    key       l0/<epoch, 20 digits>/<writer>-<number, 12 digits>    listing order is epoch order
                writer = <node>-<8 hex digits>, the writer of one process; it numbers its objects from 0 in the order
                in which they are closed

Readers use the placeholders' byte ranges; the footer serves repair and garbage collection.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import crc32c
import msgspec

from tidemill.base.errors import CorruptError
from tidemill.objects.store import Buffer

MAGIC = b"TML0\x01"
_COUNT = struct.Struct("<I")
_REGION = struct.Struct("<IQQ")


class L0Region(msgspec.Struct, frozen=True):
    topic_id: str
    partition: int
    position: int
    length: int


PREFIX = "l0/"


def object_key(epoch: int, writer: str, number: int) -> str:
    return f"{PREFIX}{epoch:020d}/{writer}-{number:012d}"


def parse_writer(key: str) -> tuple[str, int]:
    """Parse (writer, number) from an object key. A key of another form counts as object 0 of an unknown writer."""
    writer, _, number = key.removeprefix(PREFIX).partition("/")[2].rpartition("-")
    return (writer, int(number)) if len(number) == 12 and number.isdigit() else (key, 0)


def encode_footer(regions: Sequence[L0Region]) -> bytes:
    parts = [MAGIC, _COUNT.pack(len(regions))]
    for region in regions:
        name = region.topic_id.encode()
        parts += (bytes((len(name),)), name, _REGION.pack(region.partition, region.position, region.length))
    body = b"".join(parts)
    footer = body + _COUNT.pack(crc32c.crc32c(body))
    return footer + _COUNT.pack(len(footer))


def decode_footer(tail: Buffer) -> list[L0Region]:
    """Decode the regions from the last bytes of an object (at least the footer and its size). Raises CorruptError."""
    data = bytes(tail)
    try:
        (size,) = _COUNT.unpack_from(data, len(data) - 4)
        footer = data[len(data) - 4 - size : len(data) - 4]
        body = footer[:-4]
        if len(footer) != size or not body.startswith(MAGIC) or footer[-4:] != _COUNT.pack(crc32c.crc32c(body)):
            raise CorruptError(f"damaged L0 footer: footer_bytes={size} tail_bytes={len(data)}.")
        (count,) = _COUNT.unpack_from(body, len(MAGIC))
        at = len(MAGIC) + 4
        regions = []
        for _ in range(count):
            end = at + 1 + body[at]
            topic_id = body[at + 1 : end].decode()
            regions.append(L0Region(topic_id, *_REGION.unpack_from(body, end)))
            at = end + _REGION.size
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise CorruptError(f"unreadable L0 footer: tail_bytes={len(data)} cause={error}.") from error
    return regions
