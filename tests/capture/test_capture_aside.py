"""Side topics: changes stored while a table is copied (docs/rfcs/0009-changes-set-aside.md), against PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.capture.copies import PROGRAM, as_folded
from support.capture.world import World
from support.waiting import DEADLINE_S, until
from tidemill.base.clock import Rand, SystemClock
from tidemill.capture.naming import side_topic_name
from tidemill.capture.snapshot.side_topic_append import SideTopicAppender
from tidemill.capture.tables.recopy_requests import request_recopy
from tidemill.capture.topics import captured_table
from tidemill.consensus.factory import open_consensus
from tidemill.metastore.catalogue import SideTopicState, TopicRow
from tidemill.objects.factory import open_objects

pytestmark = pytest.mark.postgres

SLOW: dict[str, Any] = {
    "table_poll_s": 0.1, "copy_chunk_blocks": 16, "copy_aside_after_s": 0.3, "copy_rows_per_s": 30_000,
    "partitions": 2,
}  # fmt: skip
ROWS = 120_000


class Load:
    """Small transactions over all of table a, and a few over good, on a separate connection."""

    def __init__(self, dsn: str, seed: int = 1, pause_s: float = 0.001) -> None:
        self._dsn = dsn
        self._random = random.Random(seed)
        self._pause_s = pause_s
        self._stop = False
        self._task: asyncio.Task[None] | None = None
        self.transactions = 0

    async def __aenter__(self) -> Load:
        self._task = asyncio.ensure_future(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop = True
        assert self._task is not None
        await self._task

    async def _run(self) -> None:
        rng = self._random
        async with await psycopg.AsyncConnection.connect(self._dsn, autocommit=True) as connection:
            while not self._stop:
                with contextlib.suppress(psycopg.errors.UniqueViolation):
                    await connection.execute(self._one(rng.randint(1, ROWS), rng))
                    self.transactions += 1
                await asyncio.sleep(self._pause_s)

    @staticmethod
    def _one(number: int, rng: random.Random) -> str:
        return rng.choice((
            f"UPDATE a SET v = v + 1 WHERE id BETWEEN {number} AND {number + 5}",
            f"UPDATE a SET w = repeat('y', {rng.randint(1, 400)}) WHERE id = {number}",
            f"DELETE FROM a WHERE id = {number}",
            f"INSERT INTO a VALUES ({rng.randint(ROWS, 10**9)}, 1, 'new')",
            f"UPDATE a SET id = {rng.randint(ROWS, 10**9)} WHERE id = {number}",
            "INSERT INTO good SELECT max(id) + 1 FROM good",
        ))  # fmt: skip


async def tables(world: World, rows: int = ROWS) -> None:
    await world.sql(
        "CREATE TABLE good (id int PRIMARY KEY)", "INSERT INTO good VALUES (1)",
        "CREATE TABLE a (id int PRIMARY KEY, v int, w text)",
        f"INSERT INTO a SELECT g, g, repeat('w', 100) FROM generate_series(1, {rows}) g",
    )  # fmt: skip


async def side_topic(world: World) -> SideTopicState | None:
    row = await world.table("public.a")
    return row.side_topic if row is not None else None


async def ends_well(world: World) -> None:
    """Check that the table flows and equals SELECT, and that nothing remains of its side topic."""
    await world.flowing("a")
    await world.caught_up()
    row = await world.table("public.a")
    assert row is not None and row.is_streaming and row.copy is None and row.side_topic is None
    assert await world.folded("a") == await as_folded(world)

    async def forgotten() -> bool:
        return await world.catalogue.get(TopicRow, side_topic_name(row.topic)) is None

    await until(forgotten, "the aside is deleted")


async def confirmed_beyond_the_copy(world: World) -> None:
    async def moved() -> bool:
        row = await world.table("public.a")
        if row is None or row.copy is None or row.side_topic is None:
            return False
        assert not row.side_topic.ends, "it is still copied"
        return await world.confirmed() > row.copy.lsn

    await until(moved, "WAL is confirmed beyond where the copy began")


@pytest.mark.parametrize("again", [False, True])
async def test_wal_is_confirmed_while_a_table_is_copied_beside_the_stream_under_load(
    postgres_dsn: str, again: bool
) -> None:
    async with World(postgres_dsn) as world:
        await tables(world)
        fast = {**SLOW, "copy_rows_per_s": 0}
        async with world.capture(**fast, tables=("*",) if again else ("good",)):
            await world.flowing("good", *(["a"] if again else []))
        async with world.capture(**SLOW) as capture, Load(world.dsn) as load:
            if again:
                await request_recopy(world.catalogue, world.name, "public.a")
            await confirmed_beyond_the_copy(world)
            first = await world.confirmed()
            before = load.transactions
            await until(lambda: load.transactions > before + 50, "others write")

            async def further() -> bool:
                return await world.confirmed() > first

            await until(further, "and it goes on")
            row = await world.table("public.a")
            assert row is not None and row.copy is not None
            began_lsn = row.copy.lsn

            async def let_go() -> bool:
                await world.sql("SELECT pg_log_standby_snapshot()")
                found = await world.select(
                    f"SELECT restart_lsn - '0/0' FROM pg_replication_slots WHERE slot_name = 'tidemill_{world.name}'"
                )
                return int(found[0][0]) > began_lsn

            await until(let_go, "PostgreSQL keeps nothing from before the copy")
            found = await side_topic(world)
            assert found is not None and not found.ends, "it is still copied"
            facts = capture.facts()
            assert facts["set_aside_records"] and facts["set_aside_bytes"] and facts["wal_kept_for"] == []
            await world.flowing("a")
            await until(lambda: load.transactions > before + 300, "others write once it has joined")
        async with world.capture(**SLOW):
            await ends_well(world)


@pytest.mark.parametrize("seed", [1])
async def test_a_capture_that_is_killed_in_the_copy_and_in_the_append_is_exact(
    postgres_dsn: str, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    name, said = postgres_dsn.rpartition("/")[2], tmp_path / "capture.log"

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, str(PROGRAM), postgres_dsn, name, str(tmp_path), "slowly", "aside"]
        with said.open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    def killed(process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()

    clock, rand = SystemClock(), Rand()
    consensus = await open_consensus(f"sqlite://{tmp_path}/consensus.db", clock, rand)
    objects = await open_objects(f"file://{tmp_path}/objects", clock, rand)
    async with World(postgres_dsn, consensus=consensus, objects=objects) as world:
        await tables(world, 24_000)
        process = start()
        try:
            async with Load(world.dsn, seed) as load:

                async def known(holds: Callable[[SideTopicState], bool], what: str) -> None:
                    async def holding() -> bool:
                        found = await side_topic(world)
                        return found is not None and holds(found)

                    await until(holding, what)

                async def copying() -> bool:
                    row = await world.table("public.a")
                    return row is not None and row.copy is not None

                await until(copying, "it is copied")
                # the first copy, before the stream: later changes go to the side topic
                killed(process)
                process = start()
                await known(lambda found: found.records > 0, "some is set aside")
                confirmed_lsn = await world.confirmed()
                killed(process)
                process = start()
                await known(lambda found: bool(found.ends), "it is copied whole")
                for n in range(2):
                    since = said.read_bytes().count(b"appending")
                    await until(lambda: said.read_bytes().count(b"appending") > since, "it appends")  # noqa: B023
                    await asyncio.sleep(rng.random() * 0.5)
                    found = await side_topic(world)
                    killed(process)
                    assert n or (found is not None and found.ends), "it was appended then"
                    process = start()
                row = await world.table("public.a")
                assert row is not None and await world.confirmed() > confirmed_lsn
                before = load.transactions
                await until(lambda: load.transactions > before + 100, "others write")
            await ends_well(world)
            row = await world.table("public.a")
            assert row is not None and row.snapshot is not None and row.snapshot.joined_lsn > row.snapshot.lsn
        finally:
            killed(process)
    await consensus.aclose()


async def copied_with_side_topic(world: World, **settings: Any) -> None:
    """Interrupt a copy of `a` after some chunks, so that the next session stores its changes in a side topic."""
    async with world.capture(wait=False, **{**SLOW, **settings}):

        async def reported() -> bool:
            row = await world.table("public.a")
            return row is not None and row.copy is not None

        await until(reported, "chunks are told to be done")


@contextlib.contextmanager
def append_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Delay the append of a side topic while the stream runs. Yield two events: "the append begins" and "the append may
    proceed". A session that starts in the meantime appends without waiting, because it does not stream yet.
    """
    begins, may, to = asyncio.Event(), asyncio.Event(), SideTopicAppender.append_up_to

    async def waits(self: SideTopicAppender, offsets: Sequence[int], *moved: Callable[[int], None]) -> int:
        if moved:
            begins.set()
            await may.wait()
        return await to(self, offsets, *moved)

    with monkeypatch.context() as patch:
        patch.setattr(SideTopicAppender, "append_up_to", waits)
        yield begins, may


