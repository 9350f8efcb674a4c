"""A node with `storage.l1`: records of real clients move to L1 entirely and are read back from it, also after a
kill."""

from __future__ import annotations

import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import confluent_kafka as ck
import pytest
from quick import PARTITIONS, Quick, eventually

from support.waiting import DEADLINE_S


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Quick]:
    node = Quick(tmp_path_factory.mktemp("l1"))
    yield node
    node.end()


def test_what_was_written_is_read_from_l1_alone_with_its_times_and_without_what_was_aborted(node: Quick) -> None:
    node.make("past")
    begin_ms = int(time.time() * 1000) + 1_800_000  # after the times of the markers
    expected: dict[int, list[tuple[bytes | None, bytes]]] = defaultdict(list)
    plain = node.producer(**{"compression.type": "lz4", "batch.num.messages": 20})
    moving = node.producer(**{"transactional.id": "tx"})
    moving.init_transactions(30)
    for part in range(4):
        for i in range(300):
            key, value = b"%d" % i, b"value %d.%d " % (part, i) * 5
            plain.produce("past", key=key, value=value, partition=i % PARTITIONS, timestamp=begin_ms + part * 300 + i)
            expected[i % PARTITIONS].append((key, value))
        assert plain.flush(30) == 0
        moving.begin_transaction()
        for partition in range(PARTITIONS):
            moving.produce("past", value=b"tx %d" % part, partition=partition, timestamp=begin_ms + part * 300 + 299)
        moving.flush(30)
        if part % 2:
            moving.abort_transaction(30)
        else:
            moving.commit_transaction(30)
            for partition in range(PARTITIONS):
                expected[partition].append((None, b"tx %d" % part))
    node.only_in_l1()
    for signum in (None, signal.SIGTERM, signal.SIGKILL):
        if signum is not None:
            node.end(signum)
            node.start()
        found = node.read("past")
        assert {p: [(key, value) for _, key, value in rows] for p, rows in found.items()} == expected
    client = node.consumer()
    for at in (0, 1, 299, 300, 777):
        wanted = [ck.TopicPartition("past", p, begin_ms + at) for p in range(PARTITIONS)]
        for place in client.offsets_for_times(wanted, timeout=DEADLINE_S):
            client.assign([ck.TopicPartition("past", place.partition, place.offset)])
            message = client.poll(30)
            assert message is not None and message.error() is None
            assert message.offset() == place.offset and message.timestamp()[1] in (begin_ms + at, begin_ms + at + 1)
    client.close()


def test_nothing_acknowledged_is_lost_or_doubled_when_the_node_is_killed_while_records_move(node: Quick) -> None:
    node.make("killed")
    acked: list[list[int]] = [[] for _ in range(PARTITIONS)]
    failed: list[str] = []
    stop = threading.Event()

    def reported(partition: int, number: int) -> Callable[[Any, Any], None]:
        return lambda error, _: failed.append(str(error)) if error is not None else acked[partition].append(number)

    def load() -> None:
        client, number = node.producer(**{"linger.ms": 1, "message.timeout.ms": 100_000}), 0
        while not stop.is_set():
            for partition in range(PARTITIONS):
                value = b"%d" % number + b"." * 2_000
                client.produce("killed", value=value, partition=partition, on_delivery=reported(partition, number))
            number += 1
            client.poll(0.005)
        if client.flush(100):
            failed.append("not flushed")

    thread = threading.Thread(target=load)
    thread.start()
    try:
        for _ in range(3):
            before, moved = [len(each) for each in acked], set(node.stored("l1"))
            eventually(lambda: all(len(a) > b + 200 for a, b in zip(acked, before, strict=True)))  # noqa: B023
            eventually(lambda: bool(set(node.stored("l1")) - moved))  # noqa: B023
            node.end()
            node.start()
    finally:
        stop.set()
        thread.join()
    assert failed == []
    node.only_in_l1()
    found = node.read("killed")
    for partition in range(PARTITIONS):
        numbers = [int((value or b"").rstrip(b".")) for _, _, value in found[partition]]
        assert numbers == acked[partition] == list(range(len(numbers)))
        assert [offset for offset, _, _ in found[partition]] == list(range(len(numbers)))


def test_retention_by_size_and_by_time_reaches_into_l1(node: Quick) -> None:
    now_ms = int(time.time() * 1000)
    topics = ("size", "time")
    for topic in topics:
        node.make(topic, 1)
    client = node.producer()
    for at_ms in (now_ms - 7_200_000, now_ms):
        for topic in topics:
            for i in range(100):
                client.produce(topic, value=b"%d" % i + b"." * 1_000, partition=0, timestamp=at_ms)
        client.flush(30)
        node.only_in_l1()
    assert [len(node.read(topic, 1)[0]) for topic in topics] == [200, 200]
    node.alter("size", "retention.bytes", "50000")
    node.alter("time", "retention.ms", "3600000")

    def first(topic: str) -> int:
        client = node.consumer()
        low, _ = client.get_watermark_offsets(ck.TopicPartition(topic, 0), timeout=DEADLINE_S)
        client.close()
        return int(low)

    eventually(lambda: first("size") >= 100 and first("time") == 100)
    assert [row[0] for row in node.read("time", 1)[0]] == list(range(100, 200))
    found = [row[0] for row in node.read("size", 1)[0]]
    assert found == list(range(found[0], 200)) and len(found) * 1_000 >= 50_000


def test_a_compacted_topic_keeps_the_newest_of_each_key_and_refuses_records_without_one(node: Quick) -> None:
    node.make("keys", 1, cleanup_policy="compact", min_cleanable_dirty_ratio="0.01")
    client = node.producer(**{"compression.type": "zstd"})
    for number in range(20):
        for key in range(50):
            client.produce("keys", key=b"%d" % key, value=b"%d.%d" % (key, number) * 9, partition=0)
        assert client.flush(30) == 0
    refused: list[Any] = []
    client.produce("keys", value=b"no key", partition=0, on_delivery=lambda error, _: refused.append(error.code()))
    client.flush(30)
    assert refused == [ck.KafkaError.INVALID_RECORD]
    client.produce("keys", key=b"end", value=b"x", partition=0)
    client.flush(30)
    expected = [(950 + key, b"%d" % key, b"%d.19" % key * 9) for key in range(50)] + [(1_000, b"end", b"x")]
    eventually(lambda: node.read("keys", 1)[0] == expected)
    node.only_in_l1()
    node.end()
    node.start()
    assert node.read("keys", 1)[0] == expected
