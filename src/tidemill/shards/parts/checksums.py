"""Checksums of parts, and their verification by every reader.

    of a part   CRC32C of all bytes and of its footer, in the shard's state; CRC-32 of each page, in the page's header
    of a frame  bytes | crc32c uint32, little-endian: for temporary objects without a state that names them

A part that is read whole is verified by its first checksum, at a fifth of the cost of the page checksums. A part that
is read in pieces is verified by its footer's checksum, then by those of the decoded pages. A part that was written
without checksums has none in its state and is read unverified.
"""

from __future__ import annotations

import io
from typing import Any

import crc32c
import pyarrow as pa
import pyarrow.parquet as pq

from tidemill.base.errors import CorruptError
from tidemill.objects.reads import read_verified_sync
from tidemill.shards.api import Part

FIX = "Copy the object back from a copy of the bucket, or restore; `tidemill doctor --deep --contents` lists all."
MAGIC = b"PAR1"
TAIL_BYTES = 64 << 10
"""Bytes read first of a part that is read in pieces; they contain nearly every footer."""


def checksum(data: Any) -> int:
    return int(crc32c.crc32c(data))


def footer_bytes(data: Any) -> int:
    """Return the size of the footer, including its length and magic; 0 if these are invalid."""
    end = bytes(memoryview(data)[-8:])
    return int.from_bytes(end[:4], "little") + 8 if len(end) == 8 and end[4:] == MAGIC else 0


def checksums_of(data: Any) -> tuple[int, int]:
    """Return the checksums (of all bytes, of the footer) of an encoded part."""
    return checksum(data), checksum(memoryview(data)[-footer_bytes(data) :])


def verify_part_bytes(part: Part, data: Any) -> None:
    """Raise CorruptError unless these are the bytes that were written. A part without checksums passes."""
    if part.crc >= 0 and (found := checksum(data)) != part.crc:
        raise _damaged_error(part, part.crc, found)


def open_part(part: Part, found: Any) -> pq.ParquetFile:
    """Open the part as a Parquet file; `found` is its bytes, or a binary file of them. Every read of it is verified.

    Raises CorruptError, and the errors of the file. Later decoding raises OSError or ArrowException for a damaged page.
    """
    if not hasattr(found, "seek"):
        verify_part_bytes(part, found)
        return pq.ParquetFile(pa.BufferReader(found), pre_buffer=True, page_checksum_verification=part.crc < 0)
    metadata = None
    if part.crc >= 0:
        footer = read_verified_sync(found, part.object_key, lambda: read_footer(part, found))
        metadata = pq.read_metadata(pa.BufferReader(footer))
    return pq.ParquetFile(found, metadata=metadata, pre_buffer=True, page_checksum_verification=True)


def read_footer(part: Part, file: Any) -> bytes:
    """Return the file's bytes from the footer on. Raises CorruptError. A part without checksums is not verified."""
    tail = _tail(file, part.size_bytes, TAIL_BYTES)
    size_bytes = footer_bytes(tail)
    if size_bytes > len(tail):
        tail = _tail(file, part.size_bytes, size_bytes)
    footer = tail[-size_bytes:] if size_bytes else b""
    if part.crc >= 0 and (found := checksum(footer)) != part.footer_crc:
        raise _damaged_error(part, part.footer_crc, found)
    return footer


def _tail(file: Any, size_bytes: int, wanted: int) -> bytes:
    file.seek(-min(wanted, size_bytes), io.SEEK_END)
    return bytes(file.read())


def _damaged_error(part: Part, stored: int, computed: int) -> CorruptError:
    where = part.object_key or "inline"
    return CorruptError(
        f"part is damaged: object={where} stored_crc32c={stored:08x} computed_crc32c={computed:08x}.", fix=FIX
    )


# temporary objects, which have no state ----------------------------------------------------------


def seal_bytes(data: Any) -> bytes:
    """Return the bytes followed by their checksum."""
    return b"".join((data, checksum(data).to_bytes(4, "little")))


def unseal_bytes(data: Any, what: str) -> memoryview:
    """Return the bytes that `seal_bytes` was given. Raises CorruptError."""
    view = memoryview(data)
    body, stored = view[:-4], int.from_bytes(view[-4:], "little")
    computed = checksum(body)
    if len(view) < 4 or computed != stored:
        raise CorruptError(f"{what} is damaged: stored_crc32c={stored:08x} computed_crc32c={computed:08x}.")
    return body
