"""A table that a round of copies had to leave out reports it immediately and for as long as it lasts. The same holds
for a paused table that waits for its re-snapshot.
"""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest

from support.capture.world import GOOD, T, World, good_flows, reported
from support.waiting import DEADLINE_S, until
from tidemill.base.errors import InvalidError, UnavailableError
from tidemill.base.runtime.tasks import Backoff
from tidemill.base.status.status import StageState
from tidemill.capture.session import table_adder
from tidemill.capture.setup import publication
from tidemill.capture.setup.publication import PublishedTable
from tidemill.capture.snapshot import exported_snapshot
from tidemill.capture.tables import context, publication_repair
from tidemill.capture.tables.recopy_requests import request_recopy
from tidemill.capture.topics.topic_writer import TopicWriter

pytestmark = pytest.mark.postgres


@pytest.fixture(autouse=True)
def _tries_come_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (publication, exported_snapshot):
        monkeypatch.setattr(module, "LOCK_PAUSE_S", 0.1)


@pytest.mark.parametrize("fails", ["publish_tables", "copy_tables", "its rows"])
async def test_a_table_left_out_of_a_copy_says_so_while_its_neighbours_are_copied(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD)
        bursts, may_write = 0, asyncio.Event()
        write_rows, other = TopicWriter.write_copied_rows, await psycopg.AsyncConnection.connect(world.dsn)

        async def slowly(self: TopicWriter, target: Any, *args: Any) -> None:
            nonlocal bursts
            if target.name == "public.a":
                raise InvalidError("no such rows.")
            bursts += 1
            if bursts > 1:
                await may_write.wait()
            await write_rows(self, target, *args)

        async with world.capture(table_poll_s=0.1, budget_ms=1000) as capture:
            await good_flows(world)
            if fails != "its rows":
                real = getattr(table_adder, fails)

                async def locked(*args: Any, **settings: Any) -> Any:
                    mode = "ROW EXCLUSIVE" if fails == "publish_tables" else "ACCESS EXCLUSIVE"
                    await other.execute(f"LOCK TABLE a IN {mode} MODE")
                    return await real(*args, **settings)

                monkeypatch.setattr(table_adder, fails, locked)
            monkeypatch.setattr(TopicWriter, "write_copied_rows", slowly)
            await world.transaction(
                *T,
                "INSERT INTO t SELECT g, g, repeat('w', 500) FROM generate_series(10, 3000) g",
                "CREATE TABLE a (id int PRIMARY KEY, v int)",
                "INSERT INTO a VALUES (1, 1)",
            )

            def copied() -> bool:
                mark = reported(world, capture, capture.config.table_mark("public.t"))
                return mark is not None and mark.state is StageState.MOVING and mark.mark.position > 0

            await until(copied, "the other one is copied")
            mark = reported(world, capture, capture.config.table_mark("public.a"))
            holder = "operator" if fails == "its rows" else f"postgres-pid:{other.info.backend_pid}"
            assert mark is not None and mark.state is StageState.STUCK, mark
            assert mark.mark.held_by == holder, mark
            assert ("no such rows" if fails == "its rows" else "is locked by others") in mark.mark.error, mark
            await other.close()
            monkeypatch.undo()
            may_write.set()
            await world.flowing("t", "a")
            await good_flows(world)
            assert reported(world, capture, capture.config.table_mark("public.a")) is None


async def pause_a_table(world: World) -> None:
    """Pause `t`, whose changes can no longer be carried, and wait until it is not published."""
    await world.sql("ALTER TABLE t ADD x float DEFAULT random()")
    await world.paused("t", "column 'x' double precision is new")

    async def unpublished() -> bool:
        return not await world.select("SELECT FROM pg_publication_rel WHERE prrelid = 't'::regclass")

    await until(unpublished, "it is not published")


async def test_f409_a_parked_table_whose_copy_is_locked_names_the_holder_and_not_the_operator(
    postgres_dsn: str,
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD, *T)
        async with world.capture(table_poll_s=0.1) as capture:
            await good_flows(world)
            mark = capture.config.table_mark("public.t")
            await pause_a_table(world)
            async with await psycopg.AsyncConnection.connect(world.dsn, application_name="nightly") as other:
                await other.execute("UPDATE t SET v = v + 1")
                await request_recopy(world.catalogue, world.name, "public.t")

                def named() -> bool:
                    table = reported(world, capture, mark)
                    return table is not None and table.mark.held_by == f"postgres-pid:{other.info.backend_pid}"

                await until(named, "its holder is named")
                table = reported(world, capture, mark)
                assert table is not None and table.state is StageState.STUCK
                for words in (
                    "column 'x' double precision is new",
                    "application='nightly'",
                    "UPDATE t SET v",
                    "End that",
                ):
                    assert words in table.mark.reason
                assert "capture resnapshot" not in table.mark.reason, "it was run"
                await good_flows(world)
                row = await world.table("public.t")
                assert row is not None and row.state == "parked" and "locked" not in row.reason
                await other.rollback()
            await world.flowing("t")
            assert reported(world, capture, mark) is None


