"""Tables copied while streaming: the running session follows the catalogue, and the blocker of a copy is named."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest

from support.capture.world import GOOD, T, World, good_flows, plain, reported
from support.waiting import DEADLINE_S, until
from tidemill.base.errors import UnknownOutcomeError
from tidemill.base.status.status import StageState
from tidemill.capture.session import bootstrap
from tidemill.capture.tables.recopy_requests import request_recopy
from tidemill.capture.topics.topic_writer import TopicWriter
from tidemill.metastore.catalogue import CaptureTableRow

pytestmark = pytest.mark.postgres


async def test_a_copy_that_is_recorded_flows_though_the_next_one_cannot_be_recorded(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tables are copied together. The outcome of writing the second one's snapshot is unknown, repeatedly."""
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD)
        real, broken = world.catalogue.change_table, True

        async def change_table(capture: str, table: str, change: Any) -> CaptureTableRow | None:
            wanted = change(await world.table(table))
            if broken and table == "public.y" and wanted is not None and wanted.snapshot is not None:
                raise UnknownOutcomeError("nobody knows whether it was written.")
            return await real(capture, table, change)

        monkeypatch.setattr(world.catalogue, "change_table", change_table)
        async with world.capture(table_poll_s=0.1):
            await world.caught_up()
            await world.transaction(
                *[f"CREATE TABLE {t} (id int PRIMARY KEY, v int)" for t in "xy"],
                *[f"INSERT INTO {t} SELECT g, g FROM generate_series(1, 10) g" for t in "xy"],
            )

            async def recorded() -> bool:
                row = await world.table("public.x")
                return row is not None and row.is_streaming

            await until(recorded, "the first copy is recorded")
            await world.sql("INSERT INTO x VALUES (11, 11)", "DELETE FROM x WHERE id = 1")

            async def carried() -> bool:
                return await world.folded("x") == await plain(world, "x")

            await until(carried, "what flows by the catalogue is carried")
            broken = False
            await world.flowing("x", "y")
            await good_flows(world)
            for table in "xy":
                assert await world.folded(table) == await plain(world, table)
            row = await world.table("public.x")
            assert row is not None and row.generation == 0, "and is not copied a second time"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            ("ALTER TABLE t ADD x float DEFAULT random()", "INSERT INTO t VALUES (3, 3, 'c', 3)"),
            "column 'x' double precision is new",
        ),
        (("ALTER TABLE t REPLICA IDENTITY DEFAULT", "DELETE FROM t WHERE id = 1"), "old row"),
    ],
)
async def test_a_stream_that_is_told_again_from_before_a_copy_parks_nothing_that_the_copy_holds(
    postgres_dsn: str, changes: tuple[str, ...], words: str
) -> None:
    """A server that crashed may have lost the last confirmed position. Here its slot is replaced by an earlier copy of
    it.
    """
    async with World(postgres_dsn) as world:
        slot, early = f"tidemill_{world.name}", f"early_{world.name}"
        copy = "SELECT pg_copy_logical_replication_slot('{}', '{}')"
        await world.sql(*GOOD, *T)
        async with world.capture(table_poll_s=0.1):
            await world.caught_up()
            await world.sql(copy.format(slot, early))
            await world.transaction("UPDATE t SET v = v + 1", *changes)
            await world.paused("t", words)
            await request_recopy(world.catalogue, world.name, "public.t")
            await world.flowing("t")
            await good_flows(world)
        await until(world.slot_dropped, "the slot is free")
        await world.sql(copy.format(early, slot), f"SELECT pg_drop_replication_slot('{early}')")
        async with world.capture(table_poll_s=0.1):
            await world.sql("INSERT INTO t (id, v, w) VALUES (9, 9, 'z')", "DELETE FROM t WHERE id = 2")
            await good_flows(world)
            row = await world.table("public.t")
            assert row is not None and row.is_streaming, row
            columns = [c.name for c in row.columns]
            rows = await world.select(f"SELECT {', '.join(columns)} FROM t")
            expected = {f'{{"id":{r[0]}}}': dict(zip(columns, r, strict=True)) for r in rows}
            assert await world.folded("t") == expected


