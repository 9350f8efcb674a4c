"""SIGKILL of the capturing process at random moments, on SQLite and a directory: the topics equal SELECT."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path

import pytest

from support.capture.on_every_server import TWO_TABLES, Writer
from support.capture.world import World, assert_no_position_twice, table_as_folded
from support.waiting import until
from tidemill.base.clock import Rand, SystemClock
from tidemill.consensus.factory import open_consensus
from tidemill.objects.factory import open_objects

pytestmark = pytest.mark.postgres

PROGRAM = Path(__file__).parents[1] / "support" / "capture" / "process.py"


async def test_kill_9_loses_and_doubles_nothing(postgres_dsn: str, tmp_path: Path) -> None:
    rng = random.Random(11)
    name = postgres_dsn.rpartition("/")[2]

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, str(PROGRAM), postgres_dsn, name, str(tmp_path)]
        log = (tmp_path / "capture.log").open("ab")
        return subprocess.Popen(command, stdout=log, stderr=log)

    clock, rand = SystemClock(), Rand()
    process = start()
    consensus = await open_consensus(f"sqlite://{tmp_path}/consensus.db", clock, rand)
    objects = await open_objects(f"file://{tmp_path}/objects", clock, rand)
    async with World(postgres_dsn, consensus=consensus, objects=objects) as world:
        await world.sql(*TWO_TABLES, "INSERT INTO a SELECT g, g FROM generate_series(1000, 3000) g")
        writer = Writer(postgres_dsn, 2)
        writing = asyncio.ensure_future(writer.run())
        try:
            for _ in range(4):
                seen = await world.remap().latest()
                since = seen.time_ms if seen else 0

                async def moves(since: int = since) -> bool:
                    latest = await world.remap().latest()
                    return latest is not None and latest.time_ms > since + 200

                await until(moves, "the process binds")
                await asyncio.sleep(rng.random() * 0.3)
                process.kill()
                process.wait()
                process = start()
            writer.stop()
            await writing
            await world.caught_up()
        finally:
            process.kill()
            process.wait()
        for table in "ab":
            assert await world.folded(table) == await table_as_folded(world, table)
            assert_no_position_twice(await world.records(table))
    await consensus.aclose()
