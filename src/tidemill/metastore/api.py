"""Interface of a domain as the catalogue needs it. `Domain` (RFC 0002 §4) implements it and more; unit tests use a
fake.

One contract suite (`tests/contracts/rows.py`) runs on both.

- Invariant (linearizable sync): after `sync`, reads contain everything whose commit had returned, in any process,
  before `sync` was called.
- Invariant (atomic commit): a commit writes all its rows or none, and only if every expected row is as expected.
- Invariant (seqnos grow): the seqno of a row grows with every change of it, including its deletion. An expected seqno
  of 0 means that no live row is expected: it was never written, or is deleted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

Chunk = tuple[list[bytes], list[bytes]]
"""Keys and values of consecutive rows."""


class VersionedRow(Protocol):
    """A row and the seqno of its last write. `value` b"" = that write deleted the row."""

    @property
    def seqno(self) -> int: ...
    @property
    def value(self) -> bytes: ...


class DomainRows(Protocol):
    """Rows of one domain, as one process sees them. Reads may raise UnavailableError or ClosedError."""

    async def sync(self) -> None:
        """Wait for a linearizable barrier. Concurrent callers share one."""
        ...

    async def get(self, key: bytes) -> bytes | None: ...

    async def get_row(self, key: bytes) -> VersionedRow | None: ...

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]: ...

    async def change_stamp(self, first: bytes) -> object:
        """Return a change stamp of the rows whose key begins with this byte, as a read begun now would find them. Equal
        stamps mean that no such row was written in between; different ones need not mean anything."""
        ...

    def scan(
        self, lower: bytes = b"", upper: bytes | None = None, *, reverse: bool = False
    ) -> AsyncIterator[tuple[list[bytes], list[bytes]]]:
        """Yield live rows with lower ≤ key < upper, in chunks of (keys, values), all from one snapshot."""
        ...

    def prefix(self, prefix: bytes, *, reverse: bool = False) -> AsyncIterator[tuple[list[bytes], list[bytes]]]:
        """Yield live rows whose key begins with `prefix`; otherwise as `scan`."""
        ...

    async def commit(self, rows: Sequence[tuple[bytes, bytes]], *, expects: Mapping[bytes, int] = {}) -> int:
        """Write rows (b"" deletes) atomically if every expected key has the given seqno; return the batch's seqno.

        Raises ConflictError(current={key: VersionedRow | None}), FencedError or UnknownOutcomeError (leadership ended
        during the commit), UnavailableError.
        """
        ...

    async def flush(self, timeout_s: float | None = None) -> int:
        """Flush everything committed so far to the bucket; return the highest seqno stored there."""
        ...

    def trouble(self) -> str:
        """Return one sentence about what does not work in this domain here and now; empty if nothing. Never waits."""
        ...

    async def wait_until_ended(self) -> None:
        """Return once this handle has failed permanently. Another handle of the same domain may still work."""
        ...

    async def aclose(self) -> None: ...
