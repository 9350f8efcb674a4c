"""The log of one shape on disk: a tail in memory in front of the file's content. Implements LogStorage (log.py).

    memory   │ base chunks not written yet   │ items: written a flush ago · visible · staged
    file     │ all other chunks              │ all earlier items

- Invariant (warm tail): data that is not in the file is in memory. Data leaves memory one flush after it became
  durable, so live readers never wait for the disk. A reader decides what to read from which side before it awaits; the
  content of the file never changes.
- Invariant (whole transactions): `unsaved` returns only visible items, so the file has whole transactions only.
- Invariant (accounted): memory is counted in `budget`, and everything that is or will be in the file in `disk`, both
  before the data is stored.
- Invariant (bounded reads): data read from the file is counted until its last reader has released it, within a share of
  the memory that all such reads have together, so that slow readers cannot use more. All readers of one chunk of the
  base share one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tidemill.base.errors import InvalidError
from tidemill.shapes.log.items import LogItem, mark_last
from tidemill.shapes.log.log import SEPARATOR, Chunk, LogLimits, ReadLease
from tidemill.shapes.log.log_offset import BASE_END, BEFORE_ALL, LogOffset
from tidemill.shapes.log.sqlite_file import StoredItem, StoredShape
from tidemill.shapes.memory_budget import Budget

MAX_UNWRITTEN_CHUNKS = 2
"""Largest number of unwritten chunks while the base is loaded: with more in memory, the loader waits."""


class DiskLogStore(Protocol):
    """The store that reads and writes the file of a log: ShapeStore."""

    def mark_changed(self, log: DiskLog, size_bytes: int) -> None:
        """Note that the log has `size_bytes` more to write."""
        ...

    def end(self, log: DiskLog) -> None:
        """Note that the log was dropped, and must not exist after a restart."""
        ...

    async def wait_for_room(self, log: DiskLog) -> None:
        """Wait until the log is not crowded any more."""
        ...

    async def read_base(self, key: int, chunk: int) -> Sequence[bytes]:
        """Return that chunk as a read lease."""
        ...

    def lend_items(self, items: Sequence[bytes]) -> ReadLease:
        """Count items that were read for readers. Raises OverBudgetError."""
        ...

    async def items(self, key: int, after: LogOffset, upto: LogOffset, size_bytes: int) -> list[StoredItem]: ...


class DiskLog:
    __slots__ = (
        "_base", "_base_bytes", "_charged", "_dropped", "_end", "_held_bytes", "_items", "_keeper", "_limits",
        "_log_bytes", "_on_disk", "_open_bytes", "_open_chunk", "_sealed", "_shown", "_written", "_written_chunks",
        "budget", "disk", "key",
    )  # fmt: skip

    def __init__(
        self,
        key: int,
        keeper: DiskLogStore,
        limits: LogLimits,
        budget: Budget,
        disk: Budget,
        saved: StoredShape | None = None,
    ) -> None:
        """Create an empty log, or one over `saved`: the log that the file has under this key.

        Raises OverBudgetError if `disk` has no room for it.
        """
        self.key = key
        self.budget = budget
        self.disk = disk
        self._keeper = keeper
        self._limits = limits
        self._base: list[bytes | None] = []
        """Chunks of the base; None if the chunk is in the file only."""
        self._written_chunks = 0
        self._open_chunk: list[bytes] = []
        self._open_bytes = 0
        self._sealed = False
        self._dropped = False
        self._items: list[LogItem] = []
        self._charged: list[int] = []
        """Bytes counted per item: an item grows when it is marked as the last one."""
        self._written = 0
        """Number of items in `_items` that are in the file."""
        self._shown = 0
        self._end = self._on_disk = BASE_END
        """Offsets of the newest visible item, and of the newest item that is in the file only."""
        self._log_bytes = self._base_bytes = self._held_bytes = 0
        if saved is not None:
            disk.reserve(saved.base_bytes + saved.log_bytes)
            self._base = [None] * saved.chunks
            self._written_chunks = saved.chunks
            self._sealed = True
            self._base_bytes, self._log_bytes = saved.base_bytes, saved.log_bytes
            if saved.end[0]:
                self._end = self._on_disk = LogOffset(*saved.end)

    # -- properties ----------------------------------------------------------------------------------------------

    @property
    def end(self) -> LogOffset:
        return self._end

    @property
    def log_bytes(self) -> int:
        return self._log_bytes

    @property
    def base_bytes(self) -> int:
        return self._base_bytes

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    @property
    def chunks(self) -> int:
        return len(self._base)

    @property
    def is_overgrown(self) -> bool:
        return self._log_bytes > self._limits.log_bytes

    @property
    def limit_bytes(self) -> int:
        return self._limits.log_bytes

    @property
    def is_crowded(self) -> bool:
        """True if the base arrives faster than the file is written."""
        return len(self._base) - self._written_chunks >= MAX_UNWRITTEN_CHUNKS and not self._dropped

    # -- writing -----------------------------------------------------------------------------------------------

    def add_base(self, rows: Sequence[bytes]) -> None:
        """Add rows to the base. Raises InvalidError if it exceeds its limit, OverBudgetError if all shapes together
        do."""
        if self._dropped:
            return
        if self._sealed:
            raise RuntimeError("base is sealed")
        self._reserve(sum(map(len, rows)) + len(SEPARATOR) * len(rows), base=True)
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
        joined = SEPARATOR.join(self._open_chunk)
        self._base.append(joined)
        self._open_chunk, self._open_bytes = [], 0
        self._keeper.mark_changed(self, len(joined))

    def seal_base(self) -> None:
        if self._open_chunk or not self._base:
            self._close_chunk()
        self._sealed = True

    def stage(self, item: LogItem) -> None:
        """Append an item. Raises RuntimeError if its offset is not larger than all earlier ones, OverBudgetError
        without room."""
        if self._dropped:
            return
        last = self._items[-1].offset if self._items else self._end
        if item.offset <= last:
            raise RuntimeError(f"log offsets must grow: last={last} next={item.offset}")
        size = item.size_bytes
        self._reserve(size)
        if self._dropped:
            return
        self._items.append(item)
        self._charged.append(size)

    def publish(self, *, mark: bool = False) -> bool:
        if self._shown == len(self._items):
            return False
        last = self._items[-1]
        if mark:
            self._items[-1] = LogItem(last.offset, mark_last(last.json))
        size = sum(self._charged[self._shown :])
        self._shown = len(self._items)
        self._end = last.offset
        self._keeper.mark_changed(self, size)
        return True

    def unstage(self) -> None:
        size = sum(self._charged[self._shown :])
        self._log_bytes -= size
        self._release_memory(size)
        self.disk.release(size)
        del self._items[self._shown :], self._charged[self._shown :]

    def drop(self) -> None:
        if self._dropped:
            return
        self._dropped = True
        self._keeper.end(self)
        self.budget.release(self._held_bytes)
        self.disk.release(self._log_bytes + self._base_bytes)
        self._base, self._open_chunk, self._items, self._charged = [], [], [], []
        self._written_chunks = self._written = self._shown = 0
        self._log_bytes = self._base_bytes = self._held_bytes = 0

    def _reserve(self, size_bytes: int, *, base: bool = False) -> None:
        """Reserve memory and disk. Raises OverBudgetError, and reserves nothing then."""
        self.disk.reserve(size_bytes)
        try:
            self.budget.reserve(size_bytes)
        except BaseException:
            self.disk.release(size_bytes)
            raise
        if self._dropped:  # the budget evicted this very shape to make room
            self.disk.release(size_bytes)
            self.budget.release(size_bytes)
            return
        self._held_bytes += size_bytes
        if base:
            self._base_bytes += size_bytes
        else:
            self._log_bytes += size_bytes

    def _release_memory(self, size_bytes: int) -> None:
        self._held_bytes -= size_bytes
        self.budget.release(size_bytes)

    # -- the file ----------------------------------------------------------------------------------------------

    def unsaved(self) -> tuple[list[tuple[int, bytes]], list[LogItem]]:
        """Return the chunks and items that readers may see and the file does not have yet."""
        first = self._written_chunks
        chunks = [(first + n, json) for n, json in enumerate(self._base[first:]) if json is not None]
        return chunks, self._items[self._written : self._shown]

    def mark_saved(self, chunks: int, items: int) -> None:
        """Record that the first `chunks` and `items` of what `unsaved` returned are durable."""
        if not self._dropped:
            self._written_chunks += chunks
            self._written += items

    def release_durable(self) -> None:
        """Release from memory what was durable before this flush; called after each flush, before `mark_saved`."""
        for chunk, json in enumerate(self._base[: self._written_chunks]):
            if json is not None:
                self._base[chunk] = None
                self._release_memory(len(json))
        if self._written:
            self._release_memory(sum(self._charged[: self._written]))
            self._on_disk = self._items[self._written - 1].offset
            del self._items[: self._written], self._charged[: self._written]
            self._shown -= self._written
            self._written = 0

    # -- reading -----------------------------------------------------------------------------------------------

    async def wait_for_room(self) -> None:
        if self.is_crowded:
            await self._keeper.wait_for_room(self)

    async def fetch(self, after: LogOffset) -> Chunk:
        """Return the next chunk, as MemoryLog.read does.

        Raises UnavailableError if the file cannot be read, OverBudgetError if too much is being read from it.
        """
        if after < BASE_END:
            index = 0 if after == BEFORE_ALL else after.op + 1
            if index < len(self._base):
                return await self._read_base(index)
            after = BASE_END  # the offset of the last chunk means the whole base
        if after.read < self._on_disk:
            upto = self._on_disk
            found = await self._keeper.items(self.key, after.read, upto, self._limits.chunk_bytes)
            if self._dropped or not found:
                return Chunk((), after, False)
            end = LogOffset(found[-1].tx, found[-1].op)
            return Chunk(self._keeper.lend_items([item.json for item in found]), end, end == self._end)
        start = self._index_after(after.read)
        stop, size = start, 0
        while stop < self._shown and size < self._limits.chunk_bytes:
            size += len(self._items[stop].json)
            stop += 1
        items = self._items[start:stop]
        return Chunk([item.json for item in items], items[-1].offset if items else after, stop == self._shown)

    def _index_after(self, after: LogOffset) -> int:
        low, high = 0, self._shown
        while low < high:
            middle = (low + high) // 2
            if self._items[middle].offset <= after:
                low = middle + 1
            else:
                high = middle
        return low

    async def _read_base(self, index: int) -> Chunk:
        joined = self._base[index]
        items = await self._keeper.read_base(self.key, index) if joined is None else (joined,) if joined else ()
        return Chunk(items, LogOffset(0, index), False)