@pytest.mark.parametrize("paused", [True, False])
async def test_f413_a_copy_that_is_asked_for_and_fails_is_told_whatever_the_row_says(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch, paused: bool
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD, *T)
        async with world.capture(table_poll_s=0.1, budget_ms=1000) as capture:
            await good_flows(world)
            mark = capture.config.table_mark("public.t")
            if paused:
                await world.sql("ALTER TABLE t ADD x float DEFAULT random()")
                await world.paused("t", "column 'x' double precision is new")

            async def publish(*_: Any, **__: Any) -> Any:
                raise UnavailableError("too many connections.")

            with monkeypatch.context() as patch:
                patch.setattr(table_adder, "publish_tables", publish)
                await request_recopy(world.catalogue, world.name, "public.t")

                def failing() -> bool:
                    table = reported(world, capture, mark)
                    return table is not None and "too many connections" in table.mark.error

                await until(failing, "what its copy ended with is told")
                row = await world.table("public.t")
                assert row is not None and row.is_streaming is not paused, "what flows goes on meanwhile"
                await good_flows(world)
                assert failing(), "it still is"
            await world.flowing("t")

            async def copied() -> bool:
                row = await world.table("public.t")
                return row is not None and row.is_streaming and row.generation == 1

            await until(copied, "it is copied")
            await until(lambda: reported(world, capture, mark) is None, "nothing is told of it")


async def test_a_parked_table_that_is_copied_again_stays_published_while_its_neighbours_wait(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD, *T)
        real, looked = table_adder.publish_tables, asyncio.Event()
        async with world.capture(table_poll_s=0.1) as capture:
            await good_flows(world)
            await pause_a_table(world)

            async def publish(*args: Any, **settings: Any) -> Any:
                done = await real(*args, **settings)
                assert capture._session is not None and capture._session.adder is not None
                # as in every second while the capture waits for another table's lock
                await capture._session.adder.publication_repair.repair()
                looked.set()
                return done

            with monkeypatch.context() as patch:
                patch.setattr(table_adder, "publish_tables", publish)
                await request_recopy(world.catalogue, world.name, "public.t")
                await asyncio.wait_for(looked.wait(), DEADLINE_S)
            assert await world.select("SELECT FROM pg_publication_rel WHERE prrelid = 't'::regclass")
            await world.flowing("t")
            await good_flows(world)
        async with world.capture(table_poll_s=0.1):
            await world.flowing("t")
            row = await world.table("public.t")
            assert row is not None and row.generation == 1, "it is copied once"


async def test_a_parked_table_is_not_unpublished_once_its_copy_began(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy begins between the check of the publication and the statement that removes the table."""
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD, *T)
        async with world.capture(table_poll_s=0.1) as capture:
            await good_flows(world)
            await pause_a_table(world)
            row = await world.table("public.t")
            assert row is not None and capture._session is not None and capture._session.adder is not None
            real, joins, taken_out = context.read_published_tables, capture._session.adder, []

            async def published_tables(*args: Any, **more: Any) -> Any:
                published = await real(*args, **more)
                capture._states.copying = {"public.t": row.oid}
                return {**(published or {}), row.oid: PublishedTable("ONLY public.t")}

            async def unpublish(*args: Any) -> bool:
                taken_out.append(args[2])
                return True

            with monkeypatch.context() as patch:
                patch.setattr(publication_repair, "unpublish_table", unpublish)
                patch.setattr(context, "read_published_tables", published_tables)
                await joins.publication_repair._unpublish_paused()
                assert not taken_out
            capture._states.finish_copy()


class Never(Backoff):
    def pause_s(self, ran_s: float, *, paused: bool = False) -> float:
        return 1e6


@pytest.mark.parametrize("known", [True, False])
async def test_f409_a_table_is_taken_in_when_its_lock_is_free_however_long_the_pause(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD, *T)
        if not known:
            await world.sql("ALTER TABLE t DROP CONSTRAINT t_pkey")
        real, tries = table_adder.publish_tables, 0
        other = await psycopg.AsyncConnection.connect(world.dsn)

        async def publish(*args: Any, **settings: Any) -> Any:
            nonlocal tries
            tries += 1
            if tries == 1:
                await other.execute("LOCK TABLE t IN SHARE ROW EXCLUSIVE MODE")
            return await real(*args, **settings)

        monkeypatch.setattr(table_adder, "publish_tables", publish)
        monkeypatch.setattr(table_adder, "Backoff", Never)
        async with other, world.capture(table_poll_s=0.1) as capture:
            await good_flows(world)
            if known:
                await pause_a_table(world)
                await request_recopy(world.catalogue, world.name, "public.t")
            else:
                await world.paused("t", "primary key")
                await world.sql("ALTER TABLE t ADD PRIMARY KEY (id)")

            def refused() -> bool:
                table = reported(world, capture, capture.config.table_mark("public.t"))
                return table is not None and table.mark.held_by == f"postgres-pid:{other.info.backend_pid}"

            await until(refused, "its holder is named")
            await good_flows(world)
            await other.rollback()
            await world.flowing("t")
            assert tries == 2, "and is left alone while the lock is held"
