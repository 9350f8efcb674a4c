"""`format("tidemill")`: the Python data source. `register(spark, …)` makes the name known.

    batch      option shard=NAME, as_of=MS (default: the newest readable time): the contents at that time
    streaming  option source=topic/NAME (with schema, key) or capture/NAME (with table=schema.table)
               rows=true  (default) one row a record: columns, _time, _order, _partition, _live
               rows=false one row a partition and batch: what to read, for operators that fetch for themselves
    both       options objects=URL, consensus=URL; without them the environment of Spark's workers is asked

The streaming offset is {"ts": T}: everything below time T, planned from remap alone, so that every query
and every restart cuts a topic at the same places (U5). `latestOffset` waits for a new binding instead of
being polled: Spark asks again at once while there is nothing new.

Spark pickles instances of these classes by reference and calls them in processes of its own: a planner
that lives as long as the query, and executors. State lives in `stores.shared` of each.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from tidemill.base.errors import Invalid, Unavailable, Unknown
from tidemill.shards.front import Batch, Binding, Column, Remap, ShardSchema
from tidemill.shards.holding import HOLD_ABOVE_BYTES
from tidemill.spark.decode.ddl import stream_schema
from tidemill.spark.decode.slices import Descriptor
from tidemill.spark.feeds import NotReady, TopicFeed, captured_feed, stream_feed
from tidemill.spark.planning import plan
from tidemill.spark.stores import Stores, Urls, shared
from tidemill.spark.types import META, spark_schema

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

MAX_ROWS = 500_000
"""Records of one micro-batch, unless option max_rows says otherwise; a single time is never split."""
WAIT_S = 0.25
"""How long `latestOffset` waits for a new binding before it says that there is none."""
PACE_MS = 60
"""Two micro-batches begin at least this far apart: a trigger for every binding would cost more than it brings."""
AS_OF_TIMEOUT_S = 60.0
DESCRIPTOR_COLUMNS = (
    Column("topic", "string"), Column("partition", "int32"), Column("start", "int64"), Column("end", "int64"),
    Column("descriptor", "binary"),
)  # fmt: skip


def register(spark: SparkSession, objects: str = "", consensus: str = "") -> None:
    """Make `format("tidemill")` known to the session; with URLs given here, reads need not repeat them."""
    given = {"objects": objects, "consensus": consensus}

    class Configured(TidemillSource):  # travels to workers by value, so its defaults do too
        defaults = {key: value for key, value in given.items() if value}

    spark.dataSource.register(Configured)


class TidemillSource(DataSource):  # type: ignore[misc]
    defaults: dict[str, str] = {}

    def _given(self) -> dict[str, str]:
        return {**self.defaults, **self.options}

    @classmethod
    def name(cls) -> str:
        return "tidemill"

    def schema(self) -> StructType:
        options = _Options(self._given())
        if options.text("shard"):
            return spark_schema(_shard_schema(options).columns)
        if not options.flag("rows", True):
            return spark_schema(DESCRIPTOR_COLUMNS)
        columns = (*options.one_feed().schema.columns, *(Column(n, t) for n, t in META))
        return spark_schema(columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        return ShardReader(self._given(), schema.names)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return FeedReader(self._given())


class _Options:
    """Options as Spark hands them over: text, keys in any case. Raises Invalid naming the option."""

    def __init__(self, options: dict[str, str]) -> None:
        self._options = {key.lower(): value for key, value in options.items()}

    def text(self, key: str, default: str = "") -> str:
        return self._options.get(key, default)

    def need(self, key: str, fix: str) -> str:
        found = self.text(key)
        if not found:
            raise Invalid(f"option is missing: option={key}.", fix=fix)
        return found

    def number(self, key: str, default: int) -> int:
        try:
            return int(self.text(key, str(default)))
        except ValueError as error:
            raise Invalid(f"option is not a number: option={key} value={self.text(key)!r}.") from error

    def flag(self, key: str, default: bool) -> bool:
        value = self.text(key, str(default)).lower()
        if value not in ("true", "false"):
            raise Invalid(f"option is neither true nor false: option={key} value={value!r}.")
        return value == "true"

    @property
    def urls(self) -> Urls:
        return Urls(self.text("objects"), self.text("consensus")).here()

    @property
    def source(self) -> str:
        return self.need("source", "Write topic/<name> or capture/<name>, or give a shard for a batch read.")

    def one_feed(self) -> TopicFeed:
        """The one topic of a row-yielding stream. Raises Invalid when it does not exist yet: a schema is needed now."""
        portal, stores = shared(self.urls)
        kind, _, name = self.source.partition("/")
        try:
            if kind == "capture":
                table = self.need("table", "Name it as schema.table.")
                return portal.call(captured_feed(stores.catalogue, name, table))
            schema = stream_schema(self.need("schema", 'Write "name type, …".'), self.need("key", "Name the key."))
            return portal.call(stream_feed(stores.catalogue, name, schema))
        except NotReady as error:
            raise Invalid(f"source is not there yet: source={self.source}.", fix=f"Wait: {error.reason}.") from error


# batch --------------------------------------------------------------------------------------------------


def _shard_schema(options: _Options) -> ShardSchema:
    portal, stores = shared(options.urls)
    schema: ShardSchema = portal.call(stores.shard(options.text("shard"))).schema
    return schema


class ShardPartition(InputPartition):  # type: ignore[misc]
    """Everything an executor needs besides the bucket: the parts are named, and small ones are inside."""

    def __init__(
        self, objects: str, schema: ShardSchema, batches: Sequence[Batch], as_of: int, names: Sequence[str]
    ) -> None:
        self.objects = objects
        self.payload = msgspec.msgpack.encode((schema, list(batches), as_of, list(names)))


JOB_HOLD_MS = 15 * 60_000
"""How long what a batch read planned stays readable to its executors; a longer job is told that history is lost."""


class ShardReader(DataSourceReader):  # type: ignore[misc]
    """Contents of one shard at one time: the columns `names`, for it may have got more since the frame was made."""

    def __init__(self, options: dict[str, str], names: Sequence[str]) -> None:
        self._options = _Options(options)
        self._names = tuple(names)

    def partitions(self) -> Sequence[InputPartition]:
        portal, stores = shared(self._options.urls)
        shard = portal.call(stores.shard(self._options.text("shard")))
        since, upper = portal.call(shard.frontiers())
        as_of = self._options.number("as_of", upper - 1)
        if as_of >= upper and upper > 0:
            upper = portal.call(shard.wait_upper(as_of, AS_OF_TIMEOUT_S))
        if as_of >= upper or as_of < since:
            if upper == 0 and not self._options.text("as_of"):
                return []
            raise Invalid(
                f"time is not readable: shard={shard.name} as_of={as_of} since={since} upper={upper}.",
                fix="Read at a time from since to upper - 1.",
            )
        batches = [b for b in portal.call(shard.batches_until(as_of)) if b.parts]
        if sum(part.size_bytes for batch in batches for part in batch.parts) > HOLD_ABOVE_BYTES:
            # Executors read while nobody here is called any more, so the hold is as long as a job may take: hold first.
            portal.call(shard.hold(shard.reader_name("spark"), as_of, JOB_HOLD_MS))
            batches = [b for b in portal.call(shard.batches_until(as_of)) if b.parts]
        objects = self._options.text("objects")
        return [ShardPartition(objects, shard.schema, batches, as_of, self._names)] if batches else []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from tidemill.shards.consolidate import contents
        from tidemill.shards.reading import PartReader
        from tidemill.spark.stores import shared_objects

        assert isinstance(partition, ShardPartition)
        kind = tuple[ShardSchema, list[Batch], int, list[str]]
        schema, batches, as_of, names = msgspec.msgpack.decode(partition.payload, type=kind)
        portal, objects = shared_objects(partition.objects)
        updates = portal.call(PartReader(objects, schema).read_batches(batches, 0, as_of + 1))
        yield from contents(schema, updates).select(names).to_batches(max_chunksize=20_000)


# streaming ----------------------------------------------------------------------------------------------


class FeedPartition(InputPartition):  # type: ignore[misc]
    """`payload`: the descriptor in msgpack; `feed`: how to decode it (rows=true only)."""

    def __init__(self, objects: str, payload: bytes, feed: bytes) -> None:
        self.objects = objects
        self.payload = payload
        self.feed = feed


class FeedReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    def __init__(self, options: dict[str, str]) -> None:
        self._options = _Options(options)
        self._initial: dict[str, int] | None = None
        self._target: int | None = None
        self._remap: Remap | None = None
        self._feeds: list[TopicFeed] | None = None
        self._offered_ms = 0

    def initialOffset(self) -> dict[str, int]:
        """Called twice at start; the same answer both times. Option start=MS begins later than everything."""
        if self._initial is None:
            _end_quietly_with_the_query()
            self._initial = {"ts": self._options.number("start", 0)}
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._options.number("max_rows", MAX_ROWS))

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        """One past the newest binding, or `start` when there is none beyond it. Storage errors: try again later."""
        portal, stores = shared(self._options.urls)
        pace_ms = self._options.number("pace_ms", PACE_MS)
        try:
            end = portal.call(self._latest(stores, start["ts"], limit, pace_ms))
        except (Unavailable, Unknown):
            return start
        self._offered_ms = stores.clock.now_ms()
        return {"ts": end}

    def prepareForTriggerAvailableNow(self) -> None:
        portal, stores = shared(self._options.urls)
        latest = portal.call(self._newest(stores))
        self._target = 0 if latest is None else latest.time_ms + 1

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        portal, stores = shared(self._options.urls)
        descriptors = portal.call(self._plan(stores, start["ts"], end["ts"]))
        rows = self._options.flag("rows", True)
        feed = msgspec.msgpack.encode(self._options.one_feed()) if rows else b""
        return [FeedPartition(self._options.text("objects"), msgspec.msgpack.encode(d), feed) for d in descriptors]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        assert isinstance(partition, FeedPartition)
        descriptor = msgspec.msgpack.decode(partition.payload, type=Descriptor)
        if partition.feed:
            from tidemill.spark.tasks import decode_here

            feed = msgspec.msgpack.decode(partition.feed, type=TopicFeed)
            decoded = decode_here(partition.objects, feed, [descriptor])
            if decoded.stop is not None:
                raise Invalid(decoded.stop.reason, fix=decoded.stop.fix)
            yield from decoded.commands.rows.to_batches(20_000)
            return
        piece = descriptor.slice
        row = (piece.topic, piece.partition, piece.start, piece.end, partition.payload)
        kinds = (pa.string(), pa.int32(), pa.int64(), pa.int64(), pa.binary())
        arrays = [pa.array([value], kind) for value, kind in zip(row, kinds, strict=True)]
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
        early_ms = pace_ms - (stores.clock.now_ms() - self._offered_ms)
        if early_ms > 0 and self._target is None:
            await asyncio.sleep(min(early_ms, pace_ms) / 1000)
        if self._target is None:
            await remap.wait(start - 1, WAIT_S)
        latest = await remap.latest()
        end = start if latest is None else max(start, latest.time_ms + 1)
        if self._target is not None:
            end = max(start, min(end, self._target))
        if isinstance(limit, ReadAllAvailable) or not isinstance(limit, ReadMaxRows):
            return end
        return await self._within(remap, start, end, limit.max_rows)

    async def _within(self, remap: Remap, start: int, end: int, max_rows: int) -> int:
        """The latest end ≤ `end` with at most max_rows records after `start`; one time at least, were it larger."""
        bindings = [b for b in await remap.after(start - 1) if b.time_ms < end]
        if not bindings:
            return end
        base = await remap.at(start - 1)
        before = _records(base) if base is not None else 0
        if _records(bindings[-1]) - before <= max_rows and bindings[-1].time_ms + 1 >= end:
            return end
        fitting = [b for b in bindings if _records(b) - before <= max_rows]
        return (fitting[-1] if fitting else bindings[0]).time_ms + 1

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
