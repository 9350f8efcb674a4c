"""Several pipelines in one driver process, on one Spark session: a JVM each is dear where the machine is small.

    Together ─┬─ a thread a pipeline: a Runner; when it ends, its error is told (parked.py) and it is tried again
              └─ Opening: the JVM, and in it a session for each pipeline

The unit of failure stays the pipeline: a file that does not import, or whatever else ends its Runner, ends no other
one. Two things end the process, and with it all of them: the JVM is gone, for only a new process gets another, and the
URL of consensus is wrong, for nothing could be told. Stores, tables, mirrors, marks and the report are each pipeline's
own; the processor, Python's lock and the JVM's heap are shared.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Sequence
from pathlib import Path

import structlog

from tidemill.base.clock import SystemClock
from tidemill.base.errors import InvalidError, ends_process
from tidemill.base.runtime.tasks import Backoff, parks, sentence
from tidemill.spark.ingest.pipeline_context import own_directory
from tidemill.spark.pipeline.parked import tell
from tidemill.spark.pipeline.runner import STOP_TIMEOUT_S, Runner, bounded
from tidemill.spark.pipeline.scratch import sweep
from tidemill.spark.pipeline.streaming_query import SparkSessionLostError
from tidemill.spark.session.opener import SessionOpener
from tidemill.spark.settings import DriverSettings

END_TIMEOUT_S = 14.0
"""So long pipelines have to end, all at once; what then is left is cut off. With Spark's end, a supervisor's wait."""

log = structlog.get_logger()


class SharedDriver:
    """`session` names the Spark session and has its directory. `run` blocks until `stopping` is set, by itself too when
    the process is of no use any more, and raises why."""

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
        with own_directory(self._session.scratch):
            sweep(self._session.scratch, ())
            threads = [
                threading.Thread(target=self._keep, args=(settings,), name=f"pipeline-{settings.name}", daemon=True)
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
            bounded([self._opening.stop], self._clock, STOP_TIMEOUT_S)
        if self._failure is not None:
            raise self._failure

    def _life(self, name: str) -> threading.Event:
        """What ends the pipeline's next Runner. Set already when the driver ends: whoever ends it has seen either this
        one or none, and `stopping` was set before it looked."""
        life = threading.Event()
        with self._lock:
            self._lives[name] = life
            if self._stopping.is_set():
                life.set()
        return life

    def _keep(self, settings: DriverSettings) -> None:
        """One pipeline, until the driver ends."""
        restarts = Backoff()
        while not self._stopping.is_set():
            runner: Runner | None = None
            seen, began_s = version(settings.file), self._clock.monotonic_s()
            try:
                importlib.invalidate_caches()  # a module that its file lacked may be there now
                runner = Runner(settings, self._life(settings.name), self._opening)
                runner.run()
            except BaseException as fault:  # also what the user's file raises to leave
                if (
                    isinstance(fault, SparkSessionLostError)
                    or ends_process(fault)
                    or (runner is not None and runner.session_is_lost())
                ):
                    return self._end(fault)
                pause_s = restarts.pause_s(self._clock.monotonic_s() - began_s, parked=parks(fault))
                log.error("unit failed", unit=f"pipeline:{settings.name}", error=sentence(fault), parked=parks(fault))
                try:
                    self._pause(settings, fault, runner, seen, pause_s)
                except InvalidError as error:
                    return self._end(error)
                except BaseException as error:  # that it cannot be told is no reason to give the pipeline up
                    log.error("unit is not told", unit=f"pipeline:{settings.name}", error=sentence(error))
                    self._stopping.wait(pause_s)

    def _pause(
        self, settings: DriverSettings, fault: BaseException, runner: Runner | None, seen: object, pause_s: float
    ) -> None:
        """Told meanwhile, and over at once when its file is another. Raises InvalidError when nobody can be told."""
        until_s = self._clock.monotonic_s() + pause_s

        def over() -> bool:
            if self._stopping.is_set():
                return True
            if runner is not None and not runner.rests:
                return False
            return self._clock.monotonic_s() >= until_s or version(settings.file) != seen

        asyncio.run(tell(settings, fault, self._began_ms, over))

    def _end(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._stopping.set()


def version(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
