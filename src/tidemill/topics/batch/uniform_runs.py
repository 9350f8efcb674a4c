"""Check runs of records with the same layout together: most records of a producer have one of a few sizes.

    record   length varint │ attributes │ time delta │ offset delta │ key size │ key │ value size │ value │ headers
             └─ same bytes in every record of a run ──────────────────┴───────────┴── and these ───┘

Records of equal length are at equal distances, so a run is a table whose rows are records. If its columns of sizes are
constant, every field of every row is at the same place as in the first row. A column is every n-th byte, extracted as
bytes and compared with its expected value: one step in C per column, however many records there are. Only well-formed
records are accepted. For anything else `find_run` returns None, and the caller examines the records in another way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Final, NamedTuple

import numpy as np

from tidemill.topics.batch.varint import VarintError, read_varint

RUN_RECORDS_MIN = 8
"""Minimum records for a run, unless they end the batch: a smaller table is not worth its cost."""

_COMPARED_RECORDS = 4
"""Records whose lengths are compared one by one before a table is built, so that mixed sizes cost no more."""

_DELTA_BYTES_MAX = 3
"""Maximum bytes of offset and time deltas, which allows a million; larger ones make no run."""

_CACHED_DELTA_BYTES_MAX = 2
"""Maximum bytes of offset deltas whose columns are cached, in 16 KiB; those of three bytes are built when needed."""

_CONTINUATION_BYTES: Final = bytes(range(0x80, 0x100))


class UniformRun(NamedTuple):
    """A run of `records` records that end at byte `end`, with the least and the greatest time delta in ms."""

    records: int
    end: int
    low_ms: int
    high_ms: int


def find_run(data: bytes | memoryview, at: int, place: int, left: int) -> UniformRun | None:
    """Return the run that begins with the record at byte `at`, the `place`-th of its batch, of `left` remaining ones.

    Columns are extracted from bytes three times as fast as from a view.
    """
    try:
        length, first = read_varint(data, at, 32)
        size = first - at + length
        if size < 1 or not _have_equal_lengths(data, at, first, size, left):
            return None
        fixed, time_at, place_at, key_at = _record_layout(data, at, first, at + size)
    except (IndexError, VarintError):
        return None
    place_bytes, time_bytes = key_at - place_at, place_at - time_at
    if place_bytes > _DELTA_BYTES_MAX or time_bytes > _DELTA_BYTES_MAX:
        return None
    count = min(left, (len(data) - at) // size, (1 << 7 * place_bytes >> 1) - place)
    least = min(RUN_RECORDS_MIN, left)
    if count < least:
        return None
    end = at + count * size
    column_of = _column_reader(data)
    for byte in fixed:
        column = column_of(byte, end, size)
        if column.count(column[0]) != count:
            count = _common_prefix_length(column, column[:1] * count)
            end = at + count * size
    for byte, wanted in enumerate(_offset_delta_columns(place, count, place_bytes), place_at):
        column = column_of(byte, end, size)
        if column != wanted[: len(column)]:
            count = _common_prefix_length(column, wanted[: len(column)])
            end = at + count * size
    times = [column_of(byte, end, size) for byte in range(time_at, place_at)]
    for column in times[:-1]:
        if column.translate(None, _CONTINUATION_BYTES):
            return None
    if count < least or not times[-1].isascii():
        return None
    low_ms, high_ms = _time_delta_bounds(times)
    return UniformRun(count, end, low_ms, high_ms)


def _column_reader(data: bytes | memoryview) -> Callable[[int, int, int], bytes]:
    if isinstance(data, bytes):
        return lambda first, end, size: data[first:end:size]
    table = np.frombuffer(data, np.uint8)
    return lambda first, end, size: table[first:end:size].tobytes()


def _common_prefix_length(found: bytes, wanted: bytes) -> int:
    """Return the length of their common prefix. They differ and have the same length."""
    return int((np.frombuffer(found, np.uint8) != np.frombuffer(wanted, np.uint8)).argmax())


def _offset_delta_columns(place: int, count: int, place_bytes: int) -> list[bytes]:
    """Return the columns of the offset deltas `place`, `place` + 1, … of `place_bytes` bytes each."""
    if place_bytes <= _CACHED_DELTA_BYTES_MAX:
        return [column[place : place + count] for column in _cached_delta_columns(place_bytes)]
    return _build_delta_columns(place, count, place_bytes)


@cache
def _cached_delta_columns(place_bytes: int) -> list[bytes]:
    return _build_delta_columns(0, 1 << 7 * place_bytes >> 1, place_bytes)


def _build_delta_columns(place: int, count: int, place_bytes: int) -> list[bytes]:
    zigzag = np.arange(place, place + count, dtype=np.uint32) << np.uint32(1)
    return [
        (zigzag >> np.uint32(7 * byte) & np.uint32(0x7F) | np.uint32(0x80 if byte < place_bytes - 1 else 0))
        .astype(np.uint8)
        .tobytes()
        for byte in range(place_bytes)
    ]


def _time_delta_bounds(columns: list[bytes]) -> tuple[int, int]:
    if len(columns) == 1:
        deltas = [(byte >> 1) ^ -(byte & 1) for byte in set(columns[0])]
        return min(deltas), max(deltas)
    times = np.zeros(len(columns[0]), np.int64)
    for number, column in enumerate(columns):
        times |= (np.frombuffer(column, np.uint8) & 0x7F).astype(np.int64) << (7 * number)
    signed = (times >> 1) ^ -(times & 1)
    return int(signed.min()), int(signed.max())


def _have_equal_lengths(data: bytes | memoryview, start: int, first: int, size: int, left: int) -> bool:
    """Return whether the next records have the length of the one at `start`, whose length field ends at `first`."""
    length, bytes_of_length = data[start:first], first - start
    for other in range(start + size, start + size * min(left, _COMPARED_RECORDS), size):
        if data[other : other + bytes_of_length] != length:
            return False
    return True


def _record_layout(data: bytes | memoryview, start: int, first: int, end: int) -> tuple[list[int], int, int, int]:
    """Return (positions of all size bytes, positions of time delta, offset delta and key size) of the record.

    `first` is the end of its length field. Raises IndexError, VarintError.
    """
    sizes = [*range(start, first)]
    time_at = first + 1
    _, place_at = read_varint(data, time_at)
    _, key_at = read_varint(data, place_at, 32)
    at = key_at
    for _ in ("key", "value"):
        at = _skip_sized_field(data, at, sizes, null=True)
    headers, after = read_varint(data, at, 32)
    sizes += range(at, after)
    at = after
    if not 0 <= headers <= end - at:
        raise VarintError("the header count is out of bounds")
    for _ in range(headers):
        at = _skip_sized_field(data, _skip_sized_field(data, at, sizes, null=False), sizes, null=True)
    if at != end:
        raise VarintError("the fields do not fill the record's length")
    return sizes, time_at, place_at, key_at


def _skip_sized_field(data: bytes | memoryview, at: int, sizes: list[int], *, null: bool) -> int:
    """Return the position after a field, and note the bytes of its size."""
    size, after = read_varint(data, at, 32)
    if size < (-1 if null else 0):
        raise VarintError("the size of a field is out of bounds")
    sizes += range(at, after)
    return after + max(size, 0)
