"""Idempotent producers through errors, restarts and kill -9: every record exactly once, in order."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import pytest

from support.kafka.harness import FakeBroker, RealBroker
from support.kafka.processes import Process
from support.waiting import DEADLINE_S
from tidemill.base.errors import ClosedError, UnavailableError, UnknownOutcomeError
from tidemill.objects.store import Buffer
from tidemill.topics.api import NotLeaderError, ProduceResult, TopicLog

PARTITIONS = 2


def produce(address: str, topic: str, count: int, *, pause_s: float = 0.0, **config: Any) -> dict[int, list[bytes]]:
    """Send `count` numbered records; partition → values in the order they were sent there. All must be delivered."""
    client = ck.Producer(
        {
            "bootstrap.servers": address,
            "enable.idempotence": True,
            "linger.ms": 0,
            "batch.num.messages": 10,
            "retry.backoff.ms": 20,
            "reconnect.backoff.max.ms": 200,
            "message.timeout.ms": 60_000,
            "log_level": 0,
            **config,
        }
    )
    failures: list[Any] = []
    sent: dict[int, list[bytes]] = defaultdict(list)

    def report(error: Any, _: Any) -> None:
        if error is not None:
            failures.append(error)

    for i in range(count):
        value = str(i).encode()
        sent[i % PARTITIONS].append(value)
        client.produce(topic, value, partition=i % PARTITIONS, on_delivery=report)
        client.poll(0)
        if pause_s:
            time.sleep(pause_s)
    assert client.flush(60) == 0
    assert failures == []
    return sent


def stored(address: str, topic: str, expected: int) -> dict[int, list[bytes]]:
    """Read everything in the topic, up to the present high watermark."""
    reader = ck.Consumer(
        {"bootstrap.servers": address, "group.id": "check", "enable.auto.commit": False, "log_level": 0}
    )
    ends = {
        p: reader.get_watermark_offsets(ck.TopicPartition(topic, p), timeout=DEADLINE_S)[1] for p in range(PARTITIONS)
    }
    reader.assign([ck.TopicPartition(topic, p, 0) for p in range(PARTITIONS)])
    found: dict[int, list[bytes]] = defaultdict(list)
    deadline = time.monotonic() + 30
    while sum(map(len, found.values())) < sum(ends.values()) and time.monotonic() < deadline:
        for message in reader.consume(1000, 0.2):
            assert message.error() is None
            found[message.partition()].append(message.value())
    reader.close()
    assert sum(ends.values()) >= expected
    return found


FAULTS: dict[str, tuple[Callable[[], Exception], bool]] = {
    "not leader, not stored": (lambda: NotLeaderError("moved."), False),
    "unavailable, not stored": (lambda: UnavailableError("busy."), False),
    "closed, not stored": (lambda: ClosedError("closing."), False),
    "unknown, stored": (lambda: UnknownOutcomeError("the answer was lost."), True),
    "unknown, not stored": (lambda: UnknownOutcomeError("the answer was lost."), False),
    "a bug of ours, stored": (lambda: RuntimeError("bug"), True),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_retriable_error_leaves_every_record_stored_once(fake_broker: FakeBroker, name: str) -> None:
    make, after_storing = FAULTS[name]
    fake_broker.create_topic("t", PARTITIONS)
    fake_broker.topics.delay_s = 0.002
    calls = 0

    def fault(_topic: str, _partition: int, _batch: bytes, is_stored: bool) -> Exception | None:
        nonlocal calls
        if is_stored != after_storing:
            return None
        calls += 1
        return make() if calls in (4, 9, 10) else None

    fake_broker.topics.faults = fault
    sent = produce(fake_broker.address, "t", 600)
    assert calls > 10
    assert stored(fake_broker.address, "t", 600) == sent


class Faulty:
    """The real topics behind a wire that loses some answers and refuses some batches."""

    def __init__(self, inner: TopicLog) -> None:
        self._inner = inner
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def produce_nowait(
        self, topic_id: str, partition: int, batch: Buffer, **said: Any
    ) -> asyncio.Future[ProduceResult]:
        self._calls += 1
        if self._calls % 11 == 5:
            refused: asyncio.Future[ProduceResult] = asyncio.get_running_loop().create_future()
            refused.set_exception(NotLeaderError("moved."))
            return refused
        future = self._inner.produce_nowait(topic_id, partition, batch, **said)
        if self._calls % 11 != 9:
            return future
        lost: asyncio.Future[ProduceResult] = asyncio.get_running_loop().create_future()

        def lose(done: asyncio.Future[ProduceResult]) -> None:
            done.exception()
            lost.set_exception(UnknownOutcomeError("the answer was lost."))

        future.add_done_callback(lose)
        return lost


def test_lost_answers_and_refusals_over_the_real_topics_room() -> None:
    broker = RealBroker(wrap=Faulty)
    try:
        broker.create_topic("t", PARTITIONS)
        sent = produce(broker.address, "t", 1000)
        assert stored(broker.address, "t", 1000) == sent
    finally:
        broker.close()


def test_restarts_under_load_lose_and_repeat_nothing(broker: RealBroker) -> None:
    broker.create_topic("t", PARTITIONS)
    sent: dict[int, list[bytes]] = {}
    failed: list[BaseException] = []

    def work() -> None:
        try:
            sent.update(produce(broker.address, "t", 1500, pause_s=0.001))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(3):
        time.sleep(0.4)
        broker.restart()
    thread.join(90)
    assert not thread.is_alive()
    assert failed == []
    assert stored(broker.address, "t", 1500) == sent


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    process = Process(tmp_path)
    yield process
    process.kill()


def test_kill_9_under_load_loses_and_repeats_nothing(process: Process) -> None:
    address = f"127.0.0.1:{process.port}"
    admin = ck.Producer({"bootstrap.servers": address, "log_level": 0})
    admin.list_topics("t", timeout=DEADLINE_S)
    sent: dict[int, list[bytes]] = {}
    failed: list[BaseException] = []

    def work() -> None:
        try:
            sent.update(produce(address, "t", 1500, pause_s=0.001))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(2):
        time.sleep(0.7)
        process.kill()
        process.start()
    thread.join(90)
    assert not thread.is_alive()
    assert failed == []
    assert stored(address, "t", 1500) == sent
