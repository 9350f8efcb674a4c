"""A schema difference never becomes a NULL: the table pauses before the first row that it cannot carry, and the others
continue.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.capture.on_every_server import TWO_TABLES, Writer
from support.capture.world import (
    GOOD,
    T,
    World,
    assert_no_position_twice,
    good_flows,
    plain,
    stuck,
    table_as_folded,
)
from support.waiting import DEADLINE_S
from tidemill.base.clock import Rand, SystemClock
from tidemill.capture.changes import Fragment
from tidemill.capture.delivery.consumers import TapSession
from tidemill.capture.encode import row_encoder as values
from tidemill.capture.tables.recopy_requests import request_recopy
from tidemill.capture.topics.topic_writer import TopicWriter
from tidemill.consensus.factory import open_consensus
from tidemill.objects.factory import open_objects

pytestmark = pytest.mark.postgres


CHANGES = {
    "ADD COLUMN with a volatile default": (
        "ALTER TABLE t ADD x float DEFAULT random()", "column 'x' double precision is new",
    ),
    "DROP COLUMN": ("ALTER TABLE t DROP w", "column 'w' is gone"),
    "RENAME COLUMN": ("ALTER TABLE t RENAME v TO x", "column 'x' integer is new; column 'v' is gone"),
    "ALTER TYPE": ("ALTER TABLE t ALTER v TYPE numeric", "column 'v' was integer and is numeric"),
    "narrower": ("ALTER TABLE t ALTER w TYPE varchar(3)", "column 'w' was text and is character varying(3)"),
    "DROP PRIMARY KEY": ("ALTER TABLE t DROP CONSTRAINT t_pkey", "primary key (id) is now gone"),
    "another key": (
        "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (id, v)", "primary key (id) is now (id, v)",
    ),
    "a stored generated column": (
        "ALTER TABLE t ADD x int GENERATED ALWAYS AS (v * 2) STORED", "column 'x' integer is new",
    ),
    "RENAME TABLE": ("ALTER TABLE t RENAME TO renamed", "the table is now named public.renamed"),
}  # fmt: skip
BY_NAME = pytest.mark.parametrize("change", CHANGES)


async def before(world: World, table: str = "t") -> dict[str, dict[str, Any]]:
    rows = await world.select(f"SELECT id, v, w FROM {table}")
    return {f'{{"id":{i}}}': {"id": i, "v": v, "w": w} for i, v, w in rows}


@BY_NAME
async def test_f410_a_table_whose_description_changes_parks_before_the_first_such_row(
    postgres_dsn: str, change: str
) -> None:
    """Rows up to the DDL are there and none after it, including those of the DDL's own transaction. This holds after a
    restart too, and the slot is confirmed beyond them.
    """
    statement, words = CHANGES[change]
    table = "renamed" if "RENAME TO renamed" in statement else "t"
    columns, values = ("id, v", ("8, 8", "9, 9")) if "primary key" in words else ("id", ("8", "9"))
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD, *T)
        # Small fragments: most of the transaction is delivered, and written, before its DDL is met.
        async with world.capture(table_poll_s=60, tables=("t", "good"), fragment_changes=2):
            await world.caught_up()
            await world.sql(
                "INSERT INTO t SELECT g, g, 'c' FROM generate_series(100, 140) g", "DELETE FROM t WHERE id = 1"
            )
            expected = await before(world)
            # The stream has no message about a changed key. The catalogue has it, and may be ahead of the stream.
            await world.caught_up()
            await world.transaction(
                "UPDATE t SET v = 99", statement, f"INSERT INTO {table} ({columns}) VALUES ({values[0]})",
                "INSERT INTO good VALUES (50, 50)",
            )  # fmt: skip
            await world.sql(f"INSERT INTO {table} ({columns}) VALUES ({values[1]})")
            row = await world.paused("t")
            assert words in row.reason and "resnapshot" in row.fix
            await good_flows(world)
            binding = await world.caught_up()
            end = sum(binding.offsets[await world.topic_id("t")])
            assert await world.folded("t", end) == expected
        async with world.capture(tables=("t", "good")):
            await world.sql(f"DELETE FROM {table} WHERE id = 3")
            await good_flows(world)
            assert words in await stuck(world, "t")
            binding = await world.caught_up()
            assert sum(binding.offsets[await world.topic_id("t")]) == end


@BY_NAME
async def test_f411_a_difference_is_seen_without_any_row(postgres_dsn: str, change: str) -> None:
    """An ALTER that rewrites the table, or adds a default, changes rows without a message in the stream."""
    statement, words = CHANGES[change]
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD, *T)
        async with world.capture(table_poll_s=0.1, tables=("t", "good")):
            await world.caught_up()
            expected = await before(world)
            await world.sql(statement)
            row = await world.paused("t")
            assert words in row.reason or "needs a primary key" in row.reason
            await good_flows(world)
            assert await world.folded("t") == expected


async def test_f412_a_difference_made_while_nothing_captures_parks_the_table_at_the_next_start(
    postgres_dsn: str,
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD, *T)
        async with world.capture():
            await world.caught_up()
        await world.sql("INSERT INTO t VALUES (3, 3, 'c')", "INSERT INTO good VALUES (40, 4)")
        expected = await before(world)
        await world.sql("ALTER TABLE t ADD x float DEFAULT random()", "INSERT INTO t VALUES (4, 4, 'd', 4)")
        for _ in range(2):
            async with world.capture():
                await good_flows(world)
                assert "column 'x' double precision is new" in await stuck(world, "t")
                binding = await world.caught_up()
                assert await world.folded("t", sum(binding.offsets[await world.topic_id("t")])) == expected


class Followed:
    """A tap, as shapes are: the operations on table t that it received, in order."""

    name = consumer = ""

    def __init__(self) -> None:
        self.ops: list[str] = []

    def process_fragment(self, fragment: Fragment) -> Collection[str]:
        self.ops += [change.op for change in fragment.changes if change.relation.table == "t"]
        return ()

    def lost(self, oid: int, reason: str, columns: frozenset[str] = frozenset()) -> bool:
        return False

    def mark_incomplete(self, reason: str) -> None:
        raise AssertionError(reason)

    def set_carried_relations(self, oids: Collection[int]) -> None: ...

    def begin_session(self, last: Collection[str]) -> None: ...

    def begin_stream(self, stream: TapSession, confirmed_lsn: int, wal_end: int = 0) -> None: ...


@pytest.mark.parametrize("rows", ["INSERT INTO t VALUES (3, 3, 'c', 3)", "SELECT 1"])
async def test_who_follows_a_table_outside_the_topics_is_told_that_it_ends_there(postgres_dsn: str, rows: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD, *T)
        async with world.capture(table_poll_s=0.1) as capture:
            tap = Followed()
            capture.add_tap(tap)
            await world.sql("DELETE FROM t WHERE id = 1")
            await world.caught_up()
            assert capture.relation("public", "t") is not None
            await world.sql("ALTER TABLE t ADD x float DEFAULT random()", rows)
            await world.paused("t")
            await good_flows(world)
            assert tap.ops == ["delete", "truncate"], "a shape ends with a truncate"
            assert capture.relation("public", "t") is None, "and nobody may begin another"
            assert not [r for r in await world.records("t") if r.key is None], "which is in no topic"
            await recopy(world, "public.t")
            await world.flowing("t")
            assert capture.relation("public", "t") is not None


async def test_f413_a_table_asked_for_again_is_copied_beside_the_stream_and_flows(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD, *T)
        async with world.capture(table_poll_s=0.1):
            await world.caught_up()
            old, good = await world.topic_id("t"), await world.topic_id("good")
            await world.sql("ALTER TABLE t DROP w", "INSERT INTO t VALUES (3, 3)")
            await world.paused("t")
            await recopy(world, "public.t")
            await world.flowing("t")
            await world.sql("INSERT INTO t VALUES (4, 4)", "DELETE FROM t WHERE id = 1")
            await good_flows(world)
            assert await world.folded("t") == await plain(world, "t")
            assert await world.topic_id("t") != old
            assert await world.topic_id("good") == good
            assert not [m for m in world.tracker.report("p", 0).marks if m.name.startswith("table:")]


async def recopy(world: World, table: str) -> None:
    await request_recopy(world.catalogue, world.name, table)


async def test_f413_while_a_table_is_copied_the_others_flow_and_nothing_is_confirmed_beyond(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD, *T)
        async with world.capture(table_poll_s=0.1):
            await good_flows(world)
            writing, may_write = asyncio.Event(), asyncio.Event()
            write_rows = TopicWriter.write_copied_rows

            async def slowly(self: TopicWriter, *args: Any) -> None:
                writing.set()
                await may_write.wait()
                await write_rows(self, *args)

            monkeypatch.setattr(TopicWriter, "write_copied_rows", slowly)
            await recopy(world, "public.t")
            await asyncio.wait_for(writing.wait(), DEADLINE_S)
            copied_at = await world.wal_end()
            for n in range(100, 110):
                await world.sql(f"INSERT INTO good VALUES ({n}, 1)", f"INSERT INTO t VALUES ({n}, 1, 'x')")
            await world.caught_up()
            assert await world.folded("good") == await plain(world, "good"), "the others flow"
            assert await world.confirmed() <= copied_at
            may_write.set()
            await world.flowing("t")
            await good_flows(world)
            assert await world.folded("t") == await before(world)
            assert await world.confirmed() > copied_at


async def test_f414_tables_are_copied_beside_a_stream_under_load_and_lose_and_double_nothing(postgres_dsn: str) -> None:
    """A new table, one whose re-snapshot is requested while it flows, and writers on all of them, with a capture that
    is interrupted at random moments.
    """
    async with World(postgres_dsn) as world:
        rng = random.Random(3)
        await world.sql(*TWO_TABLES, *[f"INSERT INTO {t} SELECT g, g FROM generate_series(1000, 9000) g" for t in "ab"])
        writers = [Writer(world.dsn, seed) for seed in range(2)]
        running = [asyncio.ensure_future(writer.run()) for writer in writers]
        async with world.capture(tables=("a",)):
            await world.caught_up()
        for _ in range(4):
            async with world.capture(wait=False, table_poll_s=0.05, fragment_changes=3):
                await asyncio.sleep(rng.random() * 2)
                if await world.table("public.b") is not None:
                    await recopy(world, rng.choice(("public.a", "public.b")))
                await asyncio.sleep(rng.random() * 2)
        async with world.capture(table_poll_s=0.05):
            await asyncio.sleep(1)
            for writer in writers:
                writer.stop()
            await asyncio.gather(*running)
            await world.flowing("a", "b")
            await world.caught_up()
            for table in "ab":
                assert await world.folded(table) == await table_as_folded(world, table)
                assert_no_position_twice(
                    [r for r in await world.records(table) if b"0_" not in dict(r.headers)["tm.pos"][:2]]
                )
        bindings = await world.remap().after(0)
        assert [b.lsn for b in bindings] == sorted(b.lsn for b in bindings)


@pytest.mark.parametrize("error", [KeyError("w"), RecursionError("deep"), ZeroDivisionError(), MemoryError()])
async def test_f415_a_row_that_cannot_be_written_parks_its_table_whatever_is_raised(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD, *T)
        encode = values._encode_object

        def failing(plan: Any, row: Any) -> bytes:
            if row.get("w") == "poison":
                raise error
            return encode(plan, row)

        monkeypatch.setattr(values, "_encode_object", failing)
        async with world.capture(partitions=2) as capture:
            session = capture._session
            await world.sql("INSERT INTO t VALUES (3, 3, 'c')")
            await world.caught_up()
            expected = await before(world)
            await world.transaction(
                "INSERT INTO t SELECT g, g, 'x' FROM generate_series(100, 2000) g", "INSERT INTO good VALUES (70, 7)",
                "INSERT INTO t VALUES (4, 4, 'poison')", "INSERT INTO good VALUES (71, 7)",
            )  # fmt: skip
            row = await world.paused("t", type(error).__name__)
            assert "resnapshot" in row.fix
            await good_flows(world)
            assert capture._session is session
            binding = await world.caught_up()
            ends = binding.offsets[await world.topic_id("t")]
            bound = [r for r in await world.records("t") if (sum(ends) and r.offset < ends[0]) or r.offset < ends[1]]
            assert len(bound) >= len(expected)
        monkeypatch.setattr(values, "_encode_object", encode)
        async with world.capture(table_poll_s=0.1):
            await good_flows(world)
            await recopy(world, "public.t")
            await world.flowing("t")
            await world.caught_up()
            assert await world.folded("t") == await before(world)


PROGRAM = Path(__file__).parents[1] / "support" / "capture" / "process.py"


@pytest.mark.extended
async def test_f416_ddl_under_load_with_kills_ends_in_equal_tables_once_they_are_copied_again(
    postgres_dsn: str, tmp_path: Path
) -> None:
    """SIGKILL at random moments around the DDL, the pause and the copy; the remedy is a command of the CLI."""
    name = postgres_dsn.rpartition("/")[2]
    (tmp_path / "tidemill.toml").write_text(
        f'[node]\nname = "n"\ndata = "{tmp_path}"\n'
        f'[objects]\nurl = "file://{tmp_path}/objects"\n[consensus]\nurl = "sqlite://{tmp_path}/consensus.db"\n'
    )

    async def command(*arguments: str) -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tidemill", *arguments, "-c", str(tmp_path / "tidemill.toml"),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        out, _ = await process.communicate()
        return process.returncode or 0, out.decode()

    rng = random.Random(5)

    def start() -> subprocess.Popen[bytes]:
        log = (tmp_path / "capture.log").open("ab")
        return subprocess.Popen([sys.executable, str(PROGRAM), postgres_dsn, name, str(tmp_path)],
                                stdout=log, stderr=log)  # fmt: skip

    clock, rand = SystemClock(), Rand()
    process = start()
    consensus = await open_consensus(f"sqlite://{tmp_path}/consensus.db", clock, rand)
    objects = await open_objects(f"file://{tmp_path}/objects", clock, rand)
    async with World(postgres_dsn, consensus=consensus, objects=objects) as world:
        await world.sql(*GOOD, "CREATE TABLE t (id int PRIMARY KEY, v int)")
        await world.sql("INSERT INTO t SELECT g, g FROM generate_series(1, 3000) g")
        stop = asyncio.Event()

        async def write() -> None:
            async with await psycopg.AsyncConnection.connect(postgres_dsn, autocommit=True) as connection:
                n = 10_000
                while not stop.is_set():
                    n += 1
                    await connection.execute(f"INSERT INTO t (id, v) VALUES ({n}, {n})")
                    await connection.execute(f"UPDATE t SET v = v + 1 WHERE id = {rng.randint(1, 3000)}")
                    await connection.execute(f"DELETE FROM t WHERE id = {n - 20}")
                    await connection.execute(f"INSERT INTO good VALUES ({n}, {n})")

        writing = asyncio.ensure_future(write())
        try:
            await world.flowing("t", "good")
            for round_ in range(3):
                await world.sql(f"ALTER TABLE t ADD x{round_} float DEFAULT random()")
                await asyncio.sleep(rng.random() * 0.5)
                process.kill()
                process.wait()
                process = start()
                await world.paused("t", f"'x{round_}'")
                code, out = await command("capture", "resnapshot", "t", "--yes")
                assert code == 0, out
                await asyncio.sleep(rng.random() * 1.5)
                process.kill()
                process.wait()
                process = start()
                await world.flowing("t", "good")
            code, out = await command("capture", "list")
            assert code == 0 and out.count("captured") == 2, out
            stop.set()
            await writing
            await world.caught_up()
        finally:
            process.kill()
            process.wait()
        rows = await world.select("SELECT id, v, x0, x1, x2 FROM t")
        assert await world.folded("t") == {
            f'{{"id":{r[0]}}}': dict(zip(("id", "v", "x0", "x1", "x2"), r, strict=True)) for r in rows
        }
        assert await world.folded("good") == await plain(world, "good")
        for table in ("t", "good"):
            assert_no_position_twice(await world.records(table))
    await consensus.aclose()


async def test_f410_a_key_changed_by_a_transaction_that_is_not_visible_yet_is_found_all_the_same(
    postgres_dsn: str,
) -> None:
    """A commit is sent once it is flushed; here its session still waits for a standby that does not exist."""
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD, *T, f'ALTER DATABASE "{world.name}" SET synchronous_commit = local')
        try:
            async with world.capture(table_poll_s=60, tables=("t", "good")):
                await world.sql("SET synchronous_commit = local")
                await world.caught_up()
                expected = await before(world)
                await world.sql("ALTER SYSTEM SET synchronous_standby_names = 'nobody'", "SELECT pg_reload_conf()")
                async with await psycopg.AsyncConnection.connect(world.dsn) as late:
                    await late.execute("SET synchronous_commit = on")
                    await late.execute("ALTER TABLE t DROP CONSTRAINT t_pkey")
                    await late.execute("INSERT INTO t VALUES (1, 9, 'merged')")
                    committing = asyncio.ensure_future(late.commit())
                    await asyncio.sleep(1.0)
                    assert not committing.done(), "it is flushed, and not visible"
                    await world.sql("ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")
                    await committing
                await world.paused("t", "primary key (id) is now gone")
                await good_flows(world)
                binding = await world.caught_up()
                assert await world.folded("t", sum(binding.offsets[await world.topic_id("t")])) == expected
        finally:
            await world.sql("ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")
