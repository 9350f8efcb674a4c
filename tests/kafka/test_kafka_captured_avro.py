"""A captured table's topic of Avro events, as a Kafka consumer with Confluent's deserializer reads it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext
from starlette.applications import Starlette

from support.kafka.captured import TABLE, TOPIC, Captured, by_confluent
from support.kafka.harness import RealBroker
from tidemill.node.http.server import HttpServer
from tidemill.registry.http import registry_routes
from tidemill.registry.registry import LocalSchemaRegistrar, Registry
from tidemill.shards.api import run_on_pool

pytestmark = pytest.mark.postgres

ROWS = 2_000
"""Rows of one transaction: enough to be encoded by columns."""


class Shop:
    """A capture of Avro, its broker, and the registry over HTTP."""

    def __init__(self, dsn: str) -> None:
        self.broker = RealBroker()
        self._pool = ThreadPoolExecutor(1)
        self._failures: list[BaseException] = []
        b = self.broker
        self.registry = Registry(b.metastore, b.clock, b.rand, run_on_pool(self._pool))
        self._http = HttpServer(
            Starlette(routes=registry_routes(self.registry)), on_failure=lambda _, error: self._failures.append(error)
        )
        b.portal.call(self._http.start())
        self.captured = Captured(b, dsn, envelope="debezium-avro")
        self.captured.schemas = LocalSchemaRegistrar(self.registry)

    def read(self) -> list[tuple[Any, Any]]:
        """Return (key, event) of every record, as a new consumer reads them."""
        with SchemaRegistryClient({"url": f"http://127.0.0.1:{self._http.port}"}) as client:
            deserialize = AvroDeserializer(client)
            key, value = (SerializationContext(TOPIC, field) for field in (MessageField.KEY, MessageField.VALUE))
            return [(deserialize(m.key(), key), deserialize(m.value(), value)) for m in by_confluent(self.broker)]

    def close(self) -> None:
        self.captured.drop_slot()
        self.broker.portal.call(self._http.aclose())
        self.broker.close()
        self._pool.shutdown()
        assert not self._failures


@pytest.fixture
def shop(postgres_dsn: str) -> Iterator[Shop]:
    found = Shop(postgres_dsn)
    yield found
    found.close()


def test_a_consumer_rebuilds_the_table_across_a_new_column_and_a_restart(shop: Shop) -> None:
    captured = shop.captured
    sql = captured.sql
    sql.execute(TABLE)
    sql.execute("INSERT INTO items VALUES (0, 'ä', 1.50, '2026-11-23', '2026-11-23 10:00:00.25', NULL)")
    with captured.running():
        sql.execute(
            "INSERT INTO items SELECT g, 'item ' || g, g / 7.0, date '2026-01-01' + g, NULL,"
            f" '2026-11-23 10:00:00+02' FROM generate_series(1, {ROWS}) g"
        )
        sql.execute("ALTER TABLE items ADD rating float4 DEFAULT 0.1")
        sql.execute("UPDATE items SET name = NULL, rating = id WHERE id % 2 = 0")
        captured.caught_up()
    with captured.running():
        sql.execute("UPDATE items SET id = -id WHERE id = 7")
        sql.execute("DELETE FROM items WHERE id % 3 = 0")
        captured.caught_up()
    found: dict[int, Any] = {}
    order = []
    for key, event in shop.read():
        if event is None:
            assert found.pop(key["id"], None) is None
            continue
        order.append(event["source"]["sequence"])
        row = event["before"] if event["op"] == "d" else event["after"]
        assert row["id"] == key["id"]
        before = found.pop(key["id"], None)
        if event["op"] in "ud":
            assert before is not None and {**before, "rating": 0} == {**event["before"], "rating": 0}
        if event["op"] != "d":
            found[key["id"]] = {"rating": pytest.approx(0.1), **event["after"]}
    assert len(order) == len(set(order)) > 3 * ROWS // 2
    days, clocks = "day - '1970-01-01'", "(extract(epoch FROM at) * 1000000)::bigint"
    zoned = "to_char(z AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"')"
    fields = ("id", "name", "price", "day", "at", "z", "rating")
    select = f"SELECT id, name, price::text, {days}, {clocks}, {zoned}, rating::float8 FROM items"
    assert found == {row[0]: dict(zip(fields, row, strict=True)) for row in sql.execute(select)}
    (_, versions) = (shop.broker.portal.call(shop.registry.book.versions(f"{TOPIC}-{w}")) for w in ("key", "value"))
    assert [row.version for row in versions] == [1, 2]
