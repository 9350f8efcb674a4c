"""Compression of a batch's records: codec numbers of the attributes field, by name.

Snappy is written in xerial's framing, as Java does, and read framed or raw (librdkafka). LZ4 frames are written with
independent blocks, since Kafka's Java client rejects linked ones.

    xerial:  82 'SNAPPY' 00 | version int32 | compatible int32 | { length int32 | raw snappy block }*
"""

from __future__ import annotations

import struct
import zlib

import cramjam
import lz4.frame
import numpy as np

from tidemill.base.errors import InvalidError
from tidemill.base.limits import DECOMPRESSED_BYTES
from tidemill.topics.api import BatchTooLargeError, InvalidRecordsError

CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
XERIAL_MAGIC = b"\x82SNAPPY\x00"
XERIAL_HEADER_BYTES = 16
XERIAL_BLOCK_BYTES = 32 << 10
GZIP_MEMBERS = 16
_INT32 = struct.Struct(">i")


def codec_number(name: str) -> int:
    try:
        return CODECS[name]
    except KeyError:
        raise InvalidError(
            f"unknown compression: compression={name!r}.", fix=f"Use one of {', '.join(CODECS)}."
        ) from None


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
    raise InvalidError(f"unknown compression codec: codec={codec}.")


def decompress(codec: int, data: memoryview) -> memoryview:
    """Decompress the records; those of codec 0 are not copied. The output is limited to DECOMPRESSED_BYTES per batch.

    Raises BatchTooLargeError, and InvalidRecordsError for an invalid stream. Long work: never call it on the event
    loop.
    """
    try:
        match codec:
            case 0:
                return data
            case 1:
                return _gunzip(data)
            case 2:
                return _unsnappy(data)
            case 3:
                return _unlz4(data)
            case 4:
                return _unzstd(data)
    except (cramjam.DecompressionError, zlib.error, RuntimeError, ValueError, struct.error, EOFError) as error:
        raise InvalidRecordsError(f"the records cannot be decompressed: codec={codec} cause={error}.") from error
    raise InvalidRecordsError(f"unknown compression codec: codec={codec}.")


def _too_large_error() -> BatchTooLargeError:
    return BatchTooLargeError(
        f"the records are too large when decompressed: limit={DECOMPRESSED_BYTES}.", fix="Send smaller batches."
    )


def _gunzip(data: memoryview) -> memoryview:
    """Decompress a gzip stream of one or more members. Their number is limited, since each copies the rest."""
    parts: list[bytes] = []
    left = DECOMPRESSED_BYTES
    rest: bytes | memoryview = data
    while len(rest):
        if len(parts) >= GZIP_MEMBERS:
            raise ValueError("a gzip stream has too many members")
        member = zlib.decompressobj(31)
        part = member.decompress(rest, left + 1)
        left -= len(part)
        if left < 0:
            raise _too_large_error()
        if not member.eof:
            raise ValueError("a gzip stream is truncated")
        parts.append(part)
        rest = member.unused_data
    return memoryview(b"".join(parts) if len(parts) != 1 else parts[0])


def _unlz4(data: memoryview) -> memoryview:
    frame = lz4.frame.LZ4FrameDecompressor()
    found = frame.decompress(data, DECOMPRESSED_BYTES + 1)
    if len(found) > DECOMPRESSED_BYTES:
        raise _too_large_error()
    if not frame.eof or frame.unused_data:
        raise ValueError("not exactly one complete lz4 frame")
    return memoryview(found)


def _unzstd(data: memoryview) -> memoryview:
    """Decompress into uninitialised memory of the maximum size, of which only the written part costs anything.

    A frame need not state its size, and a stated size is not verified.
    """
    room = memoryview(np.empty(DECOMPRESSED_BYTES + 1, dtype=np.uint8).data)
    try:
        count = cramjam.zstd.decompress_into(bytes(data), room)
    except cramjam.DecompressionError as error:
        if "write whole buffer" in str(error):
            raise _too_large_error() from error
        raise
    if count > DECOMPRESSED_BYTES:
        raise _too_large_error()
    return room[:count]


def _unsnappy(data: memoryview) -> memoryview:
    """Decompress snappy. Every block begins with its size, which is checked before the block is decompressed."""
    if bytes(data[: len(XERIAL_MAGIC)]) != XERIAL_MAGIC:
        return memoryview(_decompress_raw_block(bytes(data), DECOMPRESSED_BYTES))
    parts = []
    left = DECOMPRESSED_BYTES
    at = XERIAL_HEADER_BYTES
    while at < len(data):
        (length,) = _INT32.unpack_from(data, at)
        at += 4
        if length < 0 or at + length > len(data):
            raise ValueError("a snappy block ends beyond the data")
        block = _decompress_raw_block(bytes(data[at : at + length]), left)
        left -= len(block)
        parts.append(block)
        at += length
    return memoryview(b"".join(parts))


def _decompress_raw_block(block: bytes, limit_bytes: int) -> bytes:
    if cramjam.snappy.decompress_raw_len(block) > limit_bytes:
        raise _too_large_error()
    return bytes(cramjam.snappy.decompress_raw(block))
