"""Node processes that start, leave and are killed under a producer: acknowledged records stay, once and in order."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from support.ports import free_port
from support.waiting import eventually
from tidemill.base.config.config import parse

PARTITIONS = 20
"""Either node leads each of them, by a hash of the random topic id. Of eight, one node led all in one of 128 runs."""
DEADLINE_S = 120.0


class NodeProcess:
    """A node over the cluster's directory and its consensus."""

    def __init__(self, root: Path, name: str, consensus: str) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        http = f"127.0.0.1:{free_port()}"
        node = {"name": name, "data": str(root / name), "http": http, "kafka": self.address}
        stores = {"objects": {"url": f"file://{root}/objects"}, "consensus": {"url": consensus}}
        self._config = root / f"{name}.json"
        self._config.write_text(parse({"node": node, **stores}, origin="").model_dump_json())
        self._log = root / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", "tidemill.cli.serve", str(self._config)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        admin = AdminClient({"bootstrap.servers": self.address, "log_level": 0})
        eventually(lambda: self.address in brokers_of(admin))

    def end(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(DEADLINE_S)
            self._process = None


def brokers_of(admin: AdminClient) -> set[str]:
    try:
        return {f"{broker.host}:{broker.port}" for broker in admin.list_topics(timeout=2).brokers.values()}
    except ck.KafkaException:
        return set()


class Load:
    """One idempotent producer that repeatedly sends a number to every partition."""

    def __init__(self, addresses: str) -> None:
        self.acked: list[list[int]] = [[] for _ in range(PARTITIONS)]
        self.failed: list[str] = []
        self._stop = threading.Event()
        self._producer = ck.Producer(
            {
                "bootstrap.servers": addresses,
                "enable.idempotence": True,
                "linger.ms": 0,
                "message.timeout.ms": 100_000,
                "reconnect.backoff.max.ms": 200,
                "retry.backoff.ms": 20,
                "retry.backoff.max.ms": 200,
                "topic.metadata.refresh.fast.interval.ms": 50,
                "log_level": 0,
            }
        )
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            for partition in range(PARTITIONS):
                reported = self._reported(partition, number)
                self._producer.produce("t", str(number), partition=partition, on_delivery=reported)
            number += 1
            self._producer.poll(0.02)
        if self._producer.flush(100):
            self.failed.append("not flushed")

    def _reported(self, partition: int, number: int) -> Any:
        def reported(error: Any, _: Any) -> None:
            if error is None:
                self.acked[partition].append(number)
            else:
                self.failed.append(str(error))

        return reported

    def goes_on(self, count: int = 10) -> None:
        """Wait until every partition has acknowledged `count` more records."""
        before = [len(acked) for acked in self.acked]
        eventually(lambda: all(len(acked) >= known + count for acked, known in zip(self.acked, before, strict=True)))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


def stored(addresses: str, load: Load) -> list[list[int]]:
    consumer = ck.Consumer(
        {"bootstrap.servers": addresses, "group.id": "g", "enable.auto.commit": False, "log_level": 0}
    )
    consumer.assign([ck.TopicPartition("t", partition, 0) for partition in range(PARTITIONS)])
    found: list[list[int]] = [[] for _ in range(PARTITIONS)]

    def read() -> bool:
        for message in consumer.consume(1_000, 0.5):
            if message.error() is None:
                found[message.partition()].append(int(message.value()))
        return all(len(numbers) >= len(acked) for numbers, acked in zip(found, load.acked, strict=True))

    eventually(read)
    consumer.close()
    return found


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[NodeProcess]]:
    made = [NodeProcess(tmp_path, name, f"sqlite://{tmp_path}/consensus.db") for name in ("n0", "n1")]
    yield made
    for node in made:
        node.end(signal.SIGKILL)


def test_nodes_leave_come_and_are_killed_under_a_producer_and_nothing_is_lost(nodes: list[NodeProcess]) -> None:
    for node in nodes:
        node.start()
    addresses = ",".join(node.address for node in nodes)
    admin = AdminClient({"bootstrap.servers": addresses, "log_level": 0})
    for future in admin.create_topics([NewTopic("t", PARTITIONS)]).values():
        future.result()
    load = Load(addresses)
    try:
        load.goes_on()
        first, second = nodes
        for node, number in ((second, signal.SIGTERM), (first, signal.SIGKILL)):
            node.end(number)
            load.goes_on()
            node.start()
            load.goes_on()

        def leaders() -> set[int]:
            return {p.leader for p in admin.list_topics("t", timeout=DEADLINE_S).topics["t"].partitions.values()}

        eventually(lambda: len(leaders() - {-1}) == 2)  # what came back leads again
    finally:
        load.stop()
    assert load.failed == []
    for numbers, acked in zip(stored(addresses, load), load.acked, strict=True):
        assert numbers == sorted(set(numbers)) and set(acked) <= set(numbers)
