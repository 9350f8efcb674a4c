"""Records of one shape behind each other, looked at together: what one producer writes is mostly of a few sizes.

    record   length varint │ attributes │ time delta │ offset delta │ key size │ key │ value size │ value │ headers
             └─ same bytes in every record of a run ──────────────────┴───────────┴── and these ───┘

A record as long as the one before begins as far behind it, so a run is a table whose rows are records: where its
columns of sizes are all the same, every field of every row lies where the first row has it. A column is every so
many-th byte, taken out as bytes and compared with what it must be: one step in C each, however many records there are.
Only good records come out; anything else is None, and the caller looks closer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Final, NamedTuple

import numpy as np

from tidemill.topics.batch.varint import VarintError, varint

LEAST = 8
"""Fewer records are no run worth a table of its own, unless they end the batch."""

_LOOKED_AT = 4
"""Records whose lengths are compared one by one before a table is made: records of mixed sizes cost no more."""

_VARINT_BYTES = 3
"""Offset and time deltas up to a million; of larger ones there is no run."""

_TABLE_BYTES = 2
"""Offset deltas of so many bytes are kept as columns, 16 KiB; those of three are made as they are needed."""

_HIGH: Final = bytes(range(0x80, 0x100))


class Run(NamedTuple):
    """`records` of them end at byte `end`; the least and the greatest time delta, ms."""

    records: int
    end: int
    low_ms: int
    high_ms: int


def run(data: bytes | memoryview, at: int, place: int, left: int) -> Run | None:
    """The run that begins with the record at byte `at` of `data`, the `place`-th of its batch, of `left` still to come.
    Columns are taken out of bytes three times as fast as out of a view."""
    try:
        length, first = varint(data, at, 32)
        size = first - at + length
        if size < 1 or not _alike(data, at, first, size, left):
            return None
        fixed, time_at, place_at, key_at = _shape(data, at, first, at + size)
    except (IndexError, VarintError):
        return None
    place_bytes, time_bytes = key_at - place_at, place_at - time_at
    if place_bytes > _VARINT_BYTES or time_bytes > _VARINT_BYTES:
        return None
    count = min(left, (len(data) - at) // size, (1 << 7 * place_bytes >> 1) - place)
    least = min(LEAST, left)
    if count < least:
        return None
    end = at + count * size
    column_of = _columns_of(data)
    for byte in fixed:
        column = column_of(byte, end, size)
        if column.count(column[0]) != count:
            count = _agreed(column, column[:1] * count)
            end = at + count * size
    for byte, wanted in enumerate(_places(place, count, place_bytes), place_at):
        column = column_of(byte, end, size)
        if column != wanted[: len(column)]:
            count = _agreed(column, wanted[: len(column)])
            end = at + count * size
    times = [column_of(byte, end, size) for byte in range(time_at, place_at)]
    for column in times[:-1]:
        if column.translate(None, _HIGH):
            return None
    if count < least or not times[-1].isascii():
        return None
    low_ms, high_ms = _least_and_greatest(times)
    return Run(count, end, low_ms, high_ms)


def _columns_of(data: bytes | memoryview) -> Callable[[int, int, int], bytes]:
    if isinstance(data, bytes):
        return lambda first, end, size: data[first:end:size]
    table = np.frombuffer(data, np.uint8)
    return lambda first, end, size: table[first:end:size].tobytes()


def _agreed(found: bytes, wanted: bytes) -> int:
    """How many bytes they have in common at their beginning; they differ, and are of one length."""
    return int((np.frombuffer(found, np.uint8) != np.frombuffer(wanted, np.uint8)).argmax())


def _places(place: int, count: int, place_bytes: int) -> list[bytes]:
    """The columns of the offset deltas `place`, `place` + 1, … of so many bytes each."""
    if place_bytes <= _TABLE_BYTES:
        return [column[place : place + count] for column in _first_places(place_bytes)]
    return _columns(place, count, place_bytes)


@cache
def _first_places(place_bytes: int) -> list[bytes]:
    return _columns(0, 1 << 7 * place_bytes >> 1, place_bytes)


def _columns(place: int, count: int, place_bytes: int) -> list[bytes]:
    zigzag = np.arange(place, place + count, dtype=np.uint32) << np.uint32(1)
    return [
        (zigzag >> np.uint32(7 * byte) & np.uint32(0x7F) | np.uint32(0x80 if byte < place_bytes - 1 else 0))
        .astype(np.uint8)
        .tobytes()
        for byte in range(place_bytes)
    ]


def _least_and_greatest(columns: list[bytes]) -> tuple[int, int]:
    if len(columns) == 1:
        deltas = [(byte >> 1) ^ -(byte & 1) for byte in set(columns[0])]
        return min(deltas), max(deltas)
    times = np.zeros(len(columns[0]), np.int64)
    for number, column in enumerate(columns):
        times |= (np.frombuffer(column, np.uint8) & 0x7F).astype(np.int64) << (7 * number)
    signed = (times >> 1) ^ -(times & 1)
    return int(signed.min()), int(signed.max())


def _alike(data: bytes | memoryview, start: int, first: int, size: int, left: int) -> bool:
    """Do the next records have the length of the one at `start`, whose length ends at `first`?"""
    length, bytes_of_length = data[start:first], first - start
    for other in range(start + size, start + size * min(left, _LOOKED_AT), size):
        if data[other : other + bytes_of_length] != length:
            return False
    return True


def _shape(data: bytes | memoryview, start: int, first: int, end: int) -> tuple[list[int], int, int, int]:
    """(the bytes that say how long something is, where time delta, offset delta and key size are) of the record, whose
    length ends at `first`. Raises IndexError, VarintError."""
    sizes = [*range(start, first)]
    time_at = first + 1
    _, place_at = varint(data, time_at)
    _, key_at = varint(data, place_at, 32)
    at = key_at
    for _ in ("key", "value"):
        at = _sized(data, at, sizes, null=True)
    headers, after = varint(data, at, 32)
    sizes += range(at, after)
    at = after
    if not 0 <= headers <= end - at:
        raise VarintError("a count of headers that is out of bounds")
    for _ in range(headers):
        at = _sized(data, _sized(data, at, sizes, null=False), sizes, null=True)
    if at != end:
        raise VarintError("a length that its fields do not fill")
    return sizes, time_at, place_at, key_at


def _sized(data: bytes | memoryview, at: int, sizes: list[int], *, null: bool) -> int:
    """Past a field and its size, whose bytes are noted."""
    size, after = varint(data, at, 32)
    if size < (-1 if null else 0):
        raise VarintError("a size below what its field may have")
    sizes += range(at, after)
    return after + max(size, 0)
