"""Spark session, with every setting explained.

Measured on two cores: these settings reduce an empty trigger from about 180 ms to about 14 ms. None of them is needed
for correctness.
"""

from __future__ import annotations

import os
import stat
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import tidemill
from tidemill.base.errors import UnavailableError
from tidemill.base.runtime.private_directories import make_private_directory
from tidemill.spark.session.cds_archive import archive_options
from tidemill.spark.session.java import ensure_spark_home, export_java, find_bash, find_java
from tidemill.spark.session.python_worker import BUILT_SETTING
from tidemill.spark.session.requirements import check_has_jvm, spark_version

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STDERR = 2
QUOTED_BYTES, WORDS_LINES = 4096, 4
"""Limits of the quoted output of a JVM that exited."""
LOCAL_DIRECTORY = "spark-local"
"""Directory of Spark's shuffles and blocks in the scratch directory."""
SOCKETS_DIRECTORY = "sockets"
"""Directory of the sockets between the JVM and Python in the scratch directory. A killed process leaves its own
behind; Spark's default, java.io.tmpdir, is never swept."""
SOCKETS_SETTING = "spark.python.unix.domain.socket.dir"
SOCKET_PATH_BYTES_MAX = 107
"""sun_path without its NUL. Source: unix(7)"""
SOCKET_NAME_BYTES = len(".01234567-89ab-cdef-0123-456789abcdef.sock")
"""Length of the names that Spark gives to its sockets."""
PYTHON_SETTING = "spark.pyspark.python"
CHECKPOINT_MANAGER_SETTING = "spark.sql.streaming.checkpointFileManagerClass"

STREAMING_SETTINGS: dict[str, str] = {
    # The JVM talks to Python workers over Unix sockets, which halves the cost of every hand-over to Python, because
    # TCP loopback suffers delayed acknowledgements. Never combine with spark.python.udf.pipelined.enabled, which
    # fails over these sockets.
    "spark.python.unix.domain.socket.enabled": "true",
    # Without libhadoop the default manager forks readlink and chmod for every checkpoint file (30-60 ms per
    # trigger). The raw file system does not fork, but breaks the RocksDB state store: stateless queries only.
    # `checkpoint_manager` adds the class, whose name depends on Spark's version.
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    # The default of 200 shuffle partitions means 200 tasks for a thousand rows.
    "spark.sql.shuffle.partitions": "2",
    # Adaptive planning costs more than it saves on micro-batches.
    "spark.sql.adaptive.enabled": "false",
    # Time for a started Python process to connect and authenticate (default 15 s): machines are busy at a start.
    "spark.python.authenticate.socketTimeout": "60s",
    # Time that an idle query sleeps between two polls of its source (default 10 ms).
    "spark.sql.streaming.pollingDelay": "1ms",
    # Progress objects stored per query; we publish our own statuses.
    "spark.sql.streaming.numRecentProgressUpdates": "10",
    # Arrow instead of pickled rows between DataFrames and pandas or Arrow tables.
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Arrow's own pool releases pages that a worker's next task needs (driver.py): faulting them in again is expensive.
    "spark.executorEnv.ARROW_DEFAULT_MEMORY_POOL": "system",
    # Times in shards are UTC.
    "spark.sql.session.timeZone": "UTC",
    # Speculative copies of a task would only write orphaned parts.
    "spark.speculation": "false",
}

EXACT_SETTINGS: dict[str, str] = {
    # Times in tables are UTC, in every driver of a pipeline.
    "spark.sql.session.timeZone": "UTC",
    # A part that cannot be read must fail the job: it must not read as a table without its rows.
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}
"""SQL settings that a pipeline sets in its own session of an application that it did not start."""

QUIET_SETTINGS: dict[str, str] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}

LOCAL_SETTINGS: dict[str, str] = {
    # Executors of a cluster reach the driver by its host's name, or by SPARK_LOCAL_IP; a local one needs neither.
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
}

QUICK_JVM = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto", "-XX:-UsePerfData")


def local_master(cores: int | None = None) -> str:
    """Return `local[N,4]`: N task slots and up to four attempts; plain `local[N]` never retries a failed task."""
    return f"local[{cores or max(2, os.cpu_count() or 2)},4]"


def normalise_master(master: str) -> str:
    """Return `local`, `local[*]` and `local[N]` in their retrying form; anything else unchanged."""
    if master == "local[*]" or master == "local":
        return local_master()
    if master.startswith("local[") and "," not in master:
        return master.removesuffix("]") + ",4]"
    return master


def is_local(master: str) -> bool:
    """Return whether tasks run in the driver's own JVM."""
    return master == "local" or master.startswith("local[")


def log_option() -> str:
    """Return the option that sends Spark's log to standard error, from level warning."""
    return f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties').as_uri()}"


def checkpoint_manager() -> str:
    """Return the class of checkpoints without forks; Spark 4.1 moved it."""
    import pyspark

    package = "checkpointing." if spark_version(pyspark.__version__) >= (4, 1) else ""
    return f"org.apache.spark.sql.execution.streaming.{package}FileSystemBasedCheckpointFileManager"


