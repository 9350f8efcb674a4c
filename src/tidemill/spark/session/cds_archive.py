"""Class-data archive for Spark's JVM: created once, it halves the time of every later start.

    python -m tidemill.spark.session.cds_archive        create it now (about one slow start; 60 to 170 MB on disk)

Measured up to the first Python job on a slow, shared two-core machine: 23 s without, 11 s with it. Spark loads some
fifteen thousand classes before its first batch. A dynamic archive (JDK 13 and later) maps them instead. It matches one
Java, one pyspark and one class path, which its name identifies, and a JVM ignores an archive that does not match.
Sessions use an existing archive and never create one: dumping takes time at exit that a driver does not have. Each use
sets the file's modification time. The creation of an archive deletes other archives that were not used for
UNUSED_DAYS_MAX.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import zlib
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from tidemill.base.clock import SystemClock
from tidemill.base.errors import InvalidError
from tidemill.spark.session.java import cache_dir, ensure_spark_home, find_java

DUMP_TIMEOUT_S = 600
UNUSED_DAYS_MAX = 30.0
DAY_S = 86400.0
_EXERCISE = """
import sys
from pathlib import Path
from tidemill.spark.session.cds_archive import dump_archive
dump_archive(Path(sys.argv[1]))
"""


def archive_path(environ: Mapping[str, str] | None = None) -> Path:
    """Return the path of the archive for this Java and pyspark, which may not exist."""
    env = os.environ if environ is None else environ
    java = find_java(env)
    identity = f"{java.home} {java.major} {java.build} {version('pyspark')} {ensure_spark_home(env) or sys.prefix}"
    return cache_dir(env) / f"spark-{version('pyspark')}-java{java.major}-{zlib.crc32(identity.encode()):08x}.jsa"


def archive_options(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return JVM options that use the archive, empty if there is no archive."""
    path = archive_path(environ)
    if not path.is_file():
        return []
    with contextlib.suppress(OSError):  # it belongs to another user, or the file system is read-only, as in an image
        os.utime(path)
    return [f"-XX:SharedArchiveFile={path}", "-Xlog:cds=off", "-Xlog:cds+dynamic=off"]


def ensure_archive() -> Path:
    """Create the archive if it is missing, and return its path. Raises InvalidError without a Java, or if Java
    writes no archive; OSError, subprocess.CalledProcessError."""
    path = archive_path()
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    delete_unused_archives(path.parent, SystemClock().now_ms() / 1000)
    fresh = path.with_suffix(f".{os.getpid()}")
    try:
        subprocess.run(
            [sys.executable, "-c", _EXERCISE, str(fresh)],
            check=True, timeout=DUMP_TIMEOUT_S, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        with contextlib.suppress(FileNotFoundError):
            fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    if not path.is_file():
        raise InvalidError("Java wrote no class-data archive.", fix="Use a Java that has lib/server/classes.jsa.")
    return path


def delete_unused_archives(directory: Path, now_s: float) -> None:
    """Delete the archives, and what interrupted dumps left, that were not used for UNUSED_DAYS_MAX before `now_s`, in
    seconds since 1970."""
    for path in directory.glob("spark-*-java*"):
        with contextlib.suppress(FileNotFoundError):  # another process deleted it, or has completed its archive
            if path.stat().st_mtime < now_s - UNUSED_DAYS_MAX * DAY_S:
                path.unlink()


def dump_archive(target: Path) -> None:
    """Do what a pipeline does in its first seconds, then end the JVM regularly, which writes the archive."""
    import tempfile

    import pyarrow as pa
    from pyspark import SparkContext
    from pyspark.sql import functions as f

    from tidemill.spark.session.session import QUICK_JVM, build_session, log_option

    options = " ".join([log_option(), *QUICK_JVM, f"-XX:ArchiveClassesAtExit={target}"])
    with tempfile.TemporaryDirectory() as scratch:
        spark = build_session(
            "archive", "local[2]", scratch=Path(scratch), extra={"spark.driver.extraJavaOptions": options}
        )
        left = spark.createDataFrame(pa.table({"k": [1, 2, 3], "v": ["a", "b", None]}))
        right = spark.range(10).groupBy((f.col("id") % 3).alias("k")).agg(f.sum("id").cast("decimal(18,2)").alias("s"))
        left.join(right, "k", "full_outer").select("k", f.coalesce("s", f.lit(0)).alias("s")).toArrow()
        spark.sparkContext.parallelize([b"1", b"2"], 2).map(len).collect()
        rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
        query = rate.writeStream.foreachBatch(lambda *_: None).option("checkpointLocation", f"{scratch}/c").start()
        query.awaitTermination(3)
        query.stop()
        spark.stop()
        process = SparkContext._gateway.proc
        process.stdin.close()
        process.wait(DUMP_TIMEOUT_S)


if __name__ == "__main__":
    try:
        print(f"class archive: {ensure_archive()}")
    except InvalidError as error:
        sys.exit(str(error))
