"""What the catalogue needs of a domain. `Domain` (RFC 0002 §4) has it and more; unit tests have a stand-in.

One contract suite (`tests/contracts/rows.py`) runs on both.

D1  After `sync`, reads hold everything whose commit had returned, anywhere, before `sync` was called.
D2  A commit is atomic: all its rows or none, and only when every expected row is as expected.
D3  The seqno of a row grows with every change of it, its deletion included. To expect 0 is to expect no live row:
    never written, or deleted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol


class VersionedRow(Protocol):
    """`value` b"" = the row was deleted by the write of this seqno."""

    @property
    def seqno(self) -> int: ...
    @property
    def value(self) -> bytes: ...


class Rows(Protocol):
    """One domain, as one process sees it. Reads may raise Unavailable or Closed."""

    async def sync(self) -> None:
        """A linearizable barrier (D1), shared by those who wait at once."""
        ...

    async def get(self, key: bytes) -> bytes | None: ...

    async def get_row(self, key: bytes) -> VersionedRow | None: ...

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]: ...

    async def stamp(self, first: bytes) -> object:
        """Of the rows whose key begins with this byte, as a read begun now would find them. While it is equal to an
        earlier one, no such row was written since then; a new one may also mean nothing."""
        ...

    def scan(
        self, lower: bytes = b"", upper: bytes | None = None, *, reverse: bool = False
    ) -> AsyncIterator[tuple[list[bytes], list[bytes]]]:
        """Live rows with lower ≤ key < upper, in chunks of (keys, values), as of one moment."""
        ...

    def prefix(self, prefix: bytes, *, reverse: bool = False) -> AsyncIterator[tuple[list[bytes], list[bytes]]]:
        """Live rows whose key begins with `prefix`; otherwise as `scan`."""
        ...

    async def commit(self, rows: Sequence[tuple[bytes, bytes]], *, expects: Mapping[bytes, int] = {}) -> int:
        """Write rows (b"" deletes) if every expected key has the given seqno (D2); returns the batch's seqno.

        Raises Conflict(current={key: VersionedRow | None}), Fenced or Unknown (leadership ended meanwhile),
        Unavailable.
        """
        ...

    async def flush(self, timeout_s: float | None = None) -> int:
        """Everything committed so far into the bucket; returns the highest seqno that is there."""
        ...

    def trouble(self) -> str:
        """One sentence: what this domain cannot do here and now. Empty while it does its work. Never waits."""
        ...

    async def until_ended(self) -> None:
        """Returns once this handle has failed for good; another one of the same domain may work."""
        ...

    async def aclose(self) -> None: ...
