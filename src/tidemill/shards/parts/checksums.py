"""Checksums of parts, and their verification by every reader.

    of a part   CRC32C of all bytes and of its footer, in the shard's state; CRC-32 of each page, in the page's header
    of a frame  bytes | crc32c uint32, little end first: what is stored for a while and has no state to name it

A part that is read whole is verified by the first, which costs a fifth of what the checksums of its pages do. A part
that is read in pieces is verified by its footer's, then by those of the pages that are decoded. A part from before
there were checksums has none in its state and is read as it is.
"""

from __future__ import annotations

import io
from typing import Any

import crc32c
import pyarrow as pa
import pyarrow.parquet as pq

from tidemill.base.errors import CorruptError
from tidemill.objects.verified_read import checked_now
from tidemill.shards.api import Part

FIX = "Bring the object back from a copy of the bucket, or restore; `tidemill doctor --deep --contents` names all."
MAGIC = b"PAR1"
TAIL_BYTES = 64 << 10
"""Read first of a part that is read in pieces: it holds the footer of nearly every one."""


def checksum(data: Any) -> int:
    return int(crc32c.crc32c(data))


def footer_bytes(data: Any) -> int:
    """How many bytes of the end the footer takes, its length and magic included; 0 where these make no sense."""
    end = bytes(memoryview(data)[-8:])
    return int.from_bytes(end[:4], "little") + 8 if len(end) == 8 and end[4:] == MAGIC else 0


def checksums_of(data: Any) -> tuple[int, int]:
    """(of all bytes, of the footer) of an encoded part."""
    return checksum(data), checksum(memoryview(data)[-footer_bytes(data) :])


def check_whole(part: Part, data: Any) -> None:
    """Raises CorruptError unless these are the bytes that were written. A part without checksums passes."""
    if part.crc >= 0 and (found := checksum(data)) != part.crc:
        raise _damaged(part, part.crc, found)


def open_part(part: Part, found: Any) -> pq.ParquetFile:
    """The part as a Parquet file; `found`: its bytes, or a binary file of them. Whatever is read of it is verified.

    Raises CorruptError, and as the file; what is decoded later raises OSError or ArrowException of a damaged page.
    """
    if not hasattr(found, "seek"):
        check_whole(part, found)
        return pq.ParquetFile(pa.BufferReader(found), pre_buffer=True, page_checksum_verification=part.crc < 0)
    metadata = None
    if part.crc >= 0:
        footer = checked_now(found, part.object_key, lambda: read_footer(part, found))
        metadata = pq.read_metadata(pa.BufferReader(footer))
    return pq.ParquetFile(found, metadata=metadata, pre_buffer=True, page_checksum_verification=True)


def read_footer(part: Part, file: Any) -> bytes:
    """The end of the file from the footer on. Raises CorruptError; of a part without checksums nothing is verified."""
    tail = _tail(file, part.size_bytes, TAIL_BYTES)
    size_bytes = footer_bytes(tail)
    if size_bytes > len(tail):
        tail = _tail(file, part.size_bytes, size_bytes)
    footer = tail[-size_bytes:] if size_bytes else b""
    if part.crc >= 0 and (found := checksum(footer)) != part.footer_crc:
        raise _damaged(part, part.footer_crc, found)
    return footer


def _tail(file: Any, size_bytes: int, wanted: int) -> bytes:
    file.seek(-min(wanted, size_bytes), io.SEEK_END)
    return bytes(file.read())


def _damaged(part: Part, stored: int, computed: int) -> CorruptError:
    where = part.object_key or "inline"
    return CorruptError(
        f"part is damaged: object={where} stored_crc32c={stored:08x} computed_crc32c={computed:08x}.", fix=FIX
    )


# what has no state ----------------------------------------------------------------------------------


def sealed(data: Any) -> bytes:
    """The bytes with their checksum behind them."""
    return b"".join((data, checksum(data).to_bytes(4, "little")))


def unsealed(data: Any, what: str) -> memoryview:
    """What `sealed` was given. Raises CorruptError."""
    view = memoryview(data)
    body, stored = view[:-4], int.from_bytes(view[-4:], "little")
    computed = checksum(body)
    if len(view) < 4 or computed != stored:
        raise CorruptError(f"{what} is damaged: stored_crc32c={stored:08x} computed_crc32c={computed:08x}.")
    return body
