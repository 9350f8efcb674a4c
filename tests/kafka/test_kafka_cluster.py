"""Two nodes over one bucket and one consensus: one view for clients, and failover without loss."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import confluent_kafka as ck
import pytest
from confluent_kafka.admin import AdminClient
from harness import Cluster
from raw import RawClient, batch, produce_body

from tidemill.kafka import errors

PARTITIONS = 24
"""So many that both nodes lead some, whatever the topic id is."""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster("n1", "n2")
    yield cluster
    cluster.close()


def create(cluster: Cluster, topic: str) -> None:
    cluster.portal.call(cluster.nodes[0].catalogue.create_topic(topic, PARTITIONS))


def view(address: str, topic: str) -> tuple[Any, ...]:
    found = AdminClient({"bootstrap.servers": address}).list_topics(topic, timeout=10)
    brokers = sorted((b.id, b.port) for b in found.brokers.values())
    return brokers, found.controller_id, {p.id: p.leader for p in found.topics[topic].partitions.values()}


def test_every_node_tells_clients_the_same(cluster: Cluster) -> None:
    create(cluster, "t")
    views = [view(f"127.0.0.1:{node.port}", "t") for node in cluster.nodes]
    assert views[0] == views[1]
    brokers, controller, leaders = views[0]
    assert [port for _, port in brokers] == [node.port for node in cluster.nodes]
    assert controller == brokers[0][0]
    assert set(leaders.values()) == {node_id for node_id, _ in brokers}


def test_a_topic_made_on_one_node_is_served_by_the_other_at_once(cluster: Cluster) -> None:
    create(cluster, "t")
    node = cluster.nodes[1]
    topic_id = next(row.topic_id for row in cluster.portal.call(_rows(node)) if row.name == "t")
    led = next(p for p in range(PARTITIONS) if node.topics.leader_of(topic_id, p) == node.name)

    with RawClient(node.port) as client:
        answer = client.ask(0, 3, produce_body("t", [(led, batch([b"v"]))]))
        assert int(answer.responses[0].partition_responses[0].error_code) == 0


async def _rows(node: Any) -> list[Any]:
    from tidemill.metastore.catalogue import TopicRow

    return await node.catalogue.list(TopicRow)


def test_the_wrong_node_refuses_and_names_no_loss(cluster: Cluster) -> None:
    create(cluster, "t")
    node, other = cluster.nodes
    (row,) = cluster.portal.call(_rows(node))
    led = next(p for p in range(PARTITIONS) if node.topics.leader_of(row.topic_id, p) == node.name)
    with RawClient(other.port) as client:
        client.ask(3, 1, b"\xff\xff\xff\xff")
        answer = client.ask(0, 3, produce_body("t", [(led, batch([b"v"]))]))
        code = int(answer.responses[0].partition_responses[0].error_code)
        assert code == errors.NOT_LEADER_OR_FOLLOWER


def test_an_idempotent_producer_outlives_a_node_that_leaves_and_returns(cluster: Cluster) -> None:
    create(cluster, "t")
    failures: list[Any] = []
    sent: dict[int, list[bytes]] = defaultdict(list)

    def report(error: Any, _: Any) -> None:
        if error is not None:
            failures.append(error)

    def work() -> None:
        client = ck.Producer(
            {
                "bootstrap.servers": cluster.addresses,
                "enable.idempotence": True,
                "linger.ms": 0,
                "batch.num.messages": 10,
                "retry.backoff.ms": 20,
                "reconnect.backoff.max.ms": 200,
                "topic.metadata.refresh.fast.interval.ms": 50,
                "log_level": 0,
            }
        )
        for i in range(2000):
            value = str(i).encode()
            sent[i % PARTITIONS].append(value)
            client.produce("t", value, partition=i % PARTITIONS, on_delivery=report)
            client.poll(0)
            time.sleep(0.001)
        left = client.flush(60)
        if left:
            failures.append(left)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.5)
    cluster.stop(cluster.nodes[1])
    time.sleep(0.7)
    cluster.start(cluster.nodes[1])
    thread.join(90)
    assert not thread.is_alive()
    assert failures == []
    reader = ck.Consumer(
        {"bootstrap.servers": cluster.addresses, "group.id": "g", "enable.auto.commit": False, "log_level": 0}
    )
    reader.assign([ck.TopicPartition("t", p, 0) for p in range(PARTITIONS)])
    found: dict[int, list[bytes]] = defaultdict(list)
    deadline = time.monotonic() + 30
    while sum(map(len, found.values())) < 2000 and time.monotonic() < deadline:
        for message in reader.consume(1000, 0.2):
            if message.error() is None:
                found[message.partition()].append(message.value())
    extra = reader.consume(10, 0.5)
    reader.close()
    assert found == sent
    assert extra == []
