"""Failures of a copy: a fault of one table affects only that table, and an external fault loses nothing that was
copied.
"""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest
from msgspec.structs import replace

from support.capture.copies import SMALL, as_folded, copy_of, stores
from support.capture.world import GOOD, World, good_flows, plain
from support.waiting import until
from tidemill.base.errors import ConflictError, CorruptError, FencedError, TidemillError, UnavailableError
from tidemill.capture.catalog.table_choice import Refusal
from tidemill.capture.postgres.connection import PgConnection
from tidemill.capture.postgres.control_connection import NoAnswerError
from tidemill.capture.postgres.errors import is_transient, translate_connect_error, translate_statement_error
from tidemill.capture.session import table_adder
from tidemill.capture.snapshot import copier, exported_snapshot
from tidemill.capture.snapshot.copier import SnapshotCopy
from tidemill.capture.tables import copy_progress
from tidemill.capture.tables.context import SideLoopContext
from tidemill.capture.tables.table_states import TableStates
from tidemill.capture.topics import captured_table
from tidemill.capture.topics.captured_table import CapturedTable
from tidemill.capture.topics.topic_writer import TopicWriter
from tidemill.metastore.catalogue import CaptureTableRow, TableCopy

BAD = (
    "CREATE TYPE span AS RANGE (subtype = int)",
    "CREATE TABLE bad (id int PRIMARY KEY, v span)",
    "INSERT INTO bad SELECT g, span(g, g + 1) FROM generate_series(1, 100) g",
)


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        *[
            (translate_statement_error(state, "no", "COPY t"), True)
            for state in ("53200", "57014", "57P01", "40001", "55P03")
        ],
        *[
            (translate_statement_error(state, "no", "COPY t"), False)
            for state in ("XX000", "XX001", "54000", "P0001", "58030")
        ],
        (translate_statement_error("22P03", "no", "COPY t"), False),
        (UnavailableError("no."), True),
        (FencedError("no."), False),
        (CorruptError("no."), False),
        (ValueError("no"), False),
        (translate_connect_error('FATAL: too many connections for role "bob"', "x"), True),
        (translate_connect_error("FATAL: sorry, too many clients already", "x"), True),
        (translate_connect_error('FATAL: role "bob" does not exist', "x"), False),
    ],
)
def test_what_may_pass_is_told_from_what_is_met_again(error: Exception, passes: bool) -> None:
    assert is_transient(error) is passes


@pytest.mark.postgres
async def test_f478_a_row_that_postgresql_cannot_read_keeps_its_table_out_alone_until_it_is_mended(
    postgres_dsn: str,
) -> None:
    """The catalogue lacks the range that the column's type consists of: PostgreSQL raises XX000 as soon as it prints a
    value.
    """
    async with World(postgres_dsn) as world:
        await world.sql(
            *GOOD, *BAD,
            "CREATE TABLE kept AS SELECT * FROM pg_range WHERE rngtypid = 'span'::regtype",
            "DELETE FROM pg_range WHERE rngtypid = 'span'::regtype",
        )  # fmt: skip
        async with world.capture(table_poll_s=0.1, tables=("good", "bad", "late")):
            row = await world.paused("bad", "sqlstate=XX000")
            assert row.state == "refused" and "cannot be copied" in row.reason and "automatically" in row.fix
            await good_flows(world)
            await world.sql("CREATE TABLE late (id int PRIMARY KEY, v int)", "INSERT INTO late VALUES (1, 1)")
            await world.flowing("late")
            await good_flows(world)
            assert await world.folded("late") == await plain(world, "late")
            await world.sql("INSERT INTO pg_range SELECT * FROM kept")
            await world.flowing("bad")
        assert len(await world.folded("bad")) == 100


# remains of an interrupted copy --------------------------------------------------------------------
async def cut_off(world: World, **settings: Any) -> str:
    """Interrupt a copy of `a` after some chunks and return the id of its topic."""
    await world.sql(
        "CREATE TABLE a (id int PRIMARY KEY, v int, w text)",
        "INSERT INTO a SELECT g, g, repeat('w', 100) FROM generate_series(1, 3000) g",
    )
    async with world.capture(wait=False, copy_rows_per_s=2000, **{**SMALL, **settings}):

        async def reported() -> bool:
            return await copy_of(world) is not None

        await until(reported, "chunks are told to be done")
    return await world.topic_id("a")


