"""Every handler at every version: raw requests over a socket, whose answers kio can read."""

from __future__ import annotations

import asyncio
import struct
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from kio.index import load_request_schema
from msgspec.structs import replace

from support.kafka.harness import FakeBroker
from support.kafka.raw import (
    ZERO,
    RawClient,
    batch,
    code,
    decode,
    encode,
    example,
    fetch_body,
    fields,
    nested,
    produce_body,
    request_frame,
)
from support.waiting import DEADLINE_S
from tidemill.base.clock import SystemClock
from tidemill.base.config.listeners import KafkaSection
from tidemill.base.errors import InvalidError, TidemillError, UnavailableError, UnknownOutcomeError
from tidemill.kafka import KafkaSettings, error_codes
from tidemill.kafka.api import dispatch as request_module
from tidemill.kafka.handlers import APIS, k01_fetch, k20_delete_topics
from tidemill.kafka.metadata.topic_cache import TopicCache
from tidemill.kafka.schema import codec_compiler
from tidemill.metastore.catalogue import Catalogue, PipelineRow, TopicRow
from tidemill.metastore.rows import GROUP_OFFSETS
from tidemill.metastore.rows.groups import GroupOffsetRow

ALL_TOPICS = b"\xff\xff\xff\xff"


def strict(key: int, version: int, body: dict[str, Any]) -> bytearray:
    """Call encode_response, and refuse fields that no version of the schema has."""
    api = APIS[key]
    trees = [codec_compiler.response_fields(key, v) for v in range(api.min_version, api.max_version + 1)]

    def check(value: Any, known: list[dict[str, Any]]) -> None:
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, dict):
                for name, inner in item.items():
                    here = [tree[name] for tree in known if name in tree]
                    if name != "name" or here:
                        assert here or name in UNION_EXTRAS.get(key, ()), f"no such field: {key} {name}"
                    check(inner, here)

    check(body, trees)
    return codec_compiler.encode_response(key, version, body)


UNION_EXTRAS = {10: ("key",), 9: ("group_id", "topic_id")}
"""Fields that a builder sets for both shapes of a response."""


SASL = (17, 36)
"""APIs that only a listener with SASL answers: test_kafka_sasl."""
REFUSED = {34: error_codes.LOG_DIR_NOT_FOUND, 43: error_codes.ELECTION_NOT_NEEDED}
"""The error of each API that exists only to refuse by name."""

EVERY = [(a.key, v) for a in APIS.values() if a.key not in SASL for v in range(a.min_version, a.max_version + 1)]


NOBODY = {
    11: error_codes.MEMBER_ID_REQUIRED,
    12: error_codes.UNKNOWN_MEMBER_ID,
    13: error_codes.UNKNOWN_MEMBER_ID,
    14: error_codes.UNKNOWN_MEMBER_ID,
    15: error_codes.GROUP_ID_NOT_FOUND,
    42: error_codes.GROUP_ID_NOT_FOUND,
    47: error_codes.GROUP_ID_NOT_FOUND,
    **dict.fromkeys((24, 25, 26, 28), error_codes.INVALID_PRODUCER_ID_MAPPING),
    65: error_codes.TRANSACTIONAL_ID_NOT_FOUND,
    69: error_codes.GROUP_ID_NOT_FOUND,
}
"""The error for an unknown group or transactional id, or for a caller that is not a member. Some versions have no place
for it (`expected`).
"""


def expected(key: int, version: int) -> int:
    reported = {11: version >= 4, 15: version >= 6}.get(key, True)
    return REFUSED.get(key, NOBODY.get(key, 0)) if reported else 0


@pytest.fixture(scope="module")
def shared() -> Any:
    """Return a broker on which the anonymous user is a super user, so that every request passes its check."""
    broker = FakeBroker(
        KafkaSettings(KafkaSection(group_initial_rebalance_delay_ms=0)), super_users=("User:ANONYMOUS",)
    )
    yield broker
    broker.close()


@pytest.mark.parametrize(("key", "version"), EVERY, ids=lambda n: str(n))
def test_every_version_is_answered_without_error_and_readable(
    shared: FakeBroker, monkeypatch: pytest.MonkeyPatch, key: int, version: int
) -> None:
    monkeypatch.setattr(request_module, "encode_response", strict)
    name = f"t-{key}-{version}"
    row = shared.create_topic(name, 1)
    with RawClient(shared.port) as client:
        client.ask(3, 1, ALL_TOPICS)
        answer = client.ask(key, version, example(key, version, name, uuid.UUID(row.topic_id)))
        assert code(answer) == expected(key, version)
        if key == 19:
            removed = client.ask(20, 1, encode(load_request_schema(20, 1)(topic_names=("made",), timeout=ZERO)))
            assert code(removed) == 0


