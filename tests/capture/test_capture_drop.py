"""`capture drop`: everything that a capture changed in the database is restored, in any initial state."""

from __future__ import annotations

import psycopg
import pytest
from msgspec.structs import replace

from support.capture.on_every_server import (
    IDENTITY_TABLES,
    identities,
    test_all_that_a_capture_changed_is_as_it_was,
)
from support.capture.world import World
from support.waiting import until
from tidemill.base.errors import ConflictError, InvalidError, UnknownOutcomeError
from tidemill.capture.catalog.table_discovery import list_tables
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.connection import PgConnection
from tidemill.capture.postgres.replication_stream import ReplicationStream
from tidemill.capture.session import teardown
from tidemill.capture.session.teardown import drop_capture, plan_drop
from tidemill.capture.setup.publication import Identities, PublishRequest, create_publication, publish_tables
from tidemill.capture.setup.server_checks import ADVISORY_CLASS, advisory_lock_key, try_advisory_lock
from tidemill.metastore.catalogue import PipelineRow, TopicRow

__all__ = [
    "test_all_that_a_capture_changed_is_as_it_was",
]

pytestmark = pytest.mark.postgres


async def test_an_identity_that_somebody_set_meanwhile_is_left(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*IDENTITY_TABLES[:1])
        async with world.capture():
            pass
        await world.sql("ALTER TABLE plain REPLICA IDENTITY NOTHING")
        plan = await plan_drop(world.config(), world.catalogue)
        assert (plan.slot, plan.publication, len(plan.topics)) == (True, True, 1) and plan.identities
        assert await world.catalogue.tables(world.name) and await world.select("SELECT FROM pg_publication")
        done = await drop_capture(world.config(), world.catalogue)
        assert (done.slot, done.publication, done.topics) == (plan.slot, plan.publication, plan.topics)
        assert done.identities == {} and await identities(world) == {"plain": "n"}


async def test_sessions_that_postgresql_ends_only_now_are_waited_for(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*IDENTITY_TABLES[:1])
        async with world.capture():
            pass
        config, other = world.config(), await psycopg.AsyncConnection.connect(world.dsn)
        refused = 0

        async def first_refused(wire: PgConnection, config: CaptureConfig) -> bool:
            nonlocal refused
            if await try_advisory_lock(wire, config):
                return True
            refused += 1
            await other.close()
            return False

        async def free() -> bool:
            query = f"SELECT pg_try_advisory_lock({ADVISORY_CLASS}, {advisory_lock_key(config)})"
            return (await (await other.execute(query)).fetchone()) == (True,)

        await until(free, "the capture's session has ended")
        monkeypatch.setattr(teardown, "try_advisory_lock", first_refused)
        done = await drop_capture(config, world.catalogue)
        assert refused and done.slot and not done.left and await identities(world) == {"plain": "d"}


async def test_what_a_lock_keeps_is_named_and_done_by_the_next_try(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*IDENTITY_TABLES[:1])
        async with world.capture():
            pass
        async with await psycopg.AsyncConnection.connect(world.dsn) as other:
            await other.execute("LOCK TABLE plain IN ACCESS SHARE MODE")
            done = await drop_capture(world.config(), world.catalogue)
            assert list(done.left) == ['ALTER TABLE "public"."plain" REPLICA IDENTITY DEFAULT']
            assert await world.catalogue.tables(world.name) != []
            await other.rollback()
        done = await drop_capture(world.config(), world.catalogue)
        assert not done.left and await identities(world) == {"plain": "d"}
        assert await world.catalogue.tables(world.name) == []


async def test_a_slot_that_a_session_streams_from_is_refused_before_anything_is_changed(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teardown, "ENDED_ATTEMPTS", 2)
    async with World(postgres_dsn) as world:
        await world.sql(*IDENTITY_TABLES[:1])
        async with world.capture():
            pass
        config = world.config()
        wire = await PgConnection.connect(config.dsn, purpose="stream", capture=config.name, replication=True)
        stream = ReplicationStream(wire)
        await stream.start(config.slot, config.publication)
        try:
            for attempt in (plan_drop, drop_capture):
                with pytest.raises(ConflictError, match=f"slot={config.slot} pid=.*again when that session has ended"):
                    await attempt(config, world.catalogue, really=True)
        finally:
            await stream.aclose()
        assert await identities(world) == {"plain": "f"} and await world.select("SELECT FROM pg_publication")
        assert await world.catalogue.tables(world.name)
        monkeypatch.undo()
        assert not (await drop_capture(config, world.catalogue)).left