@pytest.mark.postgres
async def test_f479_a_cut_off_copy_is_gone_on_with_though_others_write_lock_and_take_all_connections(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier, "RECORD_S", 0.05)
    monkeypatch.setattr(exported_snapshot, "LOCK_PAUSE_S", 0.1)
    publish, connect = table_adder.publish_tables, SnapshotCopy._connect
    tries = 0
    having: set[SnapshotCopy] = set()

    async def publish_later(*args: Any, **settings: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise NoAnswerError("PostgreSQL does not answer.")
        return await publish(*args, **settings)

    async def connect_once(self: SnapshotCopy, opened: Any) -> PgConnection:
        if self in having:
            raise translate_connect_error("FATAL: sorry, too many clients already", "server=x")
        having.add(self)
        return await connect(self, opened)

    async with World(postgres_dsn) as world:
        topic = await cut_off(world)
        before = await copy_of(world)
        assert before is not None
        monkeypatch.setattr(table_adder, "publish_tables", publish_later)
        monkeypatch.setattr(SnapshotCopy, "_connect", connect_once)
        async with await psycopg.AsyncConnection.connect(world.dsn) as other:
            await other.execute("UPDATE a SET v = -v WHERE id % 100 = 1")
            await other.execute("SAVEPOINT it")
            await other.execute("LOCK TABLE a IN ACCESS EXCLUSIVE MODE")
            async with world.capture(wait=False, copy_connections=3, **SMALL):
                row = await world.paused("a", "the table is locked by others")
                assert row.state == "refused" and row.copy is not None and row.copy.done == before.done
                await other.execute("ROLLBACK TO it")

                async def copied() -> bool:
                    row = await world.table("public.a")
                    return row is not None and row.is_streaming

                await until(copied, "the copy is done while a writer's transaction is open")
                await other.commit()
                await world.caught_up()
        row = await world.table("public.a")
        assert row is not None and row.snapshot is not None and row.snapshot.settled_lsn > row.snapshot.lsn
        assert tries > 2 and having and await world.topic_id("a") == topic
        assert await world.folded("a") == await as_folded(world)


@pytest.mark.postgres
async def test_a_cut_off_copy_of_a_table_that_was_unpublished_since_begins_anew(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes made while the table is unpublished are in no stream."""
    monkeypatch.setattr(copier, "RECORD_S", 0.05)
    tries = 0
    async with World(postgres_dsn) as world:
        topic = await cut_off(world)
        real = SideLoopContext.read_published

        async def published_late(self: SideLoopContext) -> Any:
            nonlocal tries
            if self.states.copying and not tries:
                tries += 1
                await world.sql(
                    f"ALTER PUBLICATION tidemill_{world.name} DROP TABLE a", "UPDATE a SET v = 7 WHERE id < 10"
                )
            return await real(self)

        monkeypatch.setattr(SideLoopContext, "read_published", published_late)
        async with world.capture(wait=False, **SMALL):
            await world.flowing("a")
            await world.caught_up()
        assert await world.topic_id("a") != topic
        assert await world.folded("a") == await as_folded(world)


@pytest.mark.postgres
@pytest.mark.parametrize("side_topic", [False, True])
async def test_a_table_that_would_park_before_its_copy_is_exact_is_copied_anew(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch, side_topic: bool
) -> None:
    """The stream reaches a row that cannot be written before it reaches the newest snapshot of the copy, which contains
    later changes. Up to that row the topic matches no state of the table.
    """
    monkeypatch.setattr(copier, "RECORD_S", 0.05)
    async with World(postgres_dsn) as world:
        topic = await cut_off(world)
        await world.sql(
            "UPDATE a SET v = 1",
            "UPDATE a SET w = repeat('w', 2000) WHERE id = 3",
            "UPDATE a SET w = 'short' WHERE id = 3",
            "DELETE FROM a WHERE id > 2500",
        )
        monkeypatch.setattr(captured_table, "MAX_ROW_BYTES", 1000)
        async with world.capture(wait=False, **SMALL, copy_aside_max_mb=100 if side_topic else 0):

            async def anew() -> bool:
                found = await world.table("public.a")
                return found is not None and found.is_streaming and await world.topic_id("a") != topic

            await until(anew, "it is copied anew")
            await world.flowing("a")
            await world.caught_up()
            assert await world.folded("a") == await as_folded(world)
        assert not [b for b in await world.remap().after(0) if topic in b.offsets], "nobody was shown the other one"


async def test_a_copy_that_is_cut_off_again_and_again_without_one_more_chunk_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copy_progress, "MAX_FRUITLESS_ATTEMPTS", 3)
    async with stores() as world:
        reported = TableStates(world.config(), world.catalogue, world.clock, world.tracker)

        async def tried(done: int, topic_id: str = "t") -> bool:
            copy = TableCopy(1, 1, (), 1, 0, topic_id, 4, 9, done, 10 * done, "", 3)
            await reported.update_row("public.a", lambda _: CaptureTableRow(world.name, "public.a", copy=copy))
            await reported.refuse_table("public.a", Refusal("refused", "no.", "Wait."), 1, going_on=True)
            return reported.rows["public.a"].copy is not None

        assert [await tried(done) for done in (1, 1, 2, 2, 3, 3, 3)] == [True] * 6 + [False]
        assert await tried(3, "another topic's"), "a copy that is begun anew has all its tries"
        await reported.refuse_table("public.a", Refusal("refused", "its own fault.", "Mend it."), 1)
        assert reported.rows["public.a"].copy is None


# one table's alone ---------------------------------------------------------------------------------
@pytest.mark.postgres
async def test_f480_a_copy_that_left_its_topic_empty_is_not_told_and_takes_no_other_with_it(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first chunks of `b` contain no row any more, so no progress is stored for it. If progress is stored
    nevertheless, only `b` starts over.
    """
    monkeypatch.setattr(copier, "RECORD_S", 0.05)
    settings: dict[str, Any] = {**SMALL, "tables": ("a", "b")}
    settle, write_rows = copier._TableCopyTask.collect_durable_chunks, TopicWriter.write_copied_rows
    settled = 0

    def counted(self: Any) -> None:
        nonlocal settled
        settle(self)
        settled += self.info.name == "public.b" and self.durable.done > 0

    async def never_of_b(self: TopicWriter, target: CapturedTable, *args: Any) -> None:
        if target.name == "public.b":
            await asyncio.Event().wait()
        await write_rows(self, target, *args)

    async with World(postgres_dsn) as world:
        await world.sql(
            *[f"CREATE TABLE {t} (id int PRIMARY KEY, v int, w text) WITH (autovacuum_enabled = off)" for t in "ab"],
            *[f"INSERT INTO {t} SELECT g, g, repeat('w', 100) FROM generate_series(1, 3000) g" for t in "ab"],
            "DELETE FROM b WHERE id <= 2900",
        )
        with monkeypatch.context() as patch:
            patch.setattr(copier._TableCopyTask, "collect_durable_chunks", counted)
            patch.setattr(TopicWriter, "write_copied_rows", never_of_b)
            async with world.capture(wait=False, copy_rows_per_s=4000, **settings):
                await until(lambda: settled > 3, "chunks of b are done, again and again")
                a, b = await world.table("public.a"), await world.table("public.b")
        assert b is not None and b.copy is None, "nobody could go on with it"
        assert a is not None and a.copy is not None
        topics = [await world.topic_id(t) for t in "ab"]
        reported = replace(b, copy=replace(a.copy, topic_id=topics[1], done=1, rows=0))
        await world.catalogue.change_table(world.name, "public.b", lambda _: reported)
        async with world.capture(wait=False, **settings):
            await world.flowing("a", "b")
        assert await world.topic_id("a") == topics[0] and await world.topic_id("b") != topics[1]
        assert (len(await world.folded("a")), len(await world.folded("b"))) == (3000, 100)


@pytest.mark.postgres
@pytest.mark.parametrize("kind", [FencedError, ConflictError])
async def test_a_copy_that_has_lost_its_topics_to_another_session_ends_and_blames_no_table(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch, kind: type[TidemillError]
) -> None:
    async def write_rows(self: TopicWriter, *_: Any) -> None:
        raise kind("a newer epoch exists.")

    async with World(postgres_dsn) as world:
        await world.sql(*GOOD)
        monkeypatch.setattr(TopicWriter, "write_copied_rows", write_rows)
        with pytest.raises(kind):
            await asyncio.wait_for(world.new_capture().run_sessions(), 20)
        row = await world.table("public.good")
        assert row is not None and row.state == "captured" and not row.reason
