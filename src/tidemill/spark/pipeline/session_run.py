"""`tidemill.spark.run`: a pipeline in the Spark session of the caller, such as a notebook, `spark-submit`, or a job.

    run(spark, build) ─► build(p), checks, the lease of (pipeline, instance)   in the caller's thread: errors are raised
                      └► runner (a daemon thread)                              until stop(), or the end of the session
                      └► guard (a daemon thread)                               renews the lease, watches the session

The pipeline uses a separate session of the caller's Spark application (`newSession`), so the caller's settings and
temporary views neither change nor matter. It has no streaming query: the feeds advance the tables without it. It never
stops the application, cancels its jobs, or installs signal handlers.

Invariant (any number of writers): identical drivers, runs and killed processes leave tables exact, because every append
is a compare-and-append. The lease only prevents that two sessions do the same work by mistake: the second one is
refused, and a run that lost its lease ends.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

import structlog

from tidemill.base.clock import Rand, SystemClock
from tidemill.base.config.sections import NAME, NOT_A_NAME
from tidemill.base.errors import ConflictError, InvalidError, TidemillError
from tidemill.base.limits import LEASE_TTL_MS, STATUS_BLIND_AFTER_MS
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.base.runtime.tasks import error_sentence
from tidemill.base.status.logging import configure_logs
from tidemill.base.status.status import derive_status, lag_of, this_process
from tidemill.consensus.api import Consensus, Lease
from tidemill.consensus.factory import open_consensus
from tidemill.consensus.status.board import StatusBoard
from tidemill.spark.definition import Pipeline
from tidemill.spark.ingest.pipeline_context import is_context_stopped
from tidemill.spark.pipeline.runner import PipelineRunner
from tidemill.spark.session.java import cache_dir
from tidemill.spark.session.opener import SessionOpener
from tidemill.spark.session.python_worker import check_session_python
from tidemill.spark.settings import DriverSettings, StoreUrls, find_cluster
from tidemill.spark.source import registered_urls

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Build = Callable[[Pipeline], object]
INSTANCE = "session"
OLDEST_SPARK = (4, 3)
LEASE_WAIT_MS = LEASE_TTL_MS + 2_000
"""Time to wait for the lease: that of a killed process expires within it."""
GUARD_S = 0.5
RETRY_S = 0.25
STOP_TIMEOUT_S = 30.0

log = structlog.get_logger()

_running: dict[tuple[str, str, StoreUrls], PipelineRun] = {}
_starting = threading.Lock()
_exit_hook = threading.Event()
"""Set once `stop_all` is called at the end of the interpreter."""


class TableStatus(NamedTuple):
    """Status of one table. `upper_ms`: the table is readable at times below it. `state`: idle (up to date), moving,
    waiting, stuck, or starting. `lag_ms`: None while the table has no time."""

    state: str
    upper_ms: int
    lag_ms: int | None
    blocked_by: str
    reason: str


class RunStatus(NamedTuple):
    """Status of a run. `state`: running, stopped or failed. `error`: of the run, or of its session; "" = none."""

    pipeline: str
    instance: str
    state: str
    error: str
    tables: dict[str, TableStatus]


class PipelineRun:
    """A running pipeline. It ends at `stop`, with the session, or with the process; also at the end of a `with`."""

    def __init__(self, spark: SparkSession, runner: PipelineRunner, stopping: threading.Event, lease: RunLease) -> None:
        self._spark = spark
        self._runner = runner
        self._stopping = stopping
        self._lease = lease
        self._ended = threading.Event()
        self._failure: BaseException | None = None

    @property
    def name(self) -> str:
        return self._runner.settings.name

    @property
    def instance(self) -> str:
        return self._runner.settings.instance

    @property
    def is_running(self) -> bool:
        return not self._ended.is_set()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop at the end of the current steps. Raises TimeoutError if that takes longer; it stops all the same."""
        self._stopping.set()
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"pipeline {self.name} is still stopping after {timeout_s:g} s")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the run ends; return False if it still runs after `timeout_s`. Raises the error that ended it.

        An interruption (KeyboardInterrupt) ends the wait only: the pipeline continues.
        """
        if not self._ended.wait(timeout_s):
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def status(self) -> RunStatus:
        """Return the state of the run and of its tables now, as `tidemill status` shows them."""
        runner = self._runner
        state = "running" if self.is_running else "failed" if self._failure is not None else "stopped"
        error = error_sentence(self._failure) if self._failure is not None else ""
        if failing := runner.tracker.failures(f"pipeline:{self.name}:spark"):
            error = error or failing[0][1]
        names = sorted({*runner.pipeline.tables, *runner.pipeline.derived_tables})
        return RunStatus(self.name, self.instance, state, error, {name: self._table_status(name) for name in names})

    def _table_status(self, name: str) -> TableStatus:
        runner, now_ms = self._runner, SystemClock().now_ms()
        if refused := runner.claims.refused.get(name):
            return TableStatus("stuck", 0, None, "", refused)
        mark = runner.tracker.mark(f"shard:{name}")
        if mark is None:
            return TableStatus("starting", 0, None, "", "")
        derived = derive_status(mark, runner.settings.process, now_ms, now_ms)
        return TableStatus(str(derived.state), mark.position, lag_of(mark), mark.held_by, mark.error or mark.reason)

    def __repr__(self) -> str:
        found = self.status()
        lines = [f"pipeline {found.pipeline} ({found.instance}): {found.state} {found.error}".rstrip()]
        for name, table in found.tables.items():
            why = f", blocked by {table.blocked_by}" if table.blocked_by else ""
            lag = "no time yet" if table.lag_ms is None else f"lag {table.lag_ms} ms"
            lines.append(f"  {name}: {table.state}, {lag}{why} {table.reason}".rstrip())
        return "\n".join(lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # threads --------------------------------------------------------------------------------------
    def start_threads(self, ended: Callable[[], object]) -> None:
        """Start the threads; `ended` is called once nothing of the run is left."""
        settings = self._runner.settings
        threading.Thread(target=self._body, args=(ended,), name=f"pipeline-{settings.name}", daemon=True).start()
        threading.Thread(target=self._guard, name=f"guard-{settings.name}", daemon=True).start()

    def _body(self, ended: Callable[[], object]) -> None:
        try:
            self._runner.run()
        except BaseException as error:  # also of the user's functions, e.g. SystemExit
            if not is_context_stopped(self._spark):  # a pipeline ends with its session: that is no failure
                self._failure = self._failure or error
                log.error("pipeline failed", pipeline=self.name, error=error_sentence(error))
        finally:
            self._stopping.set()
            if self._failure is None:
                self._lease.drop_report(self.name, self._runner.settings.process)
            self._lease.close()
            ended()
            self._ended.set()

    def _guard(self) -> None:
        """Stop the run when its session ends, or another session holds its lease."""
        while not self._stopping.wait(GUARD_S):
            if is_context_stopped(self._spark):
                self._stopping.set()
            elif (holder := self._lease.renew()) is not None:
                self._failure = InvalidError(
                    f"another session runs the pipeline, because this one did not answer: pipeline={self.name}"
                    f" instance={self.instance} by={holder}.",
                    fix="Run it again once that one has stopped, or with another instance=NAME.",
                )
                self._stopping.set()


class RunLease:
    """Lease of one (pipeline, instance), for one run. It is renewed by one thread."""

    def __init__(self, urls: StoreUrls, name: str, instance: str, holder: str) -> None:
        self._clock, self._rand = SystemClock(), Rand()
        self._name = f"pipeline/{name}/{instance}"
        self._holder = f"{holder} {self._rand.nonce()}"
        self._portal = BlockingPortal(f"lease-{name}")
        self._lease: Lease | None = None
        self._renewed_s = 0.0
        try:
            self._consensus: Consensus = self._portal.call(
                open_consensus(urls.consensus, self._clock, self._rand, create=False)
            )
        except BaseException:
            self._portal.close()
            raise

    def acquire(self) -> str | None:
        """Acquire the lease, waiting for one that a killed process left; return the holder if that is another. Raises
        UnavailableError."""
        until_s = self._clock.monotonic_s() + LEASE_WAIT_MS / 1000
        while True:
            try:
                self._lease = self._portal.call(self._consensus.acquire(self._name, self._holder, LEASE_TTL_MS))
                self._renewed_s = self._clock.monotonic_s()
                return None
            except ConflictError as error:
                if self._clock.monotonic_s() >= until_s:
                    return _holder_of(error)
            threading.Event().wait(RETRY_S)

    def renew(self) -> str | None:
        """Renew the lease when it is due; return the holder if that is another by now."""
        if self._clock.monotonic_s() - self._renewed_s < LEASE_TTL_MS / 3000:
            return None
        try:
            self._lease = self._portal.call(self._consensus.acquire(self._name, self._holder, LEASE_TTL_MS))
            self._renewed_s = self._clock.monotonic_s()
        except ConflictError as error:
            return _holder_of(error)
        except (TidemillError, CancelledError) as error:  # cancelled: the run ends
            log.warning("lease not renewed", lease=self._name, error=str(error))
        return None

    def drop_report(self, pipeline: str, process: str) -> None:
        """Drop the report of a run that ended in order, if another driver of the pipeline reports. Otherwise `status`
        shows the run as silent, because nothing maintains its tables."""

        async def drop() -> None:
            board = StatusBoard(self._consensus, self._rand)
            oldest_ms = self._clock.now_ms() - STATUS_BLIND_AFTER_MS
            for report in await board.reports():
                other = report.process != process and f"{report.process}:".startswith(f"pipeline:{pipeline}:")
                if other and report.at_ms >= oldest_ms:
                    return await board.drop_report(process)

        try:
            self._portal.call(drop())
        except TidemillError as error:
            log.info("report not dropped", process=process, cause=str(error))

    def close(self) -> None:
        try:
            if self._lease is not None:
                self._portal.call(self._consensus.release(self._name, self._holder, self._lease.term))
            self._portal.call(self._consensus.aclose())
        except TidemillError as error:
            log.info("lease not released; it expires", lease=self._name, cause=str(error))
        finally:
            self._portal.close()


def _holder_of(error: ConflictError) -> str:
    """Return the holder without its nonce."""
    return error.current.holder.rpartition(" ")[0] if isinstance(error.current, Lease) else "another session"


def run(
    spark: SparkSession,
    build: Build,
    *,
    name: str = "",
    instance: str = INSTANCE,
    config: str = "",
    objects: str = "",
    consensus: str = "",
    scratch: str | Path | None = None,
) -> PipelineRun:
    """Run the pipeline that `build(p)` declares in this session, and return immediately.

    `name`: the pipeline's; by default that of the function, or of its file if the function is called `build`.
    `instance`: distinguishes runs of one pipeline: a second one of the same instance is refused. `config`, `objects`,
    `consensus`: the cluster, chosen as by `read`. `scratch`: directory of the mirrors, which are caches.

    Raises InvalidError if a declaration is wrong, the session lacks something, or the pipeline runs already;
    UnavailableError if consensus does not answer; and what `build` raises.
    """
    if not structlog.is_configured():
        configure_logs("warning")
    pipeline = Pipeline(name or _name_of(build))
    for one in (pipeline.name, instance):
        if not NAME.match(one):
            raise InvalidError(f"bad name: {NOT_A_NAME.format(one)}.", fix="Set name=… or instance=….")
    build(pipeline)
    pipeline.check()
    check_session(spark)
    urls = find_cluster(objects, consensus, config, registered_urls(spark))
    master = spark.sparkContext.master
    directory = Path(scratch) if scratch is not None else _default_scratch(urls, pipeline.name, instance)
    settings = DriverSettings(pipeline.name, Path(), urls, master, directory.absolute(), instance=instance)
    key = (pipeline.name, instance, urls)
    with _starting:
        if key in _running:
            raise _already_runs(settings, "this process")
        pid, host = this_process()
        lease = RunLease(urls, pipeline.name, instance, f"{spark.sparkContext.applicationId} pid {pid} on {host}")
        try:
            if (holder := lease.acquire()) is not None:
                raise _already_runs(settings, holder)
            stopping = threading.Event()
            opener = SessionOpener(settings, shared=True, spark=spark, of_caller=True)
            found = PipelineRun(spark, PipelineRunner(settings, stopping, opener, pipeline), stopping, lease)
        except BaseException:
            lease.close()
            raise
        if not _exit_hook.is_set():
            # Before Python ends its pools of threads, which a run needs to stop; hooks of `atexit` are called later.
            getattr(threading, "_register_atexit", atexit.register)(stop_all)
            _exit_hook.set()
        _running[key] = found
        found.start_threads(partial(_running.pop, key, None))
    return found


def stop_all() -> None:
    """Stop all runs of this process, as the end of a program without `stop` does."""
    for found in list(_running.values()):
        try:
            found.stop()
        except TimeoutError as error:
            log.warning("run not stopped", error=str(error))


def check_session(spark: SparkSession) -> None:
    """Raise InvalidError naming what a pipeline needs and this session does not have."""
    if not hasattr(spark, "_jsparkSession"):
        raise InvalidError(
            "a pipeline needs a classic session, and this is a client of Spark Connect: setting=spark.remote.",
            fix="Run it where Spark's driver runs: spark-submit, a job, or a notebook without Spark Connect.",
        )
    if is_context_stopped(spark):
        raise InvalidError("the session was stopped.", fix="Create another: SparkSession.builder.getOrCreate().")
    version = tuple(int(part) for part in spark.version.split(".")[:2])
    if version < OLDEST_SPARK:
        wanted = ".".join(map(str, OLDEST_SPARK))
        raise InvalidError(f"Spark is too old: version={spark.version}.", fix=f"Use Spark {wanted} or newer.")
    check_session_python(spark)


def _already_runs(settings: DriverSettings, holder: str) -> InvalidError:
    return InvalidError(
        f"the pipeline runs already: pipeline={settings.name} instance={settings.instance} by={holder}.",
        fix="Stop that run (.stop() of the value that run() returned), or run this one with another instance=NAME.",
    )


def _name_of(build: Build) -> str:
    """Return the name of the function, or of its file if it is called `build`."""
    name = getattr(build, "__name__", "")
    if name != "build":
        return name.lower()
    file = Path(sys.modules["__main__"].__dict__.get("__file__") or "")
    code = getattr(build, "__code__", None)
    if code is not None and Path(code.co_filename).suffix == ".py" and "ipykernel" not in code.co_filename:
        file = Path(code.co_filename)
    if not file.stem or "ipykernel" in str(file):
        raise InvalidError("the pipeline has no name.", fix="Set name=NAME, or name the function as the pipeline.")
    return file.stem.lower()


def _default_scratch(urls: StoreUrls, name: str, instance: str) -> Path:
    """Return a directory of this user, cluster, pipeline and instance."""
    cluster = zlib.crc32(f"{urls.objects} {urls.consensus}".encode())
    return cache_dir(os.environ) / "sessions" / f"{cluster:08x}" / f"{name}-{instance}"