async def test_a_capture_that_a_pipeline_reads_is_dropped_only_when_told_twice(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*IDENTITY_TABLES[:1])
        async with world.capture():
            pass
        await world.catalogue.put(PipelineRow("p", {"plain": f"capture:{world.name}:public.plain"}))
        with pytest.raises(InvalidError, match="in use"):
            await drop_capture(world.config(), world.catalogue)
        assert await identities(world) == {"plain": "f"}
        assert not (await drop_capture(world.config(), world.catalogue, really=True)).left


async def test_a_table_that_leaves_the_capture_gets_its_identity_back(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*IDENTITY_TABLES[:3])
        async with world.capture():
            pass
        async with world.capture(tables=("public.*", "!quiet"), table_poll_s=0.2):

            async def given_back() -> bool:
                return await identities(world) == {"plain": "f", "quiet": "n"}

            await until(given_back, "the table that was left out is as it was")
            await world.sql("INSERT INTO quiet VALUES (1, 'a')", "UPDATE quiet SET v = 'b'")


async def test_a_renamed_table_gets_its_identity_back_under_its_new_name(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*IDENTITY_TABLES[:1])
        async with world.capture(table_poll_s=0.2):
            await world.sql("ALTER TABLE plain RENAME TO fancy")
            await world.flowing("fancy")

            async def forgotten() -> bool:
                return list(await world.tables()) == ["public.fancy"]

            await until(forgotten, "the old name is forgotten, though its table is captured under the new one")
        done = await drop_capture(world.config(), world.catalogue)
        assert done.identities == {'"public"."fancy"': "DEFAULT"} and await identities(world) == {"fancy": "d"}


async def test_a_table_made_anew_under_its_name_keeps_the_identity_that_somebody_gave_it(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*IDENTITY_TABLES[1:3])
        async with world.capture(table_poll_s=0.2):
            await world.transaction("DROP TABLE quiet", IDENTITY_TABLES[1], "ALTER TABLE quiet REPLICA IDENTITY FULL")
            await world.sql("INSERT INTO quiet VALUES (1, 'anew')")

            async def anew() -> bool:
                topic = await world.catalogue.get(TopicRow, f"{world.name}.public.quiet")
                return topic is not None and '{"id":1}' in await world.folded("quiet")

            await until(anew, "it is copied anew")
        assert (await drop_capture(world.config(), world.catalogue)).identities == {}
        assert await identities(world) == {"quiet": "f"}


async def test_another_cluster_than_the_captured_one_is_left_alone(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*IDENTITY_TABLES[:1])
        async with world.capture():
            pass
        await world.catalogue.put(replace(await world.row(), system_id="another"))
        with pytest.raises(InvalidError, match="not the cluster"):
            await drop_capture(world.config(), world.catalogue)
        assert await identities(world) == {"plain": "f"} and await world.tables() != {}
        await world.catalogue.put(replace(await world.row(), system_id="another"))
        assert (await drop_capture(world.config(), world.catalogue, really=True)).slot


async def test_a_note_whose_outcome_is_not_known_is_no_refusal_of_the_table(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*IDENTITY_TABLES[:1])
        wire = await PgConnection.connect(world.dsn, purpose="test")

        class Store:
            async def store_identities(self, name: str, identities: Identities) -> None:
                raise UnknownOutcomeError("nobody knows.")

            store_asked_identities = store_identities

        try:
            config = world.config()
            await create_publication(wire, config.publication)
            with pytest.raises(UnknownOutcomeError):
                await publish_tables(wire, config, PublishRequest(await list_tables(wire), {}), Store())
        finally:
            await wire.aclose()
        assert await identities(world) == {"plain": "d"}
