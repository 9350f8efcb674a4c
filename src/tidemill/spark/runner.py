"""One pipeline, assembled: feeds to sinks to queries, derived tables to threads, everything to marks.

Threads: the caller waits for the end; one opens the JVM; one a feed (opens it, brings it forward, then starts
and watches its query); one a derived table; one publishes marks and compacts. Whatever fails ends the run with
that error, except what may heal: storage that is away, and feeds that do not exist yet, are waited for.
"""

from __future__ import annotations

import fcntl
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from tidemill.base.errors import Closed, Invalid, TidemillError, Unavailable, Unknown
from tidemill.base.portal import Portal
from tidemill.metastore.catalogue import PipelineRow
from tidemill.shards.front import ShardSchema
from tidemill.spark.dead_letters import DeadLetters
from tidemill.spark.decode.stream import DEAD_LETTERS
from tidemill.spark.derived import Derivation
from tidemill.spark.facts import Latency
from tidemill.spark.feeds import NotReady, TopicFeed, captured_feed, stream_feed
from tidemill.spark.pipeline import CapturedTable, Input, Pipeline, load_pipeline
from tidemill.spark.reporting import Reporter
from tidemill.spark.sink import FeedSink
from tidemill.spark.stores import Stores, Urls, open_stores
from tidemill.spark.table import TableWriter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCK_ATTEMPTS = 50
FEED_POLL_S = 0.25
WARM_POLL_S = 0.15
"""Between two rounds while the JVM starts: it needs the processor more."""
STOP_TIMEOUT_S = 4.0
STABLE_S = 60.0
QUERY_ATTEMPTS = 5
"""A query that ends this often, each time within STABLE_S, ends the pipeline."""
SESSION_THREAD = "session"

log = structlog.get_logger()


class Settings(msgspec.Struct, frozen=True):
    name: str
    file: Path
    urls: Urls
    master: str
    scratch: Path
    instance: str = ""
    driver_memory: str = "1g"
    conf: dict[str, str] = {}


class Feed:
    """One source with its sink, once it is open; until then `waits_for` and `reason` say why it is not."""

    def __init__(self, source: str, tables: dict[str, Input]) -> None:
        self.source = source
        self.tables = tables
        self.sink: FeedSink | None = None
        self.query: Any = None
        self.waits_for = source.replace("/", ":", 1)
        self.reason = "opening"


@contextmanager
def own_directory(scratch: Path) -> Iterator[None]:
    """Keep the scratch directory to this process: two that wrote mirrors into one would read each other's files.

    Raises Invalid when it is taken or cannot be written. A predecessor that is just ending is waited for.
    """
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        lock = (scratch / "lock").open("w")
    except OSError as error:
        raise Invalid(
            f"cannot write the scratch directory: scratch={scratch} error={error.strerror}.", fix="Make it writable."
        ) from error
    with lock:
        for attempt in range(LOCK_ATTEMPTS):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if attempt == LOCK_ATTEMPTS - 1:
                    raise Invalid(
                        f"scratch directory is in use by another process: scratch={scratch}.",
                        fix="Give each driver its own --scratch.",
                    ) from error
                threading.Event().wait(0.1)
        yield


