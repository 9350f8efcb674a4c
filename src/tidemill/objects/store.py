"""The object store contract: immutable, write-once objects under keys that are never reused; and the rules for keys.

- Invariant (immutable): an object never changes, and its key is never used again.
- Invariant (durable): an acknowledged put survives power loss (local directory: temp file, fdatasync, link, directory
  fsync).
- Invariant (create once): `put` of an existing key raises ConflictError and changes nothing.
- Invariant (whole): an object that a `put` created is complete or absent at any time. One of `put_unpublished` is
  complete once that call returned.

Keys are `/`-separated, relative, without empty, `.` or `..` segments, so that one key means one object on every
backend. Every object store library, tested S3 server and file system passes these characters through unescaped. A
segment never starts with a dot: those names belong to the store (temporary files). Keys are ASCII, so byte order (S3's
listing order) and string order are the same.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from functools import lru_cache
from typing import Protocol

import msgspec

from tidemill.base.errors import InvalidError

Buffer = bytes | bytearray | memoryview


class MisconfiguredError(InvalidError):
    """The store rejects this process, not this request: permissions, credentials, a bucket that does not exist.

    When a store is opened, the operator must act. Later it was valid before, so callers wait and retry.
    """


class RangeError(InvalidError):
    """A range is beyond the object: the object is shorter than the caller expects."""


KEY_BYTES_MAX = 900
"""S3 allows 1,024 for the bucket prefix and the key together."""

SEGMENT_BYTES_MAX = 200
"""File systems allow 255 for one name."""

_SEGMENT = r"[A-Za-z0-9_=+,:@!-][A-Za-z0-9._=+,:@!-]*"
_KEY = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*")
_PREFIX = re.compile(rf"(?:{_SEGMENT}/)*(?:{_SEGMENT})?")
_RULE = "Use segments of ASCII letters, digits and -_.=+,:@! joined by '/', none empty or starting with a dot."


@lru_cache(4096)  # The same few files are read repeatedly.
def check_key(key: str) -> str:
    """Return the key. Raises InvalidError if it breaks the rules above."""
    if len(key) > KEY_BYTES_MAX or _KEY.fullmatch(key) is None:
        raise InvalidError(f"invalid object key: key={key!r}.", fix=_RULE)
    if len(key) > SEGMENT_BYTES_MAX and max(map(len, key.split("/"))) > SEGMENT_BYTES_MAX:
        raise InvalidError(
            f"a segment of an object key is longer than {SEGMENT_BYTES_MAX} bytes: key={key!r}.", fix=_RULE
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return the prefix if it is empty or the beginning of a valid key. Raises InvalidError otherwise."""
    if len(prefix) > KEY_BYTES_MAX or _PREFIX.fullmatch(prefix) is None:
        raise InvalidError(f"invalid key prefix: prefix={prefix!r}.", fix=_RULE)
    return prefix


def check_range(key: str, start: int, end: int | None, size_bytes: int) -> int:
    """Return the resolved end of [start, end) in an object of `size_bytes`.

    Raises RangeError if it is beyond the object.
    """
    stop = size_bytes if end is None else end
    if not 0 <= start <= stop <= size_bytes:
        raise RangeError(
            f"the range is outside the object: key={key} start={start} end={end} size_bytes={size_bytes}.",
            fix="Request 0 ≤ start ≤ end ≤ size.",
        )
    return stop


def as_buffers(data: Buffer | Sequence[Buffer]) -> list[memoryview]:
    """Return the payload as flat byte views, without copying and without empty ones."""
    pieces = [data] if isinstance(data, bytes | bytearray | memoryview) else data
    views = [memoryview(piece).cast("B") for piece in pieces]
    return [view for view in views if view.nbytes]


def size_of(data: Buffer | Sequence[Buffer]) -> int:
    if isinstance(data, bytes | bytearray):
        return len(data)
    if isinstance(data, memoryview):
        return data.nbytes
    return sum(piece.nbytes if isinstance(piece, memoryview) else len(piece) for piece in data)


class ObjectMeta(msgspec.Struct, frozen=True):
    key: str
    size_bytes: int
    modified_ms: int


class ObjectStore(Protocol):
    """Contract of an object store.

    In addition to the errors that each method names, methods raise UnavailableError, UnknownOutcomeError (put and
    delete only), ClosedError, InvalidError (bad key).
    """

    async def put(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        """Create `key`. A sequence of buffers is written back to back. Raises ConflictError if the key exists.

        A single `bytearray` is handed over: a store in memory uses it as the object. After the call it may only be
        changed in ways that readers of the object may see.
        """
        ...

    async def put_unpublished(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        """Create `key` as `put` does, faster, for a caller that alone knows the key until this returns.

        After an error or a crash the object may exist, after power loss with damaged contents: the caller never
        publishes a key whose put failed. Nothing but listings shows such an object.
        """
        ...

    async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Read bytes [start, end) of the object.

        Raises MissingError; RangeError if the range is beyond the object.
        """
        ...

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read several half-open ranges, in the requested order; near ones share a request. Raises MissingError."""
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
