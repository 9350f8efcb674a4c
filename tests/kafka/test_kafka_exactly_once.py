"""Consume, transform, produce: each record once, while workers join, leave and are killed, and coordinators move."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.kafka.groups.members import PARTITIONS, SETTINGS, produce
from support.kafka.harness import Cluster
from support.kafka.transactions import shown
from support.waiting import eventually

DEADLINE_S = 120
MEMBER = Path(__file__).parents[1] / "support" / "kafka" / "groups" / "transforming_member.py"


class Worker:
    def __init__(self, client: str, addresses: str, name: str) -> None:
        words = [client, addresses, "workers", "in", "out", name]
        self._process = subprocess.Popen(
            [sys.executable, str(MEMBER), *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.assigned: list[int] = []
        self.did = 0
        self.failed: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said: dict[str, Any] = json.loads(line)
            self.assigned = said.get("assigned", self.assigned)
            self.did += said.get("did", 0)
            self.failed += [said["failed"]] if "failed" in said else []

    def leave(self) -> None:
        self._process.terminate()
        self._process.wait(DEADLINE_S)

    def kill(self) -> None:
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait(DEADLINE_S)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster("n1", "n2", settings=SETTINGS)
    for topic in ("in", "out"):
        made.portal.call(made.nodes[0].catalogue.create_topic(topic, PARTITIONS))
    yield made
    made.close()


@pytest.fixture
def workers(cluster: Cluster) -> Iterator[Callable[[str], Worker]]:
    made: list[Worker] = []

    def start(client: str) -> Worker:
        made.append(Worker(client, cluster.addresses, f"worker-{len(made)}"))
        return made[-1]

    yield start
    for worker in made:
        worker.kill()


@pytest.mark.parametrize("client", ["confluent", "kafka-python", "aiokafka"])
def test_each_record_is_taken_over_once_whoever_comes_goes_or_dies(
    cluster: Cluster, workers: Callable[[str], Worker], client: str
) -> None:
    count = 0

    def more() -> None:
        nonlocal count
        produce(cluster.addresses, "in", count, PARTITIONS)
        count += PARTITIONS

    def until(check: Callable[[], object]) -> None:
        """Produce until `check` holds, so that the workers always have input."""
        eventually(lambda: more() or check())

    def written() -> list[int]:
        return sorted(int(value) for value in shown(cluster.addresses, "out", PARTITIONS))

    first = workers(client)
    until(lambda: first.did)
    second = workers(client)
    until(lambda: second.did)
    first.kill()
    third = workers(client)
    until(lambda: second.did and third.did)
    # Coordinators move: that of the group, that of an id, or both.
    did = second.did, third.did
    cluster.stop(cluster.nodes[0])
    until(lambda: second.did > did[0] and third.did > did[1])
    eventually(lambda: len(written()) >= count)
    assert written() == list(range(count))
    second.leave()
    third.leave()
    assert written() == list(range(count))
