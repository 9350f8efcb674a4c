"""One pipeline, assembled: feeds to sinks to queries, derived tables to threads, everything to marks.

Threads: the caller waits for the end; one opens the JVM; one a feed (feeding.py); one a derived table; one
publishes marks and compacts. Whatever fails ends the run with that error, except what may heal: storage that
is away, and feeds that do not exist yet, are waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from tidemill.base.errors import Closed, TidemillError
from tidemill.metastore.catalogue import PipelineRow
from tidemill.spark.dead_letters import DeadLetters
from tidemill.spark.decode.stream import DEAD_LETTERS
from tidemill.spark.derived import Derivation
from tidemill.spark.feeding import Feed
from tidemill.spark.host import Host, Settings, own_directory
from tidemill.spark.pipeline import DerivedTable, Pipeline, load_pipeline
from tidemill.spark.reporting import Reporter
from tidemill.spark.stores import open_stores
from tidemill.spark.table import TableWriter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STOP_TIMEOUT_S = 4.0
SESSION_THREAD = "session"

log = structlog.get_logger()


class Runner(Host):
    """`run` blocks until `stopping` is set or something fails for good, and raises that."""

    def __init__(self, settings: Settings, stopping: threading.Event, spark: SparkSession | None = None) -> None:
        pipeline = load_pipeline(settings.file, settings.name)
        super().__init__(settings)
        self.pipeline: Pipeline = pipeline
        self.feeds = [Feed(source, tables, self) for source, tables in pipeline.sources().items()]
        self.derivations: list[Derivation] = []
        self.dead_letters: DeadLetters | None = None
        self.spark = spark
        self._own_spark = spark is None
        self._stopping = stopping
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []

    def run(self) -> None:
        with own_directory(self.settings.scratch):
            self._run()

    def _run(self) -> None:
        self.stores = self.portal.call(open_stores(self.settings.urls, domains=self.settings.domains))
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
        self.retried(lambda: self.portal.call(self.stores.catalogue.put(row)))
        if self.spark is None:
            self._thread(SESSION_THREAD, self._open_session)
        else:
            self.session_ready.set()
        if self.pipeline.dead_letters:
            writer = self.writer(self.pipeline.dead_letters, DEAD_LETTERS)
            self.dead_letters = DeadLetters(writer, [feed.source for feed in self.feeds if not feed.captured])
        for feed in self.feeds:
            self._thread(f"feed-{feed.source}", partial(feed.run, self.dead_letters))
        for table in self.pipeline.derived_tables.values():
            self._thread(f"derived-{table.name}", partial(self._run_derived, table))
        self._thread("report", Reporter(self).run)

    def _stop(self) -> None:
        """In order: sinks end their batch, queries stop between batches, then the session, then the stores.

        A query is never stopped inside a batch: Spark would interrupt it there, noisily (notes/ecosystem.md §3).
        Bounded, for a supervisor waits: what takes longer is cut off by the end of the process, at no cost but time.
        """
        self.ending.set()
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
        if self.spark is not None and self._own_spark:
            _bounded(self.spark.stop, STOP_TIMEOUT_S)
        _quietly(lambda: self.portal.call(self.stores.aclose(), STOP_TIMEOUT_S))
        self.portal.close()

    def _thread(self, name: str, body: Callable[[], None]) -> None:
        def run() -> None:
            try:
                body()
            except BaseException as error:
                if not self.ending.is_set():
                    log.error("pipeline failed", part=name, error=str(error))
                    self._failure = self._failure or error
                self.ending.set()

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def tables(self) -> list[TableWriter]:
        """Every table that is open, derived ones too."""
        out = [t for feed in self.feeds if feed.sink is not None for t in feed.sink.tables]
        out += [d.writer for d in self.derivations if d.writer is not None]
        return out + ([self.dead_letters.writer] if self.dead_letters is not None else [])

    def _open_session(self) -> None:
        from tidemill.spark.session import build_session
        from tidemill.spark.source import register

        settings = self.settings
        spark = build_session(
            f"tidemill-{settings.name}",
            settings.master,
            scratch=settings.scratch,
            driver_memory=settings.driver_memory,
            extra=settings.conf,
        )
        spark.sparkContext.setLogLevel("WARN")
        register(spark, settings.urls.objects, settings.urls.consensus)
        self.spark = spark
        self.session_ready.set()
        log.info("session is ready", spark=spark.version, master=spark.sparkContext.master)

    def _run_derived(self, table: DerivedTable) -> None:
        while not self.session_ready.wait(0.2):
            if self.ending.is_set():
                return
        assert self.spark is not None
        found = Derivation(self.portal, self.stores, self.spark, table, self.mirror_dir(table.name))
        self.derivations.append(found)
        found.run(self.ending)


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
