"""Several DDL statements chosen by a seed, on a plain and a partitioned table, under load and with kill -9 of capture
in between. Each ends in a topic that equals SELECT, automatically or after an operator accepts the change.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.capture.evolving import ends_equal, equal
from support.capture.servers import INSTALLED, SETTINGS
from support.capture.world import GOOD, World
from support.postgres import EmbeddedPostgres
from support.waiting import until
from tidemill.base.clock import Rand, SystemClock
from tidemill.capture.tables.recopy_requests import accept_effects
from tidemill.consensus.factory import open_consensus
from tidemill.objects.factory import open_objects

pytestmark = pytest.mark.postgres

PROGRAM = Path(__file__).parents[1] / "support" / "capture" / "process.py"
SEEDS = (26, 14)
"""Statements on the newest server: stored, attached, retyped, attached, detached, volatile. On an older one: constant,
attached, volatile, detached, renamed, volatile. Capture is killed three times, and twice.
"""
COLUMNS = "id int NOT NULL, v int, w varchar(8), n numeric(6,2), f real"


@pytest.fixture(scope="module", params=[*SEEDS])
def postgres_server(
    request: pytest.FixtureRequest, postgres_server: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedPostgres]:
    """The newest, then one of 15 (test_capture_servers.py)."""
    if request.param == SEEDS[0]:
        yield postgres_server
        return
    binaries = INSTALLED / "postgres-15" / "native" / "bin"
    if not (binaries / "postgres").exists():
        pytest.skip("PostgreSQL 15 is not here: tests/clients/install")
    data_dir = tmp_path_factory.mktemp("postgres15") / "data"
    with EmbeddedPostgres(data_dir, settings=SETTINGS, binaries=binaries) as server:
        yield server


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.node.callspec.params["postgres_server"])


class Changes:
    """Source of the next DDL statements."""

    def __init__(self, rng: random.Random, version: int) -> None:
        self.rng = rng
        self.version = version
        self.number = 0
        self.there: list[str] = []
        """Columns of t that were added, which may go again."""
        self.parts = 2

    def next(self) -> tuple[str, list[str], bool]:
        """Return (table, statements, whether an operator has to accept them)."""
        self.number += 1
        n = self.number
        kinds = ["constant", "volatile", "part", "attached", "detached"]
        kinds += ["stored"] if self.version >= 180_000 else []
        kinds += ["dropped", "renamed", "retyped"] if self.there else []
        kind = self.rng.choice(kinds)
        low, self.parts = self.parts * 1000, self.parts + (kind in ("part", "attached"))
        part = f"p{low // 1000}"
        ranged = f"FOR VALUES FROM ({low}) TO ({low + 1000})"
        if kind == "part":
            return "p", [f"CREATE TABLE {part} PARTITION OF p {ranged}", *_rows("p", low)], False
        if kind == "attached":
            return "p", [
                f"CREATE TABLE {part} (LIKE p, PRIMARY KEY (id))", *_rows(part, low),
                f"ALTER TABLE p ATTACH PARTITION {part} {ranged}", f"UPDATE p SET v = 5 WHERE id = {low}",
            ], False  # fmt: skip
        if kind == "detached":
            return "p", [
                "ALTER TABLE p DETACH PARTITION p0", "DROP TABLE p0",
                "CREATE TABLE p0 PARTITION OF p FOR VALUES FROM (0) TO (1000)", *_rows("p", 7),
            ], False  # fmt: skip
        if kind in ("dropped", "renamed", "retyped"):
            name = self.there.pop(self.rng.randrange(len(self.there)))
            change = {
                "dropped": f"DROP {name}", "renamed": f"RENAME {name} TO r{n}",
                "retyped": f"ALTER {name} TYPE text",
            }[kind]  # fmt: skip
            return "t", [f"ALTER TABLE t {change}"], True
        added = {"constant": "int DEFAULT 5", "volatile": "int DEFAULT (random() * 9)::int",
                 "stored": "int GENERATED ALWAYS AS (v * 2) STORED"}[kind]  # fmt: skip
        self.there += [f"x{n}"]
        return "t", [f"ALTER TABLE t ADD x{n} {added}"], False


def _rows(table: str, low: int) -> list[str]:
    return [f"INSERT INTO {table} (id, v, n) SELECT g, g, 1.5 FROM generate_series({low}, {low + 20}) g"
            " ON CONFLICT DO NOTHING"]  # fmt: skip


async def load(dsn: str, rng: random.Random, stop: asyncio.Event) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        n = 10_000
        while not stop.is_set():
            n += 1
            async with connection.transaction():
                await connection.execute(f"INSERT INTO t (id, v, f) VALUES ({n}, {n}, 0.1)")
                await connection.execute(f"UPDATE t SET v = v + 1, w = 'u' WHERE id = {rng.randint(1, 300)}")
                await connection.execute(f"DELETE FROM t WHERE id = {n - 20}")
                await connection.execute(f"UPDATE p SET v = v + 1 WHERE id % 97 = {n % 97}")
                await connection.execute(f"INSERT INTO good VALUES ({n}, {n})")
            await asyncio.sleep(0.01)


async def test_f470_ddl_by_a_seed_under_load_and_kills_ends_in_topics_that_equal_select(
    seed: int, postgres_dsn: str, tmp_path: Path
) -> None:
    name, rng = postgres_dsn.rpartition("/")[2], random.Random(seed)

    def start() -> subprocess.Popen[bytes]:
        log = (tmp_path / "capture.log").open("ab")
        arguments = [sys.executable, str(PROGRAM), postgres_dsn, name, str(tmp_path), "again"]
        return subprocess.Popen(arguments, stdout=log, stderr=log)

    running: list[subprocess.Popen[bytes]] = []

    async def _changed(world: World, rng: random.Random) -> None:
        await world.sql(
            *GOOD, f"CREATE TABLE t ({COLUMNS}, PRIMARY KEY (id))", *_rows("t", 1),
            f"CREATE TABLE p ({COLUMNS}, PRIMARY KEY (id)) PARTITION BY RANGE (id)",
            *[f"CREATE TABLE p{n} PARTITION OF p FOR VALUES FROM ({n}000) TO ({n + 1}000)" for n in range(2)],
            *_rows("p", 1), *_rows("p", 1001),
        )  # fmt: skip
        ((version,),) = await world.select("SHOW server_version_num")
        changes, stop = Changes(rng, int(version)), asyncio.Event()
        running.append(start())
        await world.flowing("t", "p", "good")
        loading = asyncio.ensure_future(load(world.dsn, random.Random(seed), stop))
        try:
            for _ in range(6):
                table, statements, consent = changes.next()
                await world.transaction(*statements)
                if rng.random() < 0.35:
                    await asyncio.sleep(rng.random() * 0.5)
                    running[0].kill()
                    running[0].wait()
                    running[0] = start()
                if consent:
                    # A copy in progress may have taken the table in its present form; then there is nothing to accept.
                    await until(lambda t=table: _waits_or_flows(world, t), f"{table} parks, or flows")  # type: ignore[misc]
                    if not await _flow(world, table):
                        await accept_effects(world.catalogue, world.name, f"public.{table}", (), copied=True)
            assert not loading.done(), loading.result()
            stop.set()
            await loading
            await until(lambda: _flow(world, "t", "p"), "all of them flow")
            await world.flowing("t", "p", "good")
            await ends_equal(world, "p")
            await equal(world, "t", "p", "good")
        finally:
            stop.set()
            await asyncio.gather(loading, return_exceptions=True)

    clock = SystemClock()
    consensus = await open_consensus(f"sqlite://{tmp_path}/consensus.db", clock, Rand())
    objects = await open_objects(f"file://{tmp_path}/objects", clock, Rand())
    try:
        async with World(postgres_dsn, consensus=consensus, objects=objects) as world:
            try:
                await _changed(world, rng)
            finally:
                for process in running:
                    process.kill()
                    process.wait()
    finally:
        await consensus.aclose()


async def _waits_or_flows(world: World, name: str) -> bool:
    row = (await world.tables())[f"public.{name}"]
    return (row.state == "parked" and not row.again_ms) or await _flow(world, name)


async def _flow(world: World, *names: str) -> bool:
    """Return whether the tables flow, under their present descriptions."""
    rows: dict[str, Any] = await world.tables()
    for name in names:
        query = f"SELECT attname FROM pg_attribute WHERE attrelid = '{name}'::regclass AND attnum > 0"
        generated = "" if world.connection.info.server_version >= 180_000 else " AND attgenerated = ''"
        now = {column for (column,) in await world.select(f"{query} AND NOT attisdropped{generated}")}
        row = rows[f"public.{name}"]
        if not row.is_streaming or {c.name for c in row.columns} != now:
            return False
    return True
