"""Nodes as `tidemill up` runs them, on common stores, to be stopped, frozen and killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import confluent_kafka as ck
from confluent_kafka.admin import AdminClient

import paths  # noqa: F401
from support.ports import free_port

DEADLINE_S = 120.0
STOP_S = 60.0

CONFIG = """
[node]
name = "{name}"
data = "{root}/{name}"
http = "127.0.0.1:{http}"
kafka = "127.0.0.1:{kafka}"
[objects]
url = "{objects}"
[consensus]
url = "{consensus}"
"""


class Node:
    """`up` and the node that it supervises and restarts. `more`: keys of its configuration."""

    def __init__(
        self,
        root: Path,
        name: str,
        *,
        objects: str,
        consensus: str,
        more: str = "",
        environ: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        self.name = name
        self._root, self._python = root, python
        self._environ = {**os.environ, **(environ or {})}
        kafka = free_port()
        self.address = f"127.0.0.1:{kafka}"
        self._config = root / f"{name}.toml"
        self._config.write_text(
            CONFIG.format(name=name, root=root, http=free_port(), kafka=kafka, objects=objects, consensus=consensus)
            + more
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, wait: bool = True) -> None:
        with (self._root / f"{self.name}.log").open("ab") as log:
            command = [self._python, "-m", "tidemill", "up", "--config", str(self._config)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=self._environ)
        if wait:
            self.serves()

    def serves(self) -> None:
        """Wait until it answers a client. Raises TimeoutError."""
        until_s = time.monotonic() + DEADLINE_S
        admin = AdminClient({"bootstrap.servers": self.address, "log_level": 0})
        while not reached(admin):
            if time.monotonic() > until_s:
                raise TimeoutError(f"the node does not answer: name={self.name}")

    def signal(self, number: int) -> bool:
        """Send a signal to the node itself, not to its supervisor; return False if it does not run."""
        pids = children(self._process.pid) if self._process is not None else []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return bool(pids)

    def end(self, number: int) -> None:
        """End both for good. Raises TimeoutExpired if it had to kill them."""
        if self._process is None:
            return
        if number == signal.SIGKILL:  # the node itself first: it would leave in order when who started it is gone
            self.signal(number)
        process, self._process = self._process, None
        process.send_signal(number)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            for pid in list(descendants(process.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
            raise


def reached(admin: AdminClient) -> bool:
    try:
        return bool(admin.list_topics(timeout=1).brokers)
    except ck.KafkaException:
        return False


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def descendants(pid: int) -> Iterator[int]:
    """The process itself first."""
    yield pid
    for child in children(pid):
        yield from descendants(child)
