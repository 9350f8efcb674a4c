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
from kio.index import load_request_schema

from support.kafka.harness import Cluster
from support.kafka.raw import RawClient, batch, encode, fields, nested, produce_body
from support.kafka.session_reader import Fetcher
from support.waiting import eventually
from tidemill.kafka import error_codes
from tidemill.metastore.catalogue import TopicRow

PARTITIONS = 24
"""Enough partitions that both nodes lead some of them for any topic id."""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster("n1", "n2")
    yield cluster
    cluster.close()


def create(cluster: Cluster, topic: str) -> None:
    cluster.portal.call(cluster.nodes[0].catalogue.create_topic(topic, PARTITIONS))


def view(address: str, topic: str) -> tuple[Any, ...]:
    found = AdminClient({"bootstrap.servers": address}).list_topics(topic, timeout=30)
    brokers = sorted((b.id, b.port) for b in found.brokers.values())
    return brokers, {p.id: p.leader for p in found.topics[topic].partitions.values()}


def test_every_node_tells_clients_the_same(cluster: Cluster) -> None:
    create(cluster, "t")
    views = [view(f"127.0.0.1:{node.port}", "t") for node in cluster.nodes]
    assert views[0] == views[1]
    brokers, leaders = views[0]
    assert [port for _, port in brokers] == [node.port for node in cluster.nodes]
    assert set(leaders.values()) == {node_id for node_id, _ in brokers}


def test_the_controller_is_the_node_that_answers_and_so_no_dead_one(cluster: Cluster) -> None:
    """A client that sends InitProducerId or CreateTopics to the controller never reaches a node that just left."""
    for node in cluster.nodes:
        with RawClient(node.port) as client:
            found = client.ask(3, 1, b"\xff\xff\xff\xff")
            described = client.ask(60, 0, encode(fields(load_request_schema(60, 0))))
        ports = {int(broker.node_id): int(broker.port) for broker in found.brokers}
        assert ports[int(found.controller_id)] == node.port
        assert int(described.controller_id) == int(found.controller_id)


def test_a_topic_made_on_one_node_is_served_by_the_other_at_once(cluster: Cluster) -> None:
    create(cluster, "t")
    node = cluster.nodes[1]
    topic_id = next(row.topic_id for row in cluster.portal.call(_rows(node)) if row.name == "t")
    led = next(p for p in range(PARTITIONS) if node.topics.leader_of(topic_id, p) == node.name)

    with RawClient(node.port) as client:
        answer = client.ask(0, 3, produce_body("t", [(led, batch([b"v"]))]))
        assert int(answer.responses[0].partition_responses[0].error_code) == 0


async def _rows(node: Any) -> list[Any]:
    return await node.catalogue.list(TopicRow)


def test_clients_are_told_of_leaders_that_moved_and_of_topics_that_changed(cluster: Cluster) -> None:
    create(cluster, "t")
    node, other = cluster.nodes
    address = f"127.0.0.1:{node.port}"
    both = view(address, "t")
    assert view(address, "t") == both and len(set(both[1].values())) == 2
    cluster.stop(other)
    eventually(lambda: len(node.membership.members()) == 1)
    brokers, leaders = view(address, "t")
    assert set(leaders.values()) == {brokers[0][0]} and len(leaders) == PARTITIONS
    cluster.portal.call(node.catalogue.grow_topic("t", PARTITIONS + 3))
    assert len(view(address, "t")[1]) == PARTITIONS + 3
    cluster.portal.call(node.catalogue.delete(TopicRow, "t"))
    create(cluster, "t")
    create(cluster, "u")
    found = AdminClient({"bootstrap.servers": address}).list_topics(timeout=30).topics
    assert {name: len(topic.partitions) for name, topic in found.items()} == {"t": PARTITIONS, "u": PARTITIONS}


