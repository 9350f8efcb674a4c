"""Duration of the filter that checks transactions against a shape's snapshot."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from support.shapes.world import ShapeWorld
from support.waiting import until
from tidemill.base.errors import InvalidError
from tidemill.capture.postgres.pg_snapshot import PgSnapshot
from tidemill.shapes.tables.initial_snapshot import SnapshotFilter

EPOCH = 1 << 32


def test_a_transaction_that_is_seen_may_come_after_one_that_is_not() -> None:
    """Two concurrent commits: 112 is first in the WAL, 105 is first to become visible. The snapshot has 105 only."""
    stitched = SnapshotFilter(PgSnapshot(100, 110, frozenset(), lsn=10))
    assert stitched.admits(112, 1)
    assert not stitched.admits(105, 1)


def test_what_was_in_progress_or_began_later_is_not_skipped() -> None:
    stitched = SnapshotFilter(PgSnapshot(100, 110, frozenset({101}), lsn=10))
    assert not stitched.admits(99, 1)
    assert stitched.admits(101, 1)
    assert not stitched.admits(105, 1)
    assert stitched.admits(110, 1)
    assert not stitched.passed


@pytest.mark.parametrize("later", [5, 1 << 24, 1 << 31, 3 << 30, EPOCH - 10])
def test_behind_the_end_of_the_wal_of_its_snapshot_nothing_is_skipped_however_long_it_was_quiet(later: int) -> None:
    stitched = SnapshotFilter(PgSnapshot(100, 110, frozenset(), lsn=1000))
    assert not stitched.admits(99, 999)
    assert stitched.admits(110, 999)
    assert not stitched.passed
    assert stitched.admits((110 + later) % EPOCH, 1000)
    assert stitched.passed


def test_a_snapshot_is_read_back_as_it_was_kept_also_from_before_the_lsn_was() -> None:
    for snapshot in (PgSnapshot(100, 110, frozenset({101, 105}), lsn=7), PgSnapshot(100, 110, frozenset(), lsn=7)):
        assert PgSnapshot.parse(str(snapshot)) == snapshot
    assert PgSnapshot.parse("100:110:101,105") == PgSnapshot(100, 110, frozenset({101, 105}))
    for text in ("100:110", "100:110:@", "100:110:@1@2"):
        with pytest.raises(InvalidError):
            PgSnapshot.parse(text)


@pytest.mark.postgres
async def test_a_shape_knows_the_end_of_the_wal_of_its_snapshot(postgres_dsn: str) -> None:
    """The first change after it ends the filter, independently of the number of transactions."""
    async with ShapeWorld(postgres_dsn, "CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1)") as world:
        client = await world.sync(table="t")
        (consumer,) = world.sink.router.consumers()
        await world.db.execute("INSERT INTO t VALUES (2)")
        await client.follow_until(lambda: len(client.rows) == 2)
        assert consumer._filter.passed


@pytest.mark.postgres
async def test_a_shape_that_another_process_begins_sees_what_waits_for_a_synchronous_standby(postgres_dsn: str) -> None:
    """The transaction is in the WAL, and may be confirmed. Here the sink forgets deliveries, as after a restart."""
    async with ShapeWorld(postgres_dsn, "CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1)") as world:
        await world.db.execute("SET synchronous_commit = local")
        try:
            await world.db.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
            await world.db.execute("SELECT pg_reload_conf()")
            async with await psycopg.AsyncConnection.connect(postgres_dsn) as late:
                await late.execute("INSERT INTO t VALUES (2)")
                committing = asyncio.ensure_future(late.commit())
                await until(lambda: world.sink.recent)
                assert not committing.done(), "it is flushed, and not visible"
                world.sink._recent.clear()
                beginning = asyncio.ensure_future(world.sync(table="t"))
                done, _ = await asyncio.wait([beginning], timeout=1.0)
                assert not done, "it waits for what is not visible yet"
                await world.db.execute("ALTER SYSTEM RESET synchronous_standby_names")
                await world.db.execute("SELECT pg_reload_conf()")
                await committing
            assert len((await beginning).rows) == 2
        finally:
            await world.db.execute("ALTER SYSTEM RESET synchronous_standby_names")
            await world.db.execute("SELECT pg_reload_conf()")
