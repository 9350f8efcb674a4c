"""Ages of a commit when it is received, durable and bound: the part of a capture in `status --latency`."""

from __future__ import annotations

import pytest

from support.capture.world import World


@pytest.mark.postgres
async def test_a_commit_is_counted_at_each_stage_and_its_rows_are_not(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (0)")
        async with world.capture() as capture:
            for number in range(1, 4):
                await world.sql(f"INSERT INTO t SELECT g FROM generate_series({number}000, {number}500) g")
                await world.caught_up()
            found = capture.stages.histograms()
            assert set(found) == {"received", "durable", "bound"}
            counts = [found[stage].count for stage in ("received", "durable", "bound")]
            assert all(3 <= count < 100 for count in counts), "each commit is in one of them, and no row is"
