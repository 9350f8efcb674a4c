"""The object store contract: immutable, write-once objects under keys that are never reused.

O1  An object never changes, and its key is never used again.
O2  An acknowledged put survives power loss (local directory: temp file, fdatasync, link, directory fsync).
O3  `put` of an existing key raises Conflict and changes nothing.

Keys are `/`-separated, relative, without empty, `.` or `..` segments.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec

from tidemill.base.errors import InvalidError

Buffer = bytes | bytearray | memoryview


class MisconfiguredError(InvalidError):
    """The store says no to us, not to this request: rights, credentials, a bucket that is not there.

    Where a store is opened that is for the operator, at once. Later it was right before, so it is waited for.
    """


class ObjectMeta(msgspec.Struct, frozen=True):
    key: str
    size_bytes: int
    modified_ms: int


class ObjectStore(Protocol):
    """Raises, besides what each method names: Unavailable, Unknown (put and delete only), Closed, Invalid (bad key)."""

    async def put(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        """Create `key`. A sequence of buffers is written back to back. Raises Conflict if the key exists.

        One `bytearray` is given away: a store in memory keeps it as the object. Afterwards nothing is written into it
        but what whoever reads the object may see.
        """
        ...

    async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes [start, end) of the object. Raises Missing; Invalid when the range passes the end."""
        ...

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Several half-open ranges, in the order asked; near ones travel in one request. Raises Missing."""
        ...

    async def head(self, key: str) -> ObjectMeta | None:
        """Size and time of the object, or None."""
        ...

    def list(self, prefix: str, start_after: str = "") -> AsyncIterator[ObjectMeta]:
        """Objects whose key starts with `prefix`, in key order, strictly after `start_after`."""
        ...

    async def delete(self, key: str) -> None:
        """Remove the object; an absent key is success (deletes are retried)."""
        ...

    async def aclose(self) -> None: ...