def test_the_wrong_node_refuses_and_names_no_loss(cluster: Cluster) -> None:
    create(cluster, "t")
    node, other = cluster.nodes
    (row,) = cluster.portal.call(_rows(node))
    led = next(p for p in range(PARTITIONS) if node.topics.leader_of(row.topic_id, p) == node.name)
    with RawClient(other.port) as client:
        client.ask(3, 1, b"\xff\xff\xff\xff")
        answer = client.ask(0, 3, produce_body("t", [(led, batch([b"v"]))]))
        code = int(answer.responses[0].partition_responses[0].error_code)
        assert code == error_codes.NOT_LEADER_OR_FOLLOWER


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


def ends_of_epochs(port: int, topic: str) -> dict[int, tuple[int, int]]:
    """OffsetForLeaderEpoch: (code, end offset) by partition."""
    schema = load_request_schema(23, 4)
    element = nested(schema, "topics")
    asked = tuple(
        fields(nested(element, "partitions"), partition=p, current_leader_epoch=-1, leader_epoch=0)
        for p in range(PARTITIONS)
    )
    with RawClient(port) as client:
        client.ask(3, 1, b"\xff\xff\xff\xff")
        body = encode(fields(schema, replica_id=-1, topics=(fields(element, topic=topic, partitions=asked),)))
        (found,) = client.ask(23, 4, body).topics
    return {int(each.partition): (int(each.error_code), int(each.end_offset)) for each in found.partitions}


def test_an_epoch_ends_where_the_log_does_before_a_move_and_after_it(cluster: Cluster) -> None:
    create(cluster, "t")
    topic_id = next(row.topic_id for row in cluster.portal.call(_rows(cluster.nodes[0])) if row.name == "t")
    stays, goes = cluster.nodes
    led = {p for p in range(PARTITIONS) if stays.topics.leader_of(topic_id, p) == stays.name}
    for node, partitions in ((stays, led), (goes, set(range(PARTITIONS)) - led)):
        with RawClient(node.port) as client:
            client.ask(3, 1, b"\xff\xff\xff\xff")
            answer = client.ask(0, 3, produce_body("t", [(p, batch([b"a", b"b"])) for p in sorted(partitions)]))
            assert not any(int(each.error_code) for each in answer.responses[0].partition_responses)
    found = ends_of_epochs(stays.port, "t")
    assert {p for p, each in found.items() if each == (0, 2)} == led
    assert all(found[p][0] == error_codes.NOT_LEADER_OR_FOLLOWER for p in set(found) - led)
    cluster.stop(goes)
    eventually(lambda: set(ends_of_epochs(stays.port, "t").values()) == {(0, 2)})


def test_a_session_is_told_that_a_partition_moved_and_goes_on_where_it_moved_to(cluster: Cluster) -> None:
    create(cluster, "t")
    (row,) = [row for row in cluster.portal.call(_rows(cluster.nodes[0])) if row.name == "t"]
    stays, goes = cluster.nodes
    led = [p for p in range(PARTITIONS) if stays.topics.leader_of(row.topic_id, p) == stays.name]
    others = [p for p in range(PARTITIONS) if p not in led]
    with Fetcher(stays.port, [row]) as reader, Fetcher(goes.port, [row]) as other:
        for each in (reader, other):
            each.client.ask(3, 1, b"\xff\xff\xff\xff")
        first = reader.fetch({("t", p): 0 for p in led}, epoch=0)
        elsewhere = other.fetch({("t", p): 0 for p in others}, epoch=0)
        assert not any(each.code for each in (*first.reported.values(), *elsewhere.reported.values()))
        wrong = other.fetch({("t", led[0]): 0}, session_id=elsewhere.session_id, epoch=1)
        assert wrong.reported["t", led[0]].code == error_codes.NOT_LEADER_OR_FOLLOWER
        cluster.stop(goes)
        epoch = 0
        well: set[tuple[str, int]] = set()

        def moved() -> bool:
            """Partitions may be reported in several fetches, and a reported one is repeated only after a change."""
            nonlocal epoch
            epoch += 1
            reported = reader.fetch({("t", p): 0 for p in others}, session_id=first.session_id, epoch=epoch).reported
            well.difference_update(reported)
            well.update(at for at, each in reported.items() if not each.code)
            return well >= {("t", p) for p in others}

        eventually(moved)
        assert reader.fetch({}, session_id=first.session_id, epoch=epoch + 1).reported == {}
