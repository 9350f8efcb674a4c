"""Copies in chunks: an interrupted copy resumes exactly or restarts where it must, and keeps to its rate."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.capture.copies import PROGRAM, SMALL, as_folded, copy_of, stores
from support.capture.world import World
from support.waiting import until
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import TidemillError
from tidemill.capture.changes import Column, Relation
from tidemill.capture.snapshot import chunks, copier
from tidemill.capture.snapshot.chunks import CompletedPrefix, CopyThrottle, plan_chunks
from tidemill.capture.tables.table_setup import copy_producer_id
from tidemill.capture.topics.binder import Binder
from tidemill.capture.topics.captured_table import CapturedTable
from tidemill.capture.topics.topic_writer import TopicWriter
from tidemill.consensus.factory import open_consensus
from tidemill.metastore.catalogue import TableCopy
from tidemill.objects.factory import open_objects
from tidemill.topics.api import FetchRead
from tidemill.topics.batch import decode_batch


async def written_in_epoch(world: World, epoch: int) -> int:
    """Count the records of the topic that a copy's producer wrote in this epoch."""
    topic, at, count = await world.topic_id("a"), 0, 0
    end = (await world.topics.offsets(topic, 0)).high_watermark
    while at < end:
        read = FetchRead(topic, 0, at, 1 << 20)
        (fetched,) = await world.topics.fetch([read], max_wait_s=1, min_bytes=1, max_bytes=1 << 20)
        for batch in map(decode_batch, fetched.batches):
            at = batch.records[-1].offset + 1
            ours = batch.header.producer_id == copy_producer_id(world.config())
            count += len(batch.records) if ours and batch.header.producer_epoch == epoch else 0
    return count


# pure -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("blocks", "longest", "chunk", "count"),
    [(0, 0, 8, 1), (8, 8, 8, 1), (9, 9, 8, 2), (1000, 1000, 8, 125), (40, 10, 8, 5)],
)
def test_every_block_is_in_one_chunk_and_the_last_chunk_has_no_end(
    blocks: int, longest: int, chunk: int, count: int
) -> None:
    chunks = plan_chunks(blocks, longest, chunk)
    assert chunks.count == count
    conditions = [chunks.sql_condition(number) for number in range(chunks.count)]
    assert ">=" not in conditions[0] and "<" not in conditions[-1], "it begins with the first block, and has no end"
    for earlier, later in pairwise(conditions):
        assert earlier.split("< ")[1] == later.split(" AND")[0].split(">= ")[1]


def test_chunks_that_end_in_any_order_are_done_without_a_gap() -> None:
    prefix = CompletedPrefix(2, 20)
    prefix.add(4, 5)
    assert (prefix.done, prefix.rows) == (2, 20)
    prefix.add(2, 7)
    assert (prefix.done, prefix.rows) == (3, 27)
    prefix.add(3, 1)
    assert (prefix.done, prefix.rows) == (5, 33)


async def test_a_throttled_copy_is_as_fast_as_its_rate_however_many_connections_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Clock(SystemClock):
        now_s = 100.0

        def monotonic_s(self) -> float:
            return self.now_s

    clock = Clock()
    sleeping: list[float] = []

    async def sleep(pause_s: float) -> None:
        sleeping.append(clock.now_s + pause_s)

    monkeypatch.setattr(chunks.asyncio, "sleep", sleep)
    slow = CopyThrottle(1000, 2048, clock)
    parts = [len(part) for part in slow.parts([b"x"] * 1000)]
    assert parts == [250] * 4, "a quarter of a second at once"
    for part in parts * 3:
        await slow.wait_turn(part)
    assert sleeping == [100 + 0.25 * n for n in range(1, 12)], "3,000 rows in three seconds"
    clock.now_s = 500.0
    await slow.wait_turn(10)
    assert len(sleeping) == 11, "it may go on at once"
    fast = CopyThrottle(0, 2048, clock)
    assert [len(part) for part in fast.parts([b"x"] * 5000)] == [2048, 2048, 904]
    await fast.wait_turn(10**9)
    assert len(sleeping) == 11