class Panic(BaseException):
    """An exception of native code, which does not derive from `Exception`."""


@pytest.mark.parametrize(
    ("key", "version"), [place for place in EVERY if place[0] not in (0, 18)], ids=lambda n: str(n)
)
def test_f209_a_fault_of_any_type_ends_its_request_and_not_the_connection(
    shared: FakeBroker, monkeypatch: pytest.MonkeyPatch, key: int, version: int
) -> None:
    def broken(*_: Any) -> Any:
        raise Panic("nobody listed this")

    name = f"f-{key}-{version}"
    row = shared.create_topic(name, 1)
    with RawClient(shared.port) as client:
        client.ask(3, 1, ALL_TOPICS)
        body = example(key, version, name, uuid.UUID(row.topic_id))
        with monkeypatch.context() as planted:
            planted.setattr(request_module, "encode_response", strict)
            planted.setattr(request_module, "encode_answer", broken)
            planted.setattr(k01_fetch, "_fetch_full", broken)
            answer = client.ask(key, version, body)
        assert code(answer) == (error_codes.KAFKA_STORAGE_ERROR if key == 1 else error_codes.UNKNOWN_SERVER_ERROR)
        assert code(client.ask(18, 0, b"")) == 0, "the same connection"


def test_no_client_makes_partitions_beyond_the_limit_in_all() -> None:
    broker = FakeBroker(KafkaSettings(KafkaSection(partitions_max=10, default_partitions=4)))
    try:
        schema = load_request_schema(19, 4)
        element = nested(schema, "topics")

        def create(name: str, partitions: int) -> int:
            new = element(name=name, num_partitions=partitions, replication_factor=1, assignments=(), configs=())
            with RawClient(broker.port) as client:
                return int(client.ask(19, 4, encode(schema(topics=(new,), timeout=ZERO))).topics[0].error_code)

        assert create("one", 7) == 0
        assert create("two", 4) == error_codes.POLICY_VIOLATION
        with RawClient(broker.port) as client:
            answer = client.ask(3, 1, struct.pack(">ih", 1, 3) + b"new")
            assert int(answer.topics[0].error_code) == error_codes.UNKNOWN_TOPIC_OR_PARTITION
        assert create("two", 3) == 0
    finally:
        broker.close()


def test_metadata_creates_a_missing_topic_with_the_default_partitions(fake_broker: FakeBroker) -> None:
    with RawClient(fake_broker.port) as client:
        (topic,) = client.ask(3, 1, struct.pack(">ih", 1, 3) + b"new").topics
        assert (topic.name, len(topic.partitions), int(topic.error_code)) == ("new", 4, 0)
        assert {int(p.leader_id) for p in topic.partitions} == {1}


def test_metadata_creates_nothing_when_the_client_forbids_it(fake_broker: FakeBroker) -> None:
    with RawClient(fake_broker.port) as client:
        (topic,) = client.ask(3, 4, struct.pack(">ih", 1, 3) + b"new" + b"\x00").topics
        assert int(topic.error_code) == error_codes.UNKNOWN_TOPIC_OR_PARTITION
        assert client.ask(3, 1, ALL_TOPICS).topics == ()


def test_metadata_creates_nothing_when_the_setting_is_off() -> None:
    broker = FakeBroker(KafkaSettings(KafkaSection(auto_create_topics=False)))
    try:
        with RawClient(broker.port) as client:
            (topic,) = client.ask(3, 1, struct.pack(">ih", 1, 3) + b"new").topics
            assert int(topic.error_code) == error_codes.UNKNOWN_TOPIC_OR_PARTITION
    finally:
        broker.close()


def test_metadata_by_an_unknown_id_and_a_bad_name(fake_broker: FakeBroker) -> None:
    schema = load_request_schema(3, 12)
    element = nested(schema, "topics")
    asked = (element(topic_id=uuid.uuid4(), name=None), element(topic_id=None, name="a b"))
    with RawClient(fake_broker.port) as client:
        answer = client.ask(3, 12, encode(fields(schema, topics=asked)))
        codes = [int(t.error_code) for t in answer.topics]
        assert codes == [error_codes.UNKNOWN_TOPIC_ID, error_codes.INVALID_TOPIC_EXCEPTION]


