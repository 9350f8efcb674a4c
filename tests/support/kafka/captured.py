"""A captured table that clients of Kafka read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import confluent_kafka as ck
import psycopg

from support.kafka.harness import RealBroker
from support.waiting import eventually
from tidemill.base.status.status import StatusTracker
from tidemill.capture.config import CaptureConfig
from tidemill.capture.session.capture import Capture
from tidemill.shards.bindings.remap import LogRemap

TOPIC = "shop.public.items"

TABLE = "CREATE TABLE items (id int PRIMARY KEY, name text, price numeric(8,2), day date, at timestamp, z timestamptz)"


class Captured:
    """A capture of one database on a broker's topics."""

    schemas: Any = None

    def __init__(self, broker: RealBroker, dsn: str, **config: Any) -> None:
        self.broker, self.call = broker, broker.portal.call
        self.sql = psycopg.connect(dsn, autocommit=True)
        self.config = CaptureConfig("shop", dsn, linger_ms=10, binding_interval_ms=1, **config)
        self.capture: Capture | None = None

    @property
    def remap(self) -> LogRemap:
        return LogRemap(self.broker.consensus, self.config.remap_name, self.broker.clock, self.broker.rand)

    @contextmanager
    def running(self) -> Iterator[None]:
        async def start() -> asyncio.Task[None]:
            b = self.broker
            self.capture = Capture(
                self.config, topics=b.topics, catalogue=b.catalogue, remap=self.remap, clock=b.clock, rand=b.rand,
                tracker=StatusTracker(), schemas=self.schemas,
            )  # fmt: skip
            return asyncio.create_task(self.capture.run())

        async def stop(task: asyncio.Task[None]) -> None:
            assert self.capture is not None
            await self.capture.aclose()
            await asyncio.gather(task, return_exceptions=True)

        task = self.call(start())
        try:
            eventually(lambda: self.capture is not None and self.capture.streaming)
            yield
        finally:
            self.call(stop(task))

    def caught_up(self) -> None:
        """Everything committed so far is bound."""
        tag, latest = self.broker.rand.nonce(), self.call(self.remap.latest())
        since_ms = latest.time_ms if latest is not None else 0
        self.sql.execute("SELECT pg_logical_emit_message(true, 'tidemill', %s)", [tag])
        eventually(lambda: any(b.tag == tag for b in self.call(self.remap.after(since_ms))))

    def table(self) -> dict[int, Any]:
        return {row[0]: row for row in self.sql.execute("SELECT id, name, price::text FROM items")}

    def drop_slot(self) -> None:
        drop = (
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database()"
        )
        eventually(lambda: self.sql.execute(f"{drop} AND active_pid IS NULL") and not self._slots())
        self.sql.close()

    def _slots(self) -> int:
        found = self.sql.execute("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()")
        return int((found.fetchone() or (0,))[0])


def by_confluent(broker: RealBroker, *, group: bool = False) -> list[Any]:
    """Every record of the topic, from its beginning; as a member of a new group."""
    client = ck.Consumer({"bootstrap.servers": broker.address, "group.id": broker.rand.nonce(),
                          "auto.offset.reset": "earliest", "enable.partition.eof": True})  # fmt: skip
    if group:
        client.subscribe([TOPIC])
    else:
        client.assign([ck.TopicPartition(TOPIC, 0, ck.OFFSET_BEGINNING)])
    found: list[Any] = []
    try:
        while True:
            message = client.poll(30)
            assert message is not None, "no record within 30 s"
            if message.error() is None:
                found.append(message)
            elif message.error().code() == ck.KafkaError._PARTITION_EOF:
                return found
            else:
                raise ck.KafkaException(message.error())
    finally:
        client.close()
