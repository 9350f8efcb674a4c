"""Comparison of two streams of rows in one key order: missing, extra and different rows. Pure.

A row is a tuple of canonical values (`canonical_values`); its first `key_length` values are the key. Both streams must
be sorted by key in the same order. An unsorted stream is reported, never compared wrongly. A key that occurs twice on
one side is one row too many there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tidemill.base.errors import CorruptError

Row = tuple[Any, ...]
EXAMPLES = 5


class Outcome(msgspec.Struct, frozen=True):
    """Result of a comparison.

    `rows` counts the rows of the source. `missing` rows are only in the source, `extra` rows only in the shard;
    `different` rows have the same key and other values. `poisoned` rows are only in the source because they are dead
    letters. The hashes of the two streams are equal exactly when the streams are. `examples` names a few keys.
    """

    rows: int
    shard_rows: int
    missing: int
    extra: int
    different: int
    source_hash: str
    shard_hash: str
    examples: tuple[str, ...] = ()
    poisoned: int = 0

    @property
    def clean(self) -> bool:
        wrong = self.missing or self.extra or self.different or self.poisoned
        return self.source_hash == self.shard_hash and not wrong


class Comparison:
    """Incremental comparison. Push chunks of both sides with `compare_chunks`; offer rows that it did not consume
    again, followed by more."""

    def __init__(self, key_length: int, poisoned: Mapping[Row, str] | None = None) -> None:
        """Initialise. `poisoned` maps a key to the reason why its row is a dead letter."""
        self._key_length = key_length
        self._poisoned = poisoned or {}
        self._hashes = (hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16))
        self._rows = [0, 0]
        self._last: list[Any] = [None, None]
        self.missing = self.extra = self.different = self.poisoned = 0
        self._examples: list[str] = []

    @property
    def rows(self) -> int:
        """Number of source rows so far, for a progress bar."""
        return self._rows[0]

    def compare_chunks(
        self, source: Sequence[Row], shard: Sequence[Row], source_ended: bool, shard_ended: bool
    ) -> tuple[int, int]:
        """Compare as far as both chunks allow. Return how many rows of each were consumed."""
        n = self._key_length
        i = j = 0
        while i < len(source) and j < len(shard):
            a, b = source[i], shard[j]
            if a == b:
                i, j = i + 1, j + 1
                continue
            ka, kb = sort_key(a[:n]), sort_key(b[:n])
            if ka == kb:
                self._add_example("different", a[:n])
                self.different += 1
                i, j = i + 1, j + 1
            elif ka < kb:
                self._record_missing(a[:n])
                i += 1
            else:
                self._add_example("extra", b[:n])
                self.extra += 1
                j += 1
        if shard_ended and j == len(shard):
            for row in source[i:]:
                self._record_missing(row[:n])
            i = len(source)
        if source_ended and i == len(source):
            for row in shard[j:]:
                self._add_example("extra", row[:n])
            self.extra += len(shard) - j
            j = len(shard)
        self._consume_rows(0, source[:i])
        self._consume_rows(1, shard[:j])
        return i, j

    def outcome(self) -> Outcome:
        source, shard = (h.hexdigest() for h in self._hashes)
        return Outcome(
            self._rows[0], self._rows[1], self.missing, self.extra, self.different, source, shard,
            tuple(self._examples), self.poisoned,
        )  # fmt: skip

    def _record_missing(self, key: Row) -> None:
        why = self._poisoned.get(key)
        if why is not None:
            self._add_example("poisoned", key, f": {why}")
            self.poisoned += 1
        else:
            self._add_example("missing", key)
            self.missing += 1

    def _consume_rows(self, side: int, rows: Sequence[Row]) -> None:
        """Count and hash consumed rows. Raises CorruptError if they are not in the order on which this merge relies."""
        n, last, digest = self._key_length, self._last[side], self._hashes[side]
        for row in rows:
            key = sort_key(row[:n])
            if last is not None and key < last:
                raise CorruptError(
                    f"{'source' if side == 0 else 'table'} rows are out of order: key={row[:n]!r}.",
                    fix="Report it with the key's type: the two sides sort it differently.",
                )
            last = key
            digest.update(repr(row).encode())
        self._last[side] = last
        self._rows[side] += len(rows)

    def _add_example(self, what: str, key: Row, why: str = "") -> None:
        if len(self._examples) < EXAMPLES:
            self._examples.append(f"{what} {', '.join(map(str, key))}{why}")


def sort_key(key: Row) -> Row:
    """Return the key as both sides sort it: null after everything, NaN after every number."""
    return tuple((2, 0) if v is None else (1, 0) if v is NAN else (0, v) for v in key)


class _NaN:
    """NaN that, unlike the float, is equal to itself, and prints the same everywhere."""

    def __repr__(self) -> str:
        return "nan"


NAN = _NaN()
