"""Verify pages of a Parquet column chunk without decoding, for engines that read parts and do not verify checksums.

    chunk   { page header (Thrift compact) | compressed bytes of the page }*     the dictionary page first

Three facts of a header matter: field 3 compressed_page_size, field 4 crc, and its end. A page without a checksum
passes.
"""

from __future__ import annotations

import zlib
from typing import Any

from tidemill.base.errors import CorruptError

_STOP, _TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 0, 1, 2, 3, 7, 8, 9, 10, 11, 12
_SIZE_FIELD, _CRC_FIELD = 3, 4


def chunk_range(chunk: Any) -> tuple[int, int]:
    """Return [start, end) of a column chunk in its file, from its metadata (`pyarrow.parquet.ColumnChunkMetaData`)."""
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset is not None:
        start = min(start, chunk.dictionary_page_offset)
    return start, start + chunk.total_compressed_size


def check_pages(chunk: memoryview, where: str) -> None:
    """Raise CorruptError unless every page of this whole column chunk matches the checksum in its header."""
    at = 0
    try:
        while at < len(chunk):
            start, size_bytes, crc = _read_header(chunk, at)
            page = chunk[start : start + size_bytes]
            if len(page) != size_bytes or (crc is not None and zlib.crc32(page) != crc):
                raise CorruptError(f"page is damaged: {where} page_byte={at} page_bytes={size_bytes}.")
            at = start + size_bytes
    except (IndexError, ValueError) as error:
        raise CorruptError(f"page header is unreadable: {where} page_byte={at} ({error}).") from error


def _read_header(data: memoryview, at: int) -> tuple[int, int, int | None]:
    """Return (start of the page, its size in bytes, its checksum or None)."""
    field, size_bytes, crc = 0, -1, None
    while (head := data[at]) != _STOP:
        at, kind = at + 1, head & 15
        if head >> 4:
            field += head >> 4
        else:
            field, at = _read_signed(data, at)
        if field in (_SIZE_FIELD, _CRC_FIELD) and kind in (4, 5, 6):
            value, at = _read_signed(data, at)
            if field == _SIZE_FIELD:
                size_bytes = value
            else:
                crc = value & 0xFFFFFFFF
        else:
            at = _skip_value(data, at, kind)
    if size_bytes < 0:
        raise ValueError("it has no size")
    return at + 1, size_bytes, crc


def _skip_value(data: memoryview, at: int, kind: int) -> int:
    """Return where a value of this kind ends."""
    if kind in (_TRUE, _FALSE):
        return at
    if kind == _BYTE:
        return at + 1
    if kind in (4, 5, 6):
        return _read_varint(data, at)[1]
    if kind == _DOUBLE:
        return at + 8
    if kind == _BINARY:
        size, at = _read_varint(data, at)
        return at + size
    if kind == _STRUCT:
        while (head := data[at]) != _STOP:
            at += 1
            if not head >> 4:
                at = _read_varint(data, at)[1]
            at = _skip_value(data, at, head & 15)
        return at + 1
    raise ValueError(f"it has a field of kind {kind}")  # headers have no lists, sets or maps


def _read_signed(data: memoryview, at: int) -> tuple[int, int]:
    value, at = _read_varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("it has an unterminated number")
