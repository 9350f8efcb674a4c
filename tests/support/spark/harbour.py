"""A small harbour for tests: real stores, real topics, bindings minted by hand, no server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark.sql  # noqa: F401  (whole, before two threads of a pipeline import it concurrently)
from msgspec.structs import replace

from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import MissingError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.maintenance.shards.drop import drop_shard
from tidemill.metastore.catalogue import CapturedColumn, CaptureRow, CaptureTableRow, TopicRow
from tidemill.shards.api import Binding
from tidemill.shards.registry import open_remap, open_shard
from tidemill.spark.settings import StoreUrls
from tidemill.spark.stores import Stores, open_stores
from tidemill.topics.batch import Record, encode_batch
from tidemill.topics.local_topics import LocalTopics


class Harbour:
    def __init__(self, root: Path, urls: StoreUrls | None = None) -> None:
        self.urls = urls or StoreUrls(f"file://{root}/objects", f"sqlite://{root}/consensus.db")
        self.portal = BlockingPortal("harbour")
        self.stores: Stores = self.portal.call(open_stores(self.urls))
        self.topics: LocalTopics = self.portal.call(self._topics())
        self.heads: dict[str, list[int]] = {}

    async def _topics(self) -> LocalTopics:
        s = self.stores
        return LocalTopics(s.consensus, s.objects, s.catalogue, clock=SystemClock(), rand=Rand())

    def close(self) -> None:
        self.portal.call(self.topics.aclose())
        self.portal.call(self.stores.aclose())
        self.portal.close()

    def create_topic(self, name: str, partitions: int = 1, **more: Any) -> TopicRow:
        row = self.portal.call(self.stores.catalogue.create_topic(name, partitions, **more))
        self.heads[row.topic_id] = [0] * partitions
        return row

    def produce(self, topic: TopicRow, rows: Sequence[tuple[Any, Any]], partition: int = 0) -> int:
        """Produce rows of (key, value): bytes unchanged, None, or JSON. Return the partition's next offset."""

        async def run() -> int:
            records = [Record(_bytes(k), _bytes(v), (), 0, 0) for k, v in rows]
            result = await self.topics.produce_nowait(topic.topic_id, partition, encode_batch(records))
            return result.last_offset + 1

        head = self.portal.call(run())
        self.heads[topic.topic_id][partition] = head
        return head

    def truncate(self, topic: TopicRow, partition: int = 0) -> None:
        async def run() -> int:
            record = Record(None, None, (("tm.op", b"truncate"),), 0, 0)
            result = await self.topics.produce_nowait(topic.topic_id, partition, encode_batch([record]))
            return result.last_offset + 1

        self.heads[topic.topic_id][partition] = self.portal.call(run())

    def mint(self, remap: str, time_ms: int, *topics: TopicRow, source_time_ms: int = 0) -> None:
        """Bind everything produced so far into these topics to `time_ms`."""

        async def run() -> None:
            found = await open_remap(self.stores.consensus, self.stores.clock, self.stores.rand, remap)
            offsets = {t.topic_id: tuple(self.heads[t.topic_id]) for t in topics}
            await found.mint(Binding(time_ms, offsets, 0, source_time_ms))

        self.portal.call(run())

    def shard(self, name: str) -> Any:
        s = self.stores
        return self.portal.call(open_shard(s.consensus, s.objects, s.clock, s.rand, name))

    def upper(self, name: str) -> int:
        """The shard's upper; 0 while it does not exist."""
        try:
            return int(self.portal.call(self.shard(name).frontiers())[1])
        except MissingError:
            return 0

    def drop_shard(self, name: str) -> None:
        """Drop a shard as `tidemill table drop` does."""
        s = self.stores
        self.portal.call(drop_shard(s.consensus, s.objects, s.metastore, s.clock, s.rand, name))

    def contents(self, name: str, as_of: int | None = None) -> list[dict[str, Any]]:
        shard = self.shard(name)
        at = self.upper(name) - 1 if as_of is None else as_of
        table: pa.Table = self.portal.call(shard.snapshot(at, 10))
        key = shard.schema.key
        return sorted(table.to_pylist(), key=lambda row: tuple(str(row[k]) for k in key))

    def capture(
        self, name: str, tables: dict[str, list[tuple[str, str, int]]], *, snapshot_done: bool = True
    ) -> dict[str, TopicRow]:
        """A captured database as capture leaves it: tables → columns of (name, PostgreSQL type, place in the key)."""
        row = CaptureRow(
            name=name,
            system_id="1",
            slot=f"tidemill_{name}",
            publication=f"tidemill_{name}",
            generation=1,
            snapshot_done=snapshot_done,
        )
        self.portal.call(self.stores.catalogue.put(row))
        return self.capture_more(name, tables)

    def capture_more(self, name: str, tables: dict[str, list[tuple[str, str, int]]]) -> dict[str, TopicRow]:
        """Add these tables to the capture, or describe them again on new topics."""
        catalogue, found = self.stores.catalogue, {}
        for table, described in tables.items():
            topic = f"{name}.{table}"
            if self.portal.call(catalogue.table(name, table)) is not None:
                self.portal.call(catalogue.delete(TopicRow, topic))
            found[table] = self.create_topic(topic, kind="capture")
            columns = tuple(CapturedColumn(*c) for c in described)
            row = CaptureTableRow(name, table, topic, generation=1, columns=columns)
            self.portal.call(catalogue.change_table(name, table, lambda _, row=row: row))  # type: ignore[misc]
        return found

    def finish_snapshot(self, name: str) -> None:
        row = self.portal.call(self.stores.catalogue.get(CaptureRow, name))
        assert row is not None
        self.portal.call(self.stores.catalogue.put(replace(row, snapshot_done=True)))


def _bytes(value: Any) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    return json.dumps(value).encode()
