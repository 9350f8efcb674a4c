"""The definition of a shape: a table or a shard, a filter, and how changes are shown; its handles, and its memory.

Invariant (unique handles): a handle is never reused. It consists of the definition's hash, and of the time and random
bits of one shape with that definition.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from tidemill.base.clock import Clock, Rand

Replica = Literal["default", "full"]
LogMode = Literal["full", "changes_only"]


class Source(msgspec.Struct, frozen=True):
    """kind table: the relation `schema`.`table` of a captured database; kind shard: `table` is the shard's name."""

    kind: Literal["table", "shard"]
    database: str
    schema: str
    table: str

    def __str__(self) -> str:
        return f"shard:{self.table}" if self.kind == "shard" else f"{self.schema}.{self.table}"


class ShapeDefinition(msgspec.Struct, frozen=True):
    """The definition of a shape. Equal definitions share one log.

    where     text as the client sent it, "" = all rows
    within    text of the server's clause that the rows must match too, "" = none
    params    values of $1 … $n, as text: those of `within`, then those of `where`
    columns   names in table order, () = all
    """

    source: Source
    where: str = ""
    params: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    replica: Replica = "default"
    log_mode: LogMode = "full"
    within: str = ""

    def digest(self) -> str:
        """Return a decimal digest of the definition; stable across processes."""
        return str(int.from_bytes(hashlib.blake2b(msgspec.json.encode(self), digest_size=5).digest(), "big"))


MAX_DIGEST_DIGITS = 20
"""Longest digest in a handle."""


class HandleMint:
    """Creates handles that no other call, in this or any other process, creates, even if clocks go back.

    Handles of one mint increase, and 64 random bits make those of different mints distinct.
    """

    def __init__(self, clock: Clock, rand: Rand) -> None:
        self._clock = clock
        self._rand = rand
        self._last_ms = 0

    def mint(self, definition: ShapeDefinition) -> str:
        return self._mint(definition.digest())

    def mint_successor(self, handle: str) -> str:
        """Create another handle for the same definition as that of `handle`."""
        digest = handle.partition("-")[0]
        return self._mint(digest if digest.isascii() and digest.isdigit() and len(digest) <= MAX_DIGEST_DIGITS else "0")

    def _mint(self, digest: str) -> str:
        self._last_ms = max(self._clock.now_ms(), self._last_ms + 1)
        return f"{digest}-{self._last_ms << 64 | self._rand.below(1 << 64)}"


SHAPE_BYTES = 24 << 10
"""Memory of a shape apart from its rows: definition, plan, compiled clause, task (measured: docs/guides/shapes.md)."""

SMALL_CLAUSE_BYTES = 100
CLAUSE_FACTOR = 200
"""Memory for each further byte of the clause and its values, including a cached plan. Measured: 600 terms of 11 bytes
take 1.0 MiB, an array of 14 kB as a value 1.7 MiB."""


def fixed_bytes(definition: ShapeDefinition) -> int:
    """Return the bytes that a shape uses apart from its rows."""
    return SHAPE_BYTES + CLAUSE_FACTOR * max(0, clause_bytes(definition) - SMALL_CLAUSE_BYTES)


def clause_bytes(definition: ShapeDefinition) -> int:
    """Return the bytes of everything that is compiled for the definition."""
    return len(definition.within) + len(definition.where) + sum(map(len, definition.params))
