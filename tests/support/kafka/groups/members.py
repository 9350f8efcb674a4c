"""Members of a group as processes, one client library each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import confluent_kafka as ck

from support.waiting import DEADLINE_S
from tidemill.base.config.listeners import KafkaSection
from tidemill.kafka import KafkaSettings

PARTITIONS = 4

SETTINGS = KafkaSettings(
    KafkaSection(
        group_initial_rebalance_delay_ms=0,
        group_min_session_timeout_ms=1_000,
        group_consumer_session_timeout_ms=2_000,
        group_consumer_heartbeat_interval_ms=300,
    )
)

CLIENTS = [
    ("confluent", "eager"),
    ("confluent", "cooperative"),
    ("confluent", "consumer"),
    ("kafka-python", "eager"),
    ("kafka-python", "cooperative"),
    ("aiokafka", "eager"),
]

PATIENT_MS = 60_000

PATIENT = KafkaSettings(SETTINGS.section.model_copy(update={"group_consumer_session_timeout_ms": PATIENT_MS}))

MEMBER = Path(__file__).with_name("member_process.py")


class Member:
    def __init__(
        self, client: str, strategy: str, addresses: str, group: str, topic: str, instance: str = "", *,
        patient: bool = False,
    ) -> None:  # fmt: skip
        """`patient`: no other member may consider it dead in this test, however busy the machine is."""
        words = [client, strategy, addresses, group, topic, *([instance] if instance else [])]
        environment = {**os.environ, **({"SESSION_MS": str(PATIENT_MS)} if patient else {})}
        self._process = subprocess.Popen(
            [sys.executable, str(MEMBER), *words], stdout=subprocess.PIPE, text=True, env=environment
        )
        self.assigned: list[int] = []
        self.assignments = 0
        self.got: list[tuple[int, int]] = []
        self.unsure: list[tuple[int, int]] = []
        self.topics: tuple[str, ...] = ()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said: dict[str, Any] = json.loads(line)
            if "assigned" in said:
                self.assigned, self.assignments = said["assigned"], self.assignments + 1
            elif "unsure" in said:
                self.unsure.append(tuple(said["unsure"]))
            else:
                self.got.append(tuple(said["got"]))
                self.topics = tuple(sorted({*self.topics, *([said["topic"]] if "topic" in said else [])}))

    def leave(self) -> None:
        self._process.terminate()
        self._process.wait(DEADLINE_S)
        self.assigned = []

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait(DEADLINE_S)
        self.assigned = []

    def end(self) -> None:
        if self._process.poll() is None:
            self.kill()


def shared(*members: Member) -> bool:
    """Each has some, and together they have each partition once."""
    return all(m.assigned for m in members) and sorted(p for m in members for p in m.assigned) == list(
        range(PARTITIONS)
    )


def produce(addresses: str, topic: str, first: int, count: int) -> None:
    producer = ck.Producer({"bootstrap.servers": addresses, "linger.ms": 5})
    for number in range(first, first + count):
        producer.produce(topic, str(number).encode(), partition=number % PARTITIONS)
    assert producer.flush(60) == 0


def committed(addresses: str, group: str, topic: str) -> list[int]:
    client = ck.Consumer({"bootstrap.servers": addresses, "group.id": group})
    try:
        found = client.committed([ck.TopicPartition(topic, p) for p in range(PARTITIONS)], timeout=DEADLINE_S)
        return [place.offset for place in found]
    finally:
        client.close()
