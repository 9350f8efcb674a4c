"""Streams with rows=false: the progress of each source's bindings, for sinks that read the records themselves.

One stream has any number of sources and one planner, because each stream costs a Python process. Its streaming offset
is {source: T}: all records of the source bound below time T. The first batch runs immediately, with or without
bindings. After it, `latestOffset` waits for a new binding of any source: without one Spark would repeat the call
immediately, and a call costs JVM and planner more than a wait. Stopping the query interrupts the wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import structlog
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from tidemill.base.errors import TidemillError, UnavailableError, UnknownOutcomeError
from tidemill.base.runtime.tasks import Tasks, error_sentence
from tidemill.shards.api import Column
from tidemill.spark.source.bindings import SourceBindings
from tidemill.spark.source.options import SourceOptions
from tidemill.spark.source.spark_versions import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from tidemill.spark.source.stream import PACE_MS, FeedPartition, suppress_broken_pipe
from tidemill.spark.stores import Stores, shared_stores

if TYPE_CHECKING:
    import pyarrow as pa

WAIT_S = 5.0
"""Time that `latestOffset` waits for a new binding, and so the time that a planner may outlive a killed JVM."""
DESCRIPTOR_COLUMNS = (
    Column("topic", "string"), Column("partition", "int32"), Column("start", "int64"), Column("end", "int64"),
    Column("descriptor", "binary"),
)  # fmt: skip

Offset = dict[str, int]

log = structlog.get_logger()


class ProgressReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._sources = [self._bindings(name) for name in options.source.split(",")]
        self._target: Offset | None = None
        self._offered_ms = 0
        """Time at which the newest batch was offered."""
        self._offered: Offset | None = None
        """Offset that was returned last."""
        self._logged: dict[str, str] = {}
        """Source → the error that stalls it."""

    def initialOffset(self) -> Offset:
        """Return an offset without any source: each begins at option start=MS."""
        suppress_broken_pipe()
        return {}

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return no limit, because sinks limit their reads; option max_rows limits the records of each source in a
        batch."""
        most = self._options.number("max_rows", 0)
        return ReadMaxRows(most) if most else ReadAllAvailable()

    def latestOffset(self, start: Offset | None = None, limit: ReadLimit | None = None) -> Offset:
        """Return the end of the newest binding of each source, or its present offset if no later one exists, or none
        can be read: the others continue. A query with trigger availableNow must not take that for the end.

        Without `start` (`spark_versions`), the first answer is the newest end of each. Raises any permanent error,
        HistoryLostError or CorruptError, if the stream has only this source.
        """
        portal, stores = shared_stores(self._options.urls)
        start = self._offered if start is None else start
        is_known = start is not None
        if is_known and limit is None:
            limit = self.getDefaultReadLimit()
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        end = portal.call(self._latest_offset(stores, start or {}, most, is_known))
        if end != start:
            self._offered_ms = stores.clock.now_ms()
        self._offered = end
        return end

    def prepareForTriggerAvailableNow(self) -> None:
        portal, stores = shared_stores(self._options.urls)

        async def run() -> Offset:
            ends = await asyncio.gather(*(one.end(stores) for one in self._sources))
            return {one.source: end for one, end in zip(self._sources, ends, strict=True)}

        self._target = portal.call(run())

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Return one partition for each source with a new time. `read` plans the records, because most sinks read
        none."""
        intervals = [(one.source, self._source_offset(start, one), end.get(one.source, 0)) for one in self._sources]
        return [
            FeedPartition(self._options.objects, msgspec.msgpack.encode(interval), b"")
            for interval in intervals
            if interval[1] < interval[2]
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        assert isinstance(partition, FeedPartition)
        portal, stores = shared_stores(self._options.urls)
        source, start, end = msgspec.msgpack.decode(partition.payload, type=tuple[str, int, int])
        descriptors = portal.call(self._bindings(source).plan_slices(stores, start, end))
        slices = [d.slice for d in descriptors]
        arrays = [
            pa.array([s.topic for s in slices], pa.string()),
            pa.array([s.partition for s in slices], pa.int32()),
            pa.array([s.start for s in slices], pa.int64()),
            pa.array([s.end for s in slices], pa.int64()),
            pa.array([msgspec.msgpack.encode(d) for d in descriptors], pa.binary()),
        ]
        yield pa.RecordBatch.from_arrays(arrays, names=[c.name for c in DESCRIPTOR_COLUMNS])

    # ----------------------------------------------------------------------------------------------------

    def _bindings(self, source: str) -> SourceBindings:
        return SourceBindings(source.strip(), self._options.text("table"))

    def _source_offset(self, offset: Offset, one: SourceBindings) -> int:
        """Return the offset of a source. A checkpoint of an earlier release has one time, under `ts`."""
        return offset.get(one.source, offset.get("ts", self._options.number("start", 0)))

    async def _latest_offset(self, stores: Stores, start: Offset, most: int | None, is_known: bool) -> Offset:
        pace_ms = self._options.number("pace_ms", PACE_MS)
        if self._target is None and start:
            early_ms = pace_ms - (stores.clock.now_ms() - self._offered_ms)
            if early_ms > 0:
                await asyncio.sleep(min(early_ms, pace_ms) / 1000)
            await self._wait_any(stores, start)
        ends = await asyncio.gather(
            *(self._read_end(stores, one, self._source_offset(start, one), most, is_known) for one in self._sources)
        )
        end = {one.source: end for one, end in zip(self._sources, ends, strict=True)}
        if self._target is None and end == start:
            # Spark calls again immediately, and that call does not wait if a binding exists but cannot be read: pause
            # here.
            await asyncio.sleep(pace_ms / 1000)
        return end

    async def _wait_any(self, stores: Stores, start: Offset) -> None:
        """Wait until any source has a new binding, for at most WAIT_S."""

        async def wait(one: SourceBindings) -> None:
            try:
                await one.wait_for_binding(stores, self._source_offset(start, one), WAIT_S)
            except TidemillError as error:
                self._on_unreadable(one, error)
                await asyncio.sleep(WAIT_S)  # keep waiting for the others

        tasks = Tasks(
            lambda name, error: None
        )  # errors are raised below: else the query would call again without a pause
        waits = [tasks.spawn(wait(one), name=one.source) for one in self._sources]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            await tasks.aclose()

    async def _read_end(self, stores: Stores, one: SourceBindings, at: int, most: int | None, is_known: bool) -> int:
        """Return the end of the source's newest binding that fits. `is_known`: it is at the offset `at` now."""
        try:
            end = await one.end_within(stores, at, most, None if self._target is None else self._target[one.source])
        except TidemillError as error:
            if self._target is not None or not is_known:
                raise
            self._on_unreadable(one, error)
            return at
        self._logged.pop(one.source, None)
        return end

    def _on_unreadable(self, one: SourceBindings, error: TidemillError) -> None:
        """Handle a source that cannot be read now: raise `error` if it is permanent and no other source can
        continue."""
        if isinstance(error, UnavailableError | UnknownOutcomeError):
            return
        if len(self._sources) == 1:
            raise error
        if self._logged.get(one.source) != error_sentence(error):
            self._logged[one.source] = error_sentence(error)
            log.warning("source is stalled", source=one.source, error=error_sentence(error))