async def test_f481_more_than_may_be_set_aside_keeps_wal_from_there_on_and_is_exact(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with World(postgres_dsn) as world:
        await tables(world, 60_000)
        await copied_with_side_topic(world)
        settings = {**SLOW, "copy_rows_per_s": 2_000, "copy_aside_max_mb": 1}
        async with world.capture(**settings) as capture:
            await confirmed_beyond_the_copy(world)
            await world.sql("UPDATE a SET w = repeat('z', 300) WHERE id % 7 = 0")

            async def ended() -> bool:
                found = await side_topic(world)
                return found is not None and found.until_lsn > 0

            await until(ended, "the aside is full")
            found = await side_topic(world)
            assert found is not None
            assert capture.facts()["wal_kept_for"] == ["public.a"]
            await world.sql("UPDATE a SET v = 7 WHERE id % 11 = 0", "DELETE FROM a WHERE id % 13 = 0")
            await world.caught_up()
            assert await world.confirmed() <= found.until_lsn, "WAL is kept since"

            def named() -> bool:
                mark = world.tracker.mark(capture.config.mark)
                return mark is not None and mark.held_by == capture.config.table_mark("public.a")

            await until(named, "the capture's mark is held by the table's")
            again = await side_topic(world)
            assert again is not None and again.records - found.records < 20_000
        async with world.capture(**{**settings, "copy_rows_per_s": 0}):
            await ends_well(world)
            row = await world.table("public.a")
            assert row is not None and row.snapshot is not None
            assert row.snapshot.joined_lsn == found.until_lsn - 1


@pytest.mark.parametrize("what", ["column", "truncate", "wide", "dropped", "asked again"])
async def test_what_befalls_a_table_while_it_is_appended(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    async with World(postgres_dsn) as world:
        await tables(world, 20_000)
        await copied_with_side_topic(world, copy_rows_per_s=5000)
        settings = {**SLOW, "copy_rows_per_s": 0}
        with append_waits(monkeypatch) as (begins, may):
            async with world.capture(**settings) as capture:
                await asyncio.wait_for(begins.wait(), DEADLINE_S)
                await world.sql("UPDATE a SET v = -v WHERE id % 100 = 1")
                topic = await world.topic_id("a")
                match what:
                    case "column":
                        await world.sql("ALTER TABLE a ADD x int", "UPDATE a SET x = 5 WHERE id % 200 = 1")
                    case "truncate":
                        await world.sql("TRUNCATE a", "INSERT INTO a VALUES (1, 1, 'new'), (7, 7, 'new')")
                    case "wide":
                        monkeypatch.setattr(captured_table, "MAX_ROW_BYTES", 1000)
                        await world.sql("UPDATE a SET w = repeat('w', 2000) WHERE id = 3", "DELETE FROM a WHERE id = 4")
                    case "dropped":
                        await world.sql("DROP TABLE a")
                    case "asked again":
                        await request_recopy(world.catalogue, world.name, "public.a")
                await world.sql("INSERT INTO good VALUES (2)")
                await world.caught_up()
                if what in ("column", "wide"):
                    found = await side_topic(world)
                    assert found is not None and found.until_lsn and capture.facts()["wal_kept_for"] == ["public.a"]
                may.set()
                if what in ("column", "truncate"):
                    await world.flowing("a")
                    await world.caught_up()
                    rows = await as_folded(world) if what == "truncate" else await with_x(world)
                    await until_folded(world, rows)
                    assert await world.topic_id("a") == topic
                elif what == "wide":
                    row = await world.paused("a", "too large")
                    assert row.state == "parked" and row.side_topic is None and row.snapshot is not None
                    last = await world.folded("a")
                    assert last['{"id":4}'] and last['{"id":1}']["v"] == -1, "all before it is there"
                elif what == "asked again":
                    await world.flowing("a")

                    async def anew() -> bool:
                        row = await world.table("public.a")
                        return row is not None and row.is_streaming and await world.topic_id("a") != topic

                    await until(anew, "it is copied anew")
                    await until_folded(world, await as_folded(world))
                elif what == "dropped":

                    async def gone() -> bool:
                        row = await world.table("public.a")
                        return row is None or (row.side_topic is None and row.copy is None)

                    await until(gone, "its copy is given up")
                await world.sql("INSERT INTO good VALUES (3)")
                at = await world.wal_end()
                await world.caught_up()
                await until_confirmed(world, at)
                await until(lambda: no_side_topic(world), "the aside is deleted")


async def with_x(world: World) -> dict[str, dict[str, Any]]:
    """Return the expected rows as `as_folded` does; rows written before x was added have no x."""
    found = await world.select("SELECT id, v, w, x FROM a")
    return {f'{{"id":{i}}}': {"id": i, "v": v, "w": w, **({"x": x} if x is not None else {})} for i, v, w, x in found}


async def until_folded(world: World, rows: dict[str, dict[str, Any]]) -> None:
    async def same() -> bool:
        found = await world.folded("a")
        return {key: {c: v for c, v in row.items() if v is not None} for key, row in found.items()} == rows

    await until(same, "the topic is the table")


async def until_confirmed(world: World, lsn: int) -> None:
    async def confirmed() -> bool:
        return await world.confirmed() >= lsn

    await until(confirmed, "WAL is let go")


async def no_side_topic(world: World) -> bool:
    return not [topic for topic in await world.catalogue.list(TopicRow) if topic.name.endswith("_xhaside")]


async def test_a_copy_that_waits_to_be_gone_on_with_lets_wal_go(postgres_dsn: str) -> None:
    """The session survives while the copy's connection is terminated and another session holds the table's lock."""
    async with World(postgres_dsn) as world:
        await tables(world, 30_000)
        async with world.capture(**SLOW, tables=("good",)):
            await world.flowing("good")
        settings = {**SLOW, "copy_rows_per_s": 5000, "copy_aside_after_s": 2.0}
        async with world.capture(**settings) as capture:

            async def reported() -> bool:
                row = await world.table("public.a")
                return row is not None and row.copy is not None

            await until(reported, "chunks are told to be done")
            async with await psycopg.AsyncConnection.connect(world.dsn) as other:
                copies = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE '%snapshot%' AND state <> 'idle'"
                await other.execute(f"SELECT pg_terminate_backend(pid) FROM ({copies}) AS copies")
                await other.execute("LOCK TABLE a IN ACCESS EXCLUSIVE MODE")
                await confirmed_beyond_the_copy(world)
                row = await world.table("public.a")
                assert row is not None and row.snapshot is None and capture.facts()["wal_kept_for"] == []
            await ends_well(world)
