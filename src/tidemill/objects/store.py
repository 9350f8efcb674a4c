"""The object store contract: immutable, write-once objects under keys that are never reused.

- Invariant (immutable): an object never changes, and its key is never used again.
- Invariant (durable): an acknowledged put survives power loss (local directory: temp file, fdatasync, link, directory
  fsync).
- Invariant (create once): `put` of an existing key raises Conflict and changes nothing.

Keys are `/`-separated, relative, without empty, `.` or `..` segments.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec

from tidemill.base.errors import InvalidError

Buffer = bytes | bytearray | memoryview


class MisconfiguredError(InvalidError):
    """The store rejects this process, not this request: permissions, credentials, a bucket that does not exist.

    When a store is opened, the operator must act. Later it was valid before, so callers wait and retry.
    """


class ObjectMeta(msgspec.Struct, frozen=True):
    key: str
    size_bytes: int
    modified_ms: int


class ObjectStore(Protocol):
    """Contract of an object store.

    In addition to the errors that each method names, methods raise Unavailable, Unknown (put and delete only), Closed,
    Invalid (bad key).
    """

    async def put(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        """Create `key`. A sequence of buffers is written back to back. Raises Conflict if the key exists.

        A single `bytearray` is handed over: a store in memory uses it as the object. After the call it may only be
        changed in ways that readers of the object may see.
        """
        ...

    async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Read bytes [start, end) of the object. Raises Missing; Invalid if the range is beyond the object."""
        ...

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read several half-open ranges, in the requested order; near ones share a request. Raises Missing."""
        ...

    async def head(self, key: str) -> ObjectMeta | None:
        """Return size and time of the object, or None."""
        ...

    def list(self, prefix: str, start_after: str = "") -> AsyncIterator[ObjectMeta]:
        """List objects whose key starts with `prefix`, in key order, strictly after `start_after`."""
        ...

    async def delete(self, key: str) -> None:
        """Delete the object; an absent key is success (deletes are retried)."""
        ...

    async def aclose(self) -> None: ...
