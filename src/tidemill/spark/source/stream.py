"""Streams of a topic or a captured table.

The streaming offset is {"ts": T}: everything below time T, planned from remap alone, so that every query
and every restart cuts a topic at the same places (U5). `latestOffset` waits for a new binding instead of
being polled: Spark asks again at once while there is nothing new, and one question costs JVM and planner more than
the wait. A query may have other sources, which Spark asks one after the other: it waits a moment only; the operator's
own (rows=false) has none, and waits for long. Who stops the query interrupts it. The planner lives as long as the
query.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from tidemill.base.errors import Invalid, Unavailable, Unknown
from tidemill.shards.front import Binding, Column, Remap
from tidemill.spark.decode.ddl import stream_schema
from tidemill.spark.decode.slices import Descriptor
from tidemill.spark.feeds import NotReady, TopicFeed, captured_feed, stream_feed
from tidemill.spark.planning import plan
from tidemill.spark.source.corrupt import Corrupted
from tidemill.spark.source.options import Options
from tidemill.spark.stores import Stores, shared
from tidemill.spark.types import META

if TYPE_CHECKING:
    import pyarrow as pa

MAX_ROWS = 500_000
"""Records of one micro-batch, unless option max_rows says otherwise; a single time is never split."""
WAIT_S = 0.25
"""How long `latestOffset` waits for a new binding before it says that there is none."""
ALONE_WAIT_S = 5.0
"""The same of an operator's own query, after its first question. So long a planner whose JVM was killed may outlive
it."""
PACE_MS = 60
"""Two micro-batches begin at least this far apart: a trigger for every binding would cost more than it brings. The
first binding after a pause is not kept waiting."""
DESCRIPTOR_COLUMNS = (
    Column("topic", "string"), Column("partition", "int32"), Column("start", "int64"), Column("end", "int64"),
    Column("descriptor", "binary"),
)  # fmt: skip


def row_columns(options: Options) -> tuple[Column, ...]:
    """What a row-yielding stream gives. Raises Invalid when its source does not exist yet: they are needed now."""
    corrupted = Corrupted.of(options)
    columns = (*_one_feed(options).schema.columns, *(Column(n, t) for n, t in META))
    if taken := {c.name for c in columns} & {c.name for c in corrupted.columns}:
        raise Invalid(
            f"the topic has this column itself: column={taken.pop()}.",
            fix="Give what cannot be read another with option columnNameOfCorruptRecord.",
        )
    return (*columns, *corrupted.columns)


def _one_feed(options: Options) -> TopicFeed:
    """The one topic of a row-yielding stream."""
    portal, stores = shared(options.urls)
    kind, _, name = options.source.partition("/")
    try:
        if kind == "capture":
            table = options.need("table", "Name it as schema.table.")
            return portal.call(captured_feed(stores.catalogue, name, table))
        schema = stream_schema(options.need("schema", 'Write "name type, …".'), options.need("key", "Name the key."))
        return portal.call(stream_feed(stores.catalogue, name, schema))
    except NotReady as error:
        raise Invalid(f"source is not there yet: source={options.source}.", fix=f"Wait: {error.reason}.") from error


class FeedPartition(InputPartition):  # type: ignore[misc]
    """`payload` in msgpack: rows=true the descriptor, with `feed`: how to decode it; rows=false the interval."""

    def __init__(self, objects: str, payload: bytes, feed: bytes) -> None:
        self.objects = objects
        self.payload = payload
        self.feed = feed


class FeedReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    def __init__(self, options: Options) -> None:
        self._options = options
        self._corrupted = Corrupted.of(options)
        self._initial: dict[str, int] | None = None
        self._target: int | None = None
        self._remap: Remap | None = None
        self._asked = False
        self._offered_ms = 0
        """When the newest batch was offered."""

    def initialOffset(self) -> dict[str, int]:
        """Called twice at start; the same answer both times. Option start=MS begins later than everything."""
        if self._initial is None:
            _end_quietly_with_the_query()
            self._initial = {"ts": self._options.number("start", 0)}
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._options.number("max_rows", MAX_ROWS))

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        """One past the newest binding, or `start` when there is none beyond it.

        Storage errors: try again later; but a query that ends with what is there now must not take them for the end.
        """
        portal, stores = shared(self._options.urls)
        pace_ms = self._options.number("pace_ms", PACE_MS)
        try:
            end = portal.call(self._latest(stores, start["ts"], limit, pace_ms))
        except (Unavailable, Unknown):
            if self._target is not None:
                raise
            return start
        if end > start["ts"]:
            self._offered_ms = stores.clock.now_ms()
        return {"ts": end}

    def prepareForTriggerAvailableNow(self) -> None:
        portal, stores = shared(self._options.urls)
        latest = portal.call(self._newest(stores))
        self._target = 0 if latest is None else latest.time_ms + 1

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        interval = start["ts"], end["ts"]
        if not self._options.flag("rows", True):
            # Planned where they are read: an operator that only hears that time has come costs nobody a look.
            return [FeedPartition(self._options.objects, msgspec.msgpack.encode(interval), b"")]
        portal, stores = shared(self._options.urls)
        feed = msgspec.msgpack.encode(_one_feed(self._options))
        descriptors = portal.call(self._plan(stores, *interval))
        return [FeedPartition(self._options.objects, msgspec.msgpack.encode(d), feed) for d in descriptors]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        assert isinstance(partition, FeedPartition)
        if partition.feed:
            from tidemill.spark.tasks import decode_here

            descriptor = msgspec.msgpack.decode(partition.payload, type=Descriptor)
            feed = msgspec.msgpack.decode(partition.feed, type=TopicFeed)
            decoded = decode_here(partition.objects, feed, [descriptor])
            if decoded.stop is not None:
                raise Invalid(decoded.stop.reason, fix=decoded.stop.fix)
            yield from self._corrupted.rows(decoded.commands.rows, decoded.dead).to_batches(20_000)
            return
        portal, stores = shared(self._options.urls)
        start, end = msgspec.msgpack.decode(partition.payload, type=tuple[int, int])
        descriptors = portal.call(self._plan(stores, start, end))
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

    async def _open_remap(self, stores: Stores) -> Remap:
        if self._remap is None:
            self._remap = await stores.remap(self._options.source)
        return self._remap

    async def _newest(self, stores: Stores) -> Binding | None:
        return await (await self._open_remap(stores)).latest()

    async def _latest(self, stores: Stores, start: int, limit: ReadLimit, pace_ms: int) -> int:
        remap = await self._open_remap(stores)
        if self._target is None:
            early_ms = pace_ms - (stores.clock.now_ms() - self._offered_ms)
            if early_ms > 0:
                await asyncio.sleep(min(early_ms, pace_ms) / 1000)
            waits_s = ALONE_WAIT_S if self._asked and not self._options.flag("rows", True) else WAIT_S
            self._asked = True
            if not await remap.wait(start - 1, waits_s):
                return start
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return await self._within(remap, start, most)

    async def _within(self, remap: Remap, start: int, most: int | None) -> int:
        """The latest end with at most `most` records after `start`; one time at least, were it larger."""
        page = await remap.page(start)
        if most is None:
            end = page.newest.time_ms + 1 if page.newest is not None else start
            return max(start, end if self._target is None else min(end, self._target))
        before = _records(page.base) if page.base is not None else 0
        bindings = [b for b in page.bindings if self._target is None or b.time_ms < self._target]
        fitting = [b for b in bindings if _records(b) - before <= most] or bindings[:1]
        return fitting[-1].time_ms + 1 if fitting else start

    async def _plan(self, stores: Stores, start: int, end: int) -> list[Descriptor]:
        remap = await self._open_remap(stores)
        feeds = await self._topics(stores)
        return await plan(stores.topics, remap, feeds, start, end)

    async def _topics(self, stores: Stores) -> list[tuple[str, str]]:
        """(name, id) of every topic that this stream reads."""
        from tidemill.metastore.catalogue import CaptureRow, TopicRow

        kind, _, name = self._options.source.partition("/")
        names = [name]
        if kind == "capture":
            row = await stores.catalogue.get(CaptureRow, name)
            table = self._options.text("table")
            names = [] if row is None else [t for s, t in row.topics.items() if table in ("", s)]
        found = [await stores.catalogue.get(TopicRow, n) for n in names]
        return [(row.name, row.topic_id) for row in found if row is not None]


def _end_quietly_with_the_query() -> None:
    """A stopped query closes its planner's socket, often while we wait for a binding: no traceback for that."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if not issubclass(kind, BrokenPipeError):
            before(kind, error, trace)

    sys.excepthook = hook


def _records(binding: Binding) -> int:
    return sum(sum(offsets) for offsets in binding.offsets.values())
