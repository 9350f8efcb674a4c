"""One feed's life: wait for its inputs, hydrate its tables, bring them forward, then keep a query running.

While there is no query (the JVM starts, Spark makes its first plan, or Spark lost a worker) the same sink
is called from here, so that rows appear, and go on after a crash, long before the first micro-batch.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from typing import Any

import structlog

from tidemill.base.errors import Invalid, TidemillError
from tidemill.spark.dead_letters import DeadLetters
from tidemill.spark.feeds import NotReady, TopicFeed, captured_feed, stream_feed
from tidemill.spark.host import Host
from tidemill.spark.pipeline import CapturedTable, Input
from tidemill.spark.sink import FeedSink
from tidemill.spark.table import TableWriter

INPUT_POLL_S = 0.25
WARM_POLL_S = 0.15
"""Between two rounds without a query: the starting JVM needs the processor more."""
WATCH_S = 0.2
STABLE_S = 60.0
QUERY_ATTEMPTS = 5
"""A query that ends this often, each time within STABLE_S, ends the pipeline."""

log = structlog.get_logger()


class Feed:
    """One source with its sink, once it is open; until then `waits_for` and `reason` say why it is not."""

    def __init__(self, source: str, tables: dict[str, Input], host: Host) -> None:
        self.source = source
        self.tables = tables
        self.sink: FeedSink | None = None
        self.query: Any = None
        self.waits_for = source.replace("/", ":", 1)
        self.reason = "opening"
        self._host = host

    @property
    def captured(self) -> bool:
        return all(isinstance(table, CapturedTable) for table in self.tables.values())

    def run(self, dead_letters: DeadLetters | None) -> None:
        """Until the pipeline ends. Raises what no waiting heals; Invalid only for what is wrong with the pipeline."""
        sink = self._open(dead_letters)
        if sink is None:
            return
        self.sink = sink
        try:
            self._run(sink)
        except Invalid as error:
            # It ran, so this is about data (records gone, a value nothing holds): as a fault of the configuration it
            # would not be tried again, and would end every process beside this one.
            raise TidemillError(error.message, fix=error.fix) from error

    def _run(self, sink: FeedSink) -> None:
        host = self._host
        short_lives = 0
        while not host.ending.is_set():
            self._bring_forward(sink, host.session_ready.is_set)
            if host.ending.is_set():
                return
            began_s = host.stores.clock.monotonic_s()
            reason = self._watch_query(sink)
            if sink.failure is not None:
                raise sink.failure
            if reason and not host.ending.is_set():
                # Spark's own trouble, e.g. a worker that a busy machine did not start within Spark's patience.
                short_lives = short_lives + 1 if host.stores.clock.monotonic_s() - began_s < STABLE_S else 1
                log.warning("streaming query ended, starting it again", source=self.source, error=reason)
                if short_lives >= QUERY_ATTEMPTS:
                    raise TidemillError(f"streaming query does not stay up: source={self.source} error={reason}.")

    # opening ----------------------------------------------------------------------------------------
    def _open(self, dead_letters: DeadLetters | None) -> FeedSink | None:
        """Wait until every input exists, then open and hydrate all shards at once. None = the end came first."""
        host = self._host
        while True:
            try:
                inputs = host.retried(self._inputs)
                break
            except NotReady as error:
                self.waits_for, self.reason = error.held_by, error.reason
                if host.ending.wait(INPUT_POLL_S):
                    return None
        self.reason = "hydrating"
        tables = self._hydrate(inputs)
        remap = host.retried(lambda: host.portal.call(host.stores.remap(self.source)))
        self.reason = ""
        return FeedSink(
            host.portal,
            host.stores,
            self.source,
            remap,
            tables,
            host.latency,
            host.bound_latency,
            dead_letters=None if self.captured else dead_letters,
        )

    def _inputs(self) -> dict[str, TopicFeed]:
        """Raises NotReady, Invalid."""
        catalogue = self._host.stores.catalogue

        async def run() -> dict[str, TopicFeed]:
            out = {}
            for name, source in self.tables.items():
                if isinstance(source, CapturedTable):
                    out[name] = await captured_feed(catalogue, source.capture, source.table)
                else:
                    out[name] = await stream_feed(catalogue, source.topic, source.schema)
            return out

        return self._host.portal.call(run())

    def _hydrate(self, inputs: dict[str, TopicFeed]) -> list[TableWriter]:
        """All tables in name order, hydrated side by side: they wait for storage more than for the processor."""
        tables: list[TableWriter] = []
        failures: list[BaseException] = []

        def one(name: str, topic: TopicFeed) -> None:
            try:
                tables.append(self._host.writer(name, topic.schema, topic))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=one, args=item, daemon=True) for item in inputs.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return sorted(tables, key=lambda table: table.name)

    # running ----------------------------------------------------------------------------------------
    def _bring_forward(self, sink: FeedSink, done: Callable[[], bool]) -> None:
        """Process from this thread while there is no query."""
        host = self._host
        while not host.ending.is_set():
            sink.process(host.retried(sink.latest))
            if done() or host.ending.wait(WARM_POLL_S):
                return

    def _watch_query(self, sink: FeedSink) -> str:
        """Start the feed's query and wait for its end or the pipeline's; why it ended, or ""."""
        spark = self._host.spark
        assert spark is not None
        sink.use(spark.sparkContext)
        sink.called.clear()
        try:
            query = self.query = self._query(spark, sink)
            # A query takes seconds to its first batch (planner, first plan): rows do not wait for it.
            self._bring_forward(sink, lambda: sink.called.is_set() or not query.isActive)
            log.info("query runs", source=self.source, tables=len(sink.tables))
            while not self._host.ending.wait(WATCH_S):
                if not query.isActive:
                    return str(query.exception())[:500]
        except Exception as error:  # py4j and Spark raise what they like; the caller counts and gives up
            return str(error)[:500]
        return ""

    def _query(self, spark: Any, sink: FeedSink) -> Any:
        """A streaming query with a checkpoint of its own, made anew: where it starts follows from the shards (U5)."""
        from tidemill.spark.source import DESCRIPTOR_COLUMNS
        from tidemill.spark.types import spark_schema

        settings = self._host.settings
        checkpoint = settings.scratch / "checkpoints" / self.source.replace("/", "-")
        shutil.rmtree(checkpoint, ignore_errors=True)
        options = {
            "objects": settings.urls.objects,
            "consensus": settings.urls.consensus,
            "source": self.source,
            "rows": "false",
            "start": str(min(table.upper for table in sink.tables)),
        }
        frame = spark.readStream.format("tidemill").options(**options).schema(spark_schema(DESCRIPTOR_COLUMNS)).load()
        return (
            frame.writeStream.queryName(f"{settings.name}{settings.instance}:{self.source}")
            .option("checkpointLocation", str(checkpoint))
            .foreachBatch(sink.body(checkpoint))
            .start()
        )
