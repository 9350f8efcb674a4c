"""One capture on real stores and a real PostgreSQL, and readers that fold its topics back into tables."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import asynccontextmanager
from typing import Any

import psycopg

from support.waiting import DEADLINE_S, until
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.lsn import ChangePosition
from tidemill.base.status.status import DerivedStatus, StageState, StageStatus, StatusTracker, derive_status
from tidemill.capture.config import CaptureConfig
from tidemill.capture.delivery.consumers import Sink
from tidemill.capture.postgres.connection import DISPLAY_SETTINGS
from tidemill.capture.session.capture import Capture
from tidemill.capture.topics.partition_tails import read_position
from tidemill.consensus.memory import MemoryConsensus
from tidemill.metastore.catalogue import CaptureRow, CaptureTableRow, Catalogue, TopicRow
from tidemill.metastore.factory import create_metastore
from tidemill.objects.memory import MemoryObjects
from tidemill.shards.api import Binding
from tidemill.shards.bindings.remap import LogRemap
from tidemill.topics.api import FetchRead
from tidemill.topics.batch import Record, decode_batch
from tidemill.topics.local_topics import LocalTopics


class World:
    """Stores that outlive captures: `capture()` opens one on them, as often as a test likes."""

    def __init__(self, dsn: str, *, name: str = "", consensus: Any = None, objects: Any = None) -> None:
        """`name` defaults to the database's: slot names are shared by all databases of the server."""
        self.dsn = dsn
        self.name = name or dsn.rpartition("/")[2]
        self.clock = SystemClock()
        self.rand = Rand()
        self.consensus = consensus or MemoryConsensus(self.clock)
        self.objects = objects or MemoryObjects(self.clock)
        self.metastore = create_metastore(self.consensus, self.objects, self.clock, self.rand)
        self.catalogue = Catalogue(self.metastore, self.clock, self.rand)
        self.tracker = StatusTracker()
        self.topics: Any = None
        self.connection: Any = None

    async def __aenter__(self) -> World:
        self.topics = self.new_topics()
        self.connection = await psycopg.AsyncConnection.connect(self.dsn, autocommit=True)
        for setting, value in DISPLAY_SETTINGS.items():
            await self.connection.execute(f"SET {setting} = '{value}'")
        return self

    async def __aexit__(self, *_: object) -> None:
        await until(self.slot_dropped, "the slot is free and dropped")
        await self.connection.close()
        await self.topics.aclose()
        await self.metastore.aclose()

    async def slot_dropped(self) -> bool:
        """Slots count against the whole server: leave none behind."""
        mine = f"FROM pg_replication_slots WHERE slot_name = 'tidemill_{self.name}'"
        await self.sql(f"SELECT pg_drop_replication_slot(slot_name) {mine} AND active_pid IS NULL")
        return not await self.select(f"SELECT {mine}")

    def new_topics(self) -> LocalTopics:
        return LocalTopics(self.consensus, self.objects, self.catalogue, clock=self.clock, rand=self.rand)

    async def sql(self, *statements: str) -> None:
        for statement in statements:
            await self.connection.execute(statement)

    async def transaction(self, *statements: str) -> None:
        async with self.connection.transaction():
            await self.sql(*statements)

    async def select(self, statement: str) -> list[tuple[Any, ...]]:
        return await (await self.connection.execute(statement)).fetchall()

    def config(self, **settings: Any) -> CaptureConfig:
        settings.setdefault("linger_ms", 10)
        settings.setdefault("binding_interval_ms", 10)
        settings.setdefault("idle_binding_ms", 100)
        settings.setdefault("copy_again", False)  # a table that parks stays parked, for most to look at
        return CaptureConfig(name=self.name, dsn=self.dsn, **settings)

    def remap(self) -> LogRemap:
        return LogRemap(self.consensus, f"capture/{self.name}", self.clock, self.rand)

    def new_capture(
        self, *, topics: Any = None, sinks: Sequence[Sink] = (), schemas: Any = None, **settings: Any
    ) -> Capture:
        return Capture(
            self.config(**settings),
            topics=topics or self.topics,
            catalogue=self.catalogue,
            remap=self.remap(),
            clock=self.clock,
            rand=self.rand,
            tracker=self.tracker,
            sinks=sinks,
            schemas=schemas,
        )

    @asynccontextmanager
    async def capture(self, *, wait: bool = True, **settings: Any):  # type: ignore[no-untyped-def]
        capture = self.new_capture(**settings)
        task = asyncio.ensure_future(capture.run())
        try:
            if wait:
                await self.streams(capture, task)
            yield capture
        finally:
            await capture.aclose()
            await asyncio.gather(task, return_exceptions=True)
        if task.done() and not task.cancelled() and task.exception() is not None:
            raise task.exception()  # type: ignore[misc]

    async def streams(self, capture: Capture, task: asyncio.Future[None]) -> None:
        """Wait until the capture streams; fail with the reason if it is paused."""

        def is_paused() -> bool:
            failure = self.tracker.failure(capture.config.mark)
            return failure is not None and failure.parked

        await until(lambda: capture.streaming or task.done() or is_paused(), "the capture streams")
        if task.done():
            task.result()
        assert capture.streaming, self.tracker.failure(capture.config.mark)

    # what was written -----------------------------------------------------------------------------
    async def records(self, table: str, end: int | None = None) -> list[Record]:
        """All records of `public.<table>`'s topic, or those below offset `end`."""
        topic = await self.topic(table)
        out: list[Record] = []
        for partition in range(topic.partitions):
            high = (await self.topics.offsets(topic.topic_id, partition)).high_watermark
            at = 0
            while at < high:
                read = FetchRead(topic.topic_id, partition, at, 1 << 20)
                (fetched,) = await self.topics.fetch([read], max_wait_s=1, min_bytes=1, max_bytes=1 << 20)
                assert fetched.error is None, fetched.error
                for batch in fetched.batches:
                    out += decode_batch(batch).records
                at = out[-1].offset + 1
        return [r for r in out if end is None or r.offset < end]

    async def folded(self, table: str, end: int | None = None) -> dict[str, dict[str, Any]]:
        """The topic as a table: key → value, by the rules of the record format."""
        return fold(await self.records(table, end))

    async def bound(self, lsn: int, timeout_s: float = DEADLINE_S) -> Binding:
        """The first binding found that covers `lsn`."""
        remap = self.remap()
        found: list[Binding] = []

        async def covered() -> bool:
            latest = await remap.latest()
            if latest is not None and latest.lsn >= lsn:
                found.append(latest)
            return bool(found)

        await until(covered, f"a binding covers lsn {lsn}", timeout_s)
        return found[0]

    async def wal_end(self) -> int:
        rows = await self.select("SELECT pg_current_wal_flush_lsn() - '0/0'")
        return int(rows[0][0])

    async def caught_up(self, timeout_s: float = DEADLINE_S) -> Binding:
        """Emit a marker now and wait for its binding: everything committed before is bound."""
        tag = self.rand.nonce()
        await self.sql(f"SELECT pg_logical_emit_message(true, 'tidemill', '{tag}')")
        return await self.tagged(tag, timeout_s)

    async def tagged(self, tag: str, timeout_s: float = DEADLINE_S) -> Binding:
        remap = self.remap()
        found: list[Binding] = []

        async def there() -> bool:
            found.extend(b for b in await remap.after(0) if b.tag == tag)
            return bool(found)

        await until(there, f"a binding tagged {tag}", timeout_s)
        return found[0]

    async def row(self) -> CaptureRow:
        row = await self.catalogue.get(CaptureRow, self.name)
        assert row is not None
        return row

    async def tables(self) -> dict[str, CaptureTableRow]:
        return {table.table: table for table in await self.catalogue.tables(self.name)}

    async def flowing(self, *names: str) -> None:
        """Wait until these tables of schema public flow: copied, and known to the newest binding."""

        async def holds() -> bool:
            rows, latest = await self.tables(), await self.remap().latest()
            found = [rows.get(f"public.{name}") for name in names]
            if latest is None or not all(row is not None and row.is_streaming for row in found):
                return False
            topics = [await self.catalogue.get(TopicRow, row.topic) for row in found if row is not None]
            return all(topic is not None and topic.topic_id in latest.offsets for topic in topics)

        await until(holds, f"tables flow: {names}")

    async def paused(self, name: str, words: str = "") -> CaptureTableRow:
        """Wait until table `public.<name>` is paused with `words` in its reason; return its row."""
        found: list[CaptureTableRow] = []

        async def holds() -> bool:
            row = await self.table(f"public.{name}")
            if row is not None and row.state != "captured" and words in row.reason:
                found.append(row)
            return bool(found)

        await until(holds, f"table {name} is parked: {words}")
        return found[0]

    async def table(self, name: str) -> CaptureTableRow | None:
        return (await self.tables()).get(name)

    async def topic(self, table: str) -> TopicRow:
        """Return the topic of `public.<table>`, which is missing for a moment while the table is copied again."""
        found: list[TopicRow] = []

        async def exists() -> bool:
            row = await self.catalogue.get(TopicRow, f"{self.name}.public.{table}")
            found.extend([row] if row is not None else [])
            return row is not None

        await until(exists, f"table {table} has a topic")
        return found[0]

    async def topic_id(self, table: str) -> str:
        return (await self.topic(table)).topic_id

    async def confirmed(self) -> int:
        rows = await self.select(
            f"SELECT confirmed_flush_lsn - '0/0' FROM pg_replication_slots WHERE slot_name = 'tidemill_{self.name}'"
        )
        return int(rows[0][0])


