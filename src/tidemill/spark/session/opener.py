"""Opener of the one Spark session of a process. The first pipeline that uses Spark starts the JVM.

If several pipelines share the JVM, each gets a separate session in it: its temporary views and SQL settings are not the
others'.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.spark.session.code_shipping import set_worker_environment, ship_code
from tidemill.spark.session.session import EXACT_SETTINGS, LOCAL_DIRECTORY, build_session, is_local
from tidemill.spark.settings import IN_ENVIRONMENT, DriverSettings, StoreUrls

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SessionOpener:
    """Opener of a session. `settings` describe the session and its scratch directory; `spark`: an existing session;
    `of_caller`: its application is not ours. Callable from any thread; long operations are serialized."""

    def __init__(
        self,
        settings: DriverSettings,
        *,
        shared: bool = False,
        spark: SparkSession | None = None,
        of_caller: bool = False,
    ) -> None:
        self.given = spark is not None
        """True if the session existed before."""
        self.of_caller = of_caller
        self._settings = settings
        self._shared = shared
        self._spark = spark
        self._works = False
        self.local: Path | None = None
        """Directory in which the session that this process opened stores its blocks."""
        self._lock = threading.Lock()

    def session(self) -> SparkSession:
        """Return the session; block while the JVM starts. Raises InvalidError without Java, and Spark's own
        exceptions."""
        settings = self._settings
        with self._lock:
            if self._spark is None:
                self._spark = build_session(
                    f"tidemill-{settings.name}",
                    settings.master,
                    scratch=settings.scratch,
                    driver_memory=settings.driver_memory,
                    extra=settings.conf,
                )
                self._spark.sparkContext.setLogLevel("WARN")
                self.local = settings.scratch / LOCAL_DIRECTORY
            session = self._spark.newSession() if self._shared else self._spark
            if self.of_caller:
                for setting, value in EXACT_SETTINGS.items():
                    session.conf.set(setting, value)
            return session

    @property
    def worker_urls(self) -> StoreUrls:
        """URLs that the session must pass to its planners; our own drivers have them in their environment."""
        return self._settings.urls if self.of_caller else IN_ENVIRONMENT

    def prepare_executors(self) -> None:
        """Block until executors can run our tasks. Called after `session`. Raises the errors of `ship_code`."""
        with self._lock:
            if self._works or self._spark is None:
                return
            context = self._spark.sparkContext
            set_worker_environment(context, self._settings.urls)
            if not is_local(context.master):
                ship_code(context, self._settings.scratch / "archive")
            self._works = True

    def stop(self) -> None:
        if self._spark is not None:
            self._spark.stop()


def wait_for_jvm() -> bool:
    """Block until the JVM that this process started has exited; return False immediately if another process owns it."""
    from pyspark import SparkContext

    process = getattr(SparkContext._gateway, "proc", None)
    if process is None:
        return False
    with suppress(ChildProcessError):  # its exit status was collected already
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # leave the exit status for others to collect
    return True
