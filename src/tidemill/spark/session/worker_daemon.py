"""Daemon of Spark's Python workers on this machine: PySpark's own, without tracebacks of workers that nobody reads.

Spark closes the socket of a planner once it has the plan, sometimes before the worker has flushed the end of its
stream. PySpark 4.1 and newer then print a traceback into the log of the driver, although the plan is complete. Such a
worker ends silently here; every other error is printed as before.

    python -m tidemill.spark.session.worker_daemon pyspark.worker
"""

from __future__ import annotations

from typing import Any

from pyspark import daemon

_serve_worker = daemon.worker


def serve_worker(sock: Any, authenticated: bool) -> int:
    """Run one worker until its socket ends. Return its exit code; it is not 0 if the JVM has closed the socket."""
    try:
        return int(_serve_worker(sock, authenticated))
    except BrokenPipeError:
        return 1


if __name__ == "__main__":
    daemon.worker = serve_worker
    daemon.manager()
