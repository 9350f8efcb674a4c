"""Clients of other languages, unmodified, in processes of their own: a verb is a line of JSON each way.

The drivers are in tests/clients, brought there by its `install`. Verbs (defaults in `Driver`'s methods or the tests):

    connect   bootstrap: what every later verb uses; mechanism, user, password (or token); ca, certificate, key: paths;
              version: of the protocol (sarama alone)
    produce   topic, records [[partition, key, value]…], idempotent, compression: their offsets
    read      topic, partitions, count, isolation: that many records from the start [[partition, offset, key, value]…]
    join      member, group, topic, strategy, instance: a consumer that commits what it gets
    state     member: partitions now, assignments and revoked partitions so far, what it got, why it failed
    leave     member: the same, once it has left
    begin, send, end, close   producer, id, timeout_ms / topic, records / commit: a transaction
    transfer  topic, to, group, id, count: read, write and commit offsets in transactions
    create delete topics describe grow truncate offset configs alter groups group delete_group committed
    acl_add acls acl_delete   what admin clients do
    operations  topic, group: everything else that Java's admin client can ask, each with its answer or its error
    tool      class, args, input: one of Kafka's command-line tools (Java alone)

A failure is `Refused` with Kafka's code, −1 where the client gives none.
"""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from support.waiting import eventually
from tidemill.base.config.listeners import KafkaSection
from tidemill.kafka import KafkaSettings

CLIENTS = Path(__file__).parents[2] / "clients"
PATIENCE_S = 120.0
SETTINGS = KafkaSettings(KafkaSection(group_initial_rebalance_delay_ms=0, group_consumer_heartbeat_interval_ms=500))
PARTITIONS = 4
JAVA = ("java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx512m", "-Xshare:auto")
COMMANDS = {
    "java": (*JAVA, "-cp", "java/kafka/target/classes:java/kafka/target/dependency/*", "KafkaDriver"),
    "kafkajs": ("node", "kafkajs_driver.mjs"),
    "franz-go": ("go/bin/franz",),
    "sarama": ("go/bin/sarama",),
}
NEEDED = {
    "java": "java/kafka/target/classes/KafkaDriver.class",
    "kafkajs": "node_modules/kafkajs/package.json",
    "franz-go": "go/bin/franz",
    "sarama": "go/bin/sarama",
}
MARKS = {"java": pytest.mark.java, "kafkajs": pytest.mark.node, "franz-go": pytest.mark.go, "sarama": pytest.mark.go}
ALL = tuple(COMMANDS)


def of(*names: str) -> list[Any]:
    """Parameters of a test, each with the mark of what it needs."""
    return [pytest.param(name, marks=MARKS[name]) for name in names]


class Refused(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{message} code={code}")
        self.code = code


class Driver:
    def __init__(self, name: str) -> None:
        command = COMMANDS[name]
        program = shutil.which(command[0]) or shutil.which(CLIENTS / command[0])
        if program is None or not (CLIENTS / NEEDED[name]).exists():
            pytest.skip(f"{name} is not installed: tests/clients/install brings it where its toolchain is")
        self.name = name
        self._process = subprocess.Popen(
            command, cwd=CLIENTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def __call__(self, do: str, **asked: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **asked}) + "\n")
        self._process.stdin.flush()
        line = self._lines.get(timeout=PATIENCE_S)
        assert line, f"{self.name} ended"
        answer = json.loads(line)
        if "error" in answer:
            raise Refused(answer["error"], answer["message"])
        return answer["ok"]

    def produce(
        self, topic: str, records: list[list[Any]], *, idempotent: bool = True, compression: str = "none"
    ) -> Any:
        return self("produce", topic=topic, records=records, idempotent=idempotent, compression=compression)

    def read(self, topic: str, partitions: int, count: int, isolation: str = "read_committed") -> list[list[Any]]:
        found: list[list[Any]] = self("read", topic=topic, partitions=partitions, count=count, isolation=isolation)
        return sorted(found, key=lambda row: (row[0], row[1]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def numbered(first: int, count: int) -> list[list[Any]]:
    return [[n % PARTITIONS, f"k{n}", str(n)] for n in range(first, first + count)]


def share(states: list[dict[str, Any]]) -> bool:
    """Each has some, and together they have each partition once."""
    assert not any(state["failed"] for state in states), states
    have = sorted(p for state in states for p in state["assigned"])
    return all(state["assigned"] for state in states) and have == list(range(PARTITIONS))


class Members:
    def __init__(self, client: Driver, topic: str, strategy: str) -> None:
        self.client, self.topic, self.strategy = client, topic, strategy
        self.here: list[str] = []
        self.got: list[list[Any]] = []

    def join(self, member: str, instance: str = "") -> None:
        self.client(
            "join", member=member, group=self.topic, topic=self.topic, strategy=self.strategy, instance=instance
        )
        self.here.append(member)

    def states(self) -> list[dict[str, Any]]:
        return [self.client("state", member=member) for member in self.here]

    def leave(self, member: str) -> dict[str, Any]:
        self.here.remove(member)
        state: dict[str, Any] = self.client("leave", member=member)
        self.got += state["got"]
        return state

    def values(self) -> list[str]:
        return [row[3] for row in [*self.got, *(row for state in self.states() for row in state["got"])]]

    def have(self, count: int) -> None:
        """Wait until every number was read exactly once: no member died, so nothing is read again."""
        eventually(lambda: set(self.values()) >= {str(n) for n in range(count)})
        assert sorted(self.values(), key=int) == [str(n) for n in range(count)]
