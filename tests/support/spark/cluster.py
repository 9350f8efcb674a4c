"""Spark's own standalone master and worker as processes, from the jars of the installed pyspark."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import urllib.request
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.ports import free_port
from support.waiting import eventually
from tidemill.spark.session.java import ensure_spark_home, find_java
from tidemill.spark.session.session import QUICK_JVM


class Cluster:
    """A master, and a worker that can be killed and started again.

    The worker has a separate directory, an environment without this process's variables, and does not see the paths in
    `hidden` (by a mount namespace), as if it ran on another machine.
    """

    def __init__(self, root: Path, hidden: Path) -> None:
        self._root = root
        self._hidden = hidden
        self._port, self._page = free_port(), free_port()
        self._master: subprocess.Popen[bytes] | None = None
        self._worker: subprocess.Popen[bytes] | None = None
        # An interpreter of the same version that has no package at all: what executors run.
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root / "python")], check=True)
        self.python = str(root / "python" / "bin" / "python")

    @property
    def url(self) -> str:
        return f"spark://127.0.0.1:{self._port}"

    def start(self) -> None:
        ports = ["--port", str(self._port), "--webui-port", str(self._page)]
        self._master = self._java("master", "org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", *ports)
        self._until(self._master, lambda: "Spark Master at" in self._page_text())
        self.start_worker()

    def start_worker(self) -> None:
        work = self._root / "work"
        mount = f'mount -t tmpfs -o size=1m tmpfs "{self._hidden}" && exec "$@"'
        alone = ["unshare", "-m" if os.getuid() == 0 else "-rm", "sh", "-c", mount, "sh"]
        if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True).returncode:
            warnings.warn("no mount namespaces here: the worker could see what it is only not told of", stacklevel=1)
            alone = []
        self._worker = self._java(
            "worker",
            "org.apache.spark.deploy.worker.Worker",
            *("--host", "127.0.0.1", "--port", str(free_port()), "--webui-port", str(free_port())),
            *("--cores", "2", "--memory", "1g", "--work-dir", str(work), self.url),
            before=alone,
        )
        self._until(self._worker, lambda: "ALIVE</td>" in "".join(self._page_text().split()))

    def kill_worker(self) -> None:
        """Kill the worker and its executors together, as a machine failure does."""
        assert self._worker is not None
        _end(self._worker)

    def close(self) -> None:
        for process in (self._worker, self._master):
            if process is not None:
                _end(process)

    def _page_text(self) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._page}/", timeout=2) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    def _until(self, process: subprocess.Popen[bytes], there: Callable[[], bool]) -> None:
        def said() -> str:
            return (self._root / "cluster.log").read_text()[-3000:]

        def looked() -> bool:
            assert process.poll() is None, said()
            return there()

        eventually(looked, said)

    def _java(self, name: str, main: str, *arguments: str, before: list[str] | None = None) -> Any:
        home = ensure_spark_home()
        environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(self._root),
            "JAVA_HOME": find_java().home,
            "SPARK_HOME": home,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(self._root / name),
            "SPARK_LAUNCHER_OPTS": " ".join(QUICK_JVM),
            "SPARK_DAEMON_JAVA_OPTS": " ".join(QUICK_JVM),
        }
        with (self._root / "cluster.log").open("ab") as log:
            return subprocess.Popen(
                [*(before or []), f"{home}/bin/spark-class", main, *arguments],
                env=environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True, cwd=self._root,
            )  # fmt: skip


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