# the topic ------------------------------------------------------------------------------------------
async def test_nothing_of_a_session_believed_dead_lands_once_another_goes_on_with_its_copy() -> None:
    relation = Relation(
        1, "public", "a", (Column("id", 23, -1, "integer", 0, True), Column("v", 23, -1, "integer", -1))
    )
    async with stores() as world:
        topic = await world.catalogue.create_topic("t", 2, kind="capture", config={})

        async def writer(epoch: int) -> tuple[TopicWriter, CapturedTable]:
            table = CapturedTable("public.a", topic, copy_producer_id(world.config()), oid=1, epoch=epoch)
            made = TopicWriter("copy", [table], world.topics, world.rand, lambda boundaries: None)
            await made.open_tables({}, 0)
            return made, table

        def lines(first: int) -> list[bytes]:
            return [b"%d\t%d\n" % (n, n) for n in range(first, first + 100)]

        dead, of_dead = await writer(0)
        await dead.write_copied_rows(of_dead, relation, lines(0), 1)
        await dead.wait_drained()
        alive, of_alive = await writer(1)
        await dead.write_copied_rows(of_dead, relation, lines(5000), 2)
        with pytest.raises(TidemillError):
            await dead.wait_drained()
        await alive.write_copied_rows(of_alive, relation, lines(100), 3)
        await alive.wait_drained()
        ends = [(await world.topics.offsets(topic.topic_id, p)).high_watermark for p in range(2)]
        assert ends == [each.next for each in of_alive.writers]
        assert sum(ends) == 200 + 2, "a record more in each partition opens the epoch"
        await dead.aclose()
        await alive.aclose()


# against PostgreSQL ---------------------------------------------------------------------------------
@pytest.mark.postgres
async def test_f414_a_copy_that_is_killed_goes_on_at_the_first_chunk_that_was_not_told(
    postgres_dsn: str, tmp_path: Path
) -> None:
    rows = 16_000
    name = postgres_dsn.rpartition("/")[2]

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, str(PROGRAM), postgres_dsn, name, str(tmp_path), "slowly"]
        log = (tmp_path / "capture.log").open("ab")
        return subprocess.Popen(command, stdout=log, stderr=log)

    clock, rand = SystemClock(), Rand()
    consensus = await open_consensus(f"sqlite://{tmp_path}/consensus.db", clock, rand)
    objects = await open_objects(f"file://{tmp_path}/objects", clock, rand)
    async with World(postgres_dsn, consensus=consensus, objects=objects) as world:
        await world.sql(
            "CREATE TABLE a (id int PRIMARY KEY, v int, w text)",
            f"INSERT INTO a SELECT g, g, 'w' FROM generate_series(1, {rows}) g",
        )
        process = start()
        try:

            async def reported() -> bool:
                copy = await copy_of(world)
                return copy is not None and copy.done > 0

            await until(reported, "chunks are told to be done")
            process.kill()
            process.wait()
            copy = await copy_of(world)
            assert copy is not None and copy.epoch == 0 and 0 < copy.done < copy.count
            assert await world.confirmed() <= copy.lsn, "the stream since then can be told again"
            await world.sql(
                "UPDATE a SET v = -v, w = repeat('x', 900) WHERE id % 500 = 1",
                "DELETE FROM a WHERE id % 700 = 1",
                "UPDATE a SET id = id + 1000000 WHERE id % 900 = 1",
            )
            process = start()
            await world.flowing("a")
            binding = await world.caught_up()
            row = await world.table("public.a")
            assert row is not None and row.is_streaming and row.copy is None and row.snapshot is not None
            assert row.snapshot.lsn < row.snapshot.settled_lsn <= binding.lsn
            again = await written_in_epoch(world, 1)
            moved = rows // 500 + rows // 900
            assert 0 < again <= rows - copy.rows + moved + 3, "what was told to be done is not copied again"
            assert await world.folded("a") == await as_folded(world)
            topic = await world.topic_id("a")
            first = min((b for b in await world.remap().after(0) if topic in b.offsets), key=lambda b: b.lsn)
            assert first.lsn >= row.snapshot.settled_lsn
        finally:
            process.kill()
            process.wait()
    await consensus.aclose()


