"""Planner of steps: choose an interval of time with a bounded number of records and bytes, and locate its data:
bindings, slices, and the positions of their record batches.

    [upper, end) → the bindings of one page → the last of them within STEP_RECORDS → the last within STEP_BYTES

A step consists of whole times, because an append publishes a time whole or not at all. A single time may exceed the
limits: such a step is `large`, and is read in pieces (oversized_step.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from tidemill.base.errors import TidemillError
from tidemill.metastore.catalogue import TopicRow
from tidemill.shards.api import Binding, BindingsPage, Remap
from tidemill.spark.decode.records import Slice, SliceDescriptor, cut_slices, record_count
from tidemill.spark.ingest.sources import TopicFeed
from tidemill.spark.stores import Stores
from tidemill.topics.api import BatchRef, PartitionReader

STEP_RECORDS = 100_000
STEP_BYTES = 32 << 20
"""Size of stored record batches. Memory of a step is a small multiple of it, and each step shows progress."""

BINDINGS_PAGE = 2_000
"""Bindings read in one page: a minute and a half of a capture that binds every 50 ms."""

CONCURRENT_PLANS = 32


class Step(msgspec.Struct, frozen=True):
    """Interval [lower, upper) of one table and its records. `to_go`: records after it, as far as bindings are known."""

    lower: int
    upper: int
    slices: tuple[Slice, ...] = ()
    descriptors: tuple[SliceDescriptor, ...] = ()
    bindings: tuple[Binding, ...] = ()
    records: int = 0
    bytes: int = 0
    to_go: int = 0

    @property
    def large(self) -> bool:
        return self.records > STEP_RECORDS or self.bytes > STEP_BYTES


class TopicReplacedError(TidemillError):
    """The table has a new topic under its old name: reopen the table on that topic."""


class StepPlanner:
    """Planner of one feed; remembers the topics it has seen. Raises as reading bindings and logs."""

    def __init__(self, stores: Stores, remap: Remap) -> None:
        self._stores = stores
        self._remap = remap
        self._seen: dict[str, set[str]] = {}
        self._asked: dict[int, BindingsPage] = {}
        self._asking: dict[int, asyncio.Lock] = {}

    def start_round(self) -> None:
        """Start a round. Within a round bindings are read once, because most tables are at the same time."""
        self._asked, self._asking = {}, {}

    async def next(self, name: str, feed: TopicFeed, lower: int, end: int) -> Step:
        """Return the next step of a table whose upper is `lower`, at most to `end`. Also raises TopicReplacedError."""
        page = await self._read_page(lower)
        bindings = [b for b in page.bindings if b.time_ms < end]
        if len(bindings) == BINDINGS_PAGE:
            end = bindings[-1].time_ms + 1
        await self._check_topic(name, feed, bindings)
        if not bindings:
            return Step(lower, end)
        base, newest = page.base, page.newest
        mine = _fitting_bindings(base, bindings, feed.topic_id)
        slices = cut_slices(base, mine, feed.topic, feed.topic_id, begins_first=feed.captured)
        descriptors = await locate_batches(self._stores.topics, slices)
        sizes = _cumulative_bytes(mine, descriptors)
        fitting = [i for i, size in enumerate(sizes) if size <= STEP_BYTES]
        last = fitting[-1] if fitting else 0
        if last < len(mine) - 1:
            mine = mine[: last + 1]
            slices = cut_slices(base, mine, feed.topic, feed.topic_id, begins_first=feed.captured)
            descriptors = await locate_batches(self._stores.topics, slices)
        upper = end if len(mine) == len(bindings) else mine[-1].time_ms + 1
        to_go = (
            _record_total(newest, feed.topic_id) - _record_total(mine[-1], feed.topic_id) if newest is not None else 0
        )
        return Step(
            lower,
            upper,
            tuple(slices),
            tuple(descriptors),
            tuple(mine),
            record_count(slices),
            sizes[last],
            max(0, to_go),
        )

    async def _read_page(self, lower: int) -> BindingsPage:
        """Read a page once for all tables of a round, which are planned concurrently; after a failure each table
        retries."""
        async with self._asking.setdefault(lower, asyncio.Lock()):
            if lower not in self._asked:
                self._asked[lower] = await self._remap.page(lower, BINDINGS_PAGE)
            return self._asked[lower]

    async def _check_topic(self, name: str, feed: TopicFeed, bindings: Sequence[Binding]) -> None:
        """Raise TopicReplacedError if the table restarts on a new topic of the same name.

        A binding with an unknown topic may mean a re-snapshot of a captured table, or a stream that was deleted and
        created. Nothing of the old topic may be appended after such a binding.
        """
        found = {topic_id for binding in bindings for topic_id in binding.offsets}
        seen = self._seen.setdefault(name, set())
        if found <= seen:
            return
        row = await self._stores.catalogue.get(TopicRow, feed.topic)
        if row is not None and row.topic_id != feed.topic_id:
            raise TopicReplacedError(f"the table starts over on a new topic: table={name} topic={feed.topic}.")
        seen |= found


def _record_total(binding: Binding | None, topic_id: str) -> int:
    return sum(binding.offsets.get(topic_id, ())) if binding is not None else 0


def _fitting_bindings(base: Binding | None, bindings: Sequence[Binding], topic_id: str) -> list[Binding]:
    """Return the leading bindings that hold at most STEP_RECORDS records of the topic; at least one."""
    before = _record_total(base, topic_id)
    count = 0
    for binding in bindings:
        if _record_total(binding, topic_id) - before > STEP_RECORDS:
            break
        count += 1
    return list(bindings[: max(1, count)])


def _cumulative_bytes(bindings: Sequence[Binding], descriptors: Sequence[SliceDescriptor]) -> list[int]:
    """Return the stored bytes up to the end of each binding. A batch counts for the first binding that reaches into
    it."""
    times = np.array([b.time_ms for b in bindings], dtype=np.int64)
    out = np.zeros(len(bindings), dtype=np.int64)
    for descriptor in descriptors:
        if not descriptor.refs:
            continue
        first = np.array([max(r.base_offset, descriptor.slice.start) for r in descriptor.refs], dtype=np.int64)
        sizes = np.array([r.size_bytes for r in descriptor.refs], dtype=np.int64)
        np.add.at(out, np.searchsorted(times, descriptor.slice.times_of(first)), sizes)
    return [int(total) for total in np.cumsum(out)]


def split_descriptors(descriptors: Sequence[SliceDescriptor], most_bytes: int) -> Iterator[SliceDescriptor]:
    """Split each descriptor's batches into pieces; only the first piece carries the time at which its topic begins."""
    for descriptor in descriptors:
        piece, begins_ms = descriptor.slice, descriptor.slice.begins_ms
        groups: list[list[BatchRef]] = [[]]
        size = 0
        for ref in descriptor.refs:
            if groups[-1] and size + ref.size_bytes > most_bytes:
                groups.append([])
                size = 0
            groups[-1].append(ref)
            size += ref.size_bytes
        for refs in groups:
            yield SliceDescriptor(msgspec.structs.replace(piece, begins_ms=begins_ms), tuple(refs))
            begins_ms = -1


