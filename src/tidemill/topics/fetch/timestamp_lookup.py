"""Find the first record at or after a time: its batch by the index, then the record in the batch.

A batch is decoded once and searched by columns, in a thread (`validator_pool`): it may hold millions of records.
"""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np

from tidemill.base.errors import TidemillError, UnavailableError
from tidemill.objects.store import Buffer
from tidemill.topics.api import BatchRef
from tidemill.topics.batch.columnar_scan import CHUNK_RECORDS, scan_any_deltas
from tidemill.topics.batch.compression import decompress
from tidemill.topics.batch.header import APPEND_TIME, HEADER_BYTES, parse_header
from tidemill.topics.batch_reads import RangeReader, read_batches
from tidemill.topics.config.settings import TopicSettings
from tidemill.topics.fetch.fetch_planner import read_error_of
from tidemill.topics.l0.object_cache import ObjectCache
from tidemill.topics.l1.reader import L1Reader
from tidemill.topics.partition.leader import PartitionLeader
from tidemill.topics.produce.validator_pool import THREADS, BatchValidator


class TimestampLookup:
    """Searches the partitions that one process leads."""

    def __init__(
        self, l0: RangeReader, cache: ObjectCache, checker: BatchValidator, l1: L1Reader | None, settings: TopicSettings
    ) -> None:
        self._l0 = l0
        self._cache = cache
        self._checker = checker
        self._l1 = l1
        self._settings = settings
        self._concurrent = asyncio.Semaphore(THREADS)

    async def first_at(
        self, led: PartitionLeader, timestamp_ms: int, start: int, *, whole: bool = False
    ) -> tuple[int, int] | None:
        """Return (offset, timestamp) of the first record at or after `start` with timestamp ≥ timestamp_ms, or None.
        `whole`: if the log starts within a batch, records of it below the log start count too."""
        floor = 0 if whole else start
        while True:
            ref = await self._batch_at(led, timestamp_ms, start)
            if ref is None:
                return None
            if ref.record_count == 1:
                return ref.base_offset, ref.max_timestamp_ms  # The index already has the answer.
            async with self._concurrent:
                (found,) = await read_batches(self._l0, [[ref]], self._cache)
                if isinstance(found, TidemillError):
                    raise await read_error_of(led, [ref], found)
                work = partial(first_offset_at, found[0], ref, timestamp_ms, floor)
                first = await self._checker.run_in_thread("by time", work)
            if first is not None:
                return first
            start = floor = ref.base_offset + ref.record_count

    async def _batch_at(self, led: PartitionLeader, timestamp_ms: int, start: int) -> BatchRef | None:
        state = led.state
        index = state.batch_for_time(timestamp_ms, start)
        ref = state.batch_ref(index) if index is not None else None
        if state.reconciled > start:
            # L1 after the hot state: the other order would miss a batch that moves in between.
            ref = await require_l1(self._l1).first_batch_at(led.topic_id, led.partition, timestamp_ms, start) or ref
        return ref

    async def newest(self, led: PartitionLeader) -> tuple[int, int] | None:
        """Return (offset, timestamp) of the first record with the partition's highest timestamp, or None."""
        state = led.state
        times = {state.highest_timestamps[-1]} if state.highest_timestamps else set()
        if state.reconciled > state.log_start:
            rows = require_l1(self._l1).rows
            below_ms = await rows.newest_timestamp_ms(led.topic_id, led.partition, state.log_start)
            times |= {below_ms} if below_ms is not None else set()
        return await self.first_at(led, max(times), state.log_start, whole=True) if times else None


def require_l1(l1: L1Reader | None) -> L1Reader:
    if l1 is None:
        raise UnavailableError("this process cannot read L1.")
    return l1


def first_offset_at(batch: Buffer, ref: BatchRef, timestamp_ms: int, start: int = 0) -> tuple[int, int] | None:
    """Return (offset, timestamp) of the first record at or after both `timestamp_ms` and the offset `start`.

    Returns None if only records below `start` have such a time. For a batch that cannot be read, or whose header
    promises a later time than its records have (stored before that was checked), returns its first offset: never one
    after the requested record.
    """
    beginning = (max(ref.base_offset, start), ref.max_timestamp_ms)
    try:
        header = parse_header(batch)
        if header.attributes & APPEND_TIME:
            return beginning[0], header.max_timestamp_ms
        data = decompress(header.codec, memoryview(batch)[HEADER_BYTES : header.size_bytes])
    except TidemillError:
        return beginning
    wanted = max(-(2**63), min(timestamp_ms - header.base_timestamp_ms, 2**63 - 1))
    at = done = 0
    while done < header.record_count:
        found = scan_any_deltas(data, at, min(CHUNK_RECORDS, header.record_count - done))
        if found is None:
            return beginning
        late = np.flatnonzero((found.time_deltas >= wanted) & (found.offset_deltas >= max(0, start - ref.base_offset)))
        if len(late):
            index = int(late[0])
            return ref.base_offset + int(found.offset_deltas[index]), header.base_timestamp_ms + int(
                found.time_deltas[index]
            )
        at = found.end
        done += len(found.time_deltas)
    return beginning if start <= ref.base_offset else None
