"""A new session ends its predecessor: the session that holds the lock, and the stream of the same process."""

from __future__ import annotations

import os
import socket

import pytest

from support.capture.world import World
from support.waiting import until
from tidemill.capture.config import NAME_LENGTH
from tidemill.capture.postgres.connection import PgConnection, application_name
from tidemill.capture.postgres.replication_stream import ReplicationStream
from tidemill.capture.setup.server_checks import create_slot, try_advisory_lock
from tidemill.capture.setup.session_lock import end_session, read_own_session


def test_the_word_of_a_process_and_a_captures_name_are_whole_however_long_names_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "h" * 64)
    capture = "c" * NAME_LENGTH
    names = [application_name(purpose, capture) for purpose in ("capture", "stream", "start over")]
    assert all(len(name) <= 63 for name in names)
    assert {name.split(" ")[0] for name in names} == {"tidemill"}
    assert {name.split(" ")[2] for name in names} == {capture}
    (process,) = {name.split(" ")[1] for name in names}
    assert len(process) == 8 and application_name("doctor").split(" ")[1] == process
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert application_name("capture", capture).split(" ")[1] != process
    monkeypatch.setattr(socket, "gethostname", lambda: "host")
    assert application_name("stream", "shop").endswith(" shop stream host/1")


@pytest.mark.postgres
@pytest.mark.parametrize("streams", ["the same process", "another process"])
async def test_f613_of_a_frozen_process_the_lock_and_the_stream_are_ended_where_names_are_long_and_nobody_elses(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch, streams: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "ip-10-0-0-1.a-long-region-name.compute.internal.example.org")

    async def scenario(world: World) -> None:
        config = world.config()
        there = f"SELECT count(active_pid) FROM pg_replication_slots WHERE slot_name = '{config.slot}'"
        await world.sql(f"CREATE PUBLICATION {config.publication} FOR ALL TABLES")
        wires = [await PgConnection.connect(world.dsn, purpose="capture", capture=config.name)]
        try:
            assert await try_advisory_lock(wires[0], config)
            await create_slot(wires[0], config)
            session = await read_own_session(wires[0])
            if streams == "another process":
                monkeypatch.setattr(os, "getpid", lambda: 1)
            wires.append(await PgConnection.connect(world.dsn, replication=True, purpose="stream", capture=config.name))
            await ReplicationStream(wires[1]).start(config.slot, config.publication)
            assert await world.select(there) == [(1,)]
            wires.append(await PgConnection.connect(world.dsn, purpose="capture", capture=config.name))
            assert await end_session(wires[2], config, session)

            async def free() -> bool:
                return await try_advisory_lock(wires[2], config)

            async def over() -> bool:
                return await world.select(there) == [(0,)]

            await until(free, "the lock is free")
            if streams == "the same process":
                await until(over, "the slot is free")
            else:
                assert await world.select(there) == [(1,)]
        finally:
            for wire in wires:
                await wire.aclose()

    async with World(postgres_dsn) as world:
        await scenario(world)
