"""Scan a batch's records by columns, without an object per record: one pass over lengths, then numpy over varints.

    record   length varint │ attributes int8 │ time delta varint │ offset delta varint │ key │ value │ headers
             └─ hopped ────┘└─ all records together ───────────────────────────────────────────────────────┘

Only well-formed records are returned. For any deviation from the format the scan returns None, and the caller examines
the batch in another way.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from msgspec import Struct

RECORD_BYTES_MIN = 7
"""Minimum size of a record: length, attributes, two deltas, key and value sizes, header count: a byte each."""

CHUNK_RECORDS = 1 << 14
"""Records per scan: their columns fit in the cache, and a batch of millions needs no more memory than one chunk."""

_HEADERS_MAX = 32
"""Limit of headers per record for the scan by columns; records with more take the slow path."""

_VARINT32, _VARINT64 = 5, 10

Column = npt.NDArray[np.int64]


class ScannedRecords(Struct, frozen=True):
    """Columns of scanned records.

    `starts`: first byte of each record, and of the byte after the last one. A field is at `*_at`, `*_bytes` long, −1
    for null. A record's `header_counts` headers begin at `headers_at`.
    """

    starts: Column
    time_deltas: Column
    offset_deltas: Column
    key_at: Column
    key_bytes: Column
    value_at: Column
    value_bytes: Column
    headers_at: Column
    header_counts: Column

    @property
    def end(self) -> int:
        return int(self.starts[-1])


def scan_records(data: bytes | memoryview, at: int, first: int, count: int) -> ScannedRecords | None:
    """Scan records `first` … `first + count − 1` of a batch, beginning at byte `at`.

    Returns None unless they are complete and well-formed, with offset deltas equal to their places.
    """
    return scan_with_deltas(data, at, np.arange(first, first + count))


def scan_with_deltas(data: bytes | memoryview, at: int, places: Column) -> ScannedRecords | None:
    """Scan adjacent records of one or more batches, with these offset deltas; see `scan_records`."""
    try:
        starts = np.fromiter(_record_starts(data, at, len(places)), dtype=np.int64, count=len(places) + 1)
        return _scan_fields(np.frombuffer(data, dtype=np.uint8), starts, places)
    except IndexError:
        return None


def scan_any_deltas(data: bytes | memoryview, at: int, count: int) -> ScannedRecords | None:
    """Scan `count` records with any offset deltas; see `scan_records`. A compacted batch has gaps in them."""
    try:
        starts = np.fromiter(_record_starts(data, at, count), dtype=np.int64, count=count + 1)
        return _scan_fields(np.frombuffer(data, dtype=np.uint8), starts, None)
    except IndexError:
        return None


def _record_starts(data: bytes | memoryview, at: int, count: int) -> Iterator[int]:
    """Yield the first byte of each record, and the end of the last one.

    Raises IndexError beyond the end of the data.
    """
    position = at
    yield position
    for _ in range(count):
        byte = data[position]
        if byte < 0x80:
            position += 1 + (byte >> 1)
        else:
            second = data[position + 1]
            if second < 0x80:
                position += (byte >> 1) + (second << 6) - 62  # 2 + ((byte & 0x7F | second << 7) >> 1)
            else:
                third = data[position + 2]
                length, size = byte & 0x7F | (second & 0x7F) << 7 | (third & 0x7F) << 14, 3
                while third >= 0x80:
                    third = data[position + size]
                    length |= (third & 0x7F) << (7 * size)
                    size += 1
                    if size > _VARINT32:
                        raise IndexError("a length of more than five bytes")
                position += size + (length >> 1)
        yield position


def _scan_fields(data: npt.NDArray[np.uint8], starts: Column, places: Column | None) -> ScannedRecords | None:
    """Scan the fields. Raises IndexError if a field ends beyond the data."""
    begins, ends = starts[:-1], starts[1:]
    if ends[-1] > len(data):
        return None
    lengths, at = _decode_varints(data, begins, _VARINT32)
    time_deltas, at = _decode_varints(data, at + 1, _VARINT64)
    offset_deltas, at = _decode_varints(data, at, _VARINT32)
    good = lengths >= 0
    if places is not None:
        good &= offset_deltas == places
    fields: list[tuple[Column, Column]] = []
    for _ in ("key", "value"):
        sizes, at = _decode_varints(data, at, _VARINT32)
        fields.append((at, sizes))
        good &= sizes >= -1
        at = at + np.maximum(sizes, 0)
        if not (good & (at < ends)).all():
            return None
    headers, at = _decode_varints(data, at, _VARINT32)
    headers_at = at
    if headers.any():
        at = at.copy()
        with_headers = np.flatnonzero(headers)
        at[with_headers] = _header_ends(data, at[with_headers], headers[with_headers], ends[with_headers])
    if not (at == ends).all():
        return None
    return ScannedRecords(starts, time_deltas, offset_deltas, *fields[0], *fields[1], headers_at, headers)


def _header_ends(data: npt.NDArray[np.uint8], at: Column, counts: Column, ends: Column) -> Column:
    """Return the end of each record's headers; −1 for malformed ones and for too many."""
    result = np.full(len(at), -1, dtype=np.int64)
    active = np.flatnonzero((counts > 0) & (counts <= _HEADERS_MAX))
    done = 0
    while len(active):
        done += 1
        sizes, position = _decode_varints(data, at[active], _VARINT32)
        good = sizes >= 0
        position = position + np.maximum(sizes, 0)
        good &= position < ends[active]
        active, position = active[good], position[good]
        sizes, position = _decode_varints(data, position, _VARINT32)
        good = sizes >= -1
        position = position + np.maximum(sizes, 0)
        good &= position <= ends[active]
        active, position = active[good], position[good]
        at[active] = position
        ended = counts[active] == done
        result[active[ended]] = position[ended]
        active = active[~ended]
    return result


def _decode_varints(data: npt.NDArray[np.uint8], at: Column, bytes_max: int) -> tuple[Column, Column]:
    """Return (values, next positions) of the zig-zag varints at `at`.

    Raises IndexError beyond the end of the data, and for a varint that is too long or too large.
    """
    first = data[at]
    at = at + 1
    zigzag = (first & 0x7F).astype(np.uint64)
    more = np.flatnonzero(first > 0x7F)
    shift = 7
    while len(more):
        if shift >= 7 * bytes_max:
            raise IndexError("a varint is too long")
        byte = data[at[more]]
        at[more] += 1
        if shift == 63 and (byte > 1).any():
            raise IndexError("a varint is too large")
        zigzag[more] |= (byte & 0x7F).astype(np.uint64) << np.uint64(shift)
        more = more[byte > 0x7F]
        shift += 7
    if bytes_max == _VARINT32 and shift > 28 and (zigzag >> np.uint64(32)).any():
        raise IndexError("a varint is too large")
    return (zigzag >> np.uint64(1)).astype(np.int64) ^ -(zigzag & np.uint64(1)).astype(np.int64), at