async def locate_batches(topics: PartitionReader, slices: Sequence[Slice]) -> list[SliceDescriptor]:
    """Return each slice with its record batches. Raises OffsetOutOfRangeError, MissingError, UnavailableError."""
    turns = asyncio.Semaphore(CONCURRENT_PLANS)

    async def one(s: Slice) -> Sequence[BatchRef]:
        async with turns:
            return await topics.plan(s.topic_id, s.partition, s.start, s.end)

    found = await asyncio.gather(*map(one, slices))
    return [SliceDescriptor(s, tuple(refs)) for s, refs in zip(slices, found, strict=True)]


async def plan_interval(
    topics: PartitionReader, remap: Remap, names: Sequence[tuple[str, str]], start: int, end: int
) -> list[SliceDescriptor]:
    """Locate the records of [start, end), by topic and partition; `names` are (topic, topic id)."""
    base, bindings = await _bindings_in(remap, start, end)
    return await locate_batches(
        topics, [piece for name, topic_id in names for piece in cut_slices(base, bindings, name, topic_id)]
    )


async def _bindings_in(remap: Remap, start: int, end: int) -> tuple[Binding | None, list[Binding]]:
    """Return the binding in force before `start`, and every binding with start ≤ time < end, oldest first."""
    page = await remap.page(start)
    base, out = page.base, list(page.bindings)
    while page.bindings and out[-1].time_ms < end - 1:
        page = await remap.page(out[-1].time_ms + 1)
        out += page.bindings
    return base, [binding for binding in out if binding.time_ms < end]
