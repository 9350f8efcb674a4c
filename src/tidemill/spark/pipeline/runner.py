"""Runner of one pipeline: feeds with their tables, derived tables, the session and the report, each a unit of failure.

Threads: the caller waits for the end; one opens the JVM; one runs the streaming query (streaming_query.py); one per
feed (feed.py); one per table (table_unit.py); one per derived table; one publishes statuses; one watches the executors
of a cluster. An exception of a unit is reported under its stage status, and the unit is restarted (`run_unit_thread`).
The run ends when `stopping` is set, or when Spark's JVM is gone, because only a new process gets another JVM.

The JVM starts only for a pipeline that computes with it (`uses_spark`): on one machine the driver itself computes every
step of tables and histories.

A Spark job without an executor waits indefinitely. So when a cluster has no executor left, the jobs are cancelled, and
the driver computes their steps. A cancelled step is not lost: the feed computes it inline (distributed_step.py), and a
derived table retries.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import ClosedError, TidemillError
from tidemill.base.runtime.tasks import error_sentence, run_unit, run_unit_thread
from tidemill.metastore.catalogue import PipelineRow
from tidemill.shards.handle import LogShard
from tidemill.spark.decode.dead_letter_rows import DEAD_LETTERS
from tidemill.spark.definition import DerivedTable, HistoryTable, Pipeline, load_pipeline
from tidemill.spark.derived.derivation import Derivation
from tidemill.spark.derived.history import History
from tidemill.spark.ingest.dead_letters import DeadLetterWriter
from tidemill.spark.ingest.feed import Feed
from tidemill.spark.ingest.feed_sink import FeedSink
from tidemill.spark.ingest.pipeline_context import (
    MIRRORS,
    PipelineContext,
    executors_status_name,
    lock_scratch_directory,
    sweep_scratch,
)
from tidemill.spark.ingest.table_ownership import TableOwnership
from tidemill.spark.ingest.table_writer import TableWriter
from tidemill.spark.pipeline.status_report import StatusReporter
from tidemill.spark.pipeline.streaming_query import SparkSessionLostError, StreamingQuery
from tidemill.spark.session.opener import SessionOpener, wait_for_jvm
from tidemill.spark.session.session import is_local
from tidemill.spark.settings import IN_ENVIRONMENT, DriverSettings
from tidemill.spark.stores import open_stores

if TYPE_CHECKING:
    from pyspark import SparkContext

STOP_TIMEOUT_S = 4.0
SESSION_THREAD = "session"
EXPIRY_INTERVAL_S = 5.0
"""Interval at which the writer of dead letters is asked to remove old ones; most of these calls do nothing."""
REGISTRATION_CHECK_S = 30.0
"""Interval at which a driver checks that its row still exists."""
REFUSAL_CHECK_S = 5.0
"""Interval of that check while the pipeline may not maintain one of its tables."""
EXECUTOR_CHECK_S = 1.0
REPLACEMENT_WAIT_S = 5.0
"""Time in which a cluster may replace a lost executor."""

log = structlog.get_logger()


class PipelineRunner(PipelineContext):
    """Runner of one pipeline. `run` blocks until `stopping` is set, which the runner also does when the process cannot
    continue; it then raises the cause."""

    def __init__(
        self,
        settings: DriverSettings,
        stopping: threading.Event,
        opening: SessionOpener | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
        """Load the pipeline from its file, unless it is given; `opening`: opens a session that this pipeline must not
        stop."""
        pipeline = pipeline or load_pipeline(settings.file, settings.name)
        row = PipelineRow(
            settings.name, pipeline.fed_by(), pipeline.dead_letters, pipeline.inputs(), pipeline.formats()
        )
        super().__init__(settings, TableOwnership(row))
        self.pipeline: Pipeline = pipeline
        self.feeds: list[Feed] = []
        self.query: StreamingQuery | None = None
        self.derivations: dict[str, Derivation] = {}
        self.histories: dict[str, History] = {}
        self.dead_letters: DeadLetterWriter
        self._opening = opening or SessionOpener(settings)
        if not self.uses_spark:
            self.session_ready.set()
        elif pipeline.tables and not self._opening.of_caller:  # whose checkpoints and workers a query would depend on
            self.query = StreamingQuery(self, tuple(pipeline.sources()), self._sink_of, self._derived_tables_began)
        self._own_session = opening is None
        self._stopping = stopping
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._proving: Future[None] | None = None
        self._owning: Future[None] | None = None

    def run(self) -> None:
        try:
            with lock_scratch_directory(self.settings.scratch):
                sweep_scratch(
                    self.settings.scratch,
                    self.pipeline.all_tables,
                )
                self._run()
        finally:
            self.portal.close()  # for a run that failed to start

    def _run(self) -> None:
        self.stores = self.portal.call(open_stores(self.settings.urls, domains=self.settings.domains, create=True))
        self.stores.urls = IN_ENVIRONMENT
        try:
            self._start()
            self._stopping.wait()
        finally:
            self._stop()
        if self._failure is not None:
            raise self._failure

    @property
    def uses_spark(self) -> bool:
        """Return whether the pipeline computes with Spark, or was given a session (RFC 0014)."""
        return self._opening.given or self.pipeline.uses_spark(self.settings.master)

    @property
    def has_stopped(self) -> bool:
        """True once the run has ended and no thread is left that might write into its directory."""
        return not any(thread.is_alive() for thread in self._threads if thread.name != SESSION_THREAD)

    # start and stop ---------------------------------------------------------------------------------
    def _start(self) -> None:
        stores, keep_ms = self.stores, self.settings.dead_letters_ms
        self.dead_letters = DeadLetterWriter(self.portal, self._dead_letter_shard, stores.rand, stores.clock, keep_ms)
        sources = self.pipeline.sources().items()
        self.feeds = [
            Feed(source, tables, self, self.dead_letters, self.pipeline.expectations) for source, tables in sources
        ]
        reporter = StatusReporter(self)
        self.retry_until_available(reporter.adopt)
        proving = run_unit(
            "objects", self.stores.objects.probe_while_suspected, tracker=self.tracker, clock=self.stores.clock
        )
        self._proving = asyncio.run_coroutine_threadsafe(proving, self.portal.loop)
        mark = f"pipeline:{self.settings.name}:bucket"
        own = partial(self.stores.watch_ownership, partial(self.tracker.clear_failure, mark))
        owning = run_unit(mark, own, tracker=self.tracker, clock=self.stores.clock)
        self._owning = asyncio.run_coroutine_threadsafe(owning, self.portal.loop)
        self._owning.add_done_callback(self._on_ownership_lost)
        self._start_unit("catalogue", self._maintain_registration)
        if self.pipeline.dead_letters and self.settings.dead_letters_ms:
            self._start_unit("dead-letters", self._expire_dead_letters)
        if self.uses_spark:
            self._start_thread(SESSION_THREAD, self._watch_session)
        if not is_local(self.settings.master) and not self._opening.of_caller:  # it cancels all jobs
            self._start_unit("executors", partial(watch_executors, self))
        for feed in self.feeds:
            self._start_thread(f"feed-{feed.source}", feed.run)
        if self.query is not None:
            self._start_thread("query", self.query.run)
        for table in self.pipeline.derived_tables.values():
            body = partial(self._run_derived, table)
            self._start_unit(f"derived-{table.name}", body, mark=f"shard:{table.name}")
        for history in self.pipeline.histories.values():
            body = partial(self._run_history, history)
            self._start_unit(f"history-{history.name}", body, mark=f"shard:{history.name}")
        self._start_thread("report", reporter.run)
        log.info("pipeline runs", uses_spark=self.uses_spark)

    def _stop(self) -> None:
        """Stop in this order: sinks end their rounds, mirrors are saved, the query stops, then the session and the
        stores.

        A query is never stopped inside a batch, because Spark would interrupt it there with noisy errors. Each step has
        a timeout, because a supervisor waits: the end of the process cuts off the rest, which costs only time.
        """
        self.ending.set()
        for feed in self.feeds:
            feed.wake()
        if self.query is not None:
            self.query.wake()
        clock = self.stores.clock
        until_s = clock.monotonic_s() + STOP_TIMEOUT_S
        for sink in [feed.sink for feed in self.feeds if feed.sink is not None]:
            sink.stop()
        for thread in self._threads:
            if thread.name != SESSION_THREAD:
                thread.join(max(0.1, until_s - clock.monotonic_s()))
        until_s = clock.monotonic_s() + STOP_TIMEOUT_S
        sinks = [feed.sink for feed in self.feeds if feed.sink is not None]
        rested = [sink for sink in sinks if sink.idle.wait(max(0.1, until_s - clock.monotonic_s()))]
        if self.stores.is_rolled_back:
            # Mirrors may hold commits that are gone; so may what was saved of them before.
            shutil.rmtree(self.settings.scratch / MIRRORS, ignore_errors=True)
        for sink in (
            () if self.stores.is_rolled_back else rested
        ):  # before Spark, whose stop may outlast the supervisor's wait
            for table in sink.idle_tables:
                _log_failure(table.save)
        alive = {thread.name for thread in self._threads if thread.is_alive()}
        for name, derivation in self.derivations.items():
            if derivation.writer is not None and f"derived-{name}" not in alive and not self.stores.is_rolled_back:
                _log_failure(derivation.writer.save)
        if self.query is not None and self.query.query is not None and len(rested) == len(sinks):
            run_with_timeout([self.query.query.stop], clock, STOP_TIMEOUT_S)
        for background in (self._proving, self._owning):
            if background is not None:
                background.cancel()
        if self._own_session:
            run_with_timeout([self._opening.stop], clock, STOP_TIMEOUT_S)
        _log_failure(lambda: self.portal.call(self.stores.aclose(), STOP_TIMEOUT_S))
        self.portal.close()

    def _start_unit(self, name: str, body: Callable[[], None], *, mark: str = "") -> None:
        """Start a thread whose body is retried until it returns; its failures are reported under the stage status
        `mark`."""
        self._start_thread(name, partial(self._supervise, mark or f"pipeline:{self.settings.name}:{name}", body))

    def _supervise(self, mark: str, body: Callable[[], None]) -> None:
        run_unit_thread(mark, body, tracker=self.tracker, clock=self.stores.clock, ending=self.ending)

    def _start_thread(self, name: str, body: Callable[[], None]) -> None:
        """Start a thread. An exception that leaves the body ends the process, which is then restarted."""

        def run() -> None:
            try:
                body()
            except BaseException as error:
                self._end_process(name, error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _end_process(self, part: str, error: BaseException) -> None:
        """End the process, which cannot continue."""
        if not self.ending.is_set():
            log.error("pipeline failed", part=part, error=error_sentence(error))
            mark = f"pipeline:{self.settings.name}"
            self.tracker.fail(mark, error_sentence(error), now_ms=self.stores.clock.now_ms())
            self._failure = self._failure or error
        self.ending.set()
        self._stopping.set()

    def _on_ownership_lost(self, owning: Future[None]) -> None:
        if not owning.cancelled() and (error := owning.exception()) is not None:
            self._end_process("bucket", error)

    def _sink_of(self, source: str) -> FeedSink | None:
        return next((feed.sink for feed in self.feeds if feed.source == source), None)

    def _derived_tables_began(self) -> bool:
        """Return whether each derived table has had a round."""
        begun = {name for name, derivation in list(self.derivations.items()) if derivation.rounds}
        return begun == self.pipeline.derived_tables.keys()

    def tables(self) -> list[TableWriter]:
        """Return all open tables, including derived ones."""
        out = [t for feed in self.feeds if feed.sink is not None for t in feed.sink.seats.tables]
        return out + [d.writer for d in list(self.derivations.values()) if d.writer is not None]

    # bodies of units --------------------------------------------------------------------------------
    def _maintain_registration(self) -> None:
        """Maintain the pipeline's row until the pipeline ends. Without the row, which an operator may delete while the
        driver looks dead, nothing retains the records that the pipeline has yet to read. Refused tables are reported,
        and claimed again until they are free."""
        self._claim_tables()
        if self.pipeline.dead_letters:
            self.dead_letters.open()
        self.tracker.clear_failure(f"pipeline:{self.settings.name}:catalogue")
        while not self.ending.wait(REFUSAL_CHECK_S if self.claims.refused else REGISTRATION_CHECK_S):
            self._claim_tables()

    def _claim_tables(self) -> None:
        before = self.claims.refused.keys()
        self.claims.refresh(self.portal, self.stores)
        now_ms = self.stores.clock.now_ms()
        for table, why in self.claims.refused.items():
            self.tracker.fail(self.refusal_status_name(table), why, now_ms=now_ms, parked=True)
            self.tracker.remove(f"shard:{table}")  # an earlier process, or this one before the refusal, may have set it
        for table in before - self.claims.refused.keys():
            self.tracker.clear_failure(self.refusal_status_name(table))
            self.tracker.remove(self.refusal_status_name(table))

    def _dead_letter_shard(self) -> LogShard:
        """Return the dead-letter shard. Raises InvalidError if a shard of that name is not one."""
        return self.portal.call(self.stores.shard(self.pipeline.dead_letters, DEAD_LETTERS))

    def _expire_dead_letters(self) -> None:
        """Remove old dead letters until the pipeline ends."""
        while not self.ending.wait(EXPIRY_INTERVAL_S):
            if self.dead_letters.expire(self.ending) is not None:
                self.tracker.clear_failure(f"pipeline:{self.settings.name}:dead-letters")

    def _watch_session(self) -> None:
        """Open the session. Raises SparkSessionLostError when its JVM exits, which derived tables alone would notice
        only at their next input."""
        self._supervise(f"pipeline:{self.settings.name}:spark", self._open_session)
        if self.session_ready.is_set() and not self._opening.of_caller and wait_for_jvm():
            raise SparkSessionLostError("Spark's JVM has exited.")

    def _open_session(self) -> None:
        from tidemill.spark.source import register

        if self.spark is None:
            self.spark = self._opening.session()
            self.spark_local = self._opening.local
        spark = self.spark
        self._opening.prepare_executors()
        urls = self._opening.worker_urls
        register(spark, urls.objects, urls.consensus)
        self.session_ready.set()
        log.info("session is ready", spark=spark.version, master=spark.sparkContext.master)

    def _run_history(self, table: HistoryTable) -> None:
        if not self.claims.wait_ownership(table.name, self.ending):
            return
        if table.name not in self.histories:
            self.histories[table.name] = History(self.portal, self.stores, table, self.mirror_dir(table.name))
        self.histories[table.name].run(self.ending, partial(self.tracker.clear_failure, f"shard:{table.name}"))

    def _run_derived(self, table: DerivedTable) -> None:
        while not self.session_ready.wait(0.2):
            if self.ending.is_set():
                return
        if not self.claims.wait_ownership(table.name, self.ending):
            return
        assert self.spark is not None
        found = self.derivations.get(table.name)
        if found is None:
            found = Derivation(self.portal, self.stores, self.spark, table, self.mirror_dir(table.name))
            self.derivations[table.name] = found
        try:
            found.run(self.ending, partial(self.tracker.clear_failure, f"shard:{table.name}"))
        except BaseException as error:
            if not self.session_is_lost():
                raise
            self._end_process(
                f"derived-{table.name}",
                SparkSessionLostError(f"Spark's session is lost: error={error_sentence(error)}."),
            )


def run_with_timeout(calls: Sequence[Callable[[], Any]], clock: Clock, timeout_s: float) -> None:
    """Run the calls concurrently, and wait for them at most `timeout_s`."""
    threads = [threading.Thread(target=_log_failure, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    until_s = clock.monotonic_s() + timeout_s
    for thread in threads:
        thread.join(max(0.0, until_s - clock.monotonic_s()))


def _log_failure(call: Callable[[], Any]) -> None:
    """Log an exception instead of raising it: at the end of a process nothing durable depends on the call."""
    try:
        call()
    except (TidemillError, OSError, TimeoutError) as error:
        if not isinstance(error, ClosedError):
            log.warning("closing failed", error=str(error))
    except Exception as error:
        log.warning("closing failed", error=str(error).splitlines()[0][:200])


def watch_executors(host: PipelineContext) -> None:
    """Watch until the pipeline ends, once Spark's context exists. While no executor is left, report it under
    `executors_status_name`.

    If Spark itself requests executors on demand (dynamic allocation), having none is normal, and nothing is watched.
    """
    while host.spark is None:
        if host.ending.wait(EXECUTOR_CHECK_S):
            return
    if host.spark.sparkContext.getConf().get("spark.dynamicAllocation.enabled", "false") == "true":
        return
    context, clock, mark = host.spark.sparkContext, host.stores.clock, executors_status_name(host.settings.name)
    seen_s = clock.monotonic_s()
    while not host.ending.wait(EXECUTOR_CHECK_S):
        if executor_count(context):
            seen_s = clock.monotonic_s()
            host.tracker.clear_failure(mark)
        elif clock.monotonic_s() - seen_s > REPLACEMENT_WAIT_S:
            if host.tracker.failure(mark) is None:
                why = f"no executor is left: the driver computes everything: master={context.master}."
                host.tracker.fail(mark, why, now_ms=clock.now_ms(), held_by=context.master)
            context.cancelAllJobs()


def executor_count(context: SparkContext) -> int:
    """Return the number of executors, without the driver, which Spark includes."""
    return int(context._jsc.sc().getExecutorMemoryStatus().size()) - 1
