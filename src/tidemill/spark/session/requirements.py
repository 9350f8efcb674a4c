"""Requirements of tidemill on the Spark of a session: its version, and what only a session with a JVM has."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import structlog

from tidemill.base.errors import InvalidError
from tidemill.spark.session.python_worker import check_session_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OLDEST_SPARK = (4, 0)
CONNECT_VARIABLES = ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED")
"""Variables with which PySpark creates sessions of Spark Connect: the first is the user's, the second its own."""

log = structlog.get_logger()


def spark_version(text: str) -> tuple[int, int]:
    """Return (major, minor) of a version such as 4.0.1 or 4.3.0.dev1."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def check_spark_version(text: str, needed: tuple[int, int], what: str, *, fix: str = "Use a newer Spark.") -> None:
    """Raise InvalidError if Spark `text` is older than `what` needs."""
    if spark_version(text) < needed:
        raise InvalidError(f"{what} needs Spark {'.'.join(map(str, needed))} or newer: version={text}.", fix=fix)


def check_has_jvm() -> None:
    """Raise InvalidError if this process cannot start a JVM: PySpark is the client of Spark Connect alone, or is
    directed to a server."""
    try:
        import py4j  # noqa: F401
    except ImportError as error:
        raise InvalidError(
            "a session of this process needs `pyspark`; installed is `pyspark-client`, which has no JVM.",
            fix='Install tidemill[spark], or connect to a server: SparkSession.builder.remote("sc://HOST").',
        ) from error
    for variable in CONNECT_VARIABLES:
        if os.environ.get(variable):
            raise InvalidError(
                f"a session of this process needs a JVM, and PySpark uses Spark Connect: variable={variable}.",
                fix="Run it in a process without Spark Connect, where Spark's driver runs.",
            )


def check_pipeline_session(spark: SparkSession) -> None:
    """Raise InvalidError naming what a pipeline needs and this session does not have."""
    if not hasattr(spark, "_jsparkSession"):
        raise InvalidError(
            "a pipeline needs a session with a JVM, and this is a client of Spark Connect: setting=spark.remote.",
            fix="Run it where Spark's driver runs: spark-submit, a job, or a notebook without Spark Connect.",
        )
    if is_context_stopped(spark):
        raise InvalidError("the session was stopped.", fix="Create another: SparkSession.builder.getOrCreate().")
    check_spark_version(spark.version, OLDEST_SPARK, "a pipeline")
    check_session_python(spark)


def is_context_stopped(spark: SparkSession) -> bool:
    """Return whether Spark has stopped the context, as it does when the master removed it; it never restarts one."""
    try:
        return bool(spark.sparkContext._jsc.sc().isStopped())
    except (OSError, AttributeError):
        return True  # the connection to the JVM is broken
    except Exception as error:  # py4j raises exceptions of any type
        log.warning("cannot determine whether Spark runs", error=str(error).splitlines()[0][:200])
        return True
