"""Partitions that are attached: rows that came with one are in no change of its root."""

from __future__ import annotations

from typing import Any, cast

import pytest
from capture_world import World
from test_capture_tables import GOOD, in_world

from tidemill.capture.tables import came_with_rows
from tidemill.capture.wire.connection import SqlRow, Wire

pytestmark = pytest.mark.postgres

PARTITIONED = (
    *GOOD,
    "CREATE TABLE p (id int PRIMARY KEY, v int) PARTITION BY RANGE (id)",
    "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (100)",
    "INSERT INTO p VALUES (1, 1), (2, 2)",
)


class Aged:
    """A connection that reads these transaction ids in the rows of a partition and of its attachment."""

    def __init__(self, wire: Wire, written: int, attached: int) -> None:
        self._wire = wire
        self._instead = {"r.xmin": f"'{written}'::xid", "i.xmin": f"'{attached}'::xid"}

    async def query(self, sql: str) -> list[SqlRow]:
        return await self._wire.query(sql)

    async def value(self, sql: str) -> str | None:
        for column, xid in self._instead.items():
            assert column in sql
            sql = sql.replace(column, xid)
        return await self._wire.value(sql)


def test_a_row_is_older_than_the_attachment_of_its_partition_whenever_it_was_written(postgres_dsn: str) -> None:
    """age() is a difference of 32 bits with a sign."""

    async def scenario(world: World) -> None:
        await world.sql(*PARTITIONED)
        ((oid, now),) = await world.select("SELECT 'p1'::regclass::oid, pg_current_xact_id()::text::bigint")
        wire = await Wire.connect(world.dsn, purpose="test")

        async def came(ago: int) -> bool:
            aged: Any = Aged(wire, (now - ago) % (1 << 32), (now - 50) % (1 << 32))
            return await came_with_rows(cast(Wire, aged), oid) == "public.p1"

        try:
            for ago in (50, 51, 10_000, (1 << 31) - 100, (1 << 31) + 100, 3 << 30, (1 << 32) - 200):
                assert await came(ago), ago
            for ago in (0, 1, 49):
                assert not await came(ago), ago
        finally:
            await wire.aclose()

    in_world(postgres_dsn, scenario)
