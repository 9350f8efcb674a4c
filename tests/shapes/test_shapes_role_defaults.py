"""Settings that a role or a database has as defaults do not affect shapes."""

from __future__ import annotations

import pytest

from support.shapes.world import ShapeWorld

pytestmark = pytest.mark.postgres

ROWS = 15_000
DDL = f"""
CREATE TABLE item (id int PRIMARY KEY, name text);
INSERT INTO item SELECT n, repeat('n', 50) || n FROM generate_series(1, {ROWS}) n;
"""
HASTY = {
    "statement_timeout": "30ms",
    "lock_timeout": "1ms",
    "transaction_timeout": "30ms",
    "idle_in_transaction_session_timeout": "10ms",
    "default_transaction_read_only": "on",
    "quote_all_identifiers": "on",
}


async def test_f493_initial_rows_come_whatever_timeouts_are_the_database_s_defaults(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:
        database = postgres_dsn.rpartition("/")[2]
        for name, value in HASTY.items():
            await world.db.execute(f"ALTER DATABASE {database} SET {name} = '{value}'")
        client = await world.sync(table="item")
        assert len(client.rows) == ROWS
        found = await world.post({"where": "id <= 10000", "order_by": "id", "limit": 10000}, table="item")
        assert found.status == 200 and len(found.json["data"]) == 10000
        for name in HASTY:
            await world.db.execute(f"ALTER DATABASE {database} RESET {name}")
