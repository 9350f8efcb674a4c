"""Format of an L1 object: record batches of one topic, partition by partition, in offset order (RFC 0005 §2).

    regions   record batches v2 of one partition back to back, base offsets patched, each followed by its trailer
              (batch/columns_trailer.py). A partition may have several regions, of disjoint and ascending offsets.
    indexes   one per region, in the order of the regions: 'TMI1' | batch count uint32 | codec uint8 | payload
              | crc32c uint32 of the index before it
                payload   four columns of int64, one after another, each value delta-encoded (the first against 0):
                          base offset, next offset, size in bytes, max timestamp; one entry a batch
                codec     0 none · 4 zstd
    footer    'TML1' | version uint8 = 1 | topic id length uint8 | topic id utf-8 | region count uint32
              { partition uint32 | first byte uint64 | size uint64 | base offset int64 | last offset int64
                | max timestamp int64 | batch count uint32 | index byte uint64 | index size uint32 }*
              | crc32c uint32 of the footer before it
    tail      footer size uint32, its crc included

    key       l1/<topic id>/<created ms, 15 digits>-<nonce>     listing order of a topic is the order of creation

All integers are little-endian.

A region covers the offsets [base offset, last offset], both inclusive, even if no batch holds some of them: markers,
aborted and compacted records leave gaps. It may hold no batch at all. Its first batch may begin before it, if the log
was truncated within a batch. Readers take the byte ranges of a region and of its index from the extent row; the footer
serves repair and the deep check.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import cramjam
import crc32c
import msgspec
import numpy as np
import numpy.typing as npt

from tidemill.base.errors import CorruptError
from tidemill.objects.store import Buffer
from tidemill.topics.api import BatchRef

INDEX_MAGIC = b"TMI1"
FOOTER_MAGIC = b"TML1\x01"
REGION_BATCHES = 65_536
"""Limit of batches per region: its index is then 2 MiB before compression."""

_ZSTD = 4
_COMPRESSED_BATCHES_MIN = 8
_COLUMNS = 4
_U32 = struct.Struct("<I")
_INDEX_HEAD = struct.Struct("<4sIB")
_REGION = struct.Struct("<IQQqqqIQI")

Column = npt.NDArray[np.int64]


class L1Region(msgspec.Struct, frozen=True):
    """Entry of the footer for one region; offsets are inclusive.

    `first_byte` and `size_bytes` locate the batches, `index_byte` and `index_bytes` the index, all within the object.
    """

    partition: int
    first_byte: int
    size_bytes: int
    base_offset: int
    last_offset: int
    max_timestamp_ms: int
    batch_count: int
    index_byte: int
    index_bytes: int


class Footer(msgspec.Struct, frozen=True):
    topic_id: str
    regions: tuple[L1Region, ...]


def object_id(created_ms: int, nonce: str) -> str:
    return f"{created_ms:015d}-{nonce}"


def created_ms(object_id: str) -> int:
    """Return the creation time in an object id, or −1 for an id of another form."""
    text = object_id.partition("-")[0]
    return int(text) if len(text) == 15 and text.isdigit() else -1


class RegionIndex:
    """Index of a region: one entry per batch, ascending.

    `ends` are next offsets; `highest` is the running maximum of `timestamps`.
    """

    __slots__ = ("bases", "ends", "highest", "sizes", "starts", "timestamps")

    def __init__(self, bases: Column, ends: Column, sizes: Column, timestamps: Column) -> None:
        self.bases = bases
        self.ends = ends
        self.sizes = sizes
        self.timestamps = timestamps
        self.starts = np.cumsum(sizes) - sizes
        self.highest = np.maximum.accumulate(timestamps)

    def __len__(self) -> int:
        return len(self.bases)

    @property
    def cost_bytes(self) -> int:
        """Estimated memory of the index."""
        return len(self.bases) * 48 + 400

    def find(self, offset: int) -> int:
        """Return the index of the batch that holds `offset`, or of the first one after it, else len(self)."""
        return int(np.searchsorted(self.ends, offset, side="right"))

    def find_time(self, timestamp_ms: int) -> int:
        """Return the index of the first batch with a timestamp at or after `timestamp_ms`, else len(self)."""
        return int(np.searchsorted(self.highest, timestamp_ms, side="left"))

    def ref(self, index: int, object_key: str, first_byte: int) -> BatchRef:
        """Return the location of batch `index`, in a region that begins at `first_byte`."""
        base = int(self.bases[index])
        return BatchRef(
            object_key,
            first_byte + int(self.starts[index]),
            int(self.sizes[index]),
            base,
            int(self.ends[index]) - base,
            int(self.timestamps[index]),
        )


def encode_index(batches: Sequence[tuple[int, int, int, int]]) -> bytes:
    """Encode an index. `batches`: (base offset, next offset, size in bytes, max timestamp) of each batch."""
    columns = np.array(batches, np.int64).reshape(-1, _COLUMNS).T
    payload = np.diff(columns, axis=1, prepend=0).astype("<i8").tobytes()
    codec = 0
    if len(batches) >= _COMPRESSED_BATCHES_MIN:
        codec, payload = _ZSTD, bytes(cramjam.zstd.compress(payload, 1))
    body = _INDEX_HEAD.pack(INDEX_MAGIC, len(batches), codec) + payload
    return body + _U32.pack(crc32c.crc32c(body))


def decode_index(data: Buffer, region: L1Region) -> RegionIndex:
    """Decode the index of `region`, and check that its batches are adjacent, ascending and complete.

    Raises CorruptError.
    """
    body = memoryview(data)[:-4]
    if len(data) < _INDEX_HEAD.size + 4 or _U32.pack(crc32c.crc32c(body)) != bytes(data[-4:]):
        raise CorruptError(f"damaged index of an L1 region: partition={region.partition} bytes={len(data)}.")
    magic, count, codec = _INDEX_HEAD.unpack_from(body)
    if magic != INDEX_MAGIC or count != region.batch_count or count > REGION_BATCHES or codec not in (0, _ZSTD):
        raise _index_contradiction_error(region, f"count={count} codec={codec}")
    wanted = count * _COLUMNS * 8
    payload: Buffer = body[_INDEX_HEAD.size :]
    if codec == _ZSTD:
        payload = _decompress_payload(payload, wanted, region)
    if len(payload) != wanted:
        raise _index_contradiction_error(region, f"payload_bytes={len(payload)}")
    columns = np.cumsum(np.frombuffer(payload, "<i8").astype(np.int64).reshape(_COLUMNS, count), axis=1)
    bases, ends, sizes, timestamps = columns
    ordered = (bases < ends).all() and (bases[1:] >= ends[:-1]).all() and (sizes > 0).all()
    inside = not count or (ends[0] > region.base_offset and ends[-1] <= region.last_offset + 1)
    if not (ordered and inside and int(sizes.sum()) == region.size_bytes):
        raise _index_contradiction_error(region, "its batches do not match the region")
    return RegionIndex(bases, ends, sizes, timestamps)


def _decompress_payload(payload: Buffer, wanted: int, region: L1Region) -> bytes:
    out = bytearray(wanted)
    try:
        size = cramjam.zstd.decompress_into(payload, out)
    except Exception as error:
        raise _index_contradiction_error(region, f"cause={error!r}") from error
    return bytes(out[:size])


def _index_contradiction_error(region: L1Region, what: str) -> CorruptError:
    return CorruptError(
        f"the index of an L1 region contradicts the region: partition={region.partition} "
        f"base_offset={region.base_offset} {what}."
    )


def encode_footer(footer: Footer) -> bytes:
    """Encode the footer and the tail."""
    name = footer.topic_id.encode()
    parts = [FOOTER_MAGIC, bytes((len(name),)), name, _U32.pack(len(footer.regions))]
    parts += [_REGION.pack(*msgspec.structs.astuple(region)) for region in footer.regions]
    body = b"".join(parts)
    whole = body + _U32.pack(crc32c.crc32c(body))
    return whole + _U32.pack(len(whole))


def parse_tail(tail: Buffer, size_bytes: int) -> Footer | int:
    """Parse the footer from the last bytes of an object, or return how many preceding bytes are missing.

    Raises CorruptError.
    """
    if len(tail) < 4:
        if size_bytes < 4:
            raise CorruptError(f"an L1 object has no footer: size_bytes={size_bytes}.")
        return 4 - len(tail)
    (footer_bytes,) = _U32.unpack_from(tail, len(tail) - 4)
    if not len(FOOTER_MAGIC) + 9 <= footer_bytes <= size_bytes - 4:
        raise CorruptError(
            f"an L1 object has an impossible footer size: footer_bytes={footer_bytes} size_bytes={size_bytes}."
        )
    if footer_bytes + 4 > len(tail):
        return int(footer_bytes) + 4 - len(tail)
    whole = bytes(tail[len(tail) - 4 - footer_bytes : len(tail) - 4])
    body, crc = whole[:-4], whole[-4:]
    if not body.startswith(FOOTER_MAGIC) or _U32.pack(crc32c.crc32c(body)) != crc:
        raise CorruptError(f"damaged L1 footer: footer_bytes={footer_bytes} size_bytes={size_bytes}.")
    try:
        return _decode_footer(body, size_bytes - 4 - footer_bytes)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise CorruptError(f"unreadable L1 footer: footer_bytes={footer_bytes} cause={error}.") from error


def _decode_footer(body: bytes, data_bytes: int) -> Footer:
    at = len(FOOTER_MAGIC)
    end = at + 1 + body[at]
    topic_id = body[at + 1 : end].decode()
    (count,) = _U32.unpack_from(body, end)
    at = end + 4
    if len(body) != at + count * _REGION.size:
        raise CorruptError(f"an L1 footer does not have the length of its regions: count={count} bytes={len(body)}.")
    regions = tuple(L1Region(*_REGION.unpack_from(body, at + i * _REGION.size)) for i in range(count))
    for region in regions:
        ends = max(region.first_byte + region.size_bytes, region.index_byte + region.index_bytes)
        if ends > data_bytes or region.last_offset < region.base_offset:
            raise CorruptError(f"an L1 footer names bytes outside the object: {region} data_bytes={data_bytes}.")
    return Footer(topic_id, regions)
