"""Compression of a batch's records: codec numbers of the attributes field, by name.

Snappy is written in xerial's framing, as Java does, and read framed or raw (librdkafka); LZ4 frames are
written with independent blocks, since Kafka's Java client refuses linked ones.

    xerial:  82 'SNAPPY' 00 | version int32 | compatible int32 | { length int32 | raw snappy block }*
"""

from __future__ import annotations

import struct
import zlib

import cramjam
import lz4.frame

from tidemill.base.errors import Invalid
from tidemill.topics.front import CorruptBatch

CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
XERIAL_MAGIC = b"\x82SNAPPY\x00"
XERIAL_HEADER_BYTES = 16
XERIAL_BLOCK_BYTES = 32 << 10
_INT32 = struct.Struct(">i")


def codec_number(name: str) -> int:
    try:
        return CODECS[name]
    except KeyError:
        raise Invalid(f"unknown compression: compression={name!r}.", fix=f"Use one of {', '.join(CODECS)}.") from None


def compress(codec: int, data: bytes) -> bytes:
    match codec:
        case 0:
            return data
        case 1:
            compressor = zlib.compressobj(6, zlib.DEFLATED, 31)
            return compressor.compress(data) + compressor.flush()
        case 2:
            parts = [XERIAL_MAGIC, _INT32.pack(1), _INT32.pack(1)]
            for at in range(0, len(data), XERIAL_BLOCK_BYTES):
                block = bytes(cramjam.snappy.compress_raw(data[at : at + XERIAL_BLOCK_BYTES]))
                parts += (_INT32.pack(len(block)), block)
            return b"".join(parts)
        case 3:
            return bytes(lz4.frame.compress(data, block_linked=False, store_size=False))
        case 4:
            return bytes(cramjam.zstd.compress(data, 3))
    raise Invalid(f"unknown compression codec: codec={codec}.")


def decompress(codec: int, data: memoryview) -> bytes:
    """The records' bytes. Raises CorruptBatch."""
    try:
        match codec:
            case 0:
                return bytes(data)
            case 1:
                return bytes(cramjam.gzip.decompress(bytes(data)))
            case 2:
                return _unsnappy(data)
            case 3:
                return bytes(lz4.frame.decompress(data))
            case 4:
                return bytes(cramjam.zstd.decompress(bytes(data)))
    except (cramjam.DecompressionError, RuntimeError, ValueError, struct.error, EOFError) as error:
        raise CorruptBatch(f"the records cannot be decompressed: codec={codec} cause={error}.") from error
    raise CorruptBatch(f"unknown compression codec: codec={codec}.")


def _unsnappy(data: memoryview) -> bytes:
    if bytes(data[: len(XERIAL_MAGIC)]) != XERIAL_MAGIC:
        return bytes(cramjam.snappy.decompress_raw(bytes(data)))
    parts = []
    at = XERIAL_HEADER_BYTES
    while at < len(data):
        (length,) = _INT32.unpack_from(data, at)
        at += 4
        if length < 0 or at + length > len(data):
            raise ValueError("a snappy block passes the end")
        parts.append(bytes(cramjam.snappy.decompress_raw(bytes(data[at : at + length]))))
        at += length
    return b"".join(parts)