def header(record: Record, name: str) -> str:
    return next((v or b"").decode() for n, v in record.headers if n == name)


def fold(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    gone: dict[str, dict[str, Any]] = {}
    for record in records:
        if record.key is None:
            assert header(record, "tm.op") == "truncate"
            rows.clear()
        elif record.value is None:
            if (key := record.key.decode()) in rows:
                gone[key] = rows.pop(key)
        else:
            key, value = record.key.decode(), json.loads(record.value)
            headers = dict(record.headers)
            for column in json.loads(headers.get("tm.unchanged") or b"[]"):
                assert column not in value
                was = (headers.get("tm.was") or b"").decode()
                value[column] = gone[was][column] if was else rows[key][column]
            rows[key] = value
    return rows


def positions(records: Sequence[Record]) -> list[ChangePosition]:
    return [read_position(record) for record in records]


async def plain(world: World, table: str) -> dict[str, dict[str, object]]:
    return {f'{{"id":{i}}}': {"id": i, "v": v} for i, v in await world.select(f"SELECT id, v FROM {table}")}


def is_reported(world: World, table: str) -> bool:
    """True if a stage status of this table is reported."""
    name = f"table:{world.name}/public.{table}"
    return any(mark.name == name for mark in world.tracker.report("p", world.clock.now_ms()).marks)


async def is_parked(world: World, table: str) -> bool:
    """Return whether the table's status says that it waits for the operator. It follows the stored row."""
    name = f"table:{world.name}/public.{table}"
    return any(mark.name == name and mark.parked for mark in world.tracker.report("p", world.clock.now_ms()).marks)


async def stuck(world: World, table: str) -> str:
    """Wait until the table's status gives the reason of its row, which the status follows; return the status's reason.
    The status must be stuck immediately and blocked by the operator.
    """
    name = f"table:{world.name}/public.{table}"
    found: list[StageStatus] = []

    async def follows() -> bool:
        row = await world.table(f"public.{table}")
        marks = [mark for mark in world.tracker.report("p", world.clock.now_ms()).marks if mark.name == name]
        found[:] = [mark for mark in marks if row is not None and mark.reason.startswith(row.reason)]
        return bool(found)

    await until(follows, f"the status of table {table} gives the reason of its row")
    now_ms = world.clock.now_ms()
    assert derive_status(found[0], "p", now_ms, now_ms).state is StageState.STUCK
    assert found[0].parked and found[0].held_by == "operator"
    return found[0].reason


GOOD = ("CREATE TABLE good (id int PRIMARY KEY, v int)", "INSERT INTO good VALUES (1, 1)")


async def good_flows(world: World) -> None:
    """The other table is exact, and the slot is confirmed."""
    await world.sql("INSERT INTO good SELECT max(id) + 1, 7 FROM good")
    binding = await world.caught_up()
    assert await world.folded("good") == await plain(world, "good")

    async def confirmed() -> bool:
        return await world.confirmed() > binding.lsn

    await until(confirmed, "the slot is confirmed")


PARTITIONED = (
    *GOOD,
    "CREATE TABLE p (id int PRIMARY KEY, v int) PARTITION BY RANGE (id)",
    "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (100)",
    "INSERT INTO p VALUES (1, 1)",
)


def mark_of(world: World, capture: Capture) -> tuple[StageStatus, StageState]:
    capture._publish_status()
    now_ms = world.clock.now_ms()
    report = world.tracker.report("p", now_ms)
    mark = next(m for m in report.marks if m.name == capture.config.mark)
    return mark, derive_status(mark, "p", now_ms, now_ms).state


def reported(world: World, capture: Capture, name: str) -> DerivedStatus | None:
    """Return the current status of a table, or of the capture itself."""
    capture._publish_status()
    now_ms = world.clock.now_ms()
    mark = next((m for m in world.tracker.report("p", now_ms).marks if m.name == name), None)
    return derive_status(mark, "p", now_ms, now_ms) if mark is not None else None


async def table_as_folded(world: World, table: str) -> dict[str, dict[str, Any]]:
    """`SELECT` in the form that `World.folded` gives, for tables (id int, v int)."""
    return {f'{{"id":{i}}}': {"id": i, "v": v} for i, v in await world.select(f"SELECT id, v FROM {table}")}


def assert_no_position_twice(records: list[Any]) -> None:
    found = positions(records)
    assert found == sorted(found)
    assert len(found) == len(set(found))


AGAIN: dict[str, Any] = {"copy_again": True, "copy_again_pause_s": 0.1}


async def generation(world: World, name: str) -> int:
    row = await world.table(f"public.{name}")
    return row.generation if row is not None and row.is_streaming else -1


T = ("CREATE TABLE t (id int PRIMARY KEY, v int, w text)", "INSERT INTO t VALUES (1, 1, 'a'), (2, 2, 'b')")