def session_settings(
    master: str = "local[*]", *, scratch: Path | None = None, driver_memory: str = "1g", quick: bool = True
) -> dict[str, str]:
    """Return the settings of `build_session`. `quick`: use the C1 compiler and the serial collector, which cost nothing
    in steady state on small machines and halve the warm-up; turn it off for long SQL on many cores."""
    jvm = [log_option(), *archive_options(), *(QUICK_JVM if quick else ())]
    found = {
        **STREAMING_SETTINGS,
        CHECKPOINT_MANAGER_SETTING: checkpoint_manager(),
        **QUIET_SETTINGS,
        **(LOCAL_SETTINGS if is_local(master) else {}),
        "spark.driver.memory": driver_memory,
        "spark.driver.extraJavaOptions": " ".join(jvm),
    }
    if scratch is not None:
        found["spark.sql.warehouse.dir"] = str(scratch / "warehouse")
        sockets = scratch.absolute() / SOCKETS_DIRECTORY
        # Executors on other machines do not have the directory.
        if is_local(master) and len(os.fsencode(sockets)) + 1 + SOCKET_NAME_BYTES <= SOCKET_PATH_BYTES_MAX:
            found[SOCKETS_SETTING] = str(sockets)
    return found


def build_session(
    app_name: str,
    master: str = "local[*]",
    *,
    scratch: Path | None = None,
    driver_memory: str = "1g",
    quick: bool = True,
    extra: dict[str, str] | None = None,
) -> SparkSession:
    """Return a session tuned for short micro-batches; `extra` settings override the defaults.

    Finds Java and bash. Raises InvalidError if one is missing, or PySpark has no JVM here; UnavailableError,
    with the JVM's output, if it does not start. Workers run this interpreter, unless PYSPARK_PYTHON or the setting
    spark.pyspark.python names another one; those of a cluster are prepared by `code_shipping.ship_code`. A session
    that is already active in the process is returned unchanged, except for our SQL settings that can be set later.
    """
    check_has_jvm()
    find_bash()
    export_java(find_java())
    home = ensure_spark_home()
    if home:
        os.environ["SPARK_HOME"] = home
    python = (extra or {}).get(PYTHON_SETTING) or os.environ.get("PYSPARK_PYTHON") or sys.executable
    os.environ["PYSPARK_PYTHON"] = python
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    # The launcher is a separate JVM that only prints a command line: make its start fast too.
    os.environ.setdefault("SPARK_LAUNCHER_OPTS", " ".join(QUICK_JVM))
    master = normalise_master(master)
    if is_local(master):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    if scratch is not None:  # through the environment, because Spark warns about the setting
        os.environ["SPARK_LOCAL_DIRS"] = str(scratch / LOCAL_DIRECTORY)

    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(app_name).master(master)
    ours = session_settings(master, scratch=scratch, driver_memory=driver_memory, quick=quick)
    if SOCKETS_SETTING in ours:
        make_private_directory(Path(ours[SOCKETS_SETTING]))
    for key, value in {**ours, **(extra or {}), BUILT_SETTING: "true"}.items():
        builder = builder.config(key, value)
    with _planner_python_path(python), _report_jvm_output():
        return builder.getOrCreate()


@contextmanager
def _planner_python_path(python: str) -> Iterator[None]:
    """Make the packages of the driver's Python importable for planners. Spark plans Python sources on this machine with
    the executors' Python; only the JVM that is started inside the block gets this PYTHONPATH."""
    before = os.environ.get("PYTHONPATH", "")
    if python != sys.executable:
        package = str(Path(tidemill.__file__).parents[1])
        ours = dict.fromkeys([package, *map(sysconfig.get_path, ("purelib", "platlib"))])
        os.environ["PYTHONPATH"] = os.pathsep.join([*ours, before])
    try:
        yield
    finally:
        os.environ["PYTHONPATH"] = before


@contextmanager
def _report_jvm_output() -> Iterator[None]:
    """Report why a JVM did not start. It writes the reason to standard error, while PySpark only reports that it
    exited. If standard error is a file, as for a supervised driver, the lines written to it in the block are the
    reason."""
    begin = os.fstat(STDERR).st_size
    try:
        yield
    except Exception as error:
        if "JAVA_GATEWAY_EXITED" not in str(error):
            raise
        raise UnavailableError(
            f"Spark's JVM did not start: {_stderr_since(begin) or 'see the log of this process'}.",
            fix="Correct the Spark settings that the message names, or the Java that `tidemill doctor` shows.",
        ) from error


def _stderr_since(begin: int) -> str:
    """Return the last lines of standard error from `begin` on without our own log; "" if it is not a file."""
    if not stat.S_ISREG(os.fstat(STDERR).st_mode):
        return ""
    try:
        with open(f"/proc/self/fd/{STDERR}", "rb") as file:
            file.seek(max(begin, os.fstat(STDERR).st_size - QUOTED_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    said = [" ".join(line.split()) for line in lines if line.strip() and not line.startswith("{")]
    return " ".join(said[-WORDS_LINES:])
