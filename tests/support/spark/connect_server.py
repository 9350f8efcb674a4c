"""A server of Spark Connect as a process, and the Python path of a client that has what `pyspark-client` has."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pyspark

from support.ports import free_port
from support.waiting import eventually
from tidemill.spark.session.cds_archive import archive_options
from tidemill.spark.session.java import ensure_spark_home, find_java
from tidemill.spark.session.session import QUICK_JVM, log_option

SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    "spark.python.authenticate.socketTimeout": "60s",  # a machine that runs tests is busy
}
NOT_OF_THE_CLIENT = {"core", "bin", "data", "examples", "jars", "licenses", "python", "sbin"}
"""Entries of the package `pyspark` that `pyspark-client` does not have, nor `sql/classic` and the package py4j."""


@contextmanager
def connect_server(root: Path, more_settings: Mapping[str, str] | None = None) -> Iterator[str]:
    """Run a server with two cores, whose Python is this one; yield its URL. Its log is `server.log` in `root`."""
    port = free_port()
    settings = (
        SETTINGS
        | dict(more_settings or {})
        | {
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(port),
            "spark.sql.warehouse.dir": str(root / "warehouse"),
            "spark.driver.extraJavaOptions": " ".join([log_option(), *archive_options(), *QUICK_JVM]),
        }
    )
    home = ensure_spark_home() or str(Path(pyspark.__file__).parent)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK_", "SPARK_"))}
    environ |= {
        "JAVA_HOME": str(find_java().home),
        "SPARK_HOME": home,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(root / "spark"),
        "SPARK_LAUNCHER_OPTS": " ".join(QUICK_JVM),
        "PYSPARK_PYTHON": sys.executable,
    }
    more = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    with (root / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [f"{home}/bin/spark-submit", "--master", "local[2]", "--class", SERVER, *more],
            env=environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True, cwd=root,
        )  # fmt: skip

    def is_listening() -> bool:
        assert process.poll() is None, (root / "server.log").read_text()[-3000:]
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        eventually(is_listening, lambda: (root / "server.log").read_text()[-3000:], pause_s=0.05)
        yield f"sc://127.0.0.1:{port}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def client_package(directory: Path) -> Path:
    """Return `directory`, in which a package `pyspark` has only what `pyspark-client` has, and py4j is missing.

    The package consists of links to the installed one, and itself recognises that it is a client alone
    (`pyspark.util.is_remote_only`).
    """
    installed = Path(pyspark.__file__).parent
    _link(installed, directory / "pyspark", without=NOT_OF_THE_CLIENT | {"sql"})
    _link(installed / "sql", directory / "pyspark" / "sql", without={"classic"})
    (directory / "py4j.py").write_text('raise ModuleNotFoundError("No module named \'py4j\'", name="py4j")\n')
    return directory


def _link(source: Path, target: Path, without: set[str]) -> None:
    target.mkdir(parents=True)
    for entry in source.iterdir():
        if entry.name not in without:
            (target / entry.name).symlink_to(entry)
