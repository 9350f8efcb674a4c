"""The Spark session, with every setting explained.

Measured on two cores (notes/spark.md §0-1): these settings bring an empty trigger from about 180 ms to
about 14 ms. None of them is needed for correctness.
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
from tidemill.spark.session.cds_archive import archive_options
from tidemill.spark.session.java import export_java, find_bash, find_java
from tidemill.spark.session.python_worker import BUILT
from tidemill.spark.session.spark_home import spark_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STDERR = 2
WORDS_BYTES, WORDS_LINES = 4096, 4
"""Of what a JVM said before it ended, at most."""
LOCAL_DIRECTORY = "spark-local"
"""In the scratch directory: Spark's shuffles and blocks."""
PYTHON_SETTING = "spark.pyspark.python"
CHECKPOINT_MANAGER = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"

STREAMING_SETTINGS: dict[str, str] = {
    # The JVM talks to Python workers over Unix sockets: halves the cost of every Python hand-over, since
    # TCP loopback meets delayed acknowledgements. Never combine with spark.python.udf.pipelined.enabled,
    # which fails over these sockets.
    "spark.python.unix.domain.socket.enabled": "true",
    # Without libhadoop the default manager forks readlink and chmod for every checkpoint file (30-60 ms a
    # trigger). The raw file system does not fork, but breaks the RocksDB state store: stateless queries only.
    "spark.sql.streaming.checkpointFileManagerClass": CHECKPOINT_MANAGER,
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    # 200 shuffle partitions are 200 tasks for a thousand rows.
    "spark.sql.shuffle.partitions": "2",
    # Adaptive planning costs more than it saves on micro-batches.
    "spark.sql.adaptive.enabled": "false",
    # A Python process that has started has so long to say who it is (default 15 s): machines are busy at a start.
    "spark.python.authenticate.socketTimeout": "60s",
    # How long an idle query sleeps between two looks at its source (default 10 ms).
    "spark.sql.streaming.pollingDelay": "1ms",
    # Progress objects kept per query; we publish our own marks.
    "spark.sql.streaming.numRecentProgressUpdates": "10",
    # Arrow instead of pickled rows between DataFrames and pandas or Arrow tables.
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Arrow's own pool gives pages back that a worker's next task needs (driver.py): touching them anew is dear.
    "spark.executorEnv.ARROW_DEFAULT_MEMORY_POOL": "system",
    # Times in shards are UTC.
    "spark.sql.session.timeZone": "UTC",
    # Speculative copies of a task would only write orphaned parts.
    "spark.speculation": "false",
}

QUIET_SETTINGS: dict[str, str] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}

LOCAL_SETTINGS: dict[str, str] = {
    # Executors of a cluster come to the driver by its host's name, or by SPARK_LOCAL_IP; a local one needs neither.
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
}

QUICK_JVM = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto", "-XX:-UsePerfData")


def local_master(cores: int | None = None) -> str:
    """`local[N,4]`: N task slots and up to four attempts; plain `local[N]` never retries a failed task."""
    return f"local[{cores or max(2, os.cpu_count() or 2)},4]"


def normalise_master(master: str) -> str:
    """`local`, `local[*]` and `local[N]` in their retrying form; anything else unchanged."""
    if master == "local[*]" or master == "local":
        return local_master()
    if master.startswith("local[") and "," not in master:
        return master.removesuffix("]") + ",4]"
    return master


def is_local(master: str) -> bool:
    """Do tasks run in the driver's own JVM?"""
    return master == "local" or master.startswith("local[")


def log_option() -> str:
    """Spark's log goes to standard error, warnings and worse."""
    return f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties').as_uri()}"


def settings(
    master: str = "local[*]", *, scratch: Path | None = None, driver_memory: str = "1g", quick: bool = True
) -> dict[str, str]:
    """What `build_session` sets. `quick`: the C1 compiler and the serial collector, which cost nothing in steady
    state on small machines and halve the warm-up; turn it off for long SQL on many cores."""
    jvm = [log_option(), *archive_options(), *(QUICK_JVM if quick else ())]
    found = {
        **STREAMING_SETTINGS,
        **QUIET_SETTINGS,
        **(LOCAL_SETTINGS if is_local(master) else {}),
        "spark.driver.memory": driver_memory,
        "spark.driver.extraJavaOptions": " ".join(jvm),
    }
    if scratch is not None:
        found["spark.sql.warehouse.dir"] = str(scratch / "warehouse")
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
    """A session tuned for short micro-batches; `extra` settings win over ours.

    Finds Java and bash. Raises Invalid when there is none; Unavailable, with its words, when the JVM does not start.
    Workers run this very interpreter, unless PYSPARK_PYTHON or the setting spark.pyspark.python names another; the
    master's own are made able to by `code_shipping.ship`. A session that is already active in the process is returned
    as it is, with our SQL settings added where they can be.
    """
    find_bash()
    export_java(find_java())
    home = spark_home()
    if home:
        os.environ["SPARK_HOME"] = home
    python = (extra or {}).get(PYTHON_SETTING) or os.environ.get("PYSPARK_PYTHON") or sys.executable
    os.environ["PYSPARK_PYTHON"] = python
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    # The launcher is a JVM of its own that only prints a command line: keep its start short too.
    os.environ.setdefault("SPARK_LAUNCHER_OPTS", " ".join(QUICK_JVM))
    master = normalise_master(master)
    if is_local(master):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    if scratch is not None:  # by the environment, for Spark warns when it is told by a setting
        os.environ["SPARK_LOCAL_DIRS"] = str(scratch / LOCAL_DIRECTORY)

    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(app_name).master(master)
    ours = settings(master, scratch=scratch, driver_memory=driver_memory, quick=quick)
    for key, value in {**ours, **(extra or {}), BUILT: "true"}.items():
        builder = builder.config(key, value)
    with _found_by_planners(python), _told_by_the_jvm():
        return builder.getOrCreate()


@contextmanager
def _found_by_planners(python: str) -> Iterator[None]:
    """Spark plans Python sources on this machine, with the Python of the executors: the JVM that starts now, and no
    other, leads it to what the driver's own Python has."""
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
def _told_by_the_jvm() -> Iterator[None]:
    """A JVM that ends before it is reached says why on standard error, and PySpark only that it ended. Where standard
    error is a file, as a supervised driver's is, what was written to it meanwhile is the reason."""
    begin = os.fstat(STDERR).st_size
    try:
        yield
    except Exception as error:
        if "JAVA_GATEWAY_EXITED" not in str(error):
            raise
        raise UnavailableError(
            f"Spark's JVM did not start: {_written_since(begin) or 'see the log of this process'}.",
            fix="Correct the Spark settings that it names, or the Java that `tidemill doctor` shows.",
        ) from error


def _written_since(begin: int) -> str:
    """The last lines of standard error from this place on that are none of our own log; "" where it is no file."""
    if not stat.S_ISREG(os.fstat(STDERR).st_mode):
        return ""
    try:
        with open(f"/proc/self/fd/{STDERR}", "rb") as file:
            file.seek(max(begin, os.fstat(STDERR).st_size - WORDS_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    said = [" ".join(line.split()) for line in lines if line.strip() and not line.startswith("{")]
    return " ".join(said[-WORDS_LINES:])