class Transfers:
    """Random transactions that preserve the sum of v and move rows: wide and narrow updates, keys that change, rows
    that split and merge.
    """

    def __init__(self, dsn: str, seed: int) -> None:
        self._dsn = dsn
        self._random = random.Random(seed)
        self._stop = False

    def stop(self) -> None:
        self._stop = True

    async def run(self) -> None:
        rng = self._random
        async with await psycopg.AsyncConnection.connect(self._dsn, autocommit=True) as connection:
            while not self._stop:
                with contextlib.suppress(psycopg.errors.DeadlockDetected):
                    async with connection.transaction():
                        await self._one(connection)
                await asyncio.sleep(rng.random() * 0.01)

    async def _one(self, connection: Any) -> None:
        rng = self._random
        cursor = await connection.execute(
            "SELECT id, v FROM a WHERE id >= %s ORDER BY id LIMIT 2 FOR UPDATE", [rng.randint(1, 3000)]
        )
        found = await cursor.fetchall()
        if len(found) < 2:
            return
        (one, v), (other, _) = found
        amount = rng.randint(1, 1000)
        match rng.choice(("move", "hot", "toast", "key", "split", "merge")):
            case "move":
                wide = f"repeat(md5(random()::text), {rng.randint(1, 20)})"
                await connection.execute(f"UPDATE a SET v = v - {amount}, w = {wide} WHERE id = {one}")
                await connection.execute(f"UPDATE a SET v = v + {amount} WHERE id = {other}")
            case "hot":
                await connection.execute(f"UPDATE a SET v = v - {amount} WHERE id = {one}")
                await connection.execute(f"UPDATE a SET v = v + {amount} WHERE id = {other}")
            case "toast":
                text = "(SELECT string_agg(md5(random()::text), '') FROM generate_series(1, 120))"
                await connection.execute(f"UPDATE a SET w = {text} WHERE id = {one}")
            case "key":
                await connection.execute(f"UPDATE a SET id = {rng.randint(3001, 10**9)} WHERE id = {one}")
            case "split":
                await connection.execute(f"UPDATE a SET v = v - {amount} WHERE id = {one}")
                await connection.execute(f"INSERT INTO a VALUES ({rng.randint(3001, 10**9)}, {amount}, 's')")
            case "merge":
                await connection.execute(f"DELETE FROM a WHERE id = {one}")
                await connection.execute(f"UPDATE a SET v = v + {v} WHERE id = {other}")


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("seed", "connections", "identity", "partitioned", "side_topic"),
    [
        (1, 1, "full", False, False),
        (3, 3, "full", True, False),
        (4, 2, "as-is", False, False),
        (5, 1, "full", True, True),
        (6, 3, "full", False, True),
    ],
)
async def test_every_time_that_is_bound_shows_one_state_wherever_copies_were_cut_off(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch, seed: int, connections: int, identity: str, partitioned: bool,
    side_topic: bool,
) -> None:  # fmt: skip
    """The sum of all rows is the same in every state of the database."""
    rng = random.Random(seed)
    monkeypatch.setattr(copier, "RECORD_S", 0.05)
    async with World(postgres_dsn) as world:
        by = " PARTITION BY HASH (id)" if partitioned else ""
        await world.sql(f"CREATE TABLE a (id int PRIMARY KEY, v bigint, w text){by}")
        if partitioned:
            for n in range(2):
                await world.sql(f"CREATE TABLE a{n} PARTITION OF a FOR VALUES WITH (MODULUS 2, REMAINDER {n})")
        await world.sql("INSERT INTO a SELECT g, 1000, repeat('w', 300) FROM generate_series(1, 3000) g")
        settings = {**SMALL, "copy_rows_per_s": 3000, "copy_connections": connections, "identity": identity}
        settings |= {"copy_aside_max_mb": 100 if side_topic else 0, "partitions": 1}
        writers = [Transfers(world.dsn, seed * 10 + n) for n in range(2)]
        running = [asyncio.ensure_future(writer.run()) for writer in writers]
        epochs = []

        async def flows() -> bool:
            row = await world.table("public.a")
            return row is not None and row.is_streaming

        for _ in range(3):
            before = await copy_of(world)

            async def further(before: TableCopy | None = before) -> bool:
                copy = await copy_of(world)
                return copy is not None and (before is None or copy.done > before.done)

            async with world.capture(wait=False, **settings) as capture:
                if identity == "full":
                    await until(further, "chunks are told to be done")
                    await asyncio.sleep(rng.random() * 0.1)
                else:
                    await until(lambda: int(str(capture.facts().get("snapshot_chunks_done", 0))) > 3, "chunks are read")
            copy = await copy_of(world)
            epochs.append(copy.epoch if copy is not None else 0)
            await world.sql("VACUUM a")
        # No binding is minted before the copy is done; otherwise a binding of the concurrent stream would wait for the
        # inexact table.
        run = Binder.run

        async def run_late(self: Binder) -> None:
            await until(flows, "the copy is done")
            await run(self)

        if not side_topic:
            monkeypatch.setattr(Binder, "run", run_late)
        settings["copy_rows_per_s"] = 0
        async with world.capture(wait=False, **settings):
            await world.flowing("a")
            await asyncio.sleep(0.3)
            for writer in writers:
                writer.stop()
            await asyncio.gather(*running)
            await world.caught_up()
        row = await world.table("public.a")
        assert row is not None and row.snapshot is not None
        assert epochs == ([0, 1, 2] if identity == "full" else [0, 0, 0])
        assert (row.snapshot.settled_lsn > row.snapshot.lsn) == (identity == "full")
        assert (row.snapshot.joined_lsn >= row.snapshot.settled_lsn > 0) == side_topic
        if identity == "full":
            assert await world.folded("a") == await as_folded(world)
        topic = await world.topic_id("a")
        bindings = sorted(
            (b for b in await world.remap().after(0) if topic in b.offsets), key=lambda b: b.offsets[topic]
        )
        records, at = await world.records("a"), 0
        values: dict[bytes, int] = {}
        for binding in bindings:
            (end,) = binding.offsets[topic]
            for record in records[at:end]:
                assert record.key is not None
                if record.value is None:
                    values.pop(record.key, None)
                else:
                    values[record.key] = _v(record.value)
            at = max(at, end)
            assert sum(values.values()) == 3_000_000, (binding, row.snapshot)
        assert len(bindings) > 2


