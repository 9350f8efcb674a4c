"""The log of one shape on disk: a tail in memory before what its file holds. LogStorage; see `log.py` for L1 to L4.

    memory   │ base chunks not written yet   │ items: written a flush ago · shown · staged
    file     │ all other chunks              │ all earlier items

E1  What is not in the file is in memory; what leaves memory was durable before, and a flush ago: who follows live
    never waits for the disk. A reader decides what it takes from where before it waits; what the file holds never
    changes.
E2  The file holds whole transactions only: `unsaved` gives what is shown.
E3  What memory holds is counted in `budget`, what is or will be in the file in `disk`, both before it is taken.
E4  What is read from the file for readers is counted until the last of them has let go of it, and in a share of the
    memory that all such reads have: readers who are slow on purpose take no more. All readers of one chunk of the base
    have one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tidemill.base.errors import InvalidError
from tidemill.shapes.log.items import LogItem, marked_last
from tidemill.shapes.log.log import SEPARATOR, Chunk, LogLimits, ReadLease
from tidemill.shapes.log.log_offset import BASE_END, BEFORE_ALL, LogOffset
from tidemill.shapes.log.sqlite_file import Item, Saved
from tidemill.shapes.memory_budget import Budget

UNWRITTEN_CHUNKS = 2
"""Of a base that is being read: who reads it waits while more are in memory."""


class Keeper(Protocol):
    """Who writes and reads the file of a log: ShapeStore."""

    def changed(self, log: DiskLog, size_bytes: int) -> None:
        """There is so much more to write."""
        ...

    def end(self, log: DiskLog) -> None:
        """It was dropped, and must not be there after a restart."""
        ...

    async def room(self, log: DiskLog) -> None:
        """Until it is not crowded any more."""
        ...

    async def base(self, key: int, chunk: int) -> Sequence[bytes]:
        """That chunk, lent (E4)."""
        ...

    def lend(self, items: Sequence[bytes]) -> ReadLease:
        """Count what was read for readers. Raises Full."""
        ...

    async def items(self, key: int, after: LogOffset, upto: LogOffset, size_bytes: int) -> list[Item]: ...


class DiskLog:
    __slots__ = (
        "_base", "_base_bytes", "_charged", "_dropped", "_end", "_held_bytes", "_items", "_keeper", "_limits",
        "_log_bytes", "_on_disk", "_open_bytes", "_open_chunk", "_sealed", "_shown", "_written", "_written_chunks",
        "budget", "disk", "key",
    )  # fmt: skip

    def __init__(
        self,
        key: int,
        keeper: Keeper,
        limits: LogLimits,
        budget: Budget,
        disk: Budget,
        saved: Saved | None = None,
    ) -> None:
        """`saved`: the log that the file holds under this key. Raises Full when `disk` has no room for it."""
        self.key = key
        self.budget = budget
        self.disk = disk
        self._keeper = keeper
        self._limits = limits
        self._base: list[bytes | None] = []
        """None: in the file only."""
        self._written_chunks = 0
        self._open_chunk: list[bytes] = []
        self._open_bytes = 0
        self._sealed = False
        self._dropped = False
        self._items: list[LogItem] = []
        self._charged: list[int] = []
        """What was taken for each: an item grows when it is marked."""
        self._written = 0
        """Of the items, in the file."""
        self._shown = 0
        self._end = self._on_disk = BASE_END
        """Newest item that is shown; newest one that is in the file only."""
        self._log_bytes = self._base_bytes = self._held_bytes = 0
        if saved is not None:
            disk.take(saved.base_bytes + saved.log_bytes)
            self._base = [None] * saved.chunks
            self._written_chunks = saved.chunks
            self._sealed = True
            self._base_bytes, self._log_bytes = saved.base_bytes, saved.log_bytes
            if saved.end[0]:
                self._end = self._on_disk = LogOffset(*saved.end)

    # -- what it is --------------------------------------------------------------------------------------------

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
    def overgrown(self) -> bool:
        return self._log_bytes > self._limits.log_bytes

    @property
    def limit_bytes(self) -> int:
        return self._limits.log_bytes

    @property
    def crowded(self) -> bool:
        """The base comes faster than the file takes it."""
        return len(self._base) - self._written_chunks >= UNWRITTEN_CHUNKS and not self._dropped

    # -- writing -----------------------------------------------------------------------------------------------

    def add_base(self, rows: Sequence[bytes]) -> None:
        """Raises InvalidError when the base outgrows its limit, Full when all shapes together do."""
        if self._dropped:
            return
        if self._sealed:
            raise RuntimeError("base is sealed")
        self._take(sum(map(len, rows)) + len(SEPARATOR) * len(rows), base=True)
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
        self._keeper.changed(self, len(joined))

    def seal_base(self) -> None:
        if self._open_chunk or not self._base:
            self._close_chunk()
        self._sealed = True

    def stage(self, item: LogItem) -> None:
        """Raises RuntimeError when the item does not come after all before it (L1), Full without room."""
        if self._dropped:
            return
        last = self._items[-1].offset if self._items else self._end
        if item.offset <= last:
            raise RuntimeError(f"log offsets must grow: last={last} next={item.offset}")
        size = item.size_bytes
        self._take(size)
        if self._dropped:
            return
        self._items.append(item)
        self._charged.append(size)

    def publish(self, *, mark: bool = False) -> bool:
        if self._shown == len(self._items):
            return False
        last = self._items[-1]
        if mark:
            self._items[-1] = LogItem(last.offset, marked_last(last.json))
        size = sum(self._charged[self._shown :])
        self._shown = len(self._items)
        self._end = last.offset
        self._keeper.changed(self, size)
        return True

    def unstage(self) -> None:
        size = sum(self._charged[self._shown :])
        self._log_bytes -= size
        self._leave(size)
        self.disk.give(size)
        del self._items[self._shown :], self._charged[self._shown :]

    def drop(self) -> None:
        if self._dropped:
            return
        self._dropped = True
        self._keeper.end(self)
        self.budget.give(self._held_bytes)
        self.disk.give(self._log_bytes + self._base_bytes)
        self._base, self._open_chunk, self._items, self._charged = [], [], [], []
        self._written_chunks = self._written = self._shown = 0
        self._log_bytes = self._base_bytes = self._held_bytes = 0

    def _take(self, size_bytes: int, *, base: bool = False) -> None:
        """E3. Raises Full, and takes nothing then."""
        self.disk.take(size_bytes)
        try:
            self.budget.take(size_bytes)
        except BaseException:
            self.disk.give(size_bytes)
            raise
        if self._dropped:  # room was made of this very shape
            self.disk.give(size_bytes)
            self.budget.give(size_bytes)
            return
        self._held_bytes += size_bytes
        if base:
            self._base_bytes += size_bytes
        else:
            self._log_bytes += size_bytes

    def _leave(self, size_bytes: int) -> None:
        self._held_bytes -= size_bytes
        self.budget.give(size_bytes)

    # -- the file ----------------------------------------------------------------------------------------------

    def unsaved(self) -> tuple[list[tuple[int, bytes]], list[LogItem]]:
        """Chunks and items that readers may see and the file does not hold yet (E2)."""
        first = self._written_chunks
        chunks = [(first + n, json) for n, json in enumerate(self._base[first:]) if json is not None]
        return chunks, self._items[self._written : self._shown]

    def was_saved(self, chunks: int, items: int) -> None:
        """So many of what `unsaved` gave are durable."""
        if not self._dropped:
            self._written_chunks += chunks
            self._written += items

    def cool(self) -> None:
        """Called when the next flush is done, before `was_saved`: what was durable until now leaves memory (E1)."""
        for chunk, json in enumerate(self._base[: self._written_chunks]):
            if json is not None:
                self._base[chunk] = None
                self._leave(len(json))
        if self._written:
            self._leave(sum(self._charged[: self._written]))
            self._on_disk = self._items[self._written - 1].offset
            del self._items[: self._written], self._charged[: self._written]
            self._shown -= self._written
            self._written = 0

    # -- reading -----------------------------------------------------------------------------------------------

    async def room(self) -> None:
        if self.crowded:
            await self._keeper.room(self)

    async def fetch(self, after: LogOffset) -> Chunk:
        """See MemoryLog.read. Raises Unavailable when the file cannot be read, Full when too much is read (E4)."""
        if after < BASE_END:
            index = 0 if after == BEFORE_ALL else after.op + 1
            if index < len(self._base):
                return await self._read_base(index)
            after = BASE_END  # a reader that names the last chunk has all of it
        if after.read < self._on_disk:
            upto = self._on_disk
            found = await self._keeper.items(self.key, after.read, upto, self._limits.chunk_bytes)
            if self._dropped or not found:
                return Chunk((), after, False)
            end = LogOffset(found[-1].tx, found[-1].op)
            return Chunk(self._keeper.lend([item.json for item in found]), end, end == self._end)
        start = self._place_after(after.read)
        stop, size = start, 0
        while stop < self._shown and size < self._limits.chunk_bytes:
            size += len(self._items[stop].json)
            stop += 1
        items = self._items[start:stop]
        return Chunk([item.json for item in items], items[-1].offset if items else after, stop == self._shown)

    def _place_after(self, after: LogOffset) -> int:
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
        items = await self._keeper.base(self.key, index) if joined is None else (joined,) if joined else ()
        return Chunk(items, LogOffset(0, index), False)
