"""Automatic re-snapshots: a table paused for a reason that a copy resolves is copied again within bounds, and is exact
afterwards.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from support.capture.evolving import equal
from support.capture.world import AGAIN, GOOD, PARTITIONED, World, generation, is_parked, stuck
from support.waiting import until
from tidemill.base.status.status import derive_status
from tidemill.capture.catalog.columns import ColumnAttributes, TableAttributes
from tidemill.capture.tables.auto_recopy import can_copy_resolve
from tidemill.capture.tables.recopy_requests import request_recopy
from tidemill.metastore.catalogue import CapturedColumn, CaptureTableRow

pytestmark = pytest.mark.postgres

COLUMNS = "id int PRIMARY KEY, v int, w varchar(4), n numeric(6,2)"
ROWS = "(1, 1, 'a', 1.5), (2, 2, 'b', 2.5), (3, 3, 'c', NULL)"
CHANGES = {
    "volatile": "ALTER TABLE t ADD x float DEFAULT random()",
    "identity": "ALTER TABLE t ADD x int GENERATED ALWAYS AS IDENTITY",
    "stored": "ALTER TABLE t ADD x int GENERATED ALWAYS AS (v * 2) STORED",
    "together": "ALTER TABLE t ADD x int, ALTER v TYPE bigint",
    "by_expression": "ALTER TABLE t ALTER w TYPE varchar(9) USING upper(w)",
    "came_and_went": "ALTER TABLE t ADD x int DEFAULT 1; INSERT INTO t (id, x) VALUES (9, 5); ALTER TABLE t DROP x;"
                     " ALTER TABLE t ADD x int DEFAULT 2",
}  # fmt: skip


@pytest.mark.parametrize("with_rows", [True, False])
async def test_f466_what_a_copy_makes_good_is_copied_by_itself_and_is_what_select_says(
    postgres_dsn: str, with_rows: bool
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD)
        for name in CHANGES:
            await world.sql(f"CREATE TABLE {name} ({COLUMNS})", f"INSERT INTO {name} VALUES {ROWS}")
        async with world.capture(table_poll_s=0.1, **AGAIN):
            await world.caught_up()
            for name, statements in CHANGES.items():
                # In one transaction: a capture that stored the first `x` leaves another one to the operator.
                await world.sql(statements.replace(" t ", f" {name} "))
                if with_rows:
                    await world.sql(f"UPDATE {name} SET v = 9 WHERE id = 1", f"INSERT INTO {name} (id) VALUES (8)")
            again = {*CHANGES} if with_rows else {*CHANGES} - {"came_and_went"}

            async def copied() -> bool:
                return all([await generation(world, name) > 0 for name in again])

            await until(copied, "they are copied")
            await world.sql(*[f"UPDATE {name} SET v = 7 WHERE id = 2" for name in CHANGES])
            await world.flowing(*CHANGES)
            await equal(world, *CHANGES, "good")
            assert await generation(world, "good") == 0


@pytest.mark.parametrize(
    "changes",
    [
        ("CREATE TABLE p2 AS SELECT 101 id, 1 v", "ALTER TABLE p2 ALTER id SET NOT NULL, ADD PRIMARY KEY (id)",
         "ALTER TABLE p ATTACH PARTITION p2 FOR VALUES FROM (100) TO (200)", "INSERT INTO p VALUES (102, 2)"),
        ("ALTER TABLE p DETACH PARTITION p1",),
        ("DROP TABLE p1", "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (50)", "INSERT INTO p VALUES (2, 2)"),
        # Updated before capture could set its full identity.
        ("BEGIN", "CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (100) TO (200)", "INSERT INTO p VALUES (101, 1)",
         "UPDATE p SET v = 2 WHERE id = 101", "COMMIT", "DELETE FROM p WHERE id = 1"),
    ],
)  # fmt: skip
async def test_f466_rows_that_come_and_go_with_a_partition_are_copied_by_themselves(
    postgres_dsn: str, changes: tuple[str, ...]
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*PARTITIONED)
        async with world.capture(table_poll_s=0.1, **AGAIN):
            await world.caught_up()
            await world.sql(*changes)

            async def copied() -> bool:
                return await generation(world, "p") > 0

            await until(copied, "it is copied")
            await world.flowing("p")
            await equal(world, "p", "good")


async def test_f467_it_is_copied_once_a_pause_and_says_from_when_on(postgres_dsn: str) -> None:
    """The first re-snapshot starts immediately. A table that waits for the next one needs no operator, but an operator
    may request it earlier.
    """
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD, f"CREATE TABLE t ({COLUMNS})", f"INSERT INTO t VALUES {ROWS}")
        async with world.capture(table_poll_s=0.1, copy_again=True, copy_again_pause_s=3600):
            await world.caught_up()
            await world.sql("ALTER TABLE t ADD x float DEFAULT random()")

            async def copied(times: int) -> bool:
                return await generation(world, "t") == times

            await until(lambda: copied(1), "the first time it is copied at once")
            await world.flowing("t")
            await world.sql("ALTER TABLE t ADD y float DEFAULT random()")
            row = await world.paused("t", "'y'")
            now_ms = world.clock.now_ms()
            assert now_ms + 3_000_000 < row.again_ms <= now_ms + 3_600_000
            assert "re-snapshotted automatically from" in row.fix
            name = f"table:{world.name}/public.t"
            (mark,) = [m for m in world.tracker.report("p", now_ms).marks if m.name == name]
            assert not mark.parked and "re-snapshotted automatically from" in mark.reason
            assert derive_status(mark, "p", now_ms, now_ms).mark.held_by != "operator"
        async with world.capture(table_poll_s=0.1, copy_again=True, copy_again_pause_s=3600):
            row = await world.paused("t", "'y'")
            assert row.again_ms and await generation(world, "t") == -1
            await request_recopy(world.catalogue, world.name, "public.t")
            await until(lambda: copied(2), "it is copied when somebody asks")
            await world.flowing("t")
            await equal(world, "t", "good")


async def test_f467_one_that_is_too_large_or_has_changed_otherwise_since_waits_for_somebody(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD, *[f"CREATE TABLE {t} ({COLUMNS})" for t in ("large", "other", "off")])
        await world.sql(*[f"INSERT INTO {t} VALUES {ROWS}" for t in ("large", "other", "off")])
        volatile = "ALTER TABLE {} ADD x float DEFAULT random()"
        async with world.capture(table_poll_s=0.1, copy_again=True, copy_again_max_mb=0):
            await world.caught_up()
            await world.sql(volatile.format("large"))

            async def reported() -> bool:
                row = await world.table("public.large")
                return row is not None and "exceeds copy_again_max_mb" in row.fix

            await until(reported, "it is told")
            await until(lambda: is_parked(world, "large"), "the status follows the stored row")
            assert "tidemill capture resnapshot" in await stuck(world, "large")
        later = 1 << 50  # the clock was wrong
        async with world.capture(table_poll_s=0.1, copy_again=True, copy_again_pause_s=3600):
            for name in ("other", "off"):
                await world.catalogue.change_table(world.name, f"public.{name}", lambda row: _begun(row, later))
            await world.sql(volatile.format("off"), volatile.format("other"))
            row = await world.paused("off")
            assert row.again_ms <= world.clock.now_ms() + 3_600_000
            await world.paused("other")
            await world.sql("ALTER TABLE other DROP w")
        await world.catalogue.change_table(world.name, "public.other", lambda row: _due(row))
        async with world.capture(table_poll_s=0.1, copy_again=True):

            async def changed() -> bool:
                row = await world.table("public.other")
                return row is not None and "changed again since" in row.fix

            await until(changed, "a column is not lost to a copy that nobody asked for")
            await until(lambda: is_parked(world, "other"), "the status follows the stored row")
            assert "changed again since" in await stuck(world, "other")
        async with world.capture(table_poll_s=0.1):
            await until(lambda: said(world, "off", "copy_again is off"), "it says that it is off")


async def said(world: World, name: str, words: str) -> bool:
    row = await world.table(f"public.{name}")
    return row is not None and words in row.fix


def _begun(row: CaptureTableRow | None, at_ms: int) -> CaptureTableRow:
    assert row is not None
    return replace(row, again_last_ms=at_ms)


def _due(row: CaptureTableRow | None) -> CaptureTableRow:
    assert row is not None and row.again_ms
    return replace(row, again_ms=1)


INT, BIGINT, TEXT = (23, -1, "integer"), (20, -1, "bigint"), (25, -1, "text")


@pytest.mark.parametrize(
    ("now", "whole"),
    [
        ([("id", 1, INT, 0), ("v", 2, INT, -1)], True),
        ([("id", 1, BIGINT, 0), ("v", 2, BIGINT, -1), ("x", 3, TEXT, -1)], True),
        ([("id", 1, INT, 0), ("v", 2, (16_400, -1, "integer"), -1)], True),
        ([("id", 1, INT, 0)], False),
        ([("id", 1, INT, 0), ("u", 2, INT, -1)], False),
        ([("id", 1, INT, 0), ("v", 3, INT, -1)], False),
        ([("id", 1, INT, 0), ("v", 2, TEXT, -1)], False),
        ([("id", 1, INT, 0), ("v", 2, INT, 1)], False),
        ([("id", 1, INT, 0), ("v", 2, INT, -1), ("_time", 3, INT, -1)], False),
    ],
)
def test_a_copy_nobody_asked_for_takes_no_column_away_from_a_reader(now: list[Any], whole: bool) -> None:
    columns = (CapturedColumn("id", "integer", 0, 23, -1, 1), CapturedColumn("v", "integer", -1, 23, -1, 2))
    row = CaptureTableRow("c", "public.t", columns=columns)
    found = TableAttributes(tuple(ColumnAttributes(n, number, *kind, key) for n, number, kind, key in now), 3, 0, "s")
    assert can_copy_resolve(row, found) is whole
    assert not can_copy_resolve(row, None)
