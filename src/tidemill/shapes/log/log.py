"""One shape's log: a base (the initial rows, in chunks) and then items in order. Synchronous; no clock, no I/O.

`LogStorage` is the protocol. `MemoryLog` stores everything in memory and is bounded: when the items exceed
`LogLimits.log_bytes`, the owner ends the shape, and the next request starts it again with a new handle and a new base.
`disk_log.DiskLog` stores the log on disk, over a restart.

A chunk of the base is stored as the bytes that answer a request: objects joined by `,\n`. JSON has no raw line feed, so
`split_chunk` is exact.

- Invariant (growing offsets): the offsets of items strictly increase, and `end` never decreases.
- Invariant (whole transactions): `stage` adds items that no reader sees. `publish` makes all of them visible in one
  step, however many they are, and `unstage` discards them.
- Invariant (exactly once): a reader that starts at any offset gets every later item once, in order.
- Invariant (accounted): bytes are taken from the budget before the log stores them, and returned when the log is
  dropped. A dropped log takes nothing more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import msgspec

from tidemill.base.errors import InvalidError
from tidemill.shapes.log.items import ITEM_BYTES, LogItem, mark_last
from tidemill.shapes.log.log_offset import BASE_END, BEFORE_ALL, LogOffset
from tidemill.shapes.memory_budget import Budget

CHUNK_BYTES = 10 << 20
"""A chunk closes when its JSON reaches this size (Electric's default)."""

LOG_BYTES = 64 << 20
BASE_BYTES = 256 << 20
UNBOUNDED = 1 << 62


class LogLimits(msgspec.Struct, frozen=True):
    chunk_bytes: int = CHUNK_BYTES
    log_bytes: int = LOG_BYTES
    base_bytes: int = BASE_BYTES


class Chunk(msgspec.Struct, frozen=True):
    """A piece of a log. `items` are JSON objects, or several joined by SEPARATOR; `end` is the offset to request next;
    `complete` is true if nothing follows `end` now."""

    items: Sequence[bytes]
    end: LogOffset
    complete: bool


class ReadLease(list[bytes]):
    """Items that were read from disk. They count as memory for as long as a reader references this list."""

    __slots__ = ("__weakref__",)


SEPARATOR = b",\n"


def split_chunk(items: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the single objects of a chunk, one at a time, so that no reader has a second copy of it."""
    for joined in items:
        start = 0
        while (end := joined.find(SEPARATOR, start)) >= 0:
            yield joined[start:end]
            start = end + len(SEPARATOR)
        yield joined[start:]


class LogStorage(Protocol):
    @property
    def budget(self) -> Budget: ...

    @property
    def limit_bytes(self) -> int:
        """Limit for the log's size, and for transactions that are not in the log yet."""
        ...

    @property
    def end(self) -> LogOffset:
        """Offset of the last item, or of the end of the base."""
        ...

    @property
    def log_bytes(self) -> int: ...

    @property
    def base_bytes(self) -> int: ...

    @property
    def held_bytes(self) -> int:
        """Bytes of the base and the log that are in memory."""
        ...

    @property
    def is_overgrown(self) -> bool:
        """True if the log exceeds its limit; the owner then ends the shape."""
        ...

    def add_base(self, rows: Sequence[bytes]) -> None:
        """Add rows to the base; only before `seal_base`.

        Raises InvalidError if the base exceeds its limit, OverBudgetError if the budget has no room.
        """
        ...

    def seal_base(self) -> None: ...

    def stage(self, item: LogItem) -> None:
        """Append an item, not yet visible. Raises OverBudgetError, and adds nothing then."""
        ...

    def publish(self, *, mark: bool = False) -> bool:
        """Make the staged items visible; return whether there were any. `mark`: mark the last one as the end of its
        transaction."""
        ...

    def unstage(self) -> None: ...

    async def fetch(self, after: LogOffset) -> Chunk:
        """Return the next chunk after `after`, or what is left of it if the log is dropped while reading. Raises
        UnavailableError."""
        ...

    async def wait_for_room(self) -> None:
        """Wait until more of the base may be added."""
        ...

    def drop(self) -> None: ...


class MemoryLog:
    """LogStorage in memory."""

    def __init__(self, limits: LogLimits | None = None, budget: Budget | None = None) -> None:
        self._limits = limits or LogLimits()
        self.budget = budget or Budget(UNBOUNDED)
        self._base: list[bytes] = []
        self._open_chunk: list[bytes] = []
        self._open_bytes = 0
        self._sealed = False
        self._dropped = False
        self._offsets: list[LogOffset] = []
        self._json: list[bytes] = []
        self._shown = 0
        """Number of visible items; later ones are staged."""
        self._log_bytes = 0
        self._base_bytes = 0

    @property
    def end(self) -> LogOffset:
        return self._offsets[self._shown - 1] if self._shown else BASE_END

    @property
    def log_bytes(self) -> int:
        return self._log_bytes

    @property
    def base_bytes(self) -> int:
        return self._base_bytes

    @property
    def held_bytes(self) -> int:
        return self._log_bytes + self._base_bytes

    @property
    def is_overgrown(self) -> bool:
        return self._log_bytes > self._limits.log_bytes

    def add_base(self, rows: Sequence[bytes]) -> None:
        """Add rows to the base. Raises InvalidError if it exceeds its limit, OverBudgetError if all shapes together
        do."""
        if self._dropped:
            return
        if self._sealed:
            raise RuntimeError("base is sealed")
        size = sum(map(len, rows)) + len(SEPARATOR) * len(rows)
        self.budget.reserve(size)
        if self._dropped:  # the budget evicted this very shape to make room
            self.budget.release(size)
            return
        self._base_bytes += size
        for row in rows:
            self._open_chunk.append(row)
            self._open_bytes += len(row)
            if self._open_bytes >= self._limits.chunk_bytes:
                self._close_chunk()
        if self._base_bytes > self._limits.base_bytes:
            raise InvalidError(
                f"the shape is too large: limit_bytes={self._limits.base_bytes}.",
                fix="Narrow it with where or columns.",
            )

    def _close_chunk(self) -> None:
        self._base.append(SEPARATOR.join(self._open_chunk))
        self._open_chunk, self._open_bytes = [], 0

    def seal_base(self) -> None:
        if self._open_chunk or not self._base:
            self._close_chunk()
        self._sealed = True

    def stage(self, item: LogItem) -> None:
        """Append an item. Raises RuntimeError if its offset is not larger than all earlier ones."""
        if self._dropped:
            return
        last = self._offsets[-1] if self._offsets else BASE_END
        if item.offset <= last:
            raise RuntimeError(f"log offsets must grow: last={last} next={item.offset}")
        self.budget.reserve(item.size_bytes)
        if self._dropped:  # the budget evicted this very shape to make room
            self.budget.release(item.size_bytes)
            return
        self._log_bytes += item.size_bytes
        self._offsets.append(item.offset)
        self._json.append(item.json)

    def publish(self, *, mark: bool = False) -> bool:
        if self._shown == len(self._json):
            return False
        if mark:
            self._json[-1] = mark_last(self._json[-1])
        self._shown = len(self._json)
        return True

    def unstage(self) -> None:
        size = sum(map(len, self._json[self._shown :])) + ITEM_BYTES * (len(self._json) - self._shown)
        self._log_bytes -= size
        self.budget.release(size)
        del self._offsets[self._shown :], self._json[self._shown :]

    async def fetch(self, after: LogOffset) -> Chunk:
        return self.read(after)

    async def wait_for_room(self) -> None:
        """Return immediately: memory is always writable, or adding raises OverBudgetError."""

    def read(self, after: LogOffset) -> Chunk:
        """Return the next chunk after `after`. The base is read chunk by chunk, -1 → 0_0 → 0_1 → …; 0_inf follows."""
        if after < BASE_END:
            index = 0 if after == BEFORE_ALL else after.op + 1
            if index < len(self._base):
                joined = self._base[index]
                return Chunk((joined,) if joined else (), LogOffset(0, index), False)
            after = BASE_END  # the offset of the last chunk means the whole base
        start = bisect_right(self._offsets, after.read, hi=self._shown)
        stop, size = start, 0
        while stop < self._shown and size < self._limits.chunk_bytes:
            size += len(self._json[stop])
            stop += 1
        end = self._offsets[stop - 1] if stop > start else after
        return Chunk(self._json[start:stop], end, stop == self._shown)

    @property
    def limit_bytes(self) -> int:
        return self._limits.log_bytes

    def drop(self) -> None:
        self._dropped = True
        self.budget.release(self._log_bytes + self._base_bytes)
        self._base, self._open_chunk, self._offsets, self._json = [], [], [], []
        self._shown = 0
        self._log_bytes = self._base_bytes = 0
