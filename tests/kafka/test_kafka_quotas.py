"""Quotas at the endpoint: answers carry the throttle time, the connection is muted for that long, and admin clients set
the limits.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import confluent_kafka as ck
import pytest
from kio.index import load_request_schema

from support.kafka.harness import FakeBroker, RealBroker
from support.kafka.raw import RawClient, batch, encode, example, fetch_body, fields, nested, produce_body
from tidemill.base.config.listeners import KafkaSection
from tidemill.kafka import KafkaSettings
from tidemill.kafka.handlers import APIS
from tidemill.kafka.schema import fetch, produce
from tidemill.security.quotas import CONSUME, DEFAULT, NO_ENTITY, PRODUCE, REQUEST, Quota, stored_name

ME = stored_name("ANONYMOUS")
EVERY = [(a.key, v) for a in APIS.values() if a.key not in (17, 36) for v in range(a.min_version, a.max_version + 1)]


def limit(broker: FakeBroker | RealBroker, *quotas: Quota) -> None:
    assert broker.server is not None
    broker.portal.call(broker.server.quotas.change(quotas, []))


@pytest.mark.parametrize("version", range(APIS[0].min_version, APIS[0].max_version + 1))
def test_the_throttle_of_a_produce_answer_is_where_clients_read_it(version: int) -> None:
    from kio.index import load_response_schema
    from kio.serial import entity_reader

    answer = produce.PartitionAnswer(0, 0, 5, 0, error_message="m")
    topic = "t" if version < 13 else "00000000-0000-0000-0000-000000000001"
    reply = produce.encode([(topic, [answer])], version)
    produce.set_throttle([reply], version, 1234)
    read, _ = entity_reader(load_response_schema(0, version))(memoryview(bytes(reply)).toreadonly(), 0)
    assert read.throttle_time.total_seconds() == 1.234


@pytest.mark.parametrize("version", [4, 7, 11, 12, 17])
def test_the_throttle_of_a_fetch_answer_is_where_clients_read_it(version: int) -> None:
    from kio.index import load_response_schema
    from kio.serial import entity_reader

    topic = "t" if version < 13 else "00000000-0000-0000-0000-000000000001"
    reply = fetch.encode([(topic, [fetch.PartitionRecords(0, 0, 1, 0)])], version)
    fetch.set_throttle(reply, 1234)
    read, _ = entity_reader(load_response_schema(1, version))(memoryview(b"".join(reply)).toreadonly(), 0)
    assert read.throttle_time.total_seconds() == 1.234


def test_f247_who_uses_more_than_its_quota_is_not_heard_for_a_while_and_nobody_else() -> None:
    broker = FakeBroker()
    broker.create_topic("t", 1)
    limit(broker, Quota(ME, NO_ENTITY, PRODUCE, 50_000.0))
    with RawClient(broker.port) as greedy, RawClient(broker.port) as other:
        greedy.ask(3, 1, b"\xff\xff\xff\xff")
        began = time.monotonic()
        answer = greedy.ask(0, 8, produce_body("t", [(0, batch([bytes(200_000)]))]))
        throttle_s = answer.throttle_time.total_seconds()
        assert 2.9 < throttle_s < 3.2
        assert int(answer.responses[0].partition_responses[0].error_code) == 0
        other.ask(18, 0, b"")
        assert time.monotonic() - began < throttle_s, "neither the answer itself waits nor anybody else"
        greedy.ask(18, 0, b"")
        assert time.monotonic() - began >= throttle_s
    broker.close()


def test_fetches_are_counted_and_the_records_still_come() -> None:
    broker = RealBroker()
    broker.create_topic("t", 1)
    client = ck.Producer({"bootstrap.servers": broker.address})
    for _ in range(30):
        client.produce("t", bytes(10_000))
    assert client.flush(20) == 0
    limit(broker, Quota(NO_ENTITY, DEFAULT, CONSUME, 150_000.0))
    with RawClient(broker.port) as reader:
        reader.ask(3, 1, b"\xff\xff\xff\xff")
        answer = reader.ask(1, 4, fetch_body("t", 0, 0))
        assert answer.throttle_time.total_seconds() > 0.5
        assert len(answer.responses[0].partitions[0].records) > 290_000
        assert reader.ask(1, 4, fetch_body("t", 0, 30, max_wait_ms=0)).throttle_time.total_seconds() < 0.5
    broker.close()


def test_of_a_clients_time_every_answer_tells_and_nobody_elses_is_touched() -> None:
    broker = FakeBroker(KafkaSettings(KafkaSection(group_initial_rebalance_delay_ms=0)))
    row = broker.create_topic("t", 1)
    limit(broker, Quota(NO_ENTITY, stored_name("raw"), REQUEST, 1e-6))
    reported = 0
    for key, version in EVERY:
        group_or_topic = f"group-{version}" if key == 11 else "t"  # members that join one group wait for each other
        body = example(key, version, group_or_topic, uuid.UUID(row.topic_id))
        with RawClient(broker.port) as client:
            answer = client.ask(key, version, body)
        if hasattr(answer, "throttle_time") and key != 18:
            assert answer.throttle_time.total_seconds() == 1.0, (key, version)
            reported += 1
    assert reported > 100
    limit(broker, Quota(NO_ENTITY, stored_name("other"), REQUEST, 1e-6))
    with RawClient(broker.port) as client:
        # taken before the answer that mutes the connection, since that may arrive late
        began = time.monotonic()
        client.ask(3, 1, b"\xff\xff\xff\xff")
        client.ask(3, 1, b"\xff\xff\xff\xff")
        assert time.monotonic() - began > 0.9, "it was not heard"
    broker.close()


def test_a_clients_time_is_what_the_loop_works_and_not_what_it_waits() -> None:
    broker = RealBroker()
    broker.create_topic("t", 1)
    # the bucket holds 50 ms, since a loop that the system suspends for a moment counts that time
    limit(broker, Quota(ME, NO_ENTITY, REQUEST, 5.0))
    with RawClient(broker.port) as client:
        client.ask(3, 1, b"\xff\xff\xff\xff")
        for _ in range(3):
            answer = client.ask(1, 4, fetch_body("t", 0, 0, max_wait_ms=400))
            assert answer.throttle_time.total_seconds() == 0.0
        began = time.monotonic()
        throttled = 0.0
        while not throttled:
            throttled = client.ask(1, 4, fetch_body("t", 0, 0, max_wait_ms=0)).throttle_time.total_seconds()
            assert time.monotonic() - began < 40, "it works without a pause, and is not throttled"
    broker.close()


def test_librdkafka_stays_within_its_rate() -> None:
    broker = RealBroker()
    broker.create_topic("t", 1)
    limit(broker, Quota(NO_ENTITY, stored_name("app"), PRODUCE, 400_000.0))
    client = ck.Producer({"bootstrap.servers": broker.address, "client.id": "app", "batch.size": 50_000})
    began = time.monotonic()
    for _ in range(120):
        client.produce("t", bytes(10_000))
        client.poll(0)
    assert client.flush(60) == 0
    assert time.monotonic() - began > 1.0, "1.2 MB at 0.4 MB a second, with a second's burst and a frame beyond"
    broker.close()


def alter(client: RawClient, entity: list[tuple[str, str | None]], ops: list[tuple[str, float, bool]]) -> Any:
    schema = load_request_schema(49, 1)
    entry = nested(schema, "entries")
    parts = tuple(fields(nested(entry, "entity"), entity_type=kind, entity_name=name) for kind, name in entity)
    changes = tuple(fields(nested(entry, "ops"), key=k, value=v, remove=r) for k, v, r in ops)
    asked = fields(schema, entries=(fields(entry, entity=parts, ops=changes),), validate_only=False)
    return client.ask(49, 1, encode(asked)).entries[0]


def describe(client: RawClient, components: list[tuple[str, int, str | None]], *, strict: bool = False) -> Any:
    schema = load_request_schema(48, 1)
    element = nested(schema, "components")
    parts = tuple(fields(element, entity_type=kind, match_type=how, match=what) for kind, how, what in components)
    return client.ask(48, 1, encode(fields(schema, components=parts, strict=strict)))


def test_a_quota_is_updated_although_the_table_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = FakeBroker()
    assert broker.server is not None
    monkeypatch.setattr("tidemill.security.quotas.QUOTAS_MAX", 2)
    alice = [("user", "alice")]
    with RawClient(broker.port) as client:

        def code(*ops: tuple[str, float, bool]) -> int:
            return int(alter(client, alice, list(ops)).error_code)

        assert code((PRODUCE, 1.0, False), (CONSUME, 1.0, False)) == 0
        assert code((PRODUCE, 2.0, False), (CONSUME, 2.0, False)) == 0, "both exist"
        assert code((REQUEST, 3.0, False)) == 42, "a third one"
        assert code((REQUEST, 3.0, False), (CONSUME, 1.0, True)) == 0, "in the place of another"
        assert code((CONSUME, 1.0, True)) == 0, "absent already"
        assert code((PRODUCE, 4.0, False), (CONSUME, 4.0, False)) == 42, "one of them would be a third"
    stored = {(each.name, each.value) for each in broker.portal.call(broker.server.quotas.list())}
    assert stored == {(PRODUCE, 2.0), (REQUEST, 3.0)}
    broker.close()


def test_quotas_are_altered_described_and_removed_as_kip_546_says() -> None:
    broker = FakeBroker()
    with RawClient(broker.port) as client:
        for entity in (
            [("user", "alice")],
            [("user", None)],
            [("user", "alice"), ("client-id", "app")],
            [("client-id", None)],
        ):
            assert int(alter(client, entity, [(PRODUCE, 1e6, False), (CONSUME, 2e6, False)]).error_code) == 0

        def found(*components: tuple[str, int, str | None], strict: bool = False) -> set[tuple[Any, ...]]:
            answer = describe(client, list(components), strict=strict)
            assert int(answer.error_code) == 0
            assert all({v.key: v.value for v in e.values} == {PRODUCE: 1e6, CONSUME: 2e6} for e in answer.entries)
            return {tuple((part.entity_type, part.entity_name) for part in e.entity) for e in answer.entries}

        alice, both = (("user", "alice"),), (("user", "alice"), ("client-id", "app"))
        assert found() == {alice, both, (("user", None),), (("client-id", None),)}
        assert found(("user", 0, "alice")) == {alice, both}
        assert found(("user", 0, "alice"), strict=True) == {alice}
        assert found(("user", 1, None)) == {(("user", None),)}
        assert found(("user", 2, None), ("client-id", 2, None)) == {both}
        assert found(("client-id", 2, None), strict=True) == {(("client-id", None),)}
        assert int(describe(client, [("ip", 2, None)]).error_code) == 35
        for entity, ops in (
            ([("ip", "1.1.1.1")], [(PRODUCE, 1.0, False)]),
            ([("user", "alice")], [("controller_mutation_rate", 1.0, False)]),
            ([("user", "alice")], [(PRODUCE, 0.0, False)]),
            ([("user", "alice")], [(PRODUCE, 1.0, False), (PRODUCE, 2.0, False)]),
            ([("user", "")], [(PRODUCE, 1.0, False)]),
            ([], [(PRODUCE, 1.0, False)]),
        ):
            assert int(alter(client, entity, ops).error_code) == 42
        assert int(alter(client, [("user", "alice")], [(PRODUCE, 0.0, True), (CONSUME, 0.0, True)]).error_code) == 0
        assert found(("user", 0, "alice")) == {both}
    broker.close()
