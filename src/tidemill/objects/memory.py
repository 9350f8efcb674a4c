"""Objects in a dict, for tests and the simulation: no threads, no waiting, deterministic.

Every method decides and acts without an await, so each call is atomic. The objects outlive the actors that use them:
`aclose` closes only the handle, and `reopen` returns another handle on the same objects, as a restarted process would
get.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import AsyncIterator, Sequence

from tidemill.base.clock import Clock
from tidemill.base.errors import ClosedError, ConflictError, MissingError
from tidemill.objects.store import Buffer, ObjectMeta, as_buffers, check_key, check_prefix, check_range


class MemoryObjects:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._objects: dict[str, tuple[bytes | bytearray, int]] = {}
        self._keys: list[str] = []  # Always the sorted keys of _objects.
        self._closed = False

    def reopen(self) -> MemoryObjects:
        """Return another handle on the same objects."""
        other = MemoryObjects(self._clock)
        other._objects, other._keys = self._objects, self._keys
        return other

    async def put(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        self._check_open()
        check_key(key)
        if key in self._objects:
            raise ConflictError(f"the object already exists: key={key}.", current=self._meta(key))
        kept = data if isinstance(data, bytes | bytearray) else b"".join(as_buffers(data))
        self._objects[key] = (kept, self._clock.now_ms())
        insort(self._keys, key)

    async def put_unpublished(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        await self.put(key, data)

    async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        data = self._data(key)
        return _slice(data, start, check_range(key, start, end, len(data)))

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        data = self._data(key)
        return [_slice(data, start, check_range(key, start, end, len(data))) for start, end in ranges]

    async def head(self, key: str) -> ObjectMeta | None:
        self._check_open()
        return self._meta(key) if check_key(key) in self._objects else None

    async def list(self, prefix: str, start_after: str = "") -> AsyncIterator[ObjectMeta]:
        self._check_open()
        check_prefix(prefix)
        # Positions change while the consumer waits between items; the last key does not.
        at = max(bisect_left(self._keys, prefix), bisect_right(self._keys, start_after))
        while at < len(self._keys) and self._keys[at].startswith(prefix):
            key = self._keys[at]
            yield self._meta(key)
            self._check_open()
            at = bisect_right(self._keys, key)

    async def delete(self, key: str) -> None:
        self._check_open()
        check_key(key)
        if self._objects.pop(key, None) is not None:
            del self._keys[bisect_left(self._keys, key)]

    async def aclose(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the object store was closed: store=memory.")

    def _data(self, key: str) -> bytes | bytearray:
        self._check_open()
        found = self._objects.get(check_key(key))
        if found is None:
            raise MissingError(f"no such object: key={key}.")
        return found[0]

    def _meta(self, key: str) -> ObjectMeta:
        data, modified_ms = self._objects[key]
        return ObjectMeta(key, len(data), modified_ms)


def _slice(data: bytes | bytearray, start: int, end: int) -> bytes:
    return data[start:end] if isinstance(data, bytes) else bytes(memoryview(data)[start:end])
