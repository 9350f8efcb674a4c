"""One shape's log: a base (the initial rows, in chunks) and then items in order. No clock, no I/O.

`ShapeLog` stores everything in memory and is bounded: when the items exceed `LogLimits.log_bytes`, the owner ends the
shape, and the next request starts it again with a new handle and a new base. `disk_log.DiskLog` also writes the log to
a file, over a restart, and keeps only its tail in memory.

- Invariant (growing offsets): the offsets of items strictly increase, and `end` never decreases.
- Invariant (whole transactions): `stage` adds items that no reader sees. `publish` makes all of them visible in one
  step, however many they are, and `unstage` discards them.
- Invariant (exactly once): a reader that starts at any offset gets every later item once, in order.
- Invariant (accounted): bytes are taken from the budget before the log stores them, and returned when the log is
  dropped. A dropped log takes nothing more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from tidemill.base.errors import InvalidError
from tidemill.shapes.log.chunks import SEPARATOR, Chunk
from tidemill.shapes.log.items import LogItem, mark_last
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


class ShapeLog:
    """A log in memory."""

    __slots__ = (
        "_base", "_charged", "_dropped", "_json", "_limits", "_memory_end", "_offsets", "_open_bytes", "_open_chunk",
        "_sealed", "_shown", "base_bytes", "budget", "log_bytes",
    )  # fmt: skip

    def __init__(self, limits: LogLimits | None = None, budget: Budget | None = None) -> None:
        self.budget = budget or Budget(UNBOUNDED)
        self._limits = limits or LogLimits()
        self._base: list[bytes | None] = []
        """Chunks of the base; None if the chunk is not in memory."""
        self._open_chunk: list[bytes] = []
        self._open_bytes = 0
        self._sealed = False
        self._dropped = False
        self._memory_end = BASE_END
        """Offset after which the items in memory begin."""
        self._offsets: list[LogOffset] = []
        self._json: list[bytes] = []
        self._charged: list[int] = []
        """Bytes counted per item: an item grows when it is marked as the last one."""
        self._shown = 0
        """Number of visible items in memory; later ones are staged."""
        self.log_bytes = 0
        self.base_bytes = 0

    # -- properties ----------------------------------------------------------------------------------------------

    @property
    def end(self) -> LogOffset:
        """Offset of the last visible item, or of the end of the base."""
        return self._offsets[self._shown - 1] if self._shown else self._memory_end

    @property
    def held_bytes(self) -> int:
        """Bytes of the base and the log that are in memory."""
        return self.log_bytes + self.base_bytes

    @property
    def tail_bytes(self) -> int:
        """Bytes of the items that are in memory."""
        return sum(self._charged)

    @property
    def limit_bytes(self) -> int:
        """Limit for the log's size, and for transactions that are not in the log yet."""
        return self._limits.log_bytes

    @property
    def is_overgrown(self) -> bool:
        """True if the log exceeds its limit; the owner then ends the shape."""
        return self.log_bytes > self._limits.log_bytes

    # -- writing -------------------------------------------------------------------------------------------------

    def add_base(self, rows: Sequence[bytes]) -> None:
        """Add rows to the base; only before `seal_base`.

        Raises InvalidError if the base exceeds its limit, OverBudgetError if all shapes together do.
        """
        if self._dropped:
            return
        if self._sealed:
            raise RuntimeError("base is sealed")
        size = sum(map(len, rows)) + len(SEPARATOR) * len(rows)
        self._reserve(size)
        if self._dropped:  # the budget evicted this very shape to make room
            self._release(size)
            return
        self.base_bytes += size
        for row in rows:
            self._open_chunk.append(row)
            self._open_bytes += len(row)
            if self._open_bytes >= self._limits.chunk_bytes:
                self._close_chunk()
        if self.base_bytes > self._limits.base_bytes:
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
        """Append an item, not yet visible.

        Raises RuntimeError if its offset is not larger than all earlier ones, OverBudgetError without room; nothing is
        added then.
        """
        if self._dropped:
            return
        last = self._offsets[-1] if self._offsets else self._memory_end
        if item.offset <= last:
            raise RuntimeError(f"log offsets must grow: last={last} next={item.offset}")
        size = item.size_bytes
        self._reserve(size)
        if self._dropped:  # the budget evicted this very shape to make room
            self._release(size)
            return
        self.log_bytes += size
        self._offsets.append(item.offset)
        self._json.append(item.json)
        self._charged.append(size)

    def stage_all(self, items: Sequence[LogItem]) -> None:
        """Append items, of which there is at least one, not yet visible; raises as `stage` does."""
        if self._dropped:
            return
        last = self._offsets[-1] if self._offsets else self._memory_end
        sizes = []
        for item in items:
            if item.offset <= last:
                raise RuntimeError(f"log offsets must grow: last={last} next={item.offset}")
            last = item.offset
            sizes.append(item.size_bytes)
        size = sum(sizes)
        self._reserve(size)
        if self._dropped:  # the budget evicted this very shape to make room
            self._release(size)
            return
        self.log_bytes += size
        self._offsets += [item.offset for item in items]
        self._json += [item.json for item in items]
        self._charged += sizes

    def publish(self, *, mark: bool = False) -> bool:
        """Make the staged items visible; return whether there were any. `mark`: mark the last one as the end of its
        transaction."""
        if self._shown == len(self._json):
            return False
        if mark:
            self._json[-1] = mark_last(self._json[-1])
        self._shown = len(self._json)
        return True

    def unstage(self) -> None:
        size = sum(self._charged[self._shown :])
        self.log_bytes -= size
        self._release(size)
        del self._offsets[self._shown :], self._json[self._shown :], self._charged[self._shown :]

    def drop(self) -> None:
        """Release everything; nothing is added from now on. Idempotent."""
        self._dropped = True
        self.budget.release(self.held_bytes)
        self._base, self._open_chunk, self._offsets, self._json, self._charged = [], [], [], [], []
        self._shown = self.log_bytes = self.base_bytes = 0

    def _reserve(self, size_bytes: int) -> None:
        """Reserve room. Raises OverBudgetError, and reserves nothing then."""
        self.budget.reserve(size_bytes)

    def _release(self, size_bytes: int) -> None:
        self.budget.release(size_bytes)

    async def wait_for_room(self) -> None:
        """Wait until more of the base may be added. Memory is always writable, or adding raises OverBudgetError."""

    # -- reading -------------------------------------------------------------------------------------------------

    async def fetch(self, after: LogOffset) -> Chunk:
        """Return the next chunk after `after`, or what is left of it if the log is dropped while reading. Raises
        UnavailableError, OverBudgetError."""
        return self.read(after)

    def read(self, after: LogOffset) -> Chunk:
        """Return the next chunk after `after`, which is in memory. The base is read chunk by chunk, -1 → 0_0 → 0_1 → …;
        0_inf follows."""
        index = self._chunk_after(after)
        if index is not None:
            joined = self._base[index]
            return Chunk((joined,) if joined else (), LogOffset(0, index), False)
        after = max(after, BASE_END)
        start = bisect_right(self._offsets, after.read, hi=self._shown)
        stop, size = start, 0
        while stop < self._shown and size < self._limits.chunk_bytes:
            size += len(self._json[stop])
            stop += 1
        end = self._offsets[stop - 1] if stop > start else after
        return Chunk(self._json[start:stop], end, stop == self._shown)

    def _chunk_after(self, after: LogOffset) -> int | None:
        """Return the number of the base's chunk after `after`; None if the log follows: the offset of the last chunk
        means the whole base."""
        if after >= BASE_END:
            return None
        index = 0 if after == BEFORE_ALL else after.op + 1
        return index if index < len(self._base) else None
