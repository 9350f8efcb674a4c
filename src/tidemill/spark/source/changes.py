"""Streams of a shard's changelog: every update with its time and diff.

The streaming offset is {"ts": T, "shard": ID}: all updates below T of that shard are delivered. From 0 the first batch
is the contents at its last time, as insertions at that time; after that, and from any other start, batches are the
updates themselves. History is held one tick behind the offset for as long as the planner lives, even if it is not
called. A stream that resumes after the shard's history was deleted fails, and never skips updates. It also fails if its
shard was dropped, even if another shard has its name.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from tidemill.base.errors import InvalidError, UnavailableError, UnknownOutcomeError
from tidemill.base.limits import MIB
from tidemill.shards.api import DIFF, TIME, Batch, Column, SchemaEvolvedError, ShardSchema
from tidemill.shards.read.hash_ranges import HashRange, cut_ranges, read_range
from tidemill.shards.read.holds import HOLD_TTL_MS, MovingHold
from tidemill.shards.read.part_reader import PartReader, fetch_through
from tidemill.spark.source.batch import check_columns
from tidemill.spark.source.options import SourceOptions
from tidemill.spark.source.spark_versions import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from tidemill.spark.stores import shared_objects, shared_stores

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from tidemill.shards.handle import LogShard

Offset = dict[str, int | str]

META = (Column(TIME, "int64"), Column(DIFF, "int64"))
MAX_ROWS = 500_000
WAIT_S = 0.25
TASK_BYTES = 16 * MIB
"""Encoded size of the updates of one task."""


class ChangesPartition(InputPartition):  # type: ignore[misc]
    """Input of a task. `chosen`: a range of the contents at `upper` - 1, or None: the updates of `batches` in
    [lower, upper)."""

    def __init__(
        self, objects: str, schema: ShardSchema, chosen: HashRange | None, batches: list[Batch], lower: int, upper: int
    ) -> None:
        self.objects = objects
        self.payload = msgspec.msgpack.encode((schema, chosen, batches, lower, upper))


class ChangesReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._target: int | None = None
        self._opened: tuple[LogShard, MovingHold] | None = None
        self._offered: Offset | None = None
        """Offset that was returned last."""

    def initialOffset(self) -> Offset:
        return {"ts": self._options.number("start", 0)}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._options.number("max_rows", MAX_ROWS))

    def latestOffset(self, start: Offset | None = None, limit: ReadLimit | None = None) -> Offset:
        """Return the end of a batch of whole appends with at most the limit's rows; `start` if there is nothing more.

        On a storage error the query tries again later; but a query with trigger availableNow must not take that for the
        end. Without `start` (`spark_versions`), the first answer is the shard's upper.
        """
        start = start or self._offered
        try:
            found = self._newest_offset() if start is None else self._next_offset(start, limit)
        except (UnavailableError, UnknownOutcomeError):
            if self._target is not None or start is None:
                raise
            return start
        self._offered = found
        return found

    def _newest_offset(self) -> Offset:
        """Return the shard's upper, and hold all history: it is unknown where the query continues."""
        portal, _ = shared_stores(self._options.urls)
        shard, hold = self._open({})
        since, upper = portal.call(shard.frontiers())
        initial = self.initialOffset()
        if upper <= int(initial["ts"]):
            return initial
        portal.call(hold.move_to(since))
        return {"ts": upper, "shard": shard.shard_id}

    def _next_offset(self, start: Offset, limit: ReadLimit | None) -> Offset:
        portal, _ = shared_stores(self._options.urls)
        frontier = int(start["ts"])
        shard, hold = self._open(start)
        upper = portal.call(shard.wait_upper(frontier, 0 if self._target is not None else WAIT_S))
        if self._target is not None:
            upper = min(upper, self._target)
        held = min(frontier, upper) if frontier else upper
        if held:
            portal.call(hold.move_to(held - 1))
        if upper <= frontier:
            return start
        if frontier == 0:
            return {"ts": upper, "shard": shard.shard_id}
        limit = limit or self.getDefaultReadLimit()
        end, rows = frontier, 0
        for batch in portal.call(shard.batches(frontier)):
            rows += sum(part.rows for part in batch.parts)
            if isinstance(limit, ReadMaxRows) and end > frontier and rows > limit.max_rows:
                break
            end = min(batch.upper, upper)
        return {"ts": end, "shard": shard.shard_id}

    def prepareForTriggerAvailableNow(self) -> None:
        portal, _ = shared_stores(self._options.urls)
        self._target = portal.call(self._open({})[0].frontiers())[1]

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        portal, _ = shared_stores(self._options.urls)
        self._open(start)
        shard, hold = self._open(end)
        lower, upper = int(start["ts"]), int(end["ts"])
        objects = self._options.objects
        portal.call(hold.move_to(max(0, (upper if lower == 0 else lower) - 1)))
        first = lower == 0
        found = portal.call(shard.batches_until(upper - 1) if first else shard.batches(lower))
        batches = [b for b in found if b.lower < upper and b.parts]
        if any(batch.schema_version > shard.schema.version for batch in batches):
            raise SchemaEvolvedError(
                f"the table's schema changed since this query started: table={shard.name}.",
                fix="Restart the query with its checkpoint: it continues with the new columns.",
            )
        if first:
            return [ChangesPartition(objects, shard.schema, each, [], lower, upper) for each in cut_ranges(batches)]
        return [ChangesPartition(objects, shard.schema, None, group, lower, upper) for group in _group_tasks(batches)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        assert isinstance(partition, ChangesPartition)
        kind = tuple[ShardSchema, HashRange | None, list[Batch], int, int]
        schema, chosen, batches, lower, upper = msgspec.msgpack.decode(partition.payload, type=kind)
        portal, objects = shared_objects(partition.objects)
        if chosen is None:
            rows = portal.call(PartReader(objects, schema, cache_bytes=0).read_batches(batches, lower, upper))
            yield from rows.select(self._schema.fieldNames()).to_batches(20_000)
            return
        fetch = fetch_through(portal, objects, whole=True)
        for rows in read_range(schema, chosen, upper - 1, fetch):
            for name, value in ((TIME, upper - 1), (DIFF, 1)):
                rows = rows.append_column(name, pa.repeat(pa.scalar(value, pa.int64()), rows.num_rows))
            yield from rows.select(self._schema.fieldNames()).to_batches(20_000)

    def _open(self, offset: Offset) -> tuple[LogShard, MovingHold]:
        """Open the shard once, and hold its history. Raises InvalidError if the offset is of another shard; an offset
        of an older version does not name its shard."""
        if self._opened is None:
            portal, stores = shared_stores(self._options.urls)
            if not self._options.shard:
                raise InvalidError("no table is named.", fix="Set option table=NAME.")
            shard = portal.call(stores.shard(self._options.shard))
            check_columns(self._schema, (*shard.schema.columns, *META), shard.name)
            hold = MovingHold(shard, shard.reader_name("stream"), stores.clock, ttl_ms=HOLD_TTL_MS, kept=True)
            keeping = asyncio.run_coroutine_threadsafe(hold.renew_until_cancelled(), portal.loop)
            weakref.finalize(self, keeping.cancel).atexit = False
            self._opened = shard, hold
        shard, _ = self._opened
        if offset.get("shard", shard.shard_id) != shard.shard_id:
            raise InvalidError(
                f"the table was dropped, and another has its name: table={shard.name}.",
                fix="Start a new stream with a new checkpoint.",
            )
        return self._opened


def _group_tasks(batches: Sequence[Batch]) -> list[list[Batch]]:
    """Group the batches' parts into tasks of about TASK_BYTES."""
    out: list[list[Batch]] = []
    held = TASK_BYTES
    for batch in batches:
        for part in batch.parts:
            if held + part.size_bytes > TASK_BYTES:
                out.append([])
                held = 0
            out[-1].append(msgspec.structs.replace(batch, parts=(part,)))
            held += part.size_bytes
    return out
