"""Another process or task changes the catalogue between a capture's read and its act."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from tidemill.base.clock import ManualClock, Rand, SystemClock
from tidemill.base.status.status import StatusTracker
from tidemill.capture.catalog.table_choice import TableChoice
from tidemill.capture.config import CaptureConfig
from tidemill.capture.naming import side_topic_name
from tidemill.capture.postgres.connection import PgConnection
from tidemill.capture.session.continuity_check import ContinuityResult, validate_rows
from tidemill.capture.session.set_up_context import ServerState
from tidemill.capture.session.teardown import drop_capture
from tidemill.capture.setup.publication import PublishedTable
from tidemill.capture.tables.catalog_watcher import CatalogWatcher
from tidemill.capture.tables.context import SideLoopContext
from tidemill.capture.tables.recopy_requests import request_recopy
from tidemill.capture.tables.table_setup import delete_topics
from tidemill.capture.tables.table_states import TableStates
from tidemill.consensus.memory import MemoryConsensus
from tidemill.metastore.catalogue import CaptureRow, CaptureTableRow, Catalogue, PipelineRow, SideTopicState, TopicRow
from tidemill.metastore.factory import create_metastore
from tidemill.objects.memory import MemoryObjects

CONFIG = CaptureConfig("shop", "postgresql://")
ROW = CaptureRow("shop", "7", CONFIG.slot, CONFIG.publication, 1, True)
TABLE = CaptureTableRow("shop", "public.a", "shop.a", oid=42, identities={42: ("public.a", "DEFAULT")})

Peer = Callable[[], Awaitable[object]]


class Overtaken(Catalogue):
    """`peer` runs once, right after a read of a row of this kind, or of the list of them."""

    peer: tuple[type, Peer] | None = None

    async def get(self, kind: Any, name: str, *, fresh: bool = True) -> Any:
        found = await super().get(kind, name, fresh=fresh)
        await self._overtake(kind)
        return found

    async def list(self, kind: Any, *, fresh: bool = True) -> Any:
        found = await super().list(kind, fresh=fresh)
        await self._overtake(kind)
        return found

    async def _overtake(self, kind: type) -> None:
        if self.peer is not None and self.peer[0] is kind:
            (_, peer), self.peer = self.peer, None
            await peer()


@asynccontextmanager
async def new_catalogue() -> AsyncIterator[Overtaken]:
    clock, rand = SystemClock(), Rand(1)
    metastore = create_metastore(MemoryConsensus(ManualClock()), MemoryObjects(clock), clock, rand)
    yield Overtaken(metastore, clock, rand)
    await metastore.aclose()


class StubbedConnection:
    """A connection to the database of an ended capture, whose last session does `last` before it releases the lock."""

    server_version = 180000

    def __init__(self, last: Peer) -> None:
        self._last = last
        self.queries: list[str] = []

    async def value(self, sql: str) -> str:
        if "pg_try_advisory_lock" in sql:
            await self._last()
        return ROW.system_id if "system_identifier" in sql else "t"

    async def query(self, sql: str) -> list[object]:
        self.queries.append(sql)
        return []

    async def aclose(self) -> None: ...


async def test_a_drop_reverts_also_what_a_session_did_until_it_released_the_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with new_catalogue() as catalogue:
        await catalogue.put(ROW)

        async def add_table() -> None:
            await catalogue.change_table("shop", TABLE.table, lambda _: TABLE)
            await catalogue.create_topic(TABLE.topic, 1, kind="capture")

        connection = StubbedConnection(add_table)

        async def connect(*_: object, **__: object) -> StubbedConnection:
            return connection

        monkeypatch.setattr(PgConnection, "connect", connect)
        done = await drop_capture(CONFIG, catalogue)
        assert done.topics == ["shop.a"] and not done.left
        assert any("c.oid = 42" in sql for sql in connection.queries), "it reads the replica identity"
        assert not await catalogue.list(TopicRow) and not await catalogue.all_tables()
        assert await catalogue.get(CaptureRow, "shop") is None


@pytest.mark.parametrize("again", [False, True])
async def test_a_captured_topic_that_somebody_deletes_first_is_no_error_and_a_later_one_stays(again: bool) -> None:
    async with new_catalogue() as catalogue:
        row = await catalogue.create_topic("shop.a", 1, kind="capture")

        async def delete_first() -> None:
            await catalogue.delete_topic(row)
            if again:
                await catalogue.create_topic("shop.a", 1)

        catalogue.peer = (TopicRow, delete_first)
        await delete_topics(catalogue, "shop.a")
        assert catalogue.peer is None
        assert [each.kind for each in await catalogue.list(TopicRow)] == ["stream"] * again


@pytest.mark.parametrize("after", [PipelineRow, TopicRow])
async def test_a_dropped_table_that_is_added_again_while_its_row_is_deleted_keeps_row_identities_and_topic(
    after: type,
) -> None:
    """The table is created again in the database. One task of the session adds it while another one prunes it."""
    async with new_catalogue() as catalogue:
        dropped = replace(TABLE, state="dropped", identities={})
        await catalogue.change_table("shop", TABLE.table, lambda _: dropped)
        await catalogue.create_topic(TABLE.topic, 1, kind="capture")
        states = TableStates(CONFIG, catalogue, SystemClock(), StatusTracker())
        states.replace_rows({TABLE.table: dropped})
        nothing: Any = None
        context = SideLoopContext(CONFIG, nothing, states, catalogue, asyncio.Lock())
        watcher = CatalogWatcher(context, nothing, nothing, lambda: 0)
        added = replace(TABLE, oid=43, generation=1, identities={43: ("public.a", "DEFAULT")})
        topics = list[TopicRow]()

        async def add_again() -> None:
            await states.update_row(TABLE.table, lambda _: added)
            await delete_topics(catalogue, TABLE.topic)
            topics.append(await catalogue.create_topic(TABLE.topic, 1, kind="capture"))

        catalogue.peer = (after, add_again)
        await watcher._prune_rows({}, {}, [])
        assert catalogue.peer is None
        assert await catalogue.all_tables() == [added] and states.rows == {TABLE.table: added}
        assert await catalogue.list(TopicRow) == topics


async def test_of_two_ends_of_a_side_topic_at_one_moment_the_earlier_counts() -> None:
    """The reader ends it at a row that cannot be read, and another task at the end of the WAL, because it is full. With
    the later end the changes in between would be in no topic."""
    async with new_catalogue() as catalogue:
        copied = replace(TABLE, side_topic=SideTopicState("side"))
        await catalogue.change_table("shop", TABLE.table, lambda _: copied)
        for ends in ((214, 260), (260, 214)):
            await catalogue.change_table("shop", TABLE.table, lambda _: copied)
            states = TableStates(CONFIG, catalogue, SystemClock(), StatusTracker())
            states.replace_rows({TABLE.table: copied})
            await asyncio.gather(*(states.end_side_topic(TABLE.table, lsn, "why") for lsn in ends))
            (row,) = await catalogue.all_tables()
            assert row.side_topic == SideTopicState("side", until_lsn=214)


async def test_a_dropped_table_that_no_pipeline_reads_is_deleted_with_its_topics() -> None:
    async with new_catalogue() as catalogue:
        dropped = replace(TABLE, state="dropped", identities={})
        await catalogue.change_table("shop", TABLE.table, lambda _: dropped)
        for name in (TABLE.topic, side_topic_name(TABLE.topic)):
            await catalogue.create_topic(name, 1, kind="capture")
        states = TableStates(CONFIG, catalogue, SystemClock(), StatusTracker())
        states.replace_rows({TABLE.table: dropped})
        nothing: Any = None
        context = SideLoopContext(CONFIG, nothing, states, catalogue, asyncio.Lock())
        await CatalogWatcher(context, nothing, nothing, lambda: 0)._prune_rows({}, {}, [])
        assert not states.rows and not await catalogue.all_tables() and not await catalogue.list(TopicRow)


async def test_a_command_that_arrives_while_a_session_validates_its_rows_is_not_lost() -> None:
    async with new_catalogue() as catalogue:
        await catalogue.change_table("shop", TABLE.table, lambda _: TABLE)
        published = {TABLE.oid: PublishedTable("public.a", (1, 2))}
        server = ServerState([], TableChoice((), {}), published, None, None)
        context: Any = SimpleNamespace(config=CONFIG, catalogue=catalogue, wire=None)
        await request_recopy(catalogue, "shop", TABLE.table)
        rows, reason = await validate_rows(context, {TABLE.table: TABLE}, server, ContinuityResult())
        assert not reason
        assert rows[TABLE.table] == replace(TABLE, recopy=True, publication=(1, 2))
        assert await catalogue.all_tables() == [rows[TABLE.table]]
