"""Several pipelines in one driver process, because a process and a JVM each are expensive on a small machine.

    SharedDriver ─┬─ one thread per pipeline: a Runner; when it ends, its error is reported (parked.py) and it restarts
                  └─ SessionOpener: the JVM, and in it a session for each pipeline that uses Spark

The unit of failure is still the pipeline: a file that does not import, or another failure of a Runner, ends no other
pipeline. Two failures end the process, and with it all pipelines: the JVM exits, because only a new process gets
another, and the URL of consensus is wrong, because then nothing can be reported. Stores, tables, mirrors, statuses and
the report are separate for each pipeline; the processor, Python's lock and the JVM's heap are shared.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence
from pathlib import Path

import structlog

from tidemill.base.clock import SystemClock
from tidemill.base.errors import InvalidError, ends_process
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.base.runtime.tasks import Backoff, error_sentence, needs_operator
from tidemill.spark.ingest.pipeline_context import lock_scratch_directory, sweep_scratch
from tidemill.spark.pipeline.parked import publish_failure
from tidemill.spark.pipeline.runner import STOP_TIMEOUT_S, PipelineRunner, run_with_timeout
from tidemill.spark.pipeline.streaming_query import SparkSessionLostError
from tidemill.spark.session.opener import SessionOpener
from tidemill.spark.settings import DriverSettings

END_TIMEOUT_S = 14.0
"""Time that the pipelines have to end concurrently; the rest is killed. With Spark's stop it is a supervisor's
wait."""

log = structlog.get_logger()


class SharedDriver:
    """Driver of several pipelines. `session` names the Spark session and has its directory. `run` blocks until
    `stopping` is set, which the driver also does when the process cannot continue; it then raises the cause."""

    def __init__(self, pipelines: Sequence[DriverSettings], session: DriverSettings, stopping: threading.Event) -> None:
        self._pipelines = pipelines
        self._session = session
        self._opening = SessionOpener(session, shared=True)
        self._stopping = stopping
        self._clock = SystemClock()
        self._began_ms = self._clock.now_ms()
        self._lives: dict[str, threading.Event] = {}
        self._lock = threading.Lock()
        self._failure: BaseException | None = None

    def run(self) -> None:
        with lock_scratch_directory(self._session.scratch):
            sweep_scratch(self._session.scratch, ())
            threads = [
                threading.Thread(
                    target=self._supervise_pipeline, args=(settings,), name=f"pipeline-{settings.name}", daemon=True
                )
                for settings in self._pipelines
            ]
            for thread in threads:
                thread.start()
            self._stopping.wait()
            with self._lock:
                for life in self._lives.values():
                    life.set()
            until_s = self._clock.monotonic_s() + END_TIMEOUT_S
            for thread in threads:
                thread.join(max(0.1, until_s - self._clock.monotonic_s()))
            run_with_timeout([self._opening.stop], self._clock, STOP_TIMEOUT_S)
        if self._failure is not None:
            raise self._failure

    def _new_stop_event(self, name: str) -> threading.Event:
        """Return the event that ends the pipeline's next Runner, already set if the driver is ending.

        The thread that ends the driver sets `stopping` before it reads `_lives`, so it either finds this event or
        `stopping` is visible here.
        """
        life = threading.Event()
        with self._lock:
            self._lives[name] = life
            if self._stopping.is_set():
                life.set()
        return life

    def _supervise_pipeline(self, settings: DriverSettings) -> None:
        """Run one pipeline until the driver ends."""
        restarts = Backoff()
        while not self._stopping.is_set():
            runner: PipelineRunner | None = None
            seen, began_s = file_version(settings.file), self._clock.monotonic_s()
            try:
                importlib.invalidate_caches()  # a module that its file lacked may exist now
                runner = PipelineRunner(settings, self._new_stop_event(settings.name), self._opening)
                runner.run()
            except BaseException as fault:  # also exceptions of the user's file such as SystemExit
                if (
                    isinstance(fault, SparkSessionLostError)
                    or ends_process(fault)
                    or (runner is not None and runner.uses_spark and runner.session_is_lost())
                ):
                    return self._end(fault)
                pause_s = restarts.pause_s(self._clock.monotonic_s() - began_s, paused=needs_operator(fault))
                log.error(
                    "unit failed",
                    unit=f"pipeline:{settings.name}",
                    error=error_sentence(fault),
                    parked=needs_operator(fault),
                )
                try:
                    self._report_and_pause(settings, fault, runner, seen, pause_s)
                except InvalidError as error:
                    return self._end(error)
                except BaseException as error:  # the pipeline continues even if its status cannot be published
                    log.error(
                        "status of unit not published", unit=f"pipeline:{settings.name}", error=error_sentence(error)
                    )
                    self._stopping.wait(pause_s)

    def _report_and_pause(
        self,
        settings: DriverSettings,
        fault: BaseException,
        runner: PipelineRunner | None,
        seen: object,
        pause_s: float,
    ) -> None:
        """Publish the status during the pause, which ends early if the pipeline's file changes.

        Raises InvalidError if no status can be published at all.
        """
        until_s = self._clock.monotonic_s() + pause_s

        def over() -> bool:
            if self._stopping.is_set():
                return True
            if runner is not None and not runner.has_stopped:
                return False
            return self._clock.monotonic_s() >= until_s or file_version(settings.file) != seen

        with BlockingPortal(f"parked-{settings.name}") as portal:
            portal.call(publish_failure(settings, fault, self._began_ms, over))

    def _end(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._stopping.set()


def file_version(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
