"""The rows that every engine of the metastore benchmark gets: 28 B keys, 100 B values, all a function of a number.

key      'topic/' row // 20 in 12 digits '/' row % 20 in 9 digits      so a prefix of 19 B holds 20 rows
value    row in 8 digits '.' version in 3 digits '.' | 43 random bytes | 44 bytes of text      LZ4 halves it

A shuffle is `position * STEP % count`: no list in memory, the same for everyone.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable, Iterator, Sequence

GROUP = 20
STEP = 7_368_787
_SOUP = random.Random(3).randbytes(1 << 20)
_TEXT = b'{"kind":"stream","config":{"retention":"7d"}'


def key(row: int) -> bytes:
    return b"topic/%012d/%09d" % (row // GROUP, row % GROUP)


def absent(row: int) -> bytes:
    """A key inside the range of the rows that no row has: it sorts right behind `row`'s."""
    return b"topic/%012d/%08dx" % (row // GROUP, row % GROUP)


def outside(row: int) -> bytes:
    """A key behind the last row."""
    return b"value/%012d/%09d" % (row // GROUP, row % GROUP)


def group_prefix(row: int) -> bytes:
    return b"topic/%012d" % (row // GROUP)


def value(row: int, version: int) -> bytes:
    start = row * 7919 % (len(_SOUP) - 43)
    return b"%08d.%03d." % (row, version) + _SOUP[start : start + 43] + _TEXT


def shuffled(count: int, start: int = 0, end: int | None = None) -> Iterator[int]:
    """Rows at positions [start, end) of the shuffle of `count` rows."""
    step = STEP
    while math.gcd(step, count) != 1:
        step += 1
    return (position * step % count for position in range(start, count if end is None else end))


def batches(rows: Iterable[int], version: int, size: int) -> Iterator[tuple[list[bytes], list[bytes]]]:
    keys: list[bytes] = []
    values: list[bytes] = []
    for row in rows:
        keys.append(key(row))
        values.append(value(row, version))
        if len(keys) == size:
            yield keys, values
            keys, values = [], []
    if keys:
        yield keys, values


class Versions:
    """The expected version of each row: that of its last write, by ranges of the shuffle."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._written: bytearray | None = None  # a load that overwrites nothing must not weigh in its own memory figure

    def wrote(self, start: int, end: int, version: int) -> None:
        if version and self._written is None:
            self._written = bytearray(self.count)
        if self._written is not None:
            for row in shuffled(self.count, start, end):
                self._written[row] = version

    def value(self, row: int) -> bytes:
        return value(row, self._written[row] if self._written else 0)

    def digest(self) -> str:
        """Return the digest of all keys and values in key order; lengths are constant, so no shift is unnoticed."""
        digest = RowDigest()
        for first in range(0, self.count, 1000):
            rows = range(first, min(self.count, first + 1000))
            digest.add([key(row) for row in rows], [self.value(row) for row in rows])
        return digest.text()


class RowDigest:
    def __init__(self) -> None:
        self.rows = 0
        self._keys, self._values = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)

    def add(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        if len(keys) != len(values):
            raise SystemExit(f"a scan gave {len(keys)} keys and {len(values)} values")
        self.rows += len(keys)
        self._keys.update(b"".join(keys))
        self._values.update(b"".join(values))

    def text(self) -> str:
        return f"{self.rows}:{self._keys.hexdigest()}:{self._values.hexdigest()}"
