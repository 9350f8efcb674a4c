"""Map an interval of time to the data to read: bindings, slices, and the positions of their record batches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tidemill.shards.api import Binding, Remap
from tidemill.spark.decode.offset_slices import Slice, SliceDescriptor, cut_slices
from tidemill.topics.api import BatchRef, PartitionReader

CONCURRENT_PLANS = 32


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
