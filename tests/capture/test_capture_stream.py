"""Stream → topics on real stores and a real PostgreSQL."""

from __future__ import annotations

import asyncio
import json

import pytest
from capture_world import World, header, positions

pytestmark = pytest.mark.postgres

ORDERS = "CREATE TABLE orders (id int PRIMARY KEY, customer text, amount numeric(12,2), paid bool, at timestamptz)"


def test_inserts_updates_and_deletes_arrive_in_order_with_their_headers(postgres_dsn: str) -> None:
    async def scenario() -> None:
        async with World(postgres_dsn) as world:
            await world.sql(ORDERS)
            async with world.capture():
                await world.sql(
                    "INSERT INTO orders VALUES (1, 'a', 12.50, true, '2026-01-02 03:04:05+00'), (2, NULL, 0, false, NULL)",
                    "UPDATE orders SET amount = 13 WHERE id = 1",
                    "DELETE FROM orders WHERE id = 2",
                )
                await world.caught_up()
                records = await world.records("orders")
        assert [r.key for r in records] == [b'{"id":1}', b'{"id":2}', b'{"id":1}', b'{"id":2}']
        assert json.loads(records[0].value or b"") == {
            "id": 1, "customer": "a", "amount": "12.50", "paid": True, "at": "2026-01-02 03:04:05+00",
        }  # fmt: skip
        assert json.loads(records[1].value or b"") == {
            "id": 2, "customer": None, "amount": "0.00", "paid": False, "at": None,
        }  # fmt: skip
        assert records[3].value is None
        assert [header(r, "tm.op") for r in records] == ["insert", "insert", "update", "delete"]
        found = positions(records)
        assert found == sorted(set(found))
        assert found[0].commit_lsn == found[1].commit_lsn < found[2].commit_lsn

    asyncio.run(scenario())