async def test_nothing_beyond_a_park_at_the_wals_end_is_handed_on_before_the_park_is_durable(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a capture that dies in between has bound and confirmed a position beyond the omitted rows, without a
    record of the pause.
    """
    async with World(postgres_dsn) as world:
        await world.sql(
            *GOOD,
            "CREATE TABLE p (id int PRIMARY KEY, v int) PARTITION BY RANGE (id)",
            "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (100)",
            "CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (100) TO (200)",
            "INSERT INTO p VALUES (1, 1), (101, 1)",
        )
        real, pausing = world.catalogue.change_table, asyncio.Event()

        async def change_table(capture: str, table: str, change: Any) -> CaptureTableRow | None:
            wanted = change(await world.table(table))
            if wanted is not None and wanted.paused_lsn:
                pausing.set()
                await asyncio.Event().wait()
            return await real(capture, table, change)

        async with world.capture(table_poll_s=0.1):
            await world.caught_up()
            with monkeypatch.context() as patch:
                patch.setattr(world.catalogue, "change_table", change_table)
                await world.sql("ALTER TABLE p DETACH PARTITION p1")
                await asyncio.wait_for(pausing.wait(), DEADLINE_S)
                await world.sql("INSERT INTO p VALUES (102, 2)")
                with pytest.raises(AssertionError, match="a binding tagged"):
                    await world.caught_up(2.0)
        async with world.capture(table_poll_s=0.1):
            row = await world.paused("p", "a partition is gone")
            await good_flows(world)
            assert await world.confirmed() > row.paused_lsn
            binding = await world.caught_up()
            end = sum(binding.offsets[await world.topic_id("p")])
            assert await world.folded("p", end) == {
                f'{{"id":{i}}}': {"id": i, "v": v} for i, v in [(1, 1), (101, 1), (102, 2)]
            }, "every commit below where it is parked is in its topic"


async def test_f413_a_copy_beside_the_stream_moves_with_its_rows_and_holds_the_captures_mark(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD, *T, "INSERT INTO t SELECT g, g, repeat('w', 500) FROM generate_series(10, 3000) g")
        bursts, may_write = 0, asyncio.Event()
        write_rows = TopicWriter.write_copied_rows

        async def slowly(self: TopicWriter, *args: Any) -> None:
            nonlocal bursts
            bursts += 1
            if bursts > 1:
                await may_write.wait()
            await write_rows(self, *args)

        async with world.capture(table_poll_s=0.1, budget_ms=1000) as capture:
            await good_flows(world)
            monkeypatch.setattr(TopicWriter, "write_copied_rows", slowly)
            await request_recopy(world.catalogue, world.name, "public.t")
            await until(lambda: bursts > 1, "a part is copied")
            binding = await good_flows_beyond(world)
            table = reported(world, capture, capture.config.table_mark("public.t"))
            assert table is not None and table.state is StageState.MOVING, table
            assert 0 < table.mark.position < table.mark.target and table.mark.unit == "rows"
            assert "copying public.t" in table.mark.reason

            def held() -> bool:
                # Its topics may block it for a moment longer, by records that came while it streamed.
                own = reported(world, capture, capture.config.mark)
                return own is not None and own.mark.held_by == table.mark.name

            await until(held, "the capture's mark names the copy")
            own = reported(world, capture, capture.config.mark)
            assert own is not None and own.mark.position <= binding, "what the server was told, not what is flushed"
            assert await world.confirmed() <= own.mark.position

            def stuck() -> bool:
                table = reported(world, capture, capture.config.table_mark("public.t"))
                return table is not None and table.state is StageState.STUCK and table.mark.held_by.startswith("topic:")

            await until(stuck, "a copy that stands is stuck, and names who holds it")
            may_write.set()
            await world.flowing("t")
            assert reported(world, capture, capture.config.table_mark("public.t")) is None
            await good_flows(world)


async def good_flows_beyond(world: World) -> int:
    """The LSN of a commit of the other table, once it is bound."""
    await world.sql("INSERT INTO good SELECT max(id) + 1, 7 FROM good")
    return (await world.caught_up()).lsn


async def test_f409_a_copy_behind_a_lock_names_its_holder_and_does_not_keep_the_slot(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD, *T)
        async with world.capture(table_poll_s=0.1, budget_ms=1000) as capture:
            await good_flows(world)
            mark = capture.config.table_mark("public.t")
            async with await psycopg.AsyncConnection.connect(world.dsn, application_name="migration") as other:
                await other.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
                pid, query = other.info.backend_pid, "LOCK TABLE t IN ACCESS EXCLUSIVE MODE"
                await request_recopy(world.catalogue, world.name, "public.t")

                def stuck() -> bool:
                    table = reported(world, capture, mark)
                    by_pid = table is not None and table.mark.held_by == f"postgres-pid:{pid}"
                    return by_pid and table.state is StageState.STUCK and query in table.mark.reason

                await until(stuck, "the copy is stuck, and its holder named", 1 + 5)
                await good_flows(world)  # the other tables advance, and the slot is confirmed
                await until(stuck, "it still is")
                await other.rollback()
            # The table kept flowing in its former state. Its re-snapshot is complete when the stage of the copy
            # disappears.
            await until(lambda: reported(world, capture, mark) is None, "its copy is not told any more")
            await world.flowing("t")
            await good_flows(world)
            assert reported(world, capture, mark) is None


async def test_f409_a_first_copy_behind_a_lock_keeps_no_other_table_waiting(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD, *T)
        other = await psycopg.AsyncConnection.connect(world.dsn)
        real = bootstrap.copy_tables

        async def take_snapshot(*args: Any) -> Any:
            await other.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
            return await real(*args)

        monkeypatch.setattr(bootstrap, "copy_tables", take_snapshot)
        async with world.capture(table_poll_s=0.1) as capture:
            await good_flows(world)
            await world.paused("t", f"pid={other.info.backend_pid}")
            table = reported(world, capture, capture.config.table_mark("public.t"))
            assert table is not None and table.mark.held_by == f"postgres-pid:{other.info.backend_pid}"
            await other.close()
            await world.flowing("t")
            await good_flows(world)
