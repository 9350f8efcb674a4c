"""Read L1: turn extent rows and object indexes into `BatchRef`s, which are read like those of L0.

Invariant: the rows are read after `reconciled`, so every extent below it is visible (RFC 0005, X2). A missing extent
was deleted by retention since, or is lost. Only the partition's log shows which.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import CorruptError, MissingError, TidemillError
from tidemill.base.limits import MIB
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows.l1 import L1ExtentRow
from tidemill.objects.reads import read_verified
from tidemill.objects.store import ObjectStore, RangeError
from tidemill.topics.api import BatchRef
from tidemill.topics.batch_reads import select_batches
from tidemill.topics.l1.extent_cache import ExtentCache
from tidemill.topics.l1.extent_store import ExtentStore
from tidemill.topics.l1.format import L1Region, RegionIndex, decode_index
from tidemill.topics.l1.read_ahead import ReadAhead

INDEX_CACHE_BYTES = 16 * MIB
UNLIMITED = 1 << 62


class L1Reader:
    """L1 reader of one process. Raises CorruptError for data that must exist and does not, UnavailableError."""

    def __init__(
        self,
        rows: ExtentStore,
        objects: ObjectStore,
        *,
        cache_bytes: int = INDEX_CACHE_BYTES,
        ahead: ReadAhead | None = None,
    ) -> None:
        """Create the reader. `ahead` is informed of planned reads, so that it can read ahead of them."""
        self.rows = rows
        self.ahead = ahead
        self._recent = ExtentCache(rows)
        self._objects = objects
        self._cache_bytes = cache_bytes
        self._indexes: OrderedDict[tuple[str, int], RegionIndex] = OrderedDict()
        self._held_bytes = 0

    async def warm_indexes(self, places: Sequence[tuple[str, int, int]]) -> None:
        """Read concurrently the indexes that plans from these (topic id, partition, offset) begin with.

        Errors are ignored: the plan raises them.
        """
        cold = [place for place in places if not self._is_warm(*place)]
        if len(cold) > 1:
            await asyncio.gather(*(self._warm_index(*place) for place in cold))

    def _is_warm(self, topic_id: str, partition: int, offset: int) -> bool:
        """Return whether the cache has the index. If the rows have changed since, the plan reads them and the index."""
        extent = self._recent.peek(topic_id, partition, offset)
        return extent is not None and (extent.object_id, extent.index_byte) in self._indexes

    async def _warm_index(self, topic_id: str, partition: int, offset: int) -> None:
        with contextlib.suppress(TidemillError):
            extent = await self._recent.extent_at(topic_id, partition, offset, fresh=False)
            if extent is not None:
                await self.index(extent)

    async def plan(
        self,
        topic_id: str,
        partition: int,
        start: int,
        end: int,
        *,
        max_bytes: int = UNLIMITED,
        max_count: int = UNLIMITED,
        at_least_one: bool = True,
    ) -> list[BatchRef]:
        """Return the batches that overlap [start, end), in order, as many as fit; with `at_least_one` always the first.

        Empty if none of these offsets has a record any more. Raises CorruptError if some of them are in no extent.
        """
        what = (topic_id, partition, start, end)
        try:
            return await self._plan(what, max_bytes, max_count, at_least_one, fresh=False)
        except CorruptError:
            # Slightly old rows may lack the newest extents, or name deleted ones.
            return await self._plan(what, max_bytes, max_count, at_least_one, fresh=True)

    async def _plan(
        self,
        what: tuple[str, int, int, int],
        max_bytes: int,
        max_count: int,
        at_least_one: bool,
        *,
        fresh: bool,
    ) -> list[BatchRef]:
        """Plan a read of `what`: (topic id, partition, start, end)."""
        topic_id, partition, start, end = what
        found: list[BatchRef] = []
        at, passed = start, 0
        while at < end:
            extent = await self._recent.extent_at(topic_id, partition, at, fresh=fresh, passed=passed)
            if extent is None or extent.base_offset > at:
                break
            begin, at, fresh, passed = at, extent.last_offset + 1, False, passed + 1
            index = await self.index(extent)
            first, last = index.find(begin), int(np.searchsorted(index.bases, end, side="left"))
            sizes = index.sizes[first:last].tolist()
            one = at_least_one and not found
            count, size = select_batches(sizes, 0, max_bytes, max_count, at_least_one=one)
            found += [index.ref(i, extent.object_key, extent.first_byte) for i in range(first, first + count)]
            max_bytes, max_count = max_bytes - size, max_count - count
            if self.ahead is not None and count:
                first_byte = found[-count].first_byte
                limit = extent.first_byte + extent.size_bytes
                self.ahead.announce_read(extent.object_key, first_byte, first_byte + size, limit)
            if count < len(sizes):
                return found
        if at < end:
            raise CorruptError(
                f"offsets of a partition are in no L1 extent: partition={topic_id}/{partition} start={at} end={end}."
            )
        return found

    async def first_batch_at(self, topic_id: str, partition: int, timestamp_ms: int, start: int) -> BatchRef | None:
        """Return the first batch from offset `start` with a record at or after `timestamp_ms`; None if L1 has none."""
        found = await self.rows.extent_for_time(topic_id, partition, timestamp_ms)
        if found is None:
            return None
        async for extent in self.rows.extents(topic_id, partition, max(found.base_offset, start)):
            if extent.max_timestamp_ms >= timestamp_ms:
                index = await self.index(extent)
                first = index.find(start)
                late = np.flatnonzero(index.timestamps[first:] >= timestamp_ms)
                if len(late):
                    return index.ref(first + int(late[0]), extent.object_key, extent.first_byte)
        return None

    async def index(self, extent: L1ExtentRow) -> RegionIndex:
        """Return the index of an extent; recently used ones are cached."""
        key = (extent.object_id, extent.index_byte)
        known = self._indexes.get(key)
        if known is not None:
            self._indexes.move_to_end(key)
            return known
        begin, end = extent.index_byte, extent.index_byte + extent.index_bytes

        async def read() -> RegionIndex:
            return decode_index(await self._objects.get(extent.object_key, begin, end), region_of(extent))

        try:
            index = await read_verified(self._objects, extent.object_key, read)
        except (MissingError, RangeError) as error:
            raise _lost_error(extent, error) from error
        if key not in self._indexes:
            self._indexes[key] = index
            self._held_bytes += index.cost_bytes
        while self._held_bytes > self._cache_bytes and len(self._indexes) > 1:
            _, oldest = self._indexes.popitem(last=False)
            self._held_bytes -= oldest.cost_bytes
        return index

    async def data(self, extent: L1ExtentRow, span: tuple[int, int] | None = None) -> bytes:
        """Read the bytes of an extent's batches, or the `span` within them.

        Raises CorruptError if the object is missing.
        """
        begin, end = span if span is not None else (0, extent.size_bytes)
        if begin == end:
            return b""
        try:
            return await self._objects.get(extent.object_key, extent.first_byte + begin, extent.first_byte + end)
        except (MissingError, RangeError) as error:
            raise _lost_error(extent, error) from error


def open_l1_reader(
    metastore: Metastore, objects: ObjectStore, clock: Clock, rand: Rand, ahead: ReadAhead | None = None
) -> L1Reader:
    return L1Reader(ExtentStore(metastore, clock, rand), objects, ahead=ahead)


def _lost_error(extent: L1ExtentRow, error: MissingError | RangeError) -> CorruptError:
    """Return the error of an object that lacks what its extent names. It is not the reader's mistake."""
    state = "missing" if isinstance(error, MissingError) else "shorter than the extent says"
    return CorruptError(f"an object that an L1 extent names is {state}: key={extent.object_key}.")


def region_of(extent: L1ExtentRow) -> L1Region:
    return L1Region(
        extent.partition,
        extent.first_byte,
        extent.size_bytes,
        extent.base_offset,
        extent.last_offset,
        extent.max_timestamp_ms,
        extent.batch_count,
        extent.index_byte,
        extent.index_bytes,
    )
