"""The one Spark session of a process: opened by the first of its pipelines that comes to it, the same JVM for all.

Where several share it, each gets a session of its own in it: its temporary views and SQL settings are not the others'.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.spark.session.code_shipping import ship, tell
from tidemill.spark.session.session import LOCAL_DIRECTORY, build_session, is_local
from tidemill.spark.settings import DriverSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SessionOpener:
    """`settings` say what the session is like, and its scratch directory; `spark`: one that is there already. Callable
    from any thread; what is long is done for one at a time."""

    def __init__(self, settings: DriverSettings, *, shared: bool = False, spark: SparkSession | None = None) -> None:
        self._settings = settings
        self._shared = shared
        self._spark = spark
        self._works = False
        self.local: Path | None = None
        """Where the session that this process has opened keeps its blocks."""
        self._lock = threading.Lock()

    def session(self) -> SparkSession:
        """Blocks while the JVM starts. Raises Invalid without Java, and what Spark raises."""
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
            return self._spark.newSession() if self._shared else self._spark

    def make_work(self) -> None:
        """Blocks until executors can run our tasks, after `session`. Raises as `ship` does."""
        with self._lock:
            if self._works or self._spark is None:
                return
            context = self._spark.sparkContext
            tell(context, self._settings.urls)
            if not is_local(context.master):
                ship(context, self._settings.scratch / "archive")
            self._works = True

    def stop(self) -> None:
        if self._spark is not None:
            self._spark.stop()


def wait_for_jvm() -> bool:
    """Blocks until the JVM that this process started has ended; False, at once, where it is somebody else's."""
    from pyspark import SparkContext

    process = getattr(SparkContext._gateway, "proc", None)
    if process is None:
        return False
    with suppress(ChildProcessError):  # somebody has asked already how it ended
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # and whoever comes later may ask too
    return True
