"""Kafka's Java programs, as `tests/clients/install` installed them, each in a separate process."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from support.ports import free_port
from support.waiting import DEADLINE_S

CLIENTS = Path(__file__).parents[1] / "clients" / "java"
JAVA = ("java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx384m", "-Xshare:auto")


def command(part: str, main: str, *words: str) -> list[str]:
    """Return the command of a Java program. `part`: a folder of tests/clients/java."""
    target = CLIENTS / part / "target"
    if shutil.which("java") is None or not (target / "pom.xml").exists():
        pytest.skip(f"{part} is not installed: tests/clients/install brings it where its toolchain is")
    return [*JAVA, "-cp", f"{target}/classes:{target}/dependency/*", main, *words]


class StreamsApp:
    """An instance of tests/clients/java/streams/StreamsApp.java."""

    def __init__(self, configs: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            command("streams", "StreamsApp", json.dumps(configs)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.state = ""
        self.failed: list[str] = []
        self.restored: dict[str, int] = {}
        """Number of records by store that were restored from its changelog."""
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            self.state = said.get("state", self.state)
            self.failed += [said["failed"]] if "failed" in said else []
            if "restored" in said:
                self.restored[said["store"]] = self.restored.get(said["store"], 0) + said["restored"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("close\n")
        self._process.stdin.flush()
        self._process.wait(DEADLINE_S)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(DEADLINE_S)


class ConnectWorker:
    """A Kafka Connect worker as `connect-distributed.sh` starts it, with exactly-once sources. `config`: the path of
    its file."""

    def __init__(self, config: Path, address: str) -> None:
        self.id = f"127.0.0.1:{free_port()}"
        keys = {
            "bootstrap.servers": address,
            "group.id": "connect",
            "key.converter": "org.apache.kafka.connect.storage.StringConverter",
            "value.converter": "org.apache.kafka.connect.storage.StringConverter",
            "listeners": f"http://{self.id}",
            "exactly.once.source.support": "enabled",
            "plugin.discovery": "service_load",
            "scheduled.rebalance.max.delay.ms": 0,
            "session.timeout.ms": 3_000,
            "heartbeat.interval.ms": 300,
            "offset.storage.partitions": 3,
        }
        keys |= {f"{which}.storage.topic": f"connect-{which}" for which in ("config", "offset", "status")}
        keys |= {f"{which}.storage.replication.factor": -1 for which in ("config", "offset", "status")}
        config.write_text("".join(f"{key}={value}\n" for key, value in keys.items()))
        with config.with_suffix(".log").open("ab") as log:
            main = "org.apache.kafka.connect.cli.ConnectDistributed"
            self._process = subprocess.Popen(command("connect", main, str(config)), stdout=log, stderr=log)

    def __call__(self, method: str, path: str, asked: Any = None) -> Any:
        """Call its REST interface and return the answer, or None if it refuses or is unreachable."""
        body = None if asked is None else json.dumps(asked).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://{self.id}{path}", body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                return json.loads(answer.read() or "true")
        except urllib.error.HTTPError as refused:
            print(method, path, refused.code, refused.read())
            return None
        except urllib.error.URLError:
            return None

    def is_up(self) -> bool:
        assert self._process.poll() is None, "the worker ended"
        return self("GET", "/connectors") is not None

    def task(self, connector: str) -> tuple[str, str]:
        """Return the state of its one task, and the worker that runs it."""
        status = self("GET", f"/connectors/{connector}/status") or {}
        [task] = status.get("tasks") or [{}]
        return task.get("state", ""), task.get("worker_id", "")

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait(DEADLINE_S)
