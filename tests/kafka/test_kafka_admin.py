"""The remaining admin APIs, by raw requests and by clients: pages of partitions, log directories,
deletions, refusals.
"""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec
from kio.index import load_request_schema

from kafka import KafkaAdminClient
from support.kafka.harness import FakeBroker, RealBroker
from support.kafka.raw import ZERO, RawClient, encode, nested
from support.waiting import eventually
from tidemill.kafka import error_codes
from tidemill.kafka.handlers import k75_describe_topic_partitions as paging

ALL_TOPICS = b"\xff\xff\xff\xff"


def page(client: RawClient, names: list[str], limit: int, cursor: tuple[str, int] | None = None) -> Any:
    schema = load_request_schema(75, 0)
    element = nested(schema, "topics")
    kind = next(t for t in schema.__dataclass_fields__["cursor"].type.__args__ if hasattr(t, "__dataclass_fields__"))
    at = None if cursor is None else kind(topic_name=cursor[0], partition_index=cursor[1])
    topics = tuple(element(name=name) for name in names)
    return client.ask(75, 0, encode(schema(topics=topics, response_partition_limit=limit, cursor=at)))


def walk(client: RawClient, names: list[str], limit: int) -> list[list[tuple[str, int]]]:
    """The pages, each its (topic, partition) pairs."""
    pages, cursor = [], None
    while True:
        answer = page(client, names, limit, cursor)
        pages.append([(t.name, int(p.partition_index)) for t in answer.topics for p in t.partitions])
        if answer.next_cursor is None:
            return pages
        cursor = (answer.next_cursor.topic_name, int(answer.next_cursor.partition_index))


