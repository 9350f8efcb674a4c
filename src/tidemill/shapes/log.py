"""One shape's log: a base (the initial rows, in chunks) and then items in order. Synchronous; no clock, no I/O.

L1  Offsets of items grow strictly; `end` never goes back.
L2  Readers see whole transactions only: `append` takes all items of one transaction at once.
L3  A reader that asks at any offset gets every later item once, in order.

`LogStorage` is the protocol; `MemoryLog` keeps everything in memory and is bounded: when the items
outgrow `LogLimits.log_bytes` the owner ends the shape, and the next request starts it anew (new handle,
new base). A durable log implements the same protocol and may then promise more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

import msgspec

from tidemill.base.errors import Invalid
from tidemill.shapes.items import LogItem
from tidemill.shapes.offsets import BASE_END, BEFORE_ALL, LogOffset

CHUNK_BYTES = 10 << 20
"""A chunk closes when its JSON reaches this size (Electric's default)."""

LOG_BYTES = 64 << 20
BASE_BYTES = 256 << 20


class LogLimits(msgspec.Struct, frozen=True):
    chunk_bytes: int = CHUNK_BYTES
    log_bytes: int = LOG_BYTES
    base_bytes: int = BASE_BYTES


class Chunk(msgspec.Struct, frozen=True):
    """`items` are JSON bytes; `end` is the offset to ask for next; `complete` = nothing follows `end` now."""

    items: Sequence[bytes]
    end: LogOffset
    complete: bool


class LogStorage(Protocol):
    @property
    def end(self) -> LogOffset:
        """Offset of the last item, or of the end of the base."""
        ...

    @property
    def log_bytes(self) -> int: ...

    @property
    def base_bytes(self) -> int: ...

    @property
    def overgrown(self) -> bool:
        """The log is larger than its limit: the owner ends the shape."""
        ...

    def add_base(self, rows: Sequence[bytes]) -> None:
        """Add rows to the base; only before `seal_base`. Raises Invalid when it grows too large."""
        ...

    def seal_base(self) -> None: ...

    def append(self, items: Sequence[LogItem]) -> None: ...

    def read(self, after: LogOffset) -> Chunk: ...

    def drop(self) -> None: ...


class MemoryLog:
    """LogStorage in memory."""

    def __init__(self, limits: LogLimits | None = None) -> None:
        self._limits = limits or LogLimits()
        self._base: list[list[bytes]] = []
        self._open_chunk: list[bytes] = []
        self._open_bytes = 0
        self._sealed = False
        self._offsets: list[LogOffset] = []
        self._json: list[bytes] = []
        self._log_bytes = 0
        self._base_bytes = 0

    @property
    def end(self) -> LogOffset:
        return self._offsets[-1] if self._offsets else BASE_END

    @property
    def log_bytes(self) -> int:
        return self._log_bytes

    @property
    def base_bytes(self) -> int:
        return self._base_bytes

    @property
    def overgrown(self) -> bool:
        return self._log_bytes > self._limits.log_bytes

    def add_base(self, rows: Sequence[bytes]) -> None:
        """Raises Invalid when the base outgrows its limit."""
        if self._sealed:
            raise RuntimeError("base is sealed")
        for row in rows:
            self._open_chunk.append(row)
            self._open_bytes += len(row)
            self._base_bytes += len(row)
            if self._open_bytes >= self._limits.chunk_bytes:
                self._close_chunk()
        if self._base_bytes > self._limits.base_bytes:
            raise Invalid(
                f"the shape is too large: limit_bytes={self._limits.base_bytes}.",
                fix="Narrow it with where or columns.",
            )

    def _close_chunk(self) -> None:
        self._base.append(self._open_chunk)
        self._open_chunk, self._open_bytes = [], 0

    def seal_base(self) -> None:
        if self._open_chunk or not self._base:
            self._close_chunk()
        self._sealed = True

    def append(self, items: Sequence[LogItem]) -> None:
        """Add one transaction's items. Raises RuntimeError when they do not come after `end` (L1)."""
        last = self.end
        for item in items:
            if item.offset <= last:
                raise RuntimeError(f"log offsets must grow: last={last} next={item.offset}")
            last = item.offset
        for item in items:
            self._offsets.append(item.offset)
            self._json.append(item.json)
            self._log_bytes += len(item.json)

    def read(self, after: LogOffset) -> Chunk:
        """The next chunk behind `after`. The base is read chunk by chunk: -1 → 0_0 → … → 0_inf."""
        if after < BASE_END:
            index = 0 if after == BEFORE_ALL else after.op + 1
            if index >= len(self._base):
                return Chunk((), BASE_END, not self._offsets)
            is_last = index == len(self._base) - 1
            return Chunk(self._base[index], BASE_END if is_last else LogOffset(0, index), False)
        start = bisect_right(self._offsets, after)
        stop, size = start, 0
        while stop < len(self._json) and size < self._limits.chunk_bytes:
            size += len(self._json[stop])
            stop += 1
        end = self._offsets[stop - 1] if stop > start else after
        return Chunk(self._json[start:stop], end, stop == len(self._json))

    def drop(self) -> None:
        self._base, self._offsets, self._json = [], [], []
        self._log_bytes = self._base_bytes = 0
