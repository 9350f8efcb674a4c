"""The log of one shape on disk: a tail in memory in front of the file's content.

    memory   │ base chunks not written yet   │ items: written a flush ago · visible · staged
    file     │ all other chunks              │ all earlier items

- Invariant (warm tail): data that is not in the file is in memory. Data leaves memory one flush after it became
  durable, so live readers never wait for the disk. A reader decides what to read from which side before it awaits; the
  content of the file never changes.
- Invariant (whole transactions): `unsaved` returns only visible items, so the file has whole transactions only.
- Invariant (accounted): memory is counted in `budget`, and everything that is or will be in the file in `disk`, both
  before the data is stored.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from tidemill.shapes.log.chunks import Chunk, LogReader
from tidemill.shapes.log.log import LogLimits, ShapeLog
from tidemill.shapes.log.log_offset import BASE_END, LogOffset
from tidemill.shapes.log.sqlite_file import StoredItem, StoredShape
from tidemill.shapes.memory_budget import Budget

MAX_UNWRITTEN_CHUNKS = 2
"""Largest number of unwritten chunks while the base is loaded: with more in memory, the loader waits."""


class LogOwner(Protocol):
    """The writer of the logs of a file: LogSet."""

    def mark_changed(self, log: DiskLog, size_bytes: int) -> None:
        """Note that the log has `size_bytes` more to write."""
        ...

    def end(self, log: DiskLog) -> None:
        """Note that the log was dropped, and must not exist after a restart."""
        ...

    async def wait_for_room(self, log: DiskLog) -> None:
        """Wait until the log is not crowded any more."""
        ...


class LogRoom(NamedTuple):
    """The limits of each log of a file, and the memory and disk that all logs have together."""

    limits: LogLimits
    memory: Budget
    disk: Budget


class DiskLog(ShapeLog):
    __slots__ = ("_file_only_bytes", "_owner", "_reader", "_written", "_written_chunks", "disk", "key")

    def __init__(
        self,
        key: int,
        owner: LogOwner,
        reader: LogReader,
        room: LogRoom,
        saved: StoredShape | None = None,
    ) -> None:
        """Create an empty log, or one over `saved`: the log that the file has under this key.

        Raises OverBudgetError if the disk has no room for it.
        """
        super().__init__(room.limits, room.memory)
        self.key = key
        self.disk = room.disk
        self._owner = owner
        self._reader = reader
        self._written_chunks = 0
        self._written = 0
        """Number of items in memory that are also in the file."""
        self._file_only_bytes = 0
        """Bytes of the base and the log that are in the file only."""
        if saved is not None:
            size = saved.base_bytes + saved.log_bytes
            self.disk.reserve(size)
            self._base = [None] * saved.chunks
            self._written_chunks = saved.chunks
            self._sealed = True
            self.base_bytes, self.log_bytes, self._file_only_bytes = saved.base_bytes, saved.log_bytes, size
            if saved.end[0]:
                self._memory_end = LogOffset(*saved.end)

    @property
    def held_bytes(self) -> int:
        return self.log_bytes + self.base_bytes - self._file_only_bytes

    @property
    def chunks(self) -> int:
        return len(self._base)

    @property
    def is_crowded(self) -> bool:
        """True if the base arrives faster than the file is written."""
        return len(self._base) - self._written_chunks >= MAX_UNWRITTEN_CHUNKS and not self._dropped

    # -- writing -----------------------------------------------------------------------------------------------

    def _close_chunk(self) -> None:
        super()._close_chunk()
        self._owner.mark_changed(self, len(self._base[-1] or b""))

    def publish(self, *, mark: bool = False) -> bool:
        size = sum(self._charged[self._shown :])
        if not super().publish(mark=mark):
            return False
        self._owner.mark_changed(self, size)
        return True

    def drop(self) -> None:
        if not self._dropped:
            self._owner.end(self)
            self.disk.release(self.log_bytes + self.base_bytes)
            super().drop()
            self._written_chunks = self._written = self._file_only_bytes = 0

    def _reserve(self, size_bytes: int) -> None:
        self.disk.reserve(size_bytes)
        try:
            self.budget.reserve(size_bytes)
        except BaseException:
            self.disk.release(size_bytes)
            raise

    def _release(self, size_bytes: int) -> None:
        self.disk.release(size_bytes)
        self.budget.release(size_bytes)

    # -- the file ----------------------------------------------------------------------------------------------

    def unsaved(self) -> tuple[list[tuple[int, bytes]], list[StoredItem]]:
        """Return the chunks and items that readers may see and the file does not have yet."""
        first, place = self._written_chunks, slice(self._written, self._shown)
        chunks = [(first + n, json) for n, json in enumerate(self._base[first:]) if json is not None]
        items = zip(self._offsets[place], self._json[place], strict=True)
        return chunks, [StoredItem(offset.tx, offset.op, json) for offset, json in items]

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
            self._memory_end = self._offsets[self._written - 1]
            for each in (self._offsets, self._json, self._charged):
                del each[: self._written]
            self._shown -= self._written
            self._written = 0

    def _release_memory(self, size_bytes: int) -> None:
        self._file_only_bytes += size_bytes
        self.budget.release(size_bytes)

    # -- reading -----------------------------------------------------------------------------------------------

    async def wait_for_room(self) -> None:
        if self.is_crowded:
            await self._owner.wait_for_room(self)

    async def fetch(self, after: LogOffset) -> Chunk:
        index = self._chunk_after(after)
        if index is not None:
            if self._base[index] is not None:
                return self.read(after)
            return Chunk(await self._reader.read_base(self.key, index), LogOffset(0, index), False)
        after = max(after, BASE_END)
        if after.read >= self._memory_end:
            return self.read(after)
        found = await self._reader.items(self.key, after.read, self._memory_end, self._limits.chunk_bytes)
        if self._dropped or not found:
            return Chunk((), after, False)
        end = LogOffset(found[-1].tx, found[-1].op)
        return Chunk(self._reader.lend_items([item.json for item in found]), end, end == self.end)
