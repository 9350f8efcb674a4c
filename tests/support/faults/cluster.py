"""Real processes to break: nodes and drivers of one cluster, started as `tidemill up` starts them, asked as a person
asks (`why`, `/readyz`, `/api/status`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from support.ports import free_address
from support.waiting import DEADLINE_S, eventually
from tidemill.node.supervise.supervisor import launch_command


class Cluster:
    """`toml` is the rest of tidemill.toml behind [node]; `up` starts it, `close` ends every process of it. `name`: of
    its node, where it is one of several on common stores."""

    def __init__(
        self, directory: Path, toml: str = "", environ: Mapping[str, str] | None = None, *, name: str = "n1"
    ) -> None:
        self.name = name
        self.directory = directory
        self.http, self.kafka = free_address(), free_address()
        self.data = directory / "data"
        self.config = directory / "tidemill.toml"
        self.environ = {**os.environ, **(environ or {})}
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)
        self.write(toml)

    def write(self, toml: str) -> None:
        node = f'[node]\nname = "{self.name}"\ndata = "{self.data}"\nhttp = "{self.http}"\nkafka = "{self.kafka}"\n'
        self.config.write_text(node + toml)

    def up(self) -> None:
        log = (self.directory / "up.log").open("ab")
        command = [sys.executable, "-m", "tidemill", "up", "--config", str(self.config)]
        # A test run that is killed leaves no cluster behind.
        self._process = subprocess.Popen(
            launch_command(command), stdout=log, stderr=log, env=self.environ, start_new_session=True
        )

    @property
    def said(self) -> str:
        """Return the output of `up`."""
        return (self.directory / "up.log").read_text(errors="replace")

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def children(self) -> dict[str, int]:
        """Name → pid of the supervised processes that live: `node`, `pipeline-NAME`."""
        assert self._process is not None
        found = {}
        for pid in _children(self._process.pid):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"tidemill.cli.serve" in command:
                found["node"] = pid
            elif b"tidemill.spark.pipeline.driver" in command:
                found["pipeline"] = pid
        return found

    def signal(self, child: str, number: int) -> None:
        os.kill(self.children()[child], number)

    def get(self, path: str) -> tuple[int, str]:
        """Return (status, body), or (0, reason) without an answer."""
        try:
            with urlopen(f"http://{self.http}{path}", timeout=10) as answer:
                return int(answer.status), answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()
        except (URLError, OSError) as error:
            return 0, str(error)

    def ready(self) -> None:
        until(lambda: self.get("/readyz")[0] == 200, lambda: f"{self.get('/readyz')} {self.said}")

    def marks(self) -> dict[str, dict[str, Any]]:
        status, body = self.get("/api/status")
        return {mark["name"]: mark for mark in json.loads(body)["marks"]} if status == 200 else {}

    def state(self, mark: str) -> str:
        """Return the state of a status in `/api/status`, or "" if it is not there."""
        return str(self.marks().get(mark, {}).get("state", ""))

    def why(self, name: str = "") -> tuple[int, dict[str, Any]]:
        """(exit code, what `why --json` printed; {"error": …} when it could not)."""
        return self.command("why", *([name] if name else []), "--json")

    def command(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        command = [sys.executable, "-m", "tidemill", *arguments, "--config", str(self.config)]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environ, timeout=120, check=False)
        lines = done.stdout.strip().splitlines()
        try:
            found = json.loads(lines[-1]) if lines else {"error": done.stderr.strip()}
        except json.JSONDecodeError:
            found = {"text": done.stdout, "error": done.stderr}
        return done.returncode, found if isinstance(found, dict) else {"rows": found}

    def kill(self) -> None:
        """SIGKILL of `up` and everything under it: what a machine that goes down does. `up` starts it again."""
        assert self._process is not None
        for pid in (self._process.pid, *_children(self._process.pid)):
            _signal(pid, signal.SIGKILL)
        self._process.wait(DEADLINE_S)
        self._process = None

    def close(self) -> None:
        if self._process is None:
            return
        for pid in _children(self._process.pid):
            _signal(pid, signal.SIGCONT)
        _signal(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            for pid in (*_children(self._process.pid), self._process.pid):
                _signal(pid, signal.SIGKILL)
            self._process.wait(DEADLINE_S)
        self._process = None


@contextmanager
def cluster(directory: Path, toml: str = "", environ: Mapping[str, str] | None = None) -> Iterator[Cluster]:
    made = Cluster(directory, toml, environ)
    made.up()
    try:
        yield made
    finally:
        made.close()


def until(
    condition: Callable[[], object], otherwise: Callable[[], object] = str, within_s: float = DEADLINE_S
) -> float:
    """Seconds until it holds; fails with what `otherwise` says when it does not in time."""
    began_s = time.monotonic()
    eventually(condition, otherwise, within_s)
    return time.monotonic() - began_s


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
