"""Streams of a topic or a captured table, as rows.

The streaming offset is {"ts": T}: everything below time T. Remap alone determines it, so every query and every restart
cuts a topic at the same offsets. `latestOffset` waits for a new binding instead of being polled: without news Spark
calls again immediately, and a call costs JVM and planner more than the wait. It waits only briefly, because a query may
have other sources, which Spark calls one after the other. Stopping the query interrupts it. The planner lives as long
as the query.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from tidemill.base.errors import InvalidError, UnavailableError, UnknownOutcomeError
from tidemill.shards.api import Column
from tidemill.spark.decode.records import SliceDescriptor
from tidemill.spark.ingest.sources import SourceNotReadyError, TopicFeed, captured_feed, stream_feed
from tidemill.spark.source.bindings import SourceBindings
from tidemill.spark.source.corrupt import CorruptRecordMode
from tidemill.spark.source.options import SourceOptions
from tidemill.spark.source.spark_versions import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from tidemill.spark.stores import Stores, shared_stores
from tidemill.spark.types import COMMAND_META, stream_schema

if TYPE_CHECKING:
    import pyarrow as pa

MAX_ROWS = 500_000
"""Default limit of records in one micro-batch (option max_rows); a single time is never split."""
WAIT_S = 0.25
"""Time that `latestOffset` waits for a new binding."""
PACE_MS = 60
"""Minimum interval between the starts of two micro-batches: a trigger for every binding would cost more than it gains.
The first binding after a pause is not delayed."""


def stream_columns(options: SourceOptions) -> tuple[Column, ...]:
    """Return the columns of a stream of rows. Raises InvalidError if its source, which defines them, does not exist
    yet."""
    corrupted = CorruptRecordMode.from_options(options)
    columns = (*_open_feed(options).schema.columns, *(Column(n, t) for n, t in COMMAND_META))
    if taken := {c.name for c in columns} & {c.name for c in corrupted.columns}:
        raise InvalidError(
            f"the topic already has a column of this name: column={taken.pop()}.",
            fix="Set option columnNameOfCorruptRecord to another name.",
        )
    return (*columns, *corrupted.columns)


def _open_feed(options: SourceOptions) -> TopicFeed:
    """Return the one topic of a stream of rows."""
    portal, stores = shared_stores(options.urls)
    kind, _, name = options.source.partition("/")
    try:
        if kind == "capture":
            table = options.required("table", "Name it as schema.table.")
            return portal.call(captured_feed(stores.catalogue, name, table, as_text=None))
        schema = stream_schema(
            options.required("schema", 'Write "name type, …".'), options.required("key", "Name the key.")
        )
        return portal.call(stream_feed(stores.catalogue, name, schema))
    except SourceNotReadyError as error:
        raise InvalidError(
            f"source does not exist yet: source={options.source}.", fix=f"Wait: {error.reason}."
        ) from error


class FeedPartition(InputPartition):  # type: ignore[misc]
    """Input of a task. `payload` in msgpack: for rows the descriptor, with `feed` to decode it; else source and
    interval."""

    def __init__(self, objects: str, payload: bytes, feed: bytes) -> None:
        self.objects = objects
        self.payload = payload
        self.feed = feed


class RowReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._corrupted = CorruptRecordMode.from_options(options)
        self._initial: dict[str, int] | None = None
        self._target: int | None = None
        self._bindings = SourceBindings(options.source, options.text("table"))
        self._offered_ms = 0
        """Time at which the newest batch was offered."""
        self._offered: dict[str, int] | None = None
        """Offset that was returned last."""

    def initialOffset(self) -> dict[str, int]:
        """Return the start of the stream, option start=MS or 0. Spark calls it twice at start and gets the same
        answer."""
        if self._initial is None:
            suppress_broken_pipe()
            self._initial = {"ts": self._options.number("start", 0)}
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._options.number("max_rows", MAX_ROWS))

    def latestOffset(self, start: dict[str, int] | None = None, limit: ReadLimit | None = None) -> dict[str, int]:
        """Return the end of the newest binding, or `start` if no later one exists.

        On a storage error the query tries again later; but a query with trigger availableNow must not take that for the
        end. Without `start` (`spark_versions`), the first answer is the newest end.
        """
        portal, stores = shared_stores(self._options.urls)
        pace_ms = self._options.number("pace_ms", PACE_MS)
        start = start or self._offered
        limit = limit or self.getDefaultReadLimit()
        try:
            if start is None:
                end = max(self._options.number("start", 0), portal.call(self._bindings.end(stores)))
            else:
                end = portal.call(self._latest_end(stores, start["ts"], limit, pace_ms))
        except (UnavailableError, UnknownOutcomeError):
            if self._target is not None or start is None:
                raise
            return start
        if start is None or end > start["ts"]:
            self._offered_ms = stores.clock.now_ms()
        self._offered = {"ts": end}
        return self._offered

    def prepareForTriggerAvailableNow(self) -> None:
        portal, stores = shared_stores(self._options.urls)
        self._target = portal.call(self._bindings.end(stores))

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        portal, stores = shared_stores(self._options.urls)
        feed = msgspec.msgpack.encode(_open_feed(self._options))
        descriptors = portal.call(self._bindings.plan_slices(stores, start["ts"], end["ts"]))
        return [FeedPartition(self._options.objects, msgspec.msgpack.encode(d), feed) for d in descriptors]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from tidemill.spark.ingest.fetch_decode import fetch_and_decode

        assert isinstance(partition, FeedPartition)
        descriptor = msgspec.msgpack.decode(partition.payload, type=SliceDescriptor)
        feed = msgspec.msgpack.decode(partition.feed, type=TopicFeed)
        decoded = fetch_and_decode(partition.objects, feed, [descriptor])
        if decoded.stop is not None:
            raise InvalidError(decoded.stop.reason, fix=decoded.stop.fix)
        yield from self._corrupted.rows(decoded.commands.rows, decoded.dead).to_batches(20_000)

    async def _latest_end(self, stores: Stores, start: int, limit: ReadLimit, pace_ms: int) -> int:
        if self._target is None:
            early_ms = pace_ms - (stores.clock.now_ms() - self._offered_ms)
            if early_ms > 0:
                await asyncio.sleep(min(early_ms, pace_ms) / 1000)
            if not await self._bindings.wait_for_binding(stores, start, WAIT_S):
                return start
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return await self._bindings.end_within(stores, start, most, self._target)


def suppress_broken_pipe() -> None:
    """Suppress the traceback when a stopped query closes its planner's socket, often during a wait for a binding."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if not issubclass(kind, BrokenPipeError):
            before(kind, error, trace)

    sys.excepthook = hook
