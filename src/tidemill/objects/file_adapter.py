"""File interface to an object, for synchronous readers of pieces of it: Parquet's footer and some columns."""

from __future__ import annotations

import io
from typing import Any

from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.objects.store import ObjectStore
from tidemill.objects.verified_read import forward_notice


class ObjectFile(io.RawIOBase):
    """File over `key`, of `size_bytes`, read through `portal`, never from the portal's own thread.

    One reader at a time.

    Raises the errors of `ObjectStore.get`.
    """

    def __init__(self, portal: BlockingPortal, objects: ObjectStore, key: str, size_bytes: int) -> None:
        self._portal = portal
        self._objects = objects
        self._key = key
        self._size_bytes = size_bytes
        self._at = 0

    def record_notice(self, what: str) -> None:
        forward_notice(self._objects, what)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size_bytes}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        end = self._size_bytes if size is None or size < 0 else min(self._at + size, self._size_bytes)
        if end <= self._at:
            return b""
        found = self._portal.call(self._objects.get(self._key, self._at, end))
        self._at = end
        return found

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        found = self.read(len(view))
        view[: len(found)] = found
        return len(found)
