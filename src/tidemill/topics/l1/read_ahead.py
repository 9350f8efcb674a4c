"""Read ahead in L1: a reader that continues through an object finds the next bytes in memory, or on their way.

    a read that begins where an earlier one ended ──► the bytes after it, up to the region's end, a span at a time
    half a span left before the reader ─────────────► the next one

- Memory: cached and in-flight bytes stay within `limit_bytes`; the least recently used span is evicted first. All
  readers share the spans.
- Errors: a span that cannot be read is dropped. A reader that needs its bytes reads them itself and gets the error.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from tidemill.base.errors import TidemillError
from tidemill.base.limits import MIB
from tidemill.base.runtime.tasks import Tasks
from tidemill.objects.reads import forward_notice
from tidemill.objects.store import Buffer, ObjectStore

LIMIT_BYTES = 64 * MIB
SPAN_BYTES = 4 * MIB
"""Bytes that a consumer of 100 MB/s reads in 40 ms, about the latency of an object store."""

READ_ENDS_MAX = 4_096
"""Limit of remembered end positions of reads, and so of concurrent readers that are followed."""


class _Span:
    __slots__ = ("begin", "data", "end", "key")

    def __init__(self, key: str, begin: int, end: int, data: asyncio.Future[bytes | None]) -> None:
        self.key = key
        self.begin = begin
        self.end = end
        self.data = data


class ReadAhead:
    def __init__(
        self, objects: ObjectStore, tasks: Tasks, *, limit_bytes: int = LIMIT_BYTES, span_bytes: int = SPAN_BYTES
    ) -> None:
        self._objects = objects
        self._tasks = tasks
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self._span_bytes = span_bytes
        self._closed = False
        self._ends: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._spans: OrderedDict[tuple[str, int], _Span] = OrderedDict()
        """Spans by object and first byte, the least recently used first."""
        self._begins: dict[str, list[int]] = {}
        """Object key to the first bytes of its spans, ascending."""

    def announce_read(self, key: str, begin: int, end: int, limit: int) -> None:
        """Announce a read of [begin, end) of an object, in a region that ends at `limit`. A plain call."""
        goes_on = (key, begin) in self._ends
        self._ends[key, end] = None
        self._ends.move_to_end((key, end))
        if len(self._ends) > READ_ENDS_MAX:
            self._ends.popitem(last=False)
        reach = self._contiguous_end(key, end)
        if goes_on and reach < limit and reach - end < self._span_bytes // 2:
            self._start_span(key, reach, min(limit, reach + self._span_bytes))

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Read ranges as `ObjectStore.get_ranges`, from spans that cover a range completely; same errors."""
        found: list[Buffer | None] = [await self._read_cached(key, begin, end) for begin, end in ranges]
        missing = [place for place, data in zip(ranges, found, strict=True) if data is None]
        if missing:
            read = iter(await self._objects.get_ranges(key, missing))
            return [data if data is not None else next(read) for data in found]
        return [data for data in found if data is not None]

    def discard(self, key: str) -> None:
        """Drop the object's bytes, which are damaged: the next read asks the store."""
        for begin in list(self._begins.get(key, ())):
            self._discard_span(self._spans[key, begin])

    def record_notice(self, what: str) -> None:
        forward_notice(self._objects, what)

    async def _read_cached(self, key: str, begin: int, end: int) -> Buffer | None:
        parts: list[memoryview] = []
        for span, first in self._find_spans(key, begin, end):
            if not span.data.done():
                await asyncio.wait([span.data])
            data = span.data.result()
            if data is None:
                return None
            parts.append(memoryview(data)[first - span.begin : end - span.begin])
            if (key, span.begin) in self._spans:
                self._spans.move_to_end((key, span.begin))
        return parts[0] if len(parts) == 1 else b"".join(parts) if parts else None

    def _find_spans(self, key: str, begin: int, end: int) -> list[tuple[_Span, int]]:
        """Return the spans that together cover [begin, end), in order, each with the first byte to use; empty if a byte
        is missing.

        Spans of readers that began at different places overlap.
        """
        found: list[tuple[_Span, int]] = []
        at = begin
        for first in self._begins.get(key, ()):
            span = self._spans[key, first]
            if span.begin <= at < span.end:
                found.append((span, at))
                at = span.end
            if at >= end:
                return found
        return []

    def _contiguous_end(self, key: str, at: int) -> int:
        """Return the end of the contiguous bytes from `at` that are cached or in flight."""
        for first in self._begins.get(key, ()):
            span = self._spans[key, first]
            if span.begin <= at < span.end:
                at = span.end
        return at

    def close(self) -> None:
        """Stop reading ahead."""
        self._closed = True

    def _start_span(self, key: str, begin: int, end: int) -> None:
        if self._closed or (key, begin) in self._spans or end - begin > self.limit_bytes:
            return
        span = _Span(key, begin, end, asyncio.get_running_loop().create_future())
        self._spans[key, begin] = span
        begins = self._begins.setdefault(key, [])
        begins.append(begin)
        begins.sort()
        self.held_bytes += end - begin
        while self.held_bytes > self.limit_bytes:
            self._discard_span(next(iter(self._spans.values())))
        self._tasks.spawn(self._fetch_span(span), name=f"ahead {key}")

    async def _fetch_span(self, span: _Span) -> None:
        data: bytes | None = None
        try:
            data = await self._objects.get(span.key, span.begin, span.end)
        except TidemillError:
            self._discard_span(span)  # A reader that needs these bytes reads them itself and gets the error.
        finally:
            if not span.data.done():
                span.data.set_result(data)

    def _discard_span(self, span: _Span) -> None:
        if self._spans.get((span.key, span.begin)) is not span:
            return
        del self._spans[span.key, span.begin]
        self.held_bytes -= span.end - span.begin
        begins = self._begins[span.key]
        begins.remove(span.begin)
        if not begins:
            del self._begins[span.key]
