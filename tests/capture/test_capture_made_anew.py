"""A table is dropped or re-created between two queries of the capture: nothing else fails, and nothing waits long."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from support.capture.world import World
from support.waiting import until
from tidemill.capture.catalog.catalog_cache import CachedQuery
from tidemill.capture.session import bootstrap, session, table_adder
from tidemill.capture.session.session import Session
from tidemill.capture.session.set_up_context import PreparedSession
from tidemill.capture.tables.publication_repair import PublicationRepair

pytestmark = pytest.mark.postgres

TABLES = ("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE other (id int PRIMARY KEY)")


@asynccontextmanager
async def world_with_tables(dsn: str) -> AsyncIterator[World]:
    async with World(dsn) as world:
        await world.sql(*TABLES)
        yield world


def failed(world: World) -> Any:
    return world.tracker.failure(f"capture:{world.name}")


async def test_f473_a_table_that_is_dropped_while_the_capture_looks_is_not_taken_for_an_unpublished_one(
    postgres_dsn: str,
) -> None:
    """The list of tables still contains the table, the publication no longer does."""
    async with world_with_tables(postgres_dsn) as world, world.capture(table_poll_s=600.0) as capture:
        await world.flowing("t", "other")
        first = capture._session
        assert first is not None and first.adder is not None
        published: CachedQuery[Any] = first.adder.watcher._published

        async def question(wire: Any) -> Any:
            rows = await world.select("SELECT to_regclass('t')::text")
            if rows != [(None,)]:
                await world.sql("DROP TABLE t")
            return await published_now(wire)

        published_now, published._question = published._question, question
        await world.sql("INSERT INTO other VALUES (1)")  # another snapshot, so the catalogue is asked
        capture.check_tables_soon()

        async def gone() -> bool:
            capture.check_tables_soon()
            row = await world.table("public.t")
            return row is None or row.state == "dropped"

        await until(gone, "the table is dropped")
        assert capture._session is first and failed(world) is None
        await world.caught_up()


async def test_a_captured_table_that_somebody_unpublishes_is_copied_again(postgres_dsn: str) -> None:
    async with world_with_tables(postgres_dsn) as world, world.capture(table_poll_s=0.2) as capture:
        await world.flowing("t", "other")
        await world.sql(f'ALTER PUBLICATION "{capture.config.publication}" DROP TABLE ONLY t')
        await world.sql("INSERT INTO t VALUES (1)")

        async def again() -> bool:
            row = await world.table("public.t")
            return row is not None and row.is_streaming and row.generation == 1

        await until(again, "the table is copied again")
        assert len(await world.folded("t")) == 1


async def test_f473_a_table_that_is_dropped_while_a_session_is_set_up_does_not_start_over(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table ends there, and its earlier rows stay in its topic."""
    seen: list[PreparedSession] = []
    real_published, real_prepare = bootstrap.read_published_tables, session.prepare_session
    async with world_with_tables(postgres_dsn) as world:
        async with world.capture():
            await world.flowing("t", "other")

        async def published(*args: Any, **more: Any) -> Any:
            if not seen:
                await world.sql("DROP TABLE IF EXISTS t")
            return await real_published(*args, **more)

        async def prepared(*args: Any, **more: Any) -> PreparedSession:
            seen.append(await real_prepare(*args, **more))
            return seen[-1]

        monkeypatch.setattr(bootstrap, "read_published_tables", published)
        monkeypatch.setattr(session, "prepare_session", prepared)
        async with world.capture():
            assert {table.name for table in seen[0].captured} == {"public.t", "public.other"}
            assert failed(world) is None

            async def gone() -> bool:
                row = await world.table("public.t")
                return row is None or row.state == "dropped"

            await until(gone, "the table is dropped")


async def test_a_session_whose_stream_begins_while_the_catalogue_is_asked_goes_on(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session lets the query of the set-up's guard complete: a control connection is unusable after a cancelled
    query.
    """
    asked: list[str] = []
    withdraw, open_writer = PublicationRepair.withdraw_identities, Session._open_writer

    async def slowly(mending: PublicationRepair, objected: Any, *, streams: bool = True) -> None:
        if not streams:
            asked.append("begun")
            await mending._control.run(lambda wire: wire.query("SELECT pg_sleep(1)"))
            asked.append("answered")
        await withdraw(mending, objected, streams=streams)

    async def opened(self: Session, prepared: PreparedSession) -> None:
        await until(lambda: "begun" in asked, "the guard asks")
        await open_writer(self, prepared)

    async with world_with_tables(postgres_dsn) as world:
        async with world.capture():
            await world.flowing("t", "other")
        monkeypatch.setattr(PublicationRepair, "withdraw_identities", slowly)
        monkeypatch.setattr(Session, "_open_writer", opened)
        async with world.capture() as capture:
            first = capture._session
            await world.caught_up()
            assert capture._session is first and failed(world) is None
            assert asked == ["begun", "answered"]


async def test_f474_a_table_made_anew_does_not_wait_for_the_pause_of_the_one_before(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause after a failed copy belongs to that table, not to its name."""
    real, tries = table_adder.copy_tables, []
    async with world_with_tables(postgres_dsn) as world:

        async def take_snapshot(*args: Any, **more: Any) -> Any:
            tries.append([table.oid for table in args[1]])
            if len(tries) == 1:
                await world.transaction("DROP TABLE late", "CREATE TABLE late (id int PRIMARY KEY)")
                await world.sql("INSERT INTO late VALUES (7)")
            return await real(*args, **more)

        monkeypatch.setattr(table_adder, "copy_tables", take_snapshot)
        async with world.capture(table_poll_s=600.0) as capture:
            await world.flowing("t", "other")
            await world.sql("CREATE TABLE late (id int PRIMARY KEY)")
            capture.check_tables_soon()
            await until(lambda: tries, "the copy begins")
            await until(lambda: not capture._states.copying, "the copy fails")
            capture.check_tables_soon()
            await world.flowing("t", "other", "late")
            assert len(tries) == 2 and tries[0] != tries[1]
            assert len(await world.folded("late")) == 1