@pytest.mark.parametrize("version", [10, 11])
def test_metadata_by_id_alone_before_its_version_is_refused_in_an_answer_that_can_be_read(
    fake_broker: FakeBroker, version: int
) -> None:
    schema = load_request_schema(3, version)
    element = nested(schema, "topics")
    row = fake_broker.create_topic("t", 1)
    asked = (element(topic_id=uuid.UUID(row.topic_id), name=None), element(topic_id=uuid.uuid4(), name="t"))
    with RawClient(fake_broker.port) as client:
        answer = client.ask(3, version, encode(fields(schema, topics=(*asked, element(topic_id=None, name="t")))))
        assert [(t.name, int(t.error_code)) for t in answer.topics] == [
            ("", error_codes.INVALID_REQUEST),
            ("t", 0),
            ("t", 0),
        ]


def test_metadata_of_no_topics_lists_the_brokers_only(fake_broker: FakeBroker) -> None:
    fake_broker.create_topic("t", 1)
    with RawClient(fake_broker.port) as client:
        answer = client.ask(3, 1, b"\x00\x00\x00\x00")
        assert answer.topics == ()
        assert [(b.host, int(b.port)) for b in answer.brokers] == [("127.0.0.1", fake_broker.port)]


def test_metadata_of_many_topics_is_one_read_of_the_catalogue(fake_broker: FakeBroker) -> None:
    names = [f"t{i:02}" for i in range(30)]
    for name in names[:-1]:
        fake_broker.create_topic(name, 1)
    body = struct.pack(">i", len(names)) + b"".join(struct.pack(">h", 3) + name.encode() for name in names)
    with RawClient(fake_broker.port) as client:
        answer = client.ask(3, 1, body)
        assert [(t.name, int(t.error_code), len(t.partitions)) for t in answer.topics] == [
            (name, 0, 4 if name == "t29" else 1) for name in names
        ]


def test_while_consensus_is_down_known_topics_are_served_and_the_rest_is_retriable(fake_broker: FakeBroker) -> None:
    fake_broker.create_topic("known", 1)
    asked = struct.pack(">ih", 1, 5)
    with RawClient(fake_broker.port) as client:
        client.ask(3, 1, ALL_TOPICS)
        fake_broker.consensus.down = True
        assert code(client.ask(3, 1, asked + b"known")) == 0
        assert code(client.ask(3, 1, asked + b"other")) == error_codes.LEADER_NOT_AVAILABLE
        assert [t.name for t in client.ask(3, 1, ALL_TOPICS).topics] == ["known"]
        assert ask_produce(client, "known", [(0, batch([b"v"]))]) == [0]
        body = encode(load_request_schema(22, 1)(transactional_id=None, transaction_timeout=ZERO))
        assert code(client.ask(22, 1, body)) == error_codes.COORDINATOR_NOT_AVAILABLE
        fetch = struct.pack(">h", 1) + b"g" + struct.pack(">ih", 1, 5) + b"known" + struct.pack(">ii", 1, 0)
        assert code(client.ask(9, 1, fetch)) == error_codes.COORDINATOR_LOAD_IN_PROGRESS
        fake_broker.consensus.down = False
        assert code(client.ask(22, 1, body)) == 0


def ask_produce(client: RawClient, topic: str, parts: list[tuple[int, bytes | None]], **more: Any) -> list[int]:
    answer = client.ask(0, 3, produce_body(topic, parts, **more))
    return [int(p.error_code) for p in answer.responses[0].partition_responses]


def test_produce_answers_each_bad_partition_by_itself(fake_broker: FakeBroker) -> None:
    fake_broker.create_topic("t", 4)
    good = batch([b"v"])
    bad_crc = good[:-1] + bytes([good[-1] ^ 1])
    old_magic = good[:16] + b"\x01" + good[17:]
    control = good[:22] + b"\x20" + good[23:]
    with RawClient(fake_broker.port) as client:
        client.ask(3, 1, ALL_TOPICS)
        parts = [(0, good), (1, None), (2, bad_crc), (3, old_magic), (4, good), (-1, good), (0, good + good)]
        parts += [(0, good[:-3]), (0, good[:20]), (0, control), (0, good)]
        assert ask_produce(client, "t", parts) == [
            0,
            error_codes.INVALID_RECORD,
            error_codes.CORRUPT_MESSAGE,
            error_codes.INVALID_RECORD,
            error_codes.UNKNOWN_TOPIC_OR_PARTITION,
            error_codes.UNKNOWN_TOPIC_OR_PARTITION,
            error_codes.INVALID_RECORD,
            error_codes.CORRUPT_MESSAGE,
            error_codes.CORRUPT_MESSAGE,
            error_codes.INVALID_RECORD,
            0,
        ]