def test_partitions_come_by_pages_each_once_and_in_order(
    fake_broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, count in (("b", 3), ("a", 2), ("c", 4)):
        fake_broker.create_topic(name, count)
    whole = [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("b", 2), ("c", 0), ("c", 1), ("c", 2), ("c", 3)]
    with RawClient(fake_broker.port) as client:
        for limit in (1, 2, 3, 4, 5, 9, 100, 0, -7):
            pages = walk(client, [], limit)
            assert [place for each in pages for place in each] == whole, limit
            assert all(len(each) <= max(limit, 1) for each in pages)
        assert walk(client, ["c", "a", "a"], 3) == [[("a", 0), ("a", 1), ("c", 0)], [("c", 1), ("c", 2), ("c", 3)]]
        monkeypatch.setattr(paging, "PARTITIONS_PER_PAGE", 4)
        assert [len(each) for each in walk(client, [], 2**31 - 1)] == [4, 4, 1]
        unknown = page(client, ["a", "nowhere"], 10)
        assert [(t.name, int(t.error_code)) for t in unknown.topics] == [("a", 0), ("nowhere", 3)]
        assert page(client, [], 10, ("bb", 1)).topics[0].name == "c", "the topic of the cursor was deleted"
        after = page(client, [], 10, ("b", 99))
        assert [(t.name, len(t.partitions)) for t in after.topics] == [("b", 0), ("c", 4)]
        page_leaders = {int(p.leader_id) for t in page(client, [], 10).topics for p in t.partitions}
        assert page_leaders == {1}


def test_a_cursor_before_the_first_partition_is_refused(fake_broker: FakeBroker) -> None:
    with RawClient(fake_broker.port) as client:
        answer = page(client, ["a"], 10, ("a", -1))
        assert [int(t.error_code) for t in answer.topics] == [error_codes.INVALID_REQUEST]


def test_what_has_no_meaning_here_is_refused_by_name(fake_broker: FakeBroker) -> None:
    fake_broker.create_topic("t", 1)
    with RawClient(fake_broker.port) as client:
        client.ask(3, 1, ALL_TOPICS)
        schema = load_request_schema(43, 2)
        places = (nested(schema, "topic_partitions")(topic="t", partitions=(0,)),)
        places += (nested(schema, "topic_partitions")(topic="nowhere", partitions=(0,)),)
        asked = encode(schema(election_type=0, topic_partitions=places, timeout=ZERO))

        def elected() -> list[int]:
            found = client.ask(43, 2, asked).replica_election_results
            return [int(t.partition_result[0].error_code) for t in found]

        eventually(lambda: elected() == [error_codes.ELECTION_NOT_NEEDED, error_codes.UNKNOWN_TOPIC_OR_PARTITION])
        schema = load_request_schema(45, 0)
        topic = nested(schema, "topics")
        partition = nested(topic, "partitions")
        moves = tuple(partition(partition_index=0, replicas=replicas) for replicas in ((1, 2), (7,), (), None, (1,)))
        found = client.ask(45, 0, encode(schema(topics=(topic(name="t", partitions=moves),), timeout=ZERO)))
        assert [int(p.error_code) for p in found.responses[0].partitions] == [
            *[error_codes.INVALID_REPLICA_ASSIGNMENT] * 3, error_codes.NO_REASSIGNMENT_IN_PROGRESS, 0
        ]  # fmt: skip
        schema = load_request_schema(34, 2)
        directory = nested(schema, "dirs")
        topics = (nested(directory, "topics")(name="t", partitions=(0,)),)
        dirs = (directory(path="/x", topics=topics), directory(path="/bucket", topics=topics))
        found = client.ask(34, 2, encode(schema(dirs=dirs))).results
        assert [int(t.partitions[0].error_code) for t in found] == [error_codes.LOG_DIR_NOT_FOUND, 0]
        every = client.ask(46, 0, encode(load_request_schema(46, 0)(topics=None, timeout=ZERO)))
        assert (int(every.error_code), every.topics) == (0, ())


def test_records_are_deleted_by_a_client_and_its_neighbours_answered_each(broker: RealBroker) -> None:
    broker.create_topic("t", 2)
    producer = Producer({"bootstrap.servers": broker.address})
    for n in range(10):
        producer.produce("t", str(n).encode(), partition=0, timestamp=1000 + n)
    assert producer.flush(60) == 0
    admin = AdminClient({"bootstrap.servers": broker.address})
    places = [TopicPartition("t", 0, 4), TopicPartition("t", 1, 1)]
    results = admin.delete_records(places)
    assert results[places[0]].result(30).low_watermark == 4
    with pytest.raises(KafkaException, match=r"(?i)out.of.range"):
        results[places[1]].result(30)

    def offset(spec: OffsetSpec) -> int:
        place = TopicPartition("t", 0)
        return int(admin.list_offsets({place: spec})[place].result(30).offset)

    assert offset(OffsetSpec.earliest()) == 4
    assert offset(OffsetSpec.latest()) == 10
    assert offset(OffsetSpec.max_timestamp()) == 9
    assert offset(OffsetSpec.for_timestamp(1006)) == 6
    (end,) = admin.delete_records([TopicPartition("t", 0, -1)]).values()
    assert end.result(30).low_watermark == 10
    assert offset(OffsetSpec.earliest()) == 10


def test_what_has_configs_is_listed(fake_broker: FakeBroker) -> None:
    for name in ("b", "a"):
        fake_broker.create_topic(name, 1)
    with RawClient(fake_broker.port) as client:

        def listed(*kinds: int) -> list[tuple[int, str]]:
            found = client.ask(74, 1, encode(load_request_schema(74, 1)(resource_types=kinds))).config_resources
            return [(int(r.resource_type), r.resource_name) for r in found]

        assert listed() == [(2, "a"), (2, "b"), (4, "1")]
        assert listed(4) == [(4, "1")]
        assert listed(2, 16) == [(2, "a"), (2, "b")]
        assert listed(16) == []


def test_log_directories_are_the_bucket_with_what_the_broker_leads(broker: RealBroker) -> None:
    broker.create_topic("t", 3)
    broker.create_topic("u", 1)
    with RawClient(broker.port) as client:
        body = encode(load_request_schema(35, 4)(topics=None))
        (directory,) = client.ask(35, 4, body).results
        found = {t.name: [int(p.partition_index) for p in t.partitions] for t in directory.topics}
        assert found == {"t": [0, 1, 2], "u": [0]}
        assert int(directory.total_bytes) == -1
        schema = load_request_schema(35, 1)
        element = nested(schema, "topics")
        asked = (element(topic="t", partitions=(1, 7)), element(topic="nowhere", partitions=(0,)))
        (directory,) = client.ask(35, 1, encode(schema(topics=asked))).results
        assert [(t.name, len(t.partitions)) for t in directory.topics] == [("t", 1)]


def test_kafka_python_admin(broker: RealBroker) -> None:
    broker.create_topic("t", 2)
    admin = KafkaAdminClient(bootstrap_servers=broker.address)
    try:
        admin.create_partitions({"t": 5})
        assert len(admin.describe_topics(["t"])[0]["partitions"]) == 5
    finally:
        admin.close()
