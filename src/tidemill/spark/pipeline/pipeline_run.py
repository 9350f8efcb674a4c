"""A pipeline that runs in a session of the caller: its handle, with the threads that run and guard it.

runner (a daemon thread)    until stop(), or the end of the session
guard (a daemon thread)     renews the lease, watches the session
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

import structlog

from tidemill.base.clock import SystemClock
from tidemill.base.errors import InvalidError
from tidemill.base.runtime.tasks import error_sentence
from tidemill.base.status.status import derive_status, lag_of
from tidemill.spark.pipeline.run_lease import RunLease
from tidemill.spark.pipeline.runner import PipelineRunner
from tidemill.spark.session.requirements import is_context_stopped

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

GUARD_S = 0.5
STOP_TIMEOUT_S = 30.0

log = structlog.get_logger()


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
        """Stop at the end of the current steps. Raises TimeoutError if that takes longer; the run still stops."""
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
        names = sorted(runner.pipeline.all_tables)
        return RunStatus(self.name, self.instance, state, error, {name: self._table_status(name) for name in names})

    def _table_status(self, name: str) -> TableStatus:
        runner, now_ms = self._runner, SystemClock().now_ms()
        if refused := runner.claims.refused.get(name):
            return TableStatus("stuck", 0, None, "", refused)
        mark = runner.tracker.mark(f"shard:{name}")
        if mark is None:
            return TableStatus("starting", 0, None, "", "")
        derived = derive_status(mark, runner.settings.process, now_ms, now_ms)
        return TableStatus(str(derived.state), mark.position, lag_of(mark), derived.blocker, mark.error or mark.reason)

    def __repr__(self) -> str:
        found = self.status()
        lines = [f"pipeline {found.pipeline} ({found.instance}): {found.state} {found.error}".rstrip()]
        for name, table in found.tables.items():
            why = f", blocked by {table.blocked_by}" if table.blocked_by else ""
            lag = "lag unknown" if table.lag_ms is None else f"lag {table.lag_ms} ms"
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