def test_a_fault_of_ours_in_one_partition_leaves_the_others_their_answers(
    fake_broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_broker.create_topic("t", 3)
    inner = fake_broker.topics.produce_nowait

    def broken(topic_id: str, partition: int, data: Any, **more: Any) -> Any:
        if partition == 1:
            raise RuntimeError("bug")
        return inner(topic_id, partition, data, **more)

    monkeypatch.setattr(fake_broker.topics, "produce_nowait", broken)
    with RawClient(fake_broker.port) as client:
        codes = ask_produce(client, "t", [(p, batch([b"v"])) for p in range(3)])
        assert codes == [0, error_codes.REQUEST_TIMED_OUT, 0]


def test_produce_refuses_what_it_must(fake_broker: FakeBroker) -> None:
    fake_broker.create_topic("t", 1)
    fake_broker.create_topic("orders", 1, kind="capture")
    good, zstd = batch([b"v"]), batch([b"v"], codec="zstd")
    with RawClient(fake_broker.port) as client:
        client.ask(3, 1, ALL_TOPICS)
        assert ask_produce(client, "orders", [(0, good)]) == [error_codes.TOPIC_AUTHORIZATION_FAILED]
        assert ask_produce(client, "t", [(0, good)], acks=5) == [error_codes.INVALID_REQUIRED_ACKS]
        transactional = good[:22] + b"\x10" + good[23:]
        assert ask_produce(client, "t", [(0, transactional)]) == [error_codes.INVALID_RECORD]
        assert ask_produce(client, "t", [(0, zstd)]) == [76]


def test_a_topic_is_called_unknown_only_after_looking_for_it(fake_broker: FakeBroker) -> None:
    with RawClient(fake_broker.port) as client:
        assert ask_produce(client, "later", [(0, batch([b"v"]))]) == [error_codes.UNKNOWN_TOPIC_OR_PARTITION]
        fake_broker.create_topic("other", 1)
        assert ask_produce(client, "other", [(0, batch([b"v"]))]) == [0]
        fake_broker.create_topic("later", 1)
        client.ask(3, 1, ALL_TOPICS)
        assert ask_produce(client, "later", [(0, batch([b"v"]))]) == [0]


def test_fetch_tells_unknown_partitions_and_offsets_out_of_range(fake_broker: FakeBroker) -> None:
    fake_broker.create_topic("t", 1)
    with RawClient(fake_broker.port) as client:
        client.ask(3, 1, ALL_TOPICS)
        far = client.ask(1, 4, fetch_body("t", 0, 99)).responses[0].partitions[0]
        assert int(far.error_code) == error_codes.OFFSET_OUT_OF_RANGE

        def absent() -> int:
            asked = fetch_body("t", 7, 0, max_wait_ms=60_000)
            return int(client.ask(1, 4, asked).responses[0].partitions[0].error_code)

        assert absent() == error_codes.UNKNOWN_TOPIC_OR_PARTITION, (
            "the first answer waits until the topic was looked for"
        )


def test_list_offsets_by_time_is_exact_to_the_record_in_every_codec(fake_broker: FakeBroker) -> None:
    fake_broker.create_topic("t", 1)
    schema = load_request_schema(2, 1)
    topic = nested(schema, "topics")
    partition = nested(topic, "partitions")
    with RawClient(fake_broker.port) as client:
        client.ask(3, 1, ALL_TOPICS)
        for i, codec in enumerate(["none", "gzip", "snappy", "lz4"]):
            ask_produce(client, "t", [(0, batch([b"a", b"b", b"c"], codec=codec, base_ms=1000 * (i + 1)))])

        def asked(timestamp: int) -> tuple[int, int, int]:
            places = (topic(name="t", partitions=(partition(partition_index=0, timestamp=timestamp),)),)
            found = client.ask(2, 1, encode(schema(replica_id=-1, topics=places))).topics[0].partitions[0]
            return int(found.error_code), int(found.offset), int(found.timestamp)

        assert [asked(1000 * n + 1)[1] for n in (1, 2, 3, 4)] == [1, 4, 7, 10]
        assert asked(1003) == (0, 3, 2000)
        assert asked(9999) == (0, -1, -1)
        assert asked(-2)[:2] == (0, 0)
        assert asked(-1)[:2] == (0, 12)
        for special in (-3, -4, -5, -6, -99):
            assert asked(special)[0] == error_codes.UNSUPPORTED_VERSION, "this version does not know them"


def test_producer_ids_never_repeat_across_nodes_and_restarts(fake_broker: FakeBroker) -> None:
    schema = load_request_schema(22, 1)
    body = encode(schema(transactional_id=None, transaction_timeout=ZERO))
    ids = []
    for _ in range(3):
        with RawClient(fake_broker.port) as client:
            ids += [int(client.ask(22, 1, body).producer_id) for _ in range(5)]
        fake_broker.stop()
        fake_broker.start()
    assert len(set(ids)) == 15
    with RawClient(fake_broker.port) as client:
        refused = client.ask(22, 1, encode(schema(transactional_id="t", transaction_timeout=ZERO)))
        assert int(refused.error_code) == error_codes.INVALID_TRANSACTION_TIMEOUT


def test_offset_commits_of_members_are_refused_and_simple_ones_kept(fake_broker: FakeBroker) -> None:
    fake_broker.create_topic("t", 2)
    schema = load_request_schema(8, 7)
    topic = nested(schema, "topics")
    partition = nested(topic, "partitions")

    def body(member: str, index: int, offset: int, metadata: str = "") -> bytes:
        part = partition(partition_index=index, committed_offset=offset, committed_metadata=metadata)
        return encode(
            schema(
                group_id="g",
                generation_id_or_member_epoch=3 if member else -1,
                member_id=member,
                topics=(topic(name="t", partitions=(part,)),),
            )
        )

    with RawClient(fake_broker.port) as client:
        client.ask(3, 1, ALL_TOPICS)
        assert code(client.ask(8, 7, body("m-1", 0, 5))) == error_codes.UNKNOWN_MEMBER_ID
        assert code(client.ask(8, 7, body("", 0, 5, "note"))) == 0
        assert code(client.ask(8, 7, body("", 1, 6))) == 0
        assert code(client.ask(8, 7, body("", 0, 5, "x" * 5000))) == error_codes.OFFSET_METADATA_TOO_LARGE
        assert code(client.ask(8, 7, body("", 9, 5))) == error_codes.UNKNOWN_TOPIC_OR_PARTITION
        everything = client.ask(9, 2, struct.pack(">h", 1) + b"g" + b"\xff\xff\xff\xff")
        parts = everything.topics[0].partitions
        assert [(int(p.partition_index), int(p.committed_offset), p.metadata) for p in parts] == [
            (0, 5, "note"),
            (1, 6, ""),
        ]


def test_offsets_of_what_cannot_be_looked_up_are_asked_for_again_and_not_called_none(
    fake_broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An offset of −1 without an error would make a consumer start at auto.offset.reset."""
    monkeypatch.setattr("tidemill.kafka.metadata.topic_cache.SETTLE_S", 0.05)
    whole = fake_broker.catalogue.list

    async def away(kind: Any, **more: Any) -> Any:
        raise UnavailableError("the catalogue is away.")

    def asked(topic: str, version: int, partition: int, topic_id: str = "") -> bytes:
        schema = load_request_schema(9, version)
        group = nested(schema, "groups") if version >= 8 else schema
        named = {"topic_id": uuid.UUID(topic_id)} if version >= 10 else {"name": topic}
        topics = (nested(group, "topics")(**named, partition_indexes=(partition,)),)
        if version < 8:
            return encode(schema(group_id="g", topics=topics, **({"require_stable": False} if version == 7 else {})))
        member = {"member_id": None, "member_epoch": -1} if version >= 9 else {}
        return encode(schema(groups=(group(group_id="g", topics=topics, **member),), require_stable=False))

    def found(client: RawClient, topic: str, version: int, partition: int, topic_id: str = "") -> tuple[int, int]:
        answer = client.ask(9, version, asked(topic, version, partition, topic_id))
        answer = answer.groups[0] if version >= 8 else answer
        (part,) = answer.topics[0].partitions
        assert version == 1 or int(part.error_code) == int(answer.error_code), "both are looked at"
        return int(part.error_code), int(part.committed_offset)

    fake_broker.create_topic("grows", 1)
    with RawClient(fake_broker.port) as client:
        client.ask(3, 1, ALL_TOPICS)
        monkeypatch.setattr(fake_broker.catalogue, "list", away)
        new = fake_broker.create_topic("new", 1)
        grown = fake_broker.portal.call(
            fake_broker.catalogue.change_topic("grows", lambda row: msgspec.structs.replace(row, partitions=3))
        )
        places = {("new", 0): new, ("grows", 2): grown}
        rows = [GROUP_OFFSETS.encode(GroupOffsetRow("g", row.topic_id, p, 7)) for (_, p), row in places.items()]
        fake_broker.portal.call(fake_broker.metastore.commit(rows))
        for version in (1, 5, 7, 8, 10):
            for (name, partition), row in places.items():
                reported = found(client, name, version, partition, row.topic_id)
                assert reported == (error_codes.COORDINATOR_LOAD_IN_PROGRESS, -1), (name, version)
        topic = nested(load_request_schema(8, 7), "topics")
        part = nested(topic, "partitions")
        commit = encode(
            load_request_schema(8, 7)(
                group_id="g", generation_id_or_member_epoch=-1, member_id="", group_instance_id=None,
                topics=tuple(
                    topic(name=name, partitions=(
                        part(partition_index=p, committed_offset=8, committed_leader_epoch=-1, committed_metadata=""),
                    ))
                    for name, p in places
                ),
            )
        )  # fmt: skip
        reported = [int(p.error_code) for t in client.ask(8, 7, commit).topics for p in t.partitions]
        assert reported == [error_codes.COORDINATOR_LOAD_IN_PROGRESS] * 2
        monkeypatch.setattr(fake_broker.catalogue, "list", whole)
        monkeypatch.setattr("tidemill.kafka.metadata.topic_cache.SETTLE_S", DEADLINE_S)
        for version in (1, 5, 7, 8, 10):
            for (name, partition), row in places.items():
                assert found(client, name, version, partition, row.topic_id) == (0, 7), (name, version)
        assert found(client, "nowhere", 7, 0) == (0, -1), "as Kafka says of what is not there"
        assert found(client, "grows", 7, 3) == (0, -1)


def test_f213_a_topic_in_use_is_not_deleted_by_a_client(fake_broker: FakeBroker) -> None:
    fake_broker.create_topic("orders", 1, kind="capture")
    fake_broker.create_topic("clicks", 1)
    fake_broker.portal.call(fake_broker.catalogue.put(PipelineRow("p", {"clicks": "topic:clicks"})))
    with RawClient(fake_broker.port) as client:
        body = encode(load_request_schema(20, 5)(topic_names=("orders", "clicks", "none"), timeout=ZERO))
        answer = client.ask(20, 5, body)
        assert [int(r.error_code) for r in answer.responses] == [
            error_codes.POLICY_VIOLATION,
            error_codes.POLICY_VIOLATION,
            error_codes.UNKNOWN_TOPIC_OR_PARTITION,
        ]
        assert "pipeline:p" in answer.responses[1].error_message


@pytest.mark.parametrize("by_id", [False, True])
def test_a_topic_that_is_created_again_during_its_deletion_stays(
    fake_broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, by_id: bool
) -> None:
    asked, later = fake_broker.create_topic("t", 1), list[TopicRow]()
    checked = k20_delete_topics.find_topic_users

    async def overtaken(catalogue: Catalogue, row: TopicRow) -> list[str]:
        users = await checked(catalogue, row)
        await catalogue.delete_topic(row)  # through another node
        later.append(await catalogue.create_topic("t", 1, kind="capture"))
        return users

    monkeypatch.setattr(k20_delete_topics, "find_topic_users", overtaken)
    schema = load_request_schema(20, 6)
    state = nested(schema, "topics")
    named = state(name=None, topic_id=uuid.UUID(asked.topic_id)) if by_id else state(name="t", topic_id=None)
    with RawClient(fake_broker.port) as client:
        (answer,) = client.ask(20, 6, encode(schema(topics=(named,), timeout=ZERO))).responses
    expected = error_codes.UNKNOWN_TOPIC_ID if by_id else error_codes.UNKNOWN_TOPIC_OR_PARTITION
    assert int(answer.error_code) == expected
    assert fake_broker.portal.call(fake_broker.catalogue.list(TopicRow)) == later


CREATE_REFUSALS: list[tuple[dict[str, Any], int]] = [
    ({"name": "bad name"}, error_codes.INVALID_TOPIC_EXCEPTION),
    ({"num_partitions": 0}, error_codes.INVALID_PARTITIONS),
    ({"num_partitions": 1_000_000}, error_codes.INVALID_PARTITIONS),
    ({"replication_factor": 0}, error_codes.INVALID_REPLICATION_FACTOR),
    ({"name": "taken"}, error_codes.TOPIC_ALREADY_EXISTS),
    ({"configs": (("no.such", "1"),)}, error_codes.INVALID_CONFIG),
    ({"configs": (("cleanup.policy", "shrink"),)}, error_codes.INVALID_CONFIG),
    ({"configs": (("retention.ms", "a week"),)}, error_codes.INVALID_CONFIG),
    ({"configs": (("retention.ms", "-2"),)}, error_codes.INVALID_CONFIG),
    ({"configs": (("max.message.bytes", "1000000000"),)}, error_codes.INVALID_CONFIG),
    ({"configs": (("min.insync.replicas", "0"),)}, error_codes.INVALID_CONFIG),
]


@pytest.mark.parametrize(("change", "expected"), CREATE_REFUSALS)
def test_create_topics_refuses(fake_broker: FakeBroker, change: dict[str, Any], expected: int) -> None:
    fake_broker.create_topic("taken", 1)
    schema = load_request_schema(19, 4)
    element = nested(schema, "topics")
    values: dict[str, Any] = {"name": "new", "num_partitions": 1, "replication_factor": 1, "assignments": ()}
    config = nested(element, "configs")
    values["configs"] = tuple(config(name=n, value=v) for n, v in change.get("configs", ()))
    values |= {k: v for k, v in change.items() if k != "configs"}
    for validate_only in (True, False):
        with RawClient(fake_broker.port) as client:
            body = encode(schema(topics=(element(**values),), timeout=ZERO, validate_only=validate_only))
            (topic,) = client.ask(19, 4, body).topics
            assert int(topic.error_code) == expected
            assert topic.error_message


def test_create_topics_only_validates_when_asked_to(fake_broker: FakeBroker) -> None:
    schema = load_request_schema(19, 4)
    element = nested(schema, "topics")
    topic = element(name="new", num_partitions=-1, replication_factor=-1, assignments=(), configs=())
    with RawClient(fake_broker.port) as client:
        assert code(client.ask(19, 4, encode(schema(topics=(topic,), timeout=ZERO, validate_only=True)))) == 0
        assert client.ask(3, 1, ALL_TOPICS).topics == ()
        assert code(client.ask(19, 4, encode(schema(topics=(topic,), timeout=ZERO, validate_only=False)))) == 0
        assert len(client.ask(3, 1, ALL_TOPICS).topics[0].partitions) == 4


def test_coordinators_of_anything_but_groups_and_transactions_are_refused_with_a_message(
    fake_broker: FakeBroker,
) -> None:
    with RawClient(fake_broker.port) as client:
        answer = client.ask(10, 1, struct.pack(">h", 1) + b"t" + b"\x01")
        assert (int(answer.error_code), answer.node_id) == (0, 1)
        answer = client.ask(10, 1, struct.pack(">h", 1) + b"t" + b"\x02")
        assert int(answer.error_code) == error_codes.INVALID_REQUEST
        assert answer.error_message == "Share groups are not supported."


# the table of codes ------------------------------------------------------------------------------


def test_every_kind_of_error_has_a_retriable_or_honest_code() -> None:
    from tidemill.base import errors as kinds
    from tidemill.topics import api as front

    expected = {
        kinds.UnavailableError: error_codes.KAFKA_STORAGE_ERROR,
        kinds.UnknownOutcomeError: error_codes.REQUEST_TIMED_OUT,
        kinds.FencedError: error_codes.NOT_LEADER_OR_FOLLOWER,
        kinds.ClosedError: error_codes.NOT_LEADER_OR_FOLLOWER,
        kinds.ConflictError: error_codes.NOT_LEADER_OR_FOLLOWER,
        kinds.CorruptError: error_codes.KAFKA_STORAGE_ERROR,
        kinds.MissingError: error_codes.UNKNOWN_TOPIC_OR_PARTITION,
        kinds.InvalidError: error_codes.INVALID_REQUEST,
        front.NotLeaderError: error_codes.NOT_LEADER_OR_FOLLOWER,
        front.OutOfOrderSequenceError: error_codes.OUT_OF_ORDER_SEQUENCE_NUMBER,
        front.InvalidProducerEpochError: error_codes.INVALID_PRODUCER_EPOCH,
        front.CorruptBatchError: error_codes.CORRUPT_MESSAGE,
        front.InvalidRecordsError: error_codes.INVALID_RECORD,
        front.BatchTooLargeError: error_codes.MESSAGE_TOO_LARGE,
        front.UnreadableBatchError: error_codes.KAFKA_STORAGE_ERROR,
        front.OffsetOutOfRangeError: error_codes.OFFSET_OUT_OF_RANGE,
    }
    assert {kind: error_codes.code_of(kind("x")) for kind in expected} == expected
    assert all(issubclass(kind, TidemillError) and error_codes.is_expected(kind("x")) for kind in expected)


def test_a_fault_of_ours_counts_as_an_unknown_outcome() -> None:
    assert (
        error_codes.code_of(RuntimeError("bug"))
        == error_codes.code_of(UnknownOutcomeError("x"))
        == error_codes.REQUEST_TIMED_OUT
    )
    assert not error_codes.is_expected(RuntimeError("bug"))
    assert error_codes.code_of(UnavailableError("x")) != error_codes.code_of(InvalidError("x"))


def test_only_a_batch_that_can_never_be_stored_gets_a_code_that_loses_messages() -> None:
    from tidemill.topics import api as front

    losing = {kind for kind, code in error_codes._CODES if code in (-1, 10, 59, 87, 89)}
    assert losing == {front.InvalidRecordsError, front.BatchTooLargeError}


def test_a_hundred_requests_for_all_topics_share_a_few_readings_of_the_catalogue(
    fake_broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_broker.create_topic("t", 1)
    readings = 0
    whole = fake_broker.catalogue.list

    async def counted(kind: Any, **more: Any) -> Any:
        nonlocal readings
        readings += 1
        await asyncio.sleep(0.05)
        return await whole(kind, **more)

    monkeypatch.setattr(fake_broker.catalogue, "list", counted)
    with RawClient(fake_broker.port) as client:
        client.sock.sendall(b"".join(request_frame(3, 1, i, ALL_TOPICS) for i in range(100)))
        for i in range(100):
            correlation_id, data = client.receive()
            assert correlation_id == i
            assert [topic.name for topic in decode(3, 1, data).topics] == ["t"]
    assert readings < 20


async def test_a_reading_of_the_catalogue_that_failed_fails_all_who_shared_it() -> None:
    class Down:
        readings = 0

        async def list(self, kind: Any) -> Any:
            self.readings += 1
            await asyncio.sleep(0.01)
            raise UnavailableError("away.")

    catalogue = Down()
    cache = TopicCache(catalogue, SystemClock())  # type: ignore[arg-type]
    found = await asyncio.gather(*(cache.refresh() for _ in range(20)), return_exceptions=True)
    assert all(isinstance(each, UnavailableError) for each in found)
    assert catalogue.readings <= 2


async def test_what_is_created_or_deleted_during_a_reading_of_the_catalogue_is_known_or_unknown_after_it() -> None:
    created, deleted, grown = (TopicRow(name, f"id of {name}", 1) for name in ("created", "deleted", "grown"))
    larger = replace(grown, partitions=2)

    class Reading:
        rows: Sequence[TopicRow] = (deleted, grown)

        async def list(self, kind: Any) -> Any:
            found, self.rows = self.rows, (created, larger)
            if found == (deleted, grown):  # other requests change the catalogue and end, while this one waits
                cache.add(created)
                cache.add(larger)
                cache.remove(deleted)
            return found

    cache = TopicCache(Reading(), SystemClock())  # type: ignore[arg-type]
    for row in (deleted, grown):
        cache.add(row)
    for topic, is_id in (("created", False), ("id of created", True)):
        assert cache.find(topic, is_id=is_id) is None, "nobody has looked yet"
    for _ in range(2):
        await cache.refresh()
        assert cache.find("created", is_id=False) == created == cache.find("id of created", is_id=True)
        assert cache.by_name("deleted") is None
        assert sorted(cache.rows(), key=str) == [created, larger] and cache.partitions == 3


def test_a_request_that_finds_a_topic_gone_does_not_hide_a_later_one_of_its_name() -> None:
    cache = TopicCache(None, SystemClock())  # type: ignore[arg-type]
    gone, later = (TopicRow("t", topic_id, 1) for topic_id in ("gone", "later"))
    cache.add(gone)
    cache.add(later)
    cache.remove(gone)
    assert cache.find("t", is_id=False) == later == cache.by_id("later") and cache.partitions == 1
    cache.remove(later)
    assert cache.by_name("t") is None and cache.by_id("later") is None and cache.partitions == 0


async def test_waiting_for_a_catalogue_that_takes_longer_than_a_request_may_ends_the_wait_and_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error was once ValueError, and so UNKNOWN_SERVER_ERROR: the running refresh had removed the
    waiting futures.
    """
    monkeypatch.setattr("tidemill.kafka.metadata.topic_cache.SETTLE_S", 0.05)

    class Slow:
        error: TidemillError | None = None

        def __init__(self) -> None:
            self.answer = asyncio.Event()

        async def list(self, kind: Any) -> Any:
            await self.answer.wait()
            if self.error is not None:
                raise self.error
            return []

    catalogue = Slow()
    cache = TopicCache(catalogue, SystemClock())  # type: ignore[arg-type]
    refreshing = asyncio.create_task(cache.run(1000.0))
    await cache.settle_topics([("orders", 0)], is_id=False)
    assert cache.resolve("orders", is_id=False) == error_codes.NOT_LEADER_OR_FOLLOWER, "nobody has looked yet"
    left = asyncio.create_task(cache.await_refresh())
    await asyncio.sleep(0)
    left.cancel()  # its client has disconnected
    catalogue.error = UnavailableError("away.")
    catalogue.answer.set()
    await asyncio.sleep(0.1)
    assert not [future for future in cache._looking if not future.done()], "nobody waits"
    catalogue.error = None
    await cache.settle_topics([("orders", 0)], is_id=False)
    await cache.next_refresh()
    assert cache.resolve("orders", is_id=False) == error_codes.UNKNOWN_TOPIC_OR_PARTITION
    refreshing.cancel()
