"""Topics of captured tables as Kafka clients see them: Debezium's envelope, and the contents after compaction."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

import kafka
from support.kafka.captured import TABLE, TOPIC, Captured, by_confluent
from support.kafka.harness import RealBroker
from support.waiting import eventually
from tidemill import __version__
from tidemill.maintenance.checkpoint.restore_horizon import RestoreHorizon
from tidemill.maintenance.scheduler import JobContext, Retention, StepBudget
from tidemill.maintenance.topics.compaction import TopicCompaction
from tidemill.maintenance.topics.pipeline_holds import PipelineHolds
from tidemill.metastore.catalogue import TopicRow
from tidemill.topics.batch.columns_trailer import read_trailer
from tidemill.topics.batch_reads import read_batches
from tidemill.topics.l1.extent_store import ExtentStore
from tidemill.topics.l1.reconciler import Reconciler
from tidemill.topics.lifecycle.checkpoint import PartitionsStage
from tidemill.topics.partition_reader import LogPartitionReader

pytestmark = pytest.mark.postgres


@pytest.fixture
def broker() -> Iterator[RealBroker]:
    broker = RealBroker()
    yield broker
    broker.close()


@pytest.fixture
def database(broker: RealBroker, postgres_dsn: str) -> Iterator[Captured]:
    made: list[Captured] = []

    def capture(**config: Any) -> Captured:
        made.append(Captured(broker, postgres_dsn, **config))
        return made[0]

    yield capture  # type: ignore[misc]
    for each in made:
        each.drop_slot()


def by_kafka_python(broker: RealBroker) -> list[Any]:
    client = kafka.KafkaConsumer(bootstrap_servers=broker.address, group_id=broker.rand.nonce())
    partition = kafka.TopicPartition(TOPIC, 0)
    client.assign([partition])
    client.seek_to_beginning(partition)
    found: list[Any] = []
    try:
        end = client.end_offsets([partition])[partition]

        def read() -> bool:
            found.extend(record for records in client.poll(1000).values() for record in records)
            return bool(client.position(partition) >= end)

        eventually(read)
        return found
    finally:
        client.close()


def test_records_are_what_debezium_writes_and_a_restart_goes_on_behind_them(broker: RealBroker, database: Any) -> None:
    shop: Captured = database(envelope="debezium")
    shop.sql.execute(TABLE)
    shop.sql.execute("INSERT INTO items VALUES (1, 'ä', 1.50, '2026-11-23', '2026-11-23 10:00:00.25', NULL)")
    with shop.running():
        shop.sql.execute("INSERT INTO items VALUES (2, NULL, NULL, NULL, NULL, '2026-11-23 10:00:00+02')")
        shop.caught_up()
    with shop.running():
        shop.sql.execute("UPDATE items SET price = 2 WHERE id = 2")
        shop.sql.execute("UPDATE items SET id = 3 WHERE id = 2")
        shop.sql.execute("DELETE FROM items WHERE id = 1")
        shop.sql.execute("TRUNCATE items")
        shop.caught_up()
    messages = by_confluent(broker, group=True)
    events = [json.loads(m.value()) if m.value() is not None else None for m in messages]
    keys = [json.loads(m.key()) if m.key() is not None else None for m in messages]
    ops = [
        (event["op"] if event else None, key["id"] if key else None) for event, key in zip(events, keys, strict=True)
    ]
    assert ops == [("r", 1), ("c", 2), ("u", 2), ("d", 2), (None, 2), ("c", 3), ("d", 1), (None, 1), ("t", None)]
    first = {"id": 1, "name": "ä", "price": "1.50", "day": 20780, "at": 1795428000250000, "z": None}
    second = {"id": 2, "name": None, "price": None, "day": None, "at": None, "z": "2026-11-23T08:00:00Z"}
    dearer = second | {"price": "2.00"}
    rows = [(event["before"], event["after"]) for event in events if event]
    moved = dearer | {"id": 3}
    assert rows == [
        (None, first), (None, second), (second, dearer), (dearer, None), (None, moved), (first, None), (None, None),
    ]  # fmt: skip
    assert [list(event) for event in events if event] == [
        ["before", "after", "source", "transaction", "op", "ts_ms"]
    ] * 7
    for event, message in zip(events, messages, strict=True):
        if event is None:
            continue
        source, at_ms = event["source"], message.timestamp()[1]
        place = json.loads(source.pop("sequence"))
        copied = event["op"] == "r"
        assert place[0] == str(source["lsn"]) and len(place) == 2
        assert (source.pop("txId") is None) == copied and source.pop("lsn") > 0
        assert source == {
            "version": __version__, "connector": "postgresql", "name": "shop", "ts_ms": at_ms,
            "snapshot": "true" if copied else "false", "db": shop.config.dsn.rpartition("/")[2].partition("?")[0],
            "ts_us": at_ms * 1000, "ts_ns": at_ms * 1_000_000, "schema": "public", "table": "items", "xmin": None,
        }  # fmt: skip
        assert (event["transaction"], event["ts_ms"]) == (None, at_ms)
    moves = [dict(messages[n].headers()) for n in (3, 4, 5)]
    assert [(m.get("__debezium.newkey"), m.get("__debezium.oldkey")) for m in moves] == [
        (b'{"id":3}', None), (None, None), (None, b'{"id":2}'),
    ]  # fmt: skip
    assert [(r.key, r.value) for r in by_kafka_python(broker)] == [(m.key(), m.value()) for m in messages]


@pytest.mark.parametrize("envelope", ["row", "debezium"])
def test_t8_a_new_consumer_of_a_compacted_topic_ends_with_exactly_the_table(
    broker: RealBroker, database: Any, envelope: str
) -> None:
    shop: Captured = database(envelope=envelope, cleanup="compact")
    shop.sql.execute(TABLE)
    shop.sql.execute("INSERT INTO items SELECT n, 'x', 1 FROM generate_series(1, 50) n")
    with shop.running():
        shop.caught_up()  # the first binding covers only the copy
        shop.sql.execute("UPDATE items SET name = 'y'")
        shop.sql.execute("TRUNCATE items")
        shop.sql.execute("INSERT INTO items SELECT n, 'x', 1 FROM generate_series(40, 90) n")
        for n in range(40):
            shop.sql.execute("UPDATE items SET price = %s, name = 'z' WHERE id > 60", [n])
        shop.sql.execute("DELETE FROM items WHERE id % 3 = 0")
        shop.sql.execute("UPDATE items SET id = id + 1000 WHERE id % 7 = 0")
        shop.caught_up()
        shop.sql.execute("UPDATE items SET name = 'last' WHERE id = 88")  # the last batch is not compacted
        shop.caught_up()
        for n in range(150):  # each is a binding
            shop.sql.execute(f"SELECT pg_logical_emit_message(true, 'tidemill', 'n{n}')")
        shop.caught_up()
        before = len(by_confluent(broker))
        compact(broker)
        assert len(by_confluent(broker)) == before, "a pipeline may still begin with the first binding"
        latest = shop.call(shop.remap.latest())
        assert latest is not None and shop.call(shop.remap.truncate_before(latest.time_ms))
        compact(broker)
        shop.sql.execute("UPDATE items SET name = 'w' WHERE id = 89")
        shop.caught_up()
    found = by_kafka_python(broker)
    assert len(found) < before / 5
    assert any(record.key is None for record in found), "the truncate stays as long as tombstones do"
    rows: dict[bytes, Any] = {}
    for record in found:
        value = json.loads(record.value) if record.value is not None else None
        row = value["after"] if value is not None and envelope == "debezium" else value
        if record.key is None:
            rows.clear()
        elif row is None:
            rows.pop(record.key, None)
        else:
            rows[record.key] = row
    assert {row["id"]: (row["id"], row["name"], row["price"]) for row in rows.values()} == shop.table()
    with shop.running():  # the tail is found after compaction, too
        shop.sql.execute("INSERT INTO items VALUES (5000)")
        shop.caught_up()
    assert json.loads(by_confluent(broker)[-1].key()) == {"id": 5000}


def test_clients_see_nothing_of_the_columns_behind_large_batches(broker: RealBroker, database: Any) -> None:
    """RFC 0015. The same records come from L0, from L1 and after compaction, and a restart finds the tail."""
    shop: Captured = database(cleanup="compact")
    shop.sql.execute(TABLE)
    shop.sql.execute("INSERT INTO items SELECT n, 'copied ' || n, n FROM generate_series(1, 1000) n")
    with shop.running():
        shop.caught_up()
        shop.sql.execute("INSERT INTO items SELECT n, 'written ' || n, n FROM generate_series(1001, 4000) n")
        shop.sql.execute("UPDATE items SET price = price + 1 WHERE id % 2 = 0")
        shop.sql.execute("DELETE FROM items WHERE id % 5 = 0")
        shop.caught_up()
    with_columns = columns_of(broker)
    assert sum(with_columns.values()) > 3_000
    found = by_confluent(broker)
    assert [(r.key, r.value) for r in by_kafka_python(broker)] == [(m.key(), m.value()) for m in found]
    assert [m.offset() for m in found] == list(range(len(found))) and len(found) > 5_000
    with shop.running():
        shop.sql.execute("UPDATE items SET name = 'last' WHERE id = 4")
        for n in range(150):  # each is a binding
            shop.sql.execute(f"SELECT pg_logical_emit_message(true, 'tidemill', 'n{n}')")
        shop.caught_up()
    found = by_confluent(broker)
    latest = shop.call(shop.remap.latest())
    assert latest is not None and shop.call(shop.remap.truncate_before(latest.time_ms))
    compact(broker)
    cleaned = by_confluent(broker, group=True)
    assert len(cleaned) < len(found)
    for messages in (found, cleaned):
        rows = {m.key(): json.loads(m.value()) if m.value() is not None else None for m in messages}
        table = {row["id"]: (row["id"], row["name"], row["price"]) for row in rows.values() if row is not None}
        assert table == shop.table()
    with shop.running():
        shop.sql.execute("INSERT INTO items VALUES (5000)")
        shop.caught_up()
    assert json.loads(by_confluent(broker)[-1].key()) == {"id": 5000}


def columns_of(broker: RealBroker) -> dict[int, int]:
    """Return the base offset and the number of records of every stored batch with a trailer."""

    async def read() -> dict[int, int]:
        topic = await broker.catalogue.get(TopicRow, TOPIC)
        assert topic is not None
        reader = LogPartitionReader(broker.consensus, broker.objects)
        refs = await reader.plan(topic.topic_id, 0, 0, await reader.high_watermark(topic.topic_id, 0))
        (found,) = await read_batches(broker.objects, [refs])
        assert isinstance(found, list)
        pairs = zip(refs, found, strict=True)
        return {r.base_offset: r.record_count for r, data in pairs if read_trailer(data, r.record_count) is not None}

    return broker.portal.call(read())


def compact(broker: RealBroker) -> None:
    """Compact the topic as maintenance does, regardless of its dirty ratio."""

    async def run() -> None:
        topic = await broker.catalogue.get(TopicRow, TOPIC)
        assert topic is not None and topic.config["cleanup.policy"] == "compact"
        topics, metastore, clock, rand = broker.topics, broker.metastore, broker.clock, broker.rand
        rows = ExtentStore(metastore, clock, rand)
        reconciler = Reconciler(rows, topics._around, topics._shared, topics._cache, topics._led)
        stage = PartitionsStage(broker.consensus, broker.objects, metastore, broker.clock)
        await stage.load()
        for unit in (await stage.gather()).values():
            for group in unit:
                await metastore.commit(group)
        assert (await reconciler.run_round(topic.topic_id, range(topic.partitions))).failed is None
        await topics._commits.drain(30)
        context = JobContext(broker.consensus, broker.objects, metastore, clock, rand, Retention(collect_after_s=0))
        holds = PipelineHolds(broker.consensus, broker.catalogue, RestoreHorizon(metastore), clock, rand)
        job = TopicCompaction(context, holds)
        eager = {"min.cleanable.dirty.ratio": "0"}
        await broker.catalogue.change_topic(TOPIC, lambda row: replace(row, config=row.config | eager))
        while await job.run(StepBudget(clock, 1)):
            pass

    broker.portal.call(run())