class Runner:
    """`run` blocks until `stopping` is set or something fails for good, and raises that."""

    def __init__(self, settings: Settings, stopping: threading.Event, spark: SparkSession | None = None) -> None:
        self.settings = settings
        self.pipeline: Pipeline = load_pipeline(settings.file, settings.name)
        self.latency = Latency()
        self.feeds = [Feed(source, tables) for source, tables in self.pipeline.sources().items()]
        self.derivations: list[Derivation] = []
        self.dead_letters: DeadLetters | None = None
        self.portal = Portal(f"pipeline-{settings.name}")
        self.stores: Stores
        self._stopping = stopping
        self._ending = threading.Event()
        self._failure: BaseException | None = None
        self._spark = spark
        self._own_spark = spark is None
        self._session_ready = threading.Event()
        self._threads: list[threading.Thread] = []

    def run(self) -> None:
        with own_directory(self.settings.scratch):
            self._run()

    def _run(self) -> None:
        self.stores = self.portal.call(open_stores(self.settings.urls))
        try:
            self._start()
            while not self._stopping.wait(0.2) and not self.ending.is_set():
                pass
        finally:
            self._stop()
        if self._failure is not None:
            raise self._failure

    # start and stop ---------------------------------------------------------------------------------
    def _start(self) -> None:
        row = PipelineRow(self.settings.name, self.pipeline.fed_by(), self.pipeline.dead_letters)
        self._retried(lambda: self.portal.call(self.stores.catalogue.put(row)))
        if self._spark is None:
            self._thread(SESSION_THREAD, self._open_session)
        else:
            self._session_ready.set()
        if self.pipeline.dead_letters:
            self._open_dead_letters()
        for feed in self.feeds:
            self._thread(f"feed-{feed.source}", partial(self._run_feed, feed))
        for table in self.pipeline.derived_tables.values():
            self._thread(f"derived-{table.name}", partial(self._run_derived, table))
        self._thread("report", Reporter(self).run)

    def _stop(self) -> None:
        """In order: sinks end their batch, queries stop between batches, then the session, then the stores.

        A query is never stopped inside a batch: Spark would interrupt it there, noisily (notes/ecosystem.md §3).
        Bounded, for a supervisor waits: what takes longer is cut off by the end of the process, at no cost but time.
        """
        self._ending.set()
        clock = self.stores.clock
        until_s = clock.monotonic_s() + STOP_TIMEOUT_S
        for feed in self.feeds:
            if feed.sink is not None:
                feed.sink.stop()
        for thread in self._threads:
            if thread.name != SESSION_THREAD:
                thread.join(max(0.1, until_s - clock.monotonic_s()))
        for feed in self.feeds:
            if feed.query is not None and feed.sink is not None and feed.sink.idle.wait(STOP_TIMEOUT_S):
                _bounded(feed.query.stop, STOP_TIMEOUT_S)
        for table in self.tables():
            _quietly(table.save)
        if self._spark is not None and self._own_spark:
            _bounded(self._spark.stop, STOP_TIMEOUT_S)
        _quietly(lambda: self.portal.call(self.stores.aclose(), STOP_TIMEOUT_S))
        self.portal.close()

    @property
    def ending(self) -> threading.Event:
        return self._ending

    def _thread(self, name: str, body: Callable[[], None]) -> None:
        def run() -> None:
            try:
                body()
            except BaseException as error:
                if not self.ending.is_set():
                    log.error("pipeline failed", part=name, error=str(error))
                    self._failure = self._failure or error
                self._ending.set()

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _retried(self, call: Callable[[], Any]) -> Any:
        """Call until storage answers or the pipeline ends."""
        while True:
            try:
                return call()
            except (Unavailable, Unknown) as error:
                log.warning("storage is away, waiting", error=str(error))
                if self._ending.wait(1):
                    raise

    def tables(self) -> list[TableWriter]:
        """Every table that is open, derived ones too."""
        out = [t for feed in self.feeds if feed.sink is not None for t in feed.sink.tables]
        out += [d.writer for d in self.derivations if d.writer is not None]
        return out + ([self.dead_letters.writer] if self.dead_letters is not None else [])

    # Spark ------------------------------------------------------------------------------------------
    def _open_session(self) -> None:
        from tidemill.spark.session import build_session
        from tidemill.spark.source import register

        spark = build_session(
            f"tidemill-{self.settings.name}",
            self.settings.master,
            scratch=self.settings.scratch,
            driver_memory=self.settings.driver_memory,
            extra=self.settings.conf,
        )
        spark.sparkContext.setLogLevel("WARN")
        register(spark, self.settings.urls.objects, self.settings.urls.consensus)
        self._spark = spark
        self._session_ready.set()
        log.info("session is ready", spark=spark.version, master=spark.sparkContext.master)

    def spark(self) -> SparkSession | None:
        """The session, or None while it starts."""
        return self._spark if self._session_ready.is_set() else None

    # feeds ------------------------------------------------------------------------------------------
    def _run_feed(self, feed: Feed) -> None:
        sink = self._open_feed(feed)
        if sink is None:
            return
        feed.sink = sink
        short_lives = 0
        while not self.ending.is_set():
            self._bring_forward(sink, self._session_ready.is_set)
            if self._ending.is_set():
                return
            began_s = self.stores.clock.monotonic_s()
            reason = self._watch_query(feed, sink)
            if sink.failure is not None:
                raise sink.failure
            if reason and not self.ending.is_set():
                # Spark's own trouble, e.g. a worker that a busy machine did not start within Spark's patience.
                short_lives = short_lives + 1 if self.stores.clock.monotonic_s() - began_s < STABLE_S else 1
                log.warning("streaming query ended, starting it again", source=feed.source, error=reason)
                if short_lives >= QUERY_ATTEMPTS:
                    raise TidemillError(f"streaming query does not stay up: source={feed.source} error={reason}.")

    def _bring_forward(self, sink: FeedSink, done: Callable[[], bool]) -> None:
        """Process from this thread while there is no query: rows first, the JVM may take its time."""
        while not self.ending.is_set():
            sink.process(self._retried(sink.latest))
            if done() or self._ending.wait(WARM_POLL_S):
                return

    def _watch_query(self, feed: Feed, sink: FeedSink) -> str:
        """Start the feed's query and wait for its end or the pipeline's; why it ended, or ""."""
        spark = self._spark
        assert spark is not None
        sink.use(spark.sparkContext)
        sink.called.clear()
        try:
            feed.query = self._query(spark, feed, sink)
            query = feed.query
            # A query takes seconds to its first batch (planner, first plan): rows do not wait for it.
            self._bring_forward(sink, lambda: sink.called.is_set() or not query.isActive)
            log.info("query runs", source=feed.source, tables=len(sink.tables))
            while not self._ending.wait(0.2):
                if not query.isActive:
                    return str(query.exception())[:500]
        except Exception as error:  # py4j and Spark raise what they like; the caller counts and gives up
            return str(error)[:500]
        return ""

    def _open_feed(self, feed: Feed) -> FeedSink | None:
        """Wait until every input exists, then open and hydrate all shards at once. None = the end came first."""
        while True:
            try:
                inputs = self._retried(lambda: self._inputs(feed))
                break
            except NotReady as error:
                feed.waits_for, feed.reason = error.held_by, error.reason
                if self._ending.wait(FEED_POLL_S):
                    return None
        feed.reason = "hydrating"
        tables: list[TableWriter] = []
        threads = []

        def hydrate(name: str, topic: TopicFeed) -> None:
            table = self._writer(name, topic.schema, topic)
            self._retried(table.hydrate)
            tables.append(table)

        failures: list[BaseException] = []
        for name, topic in inputs.items():

            def body(name: str = name, topic: TopicFeed = topic) -> None:
                try:
                    hydrate(name, topic)
                except BaseException as error:
                    failures.append(error)

            thread = threading.Thread(target=body, name=f"hydrate-{name}", daemon=True)
            threads.append(thread)
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        tables.sort(key=lambda t: t.name)
        remap = self._retried(lambda: self.portal.call(self.stores.remap(feed.source)))
        feed.reason = ""
        captured = all(isinstance(t, CapturedTable) for t in feed.tables.values())
        return FeedSink(
            self.portal,
            self.stores,
            feed.source,
            remap,
            tables,
            self.latency,
            dead_letters=None if captured else self.dead_letters,
        )

    def _inputs(self, feed: Feed) -> dict[str, TopicFeed]:
        """Raises NotReady, Invalid."""

        async def run() -> dict[str, TopicFeed]:
            out = {}
            for name, source in feed.tables.items():
                if isinstance(source, CapturedTable):
                    out[name] = await captured_feed(self.stores.catalogue, source.capture, source.table)
                else:
                    out[name] = await stream_feed(self.stores.catalogue, source.topic, source.schema)
            return out

        return self.portal.call(run())

    def _writer(self, name: str, schema: ShardSchema, feed: TopicFeed | None = None) -> TableWriter:
        shard = self._retried(lambda: self.portal.call(self.stores.shard(name, schema)))
        return TableWriter(self.portal, self.stores, shard, self._mirror_dir(name), feed)

    def _mirror_dir(self, name: str) -> Path:
        return self.settings.scratch / "mirrors" / name

    def _open_dead_letters(self) -> None:
        writer = self._writer(self.pipeline.dead_letters, DEAD_LETTERS)
        self._retried(writer.hydrate)
        sources = [f.source for f in self.feeds if f.source.startswith("topic/")]
        self.dead_letters = DeadLetters(writer, sources)

    def _query(self, spark: SparkSession, feed: Feed, sink: FeedSink) -> Any:
        from tidemill.spark.source import DESCRIPTOR_COLUMNS
        from tidemill.spark.types import spark_schema

        checkpoint = self.settings.scratch / "checkpoints" / feed.source.replace("/", "-")
        shutil.rmtree(checkpoint, ignore_errors=True)
        options = {
            "objects": self.settings.urls.objects,
            "consensus": self.settings.urls.consensus,
            "source": feed.source,
            "rows": "false",
            "start": str(min(table.upper for table in sink.tables)),
        }
        frame = spark.readStream.format("tidemill").options(**options)
        return (
            frame.schema(spark_schema(DESCRIPTOR_COLUMNS))
            .load()
            .writeStream.queryName(f"{self.settings.name}{self.settings.instance}:{feed.source}")
            .option("checkpointLocation", str(checkpoint))
            .foreachBatch(sink.body(checkpoint))
            .start()
        )

    # derived ----------------------------------------------------------------------------------------
    def _run_derived(self, table: Any) -> None:
        while not self._session_ready.wait(0.2):
            if self._ending.is_set():
                return
        assert self._spark is not None
        found = Derivation(self.portal, self.stores, self._spark, table, self._mirror_dir(table.name))
        self.derivations.append(found)
        found.run(self._ending)


def _bounded(call: Callable[[], Any], timeout_s: float) -> None:
    """Call, but wait for its end no longer than this."""
    thread = threading.Thread(target=_quietly, args=(call,), daemon=True)
    thread.start()
    thread.join(timeout_s)


def _quietly(call: Callable[[], Any]) -> None:
    """At the end of a process nothing durable depends on what fails here; it is said, not raised."""
    try:
        call()
    except (TidemillError, OSError, TimeoutError) as error:
        if not isinstance(error, Closed):
            log.warning("closing failed", error=str(error))
    except Exception as error:
        log.warning("closing failed", error=str(error).splitlines()[0][:200])
