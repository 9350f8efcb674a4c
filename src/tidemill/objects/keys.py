"""Rules for keys, so that one key means one object on every backend.

Every object store library, tested S3 server and file system passes these characters through unescaped. A segment never
starts with a dot: those names belong to the store (temporary files). Keys are ASCII, so byte order (S3's listing order)
and string order are the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from tidemill.base.errors import InvalidError
from tidemill.objects.store import Buffer

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

    Raises InvalidError if it is beyond the object.
    """
    stop = size_bytes if end is None else end
    if not 0 <= start <= stop <= size_bytes:
        raise InvalidError(
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
