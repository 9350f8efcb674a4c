"""Rows and log items on their way to a reader, and their memory.

A chunk of a shape's base is stored as the bytes that answer a request: objects joined by `,\n`. JSON has no raw line
feed, so `split_chunk` is exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from weakref import WeakValueDictionary, finalize

import msgspec

from tidemill.base.errors import InvalidError
from tidemill.shapes.log.log_offset import LogOffset
from tidemill.shapes.log.sqlite_file import FileThreads, ShapeFile, StoredItem
from tidemill.shapes.memory_budget import Budget, reserve_in_all

READ_MEMORY_DIVISOR = 4
"""Divisor: data read from disk for slow readers may use this fraction of the memory."""


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


class LogReader:
    """Reads the file of logs. Bytes read count as memory until their last reader has released them, within a share of
    the memory that all such readers of a file have together. All readers of one chunk of a base share one copy."""

    def __init__(self, file: ShapeFile, threads: FileThreads, memory: Budget) -> None:
        self._file = file
        self._threads = threads
        self._memory = memory
        self.lent = Budget(memory.limit_bytes // READ_MEMORY_DIVISOR, whose="all that is read from disk for readers")
        self._bases: WeakValueDictionary[tuple[int, int], ReadLease] = WeakValueDictionary()
        """(log, chunk of its base) → the copy that some reader has"""

    async def read_base(self, key: int, chunk: int) -> Sequence[bytes]:
        """Return a chunk of the base, () if it is deleted. Raises UnavailableError, OverBudgetError."""
        place = (key, chunk)
        lent = self._bases.get(place)
        if lent is None:
            read = await self._threads.read(lambda: self._file.read_base(key, chunk))
            lent = self._bases.get(place)  # another reader may have been faster
            if lent is None and read:
                lent = self._bases[place] = self.lend_items([read])
        return lent if lent is not None else ()

    async def items(self, key: int, after: LogOffset, upto: LogOffset, size_bytes: int) -> list[StoredItem]:
        places = (after.tx, after.op), (upto.tx, upto.op)
        return await self._threads.read(lambda: self._file.items(key, *places, size_bytes))

    def lend_items(self, items: Sequence[bytes]) -> ReadLease:
        """Count items as read from disk until their last reader releases them. Raises OverBudgetError."""
        size = sum(map(len, items))
        reserve_in_all(size, self.lent, self._memory)
        lent = ReadLease(items)
        finalize(lent, self._release_lent, size).atexit = False
        return lent

    def _release_lent(self, size_bytes: int) -> None:
        self.lent.release(size_bytes)
        self._memory.release(size_bytes)


class ResponseMemory:
    """Rows of one response: `add` while they are read, then send `pieces`, and `release` at the end.

    The bytes count against the memory of all shapes until the last byte is sent, and against the share of it that all
    such responses have together, so that slow readers cannot use up the memory of the shapes.
    """

    def __init__(self, budget: Budget, share: Budget, limit_bytes: int) -> None:
        self.budget = budget
        self._share = share
        self._limit_bytes = limit_bytes
        self.pieces: list[bytes] = []
        """Rows as JSON, several joined by SEPARATOR."""
        self.size_bytes = 0
        self._released = False

    def add(self, rows: Sequence[bytes]) -> None:
        """Add rows. Raises InvalidError if the response grows too large, OverBudgetError if a budget has no room."""
        if not rows or self._released:
            return
        joined = SEPARATOR.join(rows)
        if self.size_bytes + len(joined) > self._limit_bytes:
            raise InvalidError(
                f"the subset is too large: limit_bytes={self._limit_bytes}.", fix="Narrow it, or read it in pages."
            )
        reserve_in_all(len(joined), self._share, self.budget)
        self.size_bytes += len(joined)
        self.pieces.append(joined)

    def release(self) -> None:
        """Free the memory. Idempotent."""
        if not self._released:
            self._released = True
            self.budget.release(self.size_bytes)
            self._share.release(self.size_bytes)
            self.pieces = []