def _v(value: bytes) -> int:
    import json

    return int(json.loads(value)["v"])


@pytest.mark.postgres
@pytest.mark.parametrize(
    "statements",
    [
        ("VACUUM FULL a",),
        ("TRUNCATE a", "INSERT INTO a SELECT g, -g, 'new' FROM generate_series(1, 3000) g"),
        ("ALTER TABLE a ADD x int", "ALTER TABLE a DROP x"),
        ("ALTER TABLE a ALTER w TYPE varchar(200)",),
    ],
    ids=["vacuum-full", "truncate", "alter", "retype"],
)
async def test_a_table_that_was_written_anew_while_its_copy_was_cut_off_is_copied_from_the_beginning(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch, statements: tuple[str, ...]
) -> None:
    monkeypatch.setattr(copier, "RECORD_S", 0.05)
    async with World(postgres_dsn) as world:
        await world.sql(
            "CREATE TABLE a (id int PRIMARY KEY, v int, w text)",
            "INSERT INTO a SELECT 3001 - g, g, repeat('w', 100) FROM generate_series(1, 3000) g",
        )
        async with world.capture(wait=False, copy_rows_per_s=2000, **SMALL):

            async def reported() -> bool:
                return await copy_of(world) is not None

            await until(reported, "chunks are told to be done")
        old = await world.topic_id("a")
        await world.sql("DELETE FROM a WHERE id % 3 = 0", *statements)
        async with world.capture(wait=False, **SMALL):
            await world.flowing("a")
            await world.caught_up()
            row = await world.table("public.a")
            assert row is not None and row.snapshot is not None and row.snapshot.settled_lsn == 0
            assert await world.topic_id("a") != old
            assert await world.folded("a") == await as_folded(world)


@pytest.mark.postgres
async def test_the_slot_is_let_go_when_a_table_whose_copy_was_cut_off_is_not_wanted_any_more(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier, "RECORD_S", 0.05)
    async with World(postgres_dsn) as world:
        await world.sql(
            "CREATE TABLE good (id int PRIMARY KEY, v int)",
            "CREATE TABLE a (id int PRIMARY KEY, v int, w text)",
            "INSERT INTO a SELECT g, g, repeat('w', 100) FROM generate_series(1, 3000) g",
        )
        async with world.capture(wait=False, copy_rows_per_s=2000, **{**SMALL, "tables": ("a",)}):

            async def reported() -> bool:
                return await copy_of(world) is not None

            await until(reported, "chunks are told to be done")
        copy = await copy_of(world)
        assert copy is not None
        async with world.capture(wait=False, **{**SMALL, "tables": ("good",)}):
            await world.sql("INSERT INTO good VALUES (1, 1)")
            await world.flowing("good")

            async def let_go() -> bool:
                return await world.confirmed() > copy.lsn and await copy_of(world) is None

            await until(let_go, "the slot goes on")
