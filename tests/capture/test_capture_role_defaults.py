"""Defaults of a role apply neither to its capture nor to `verify`."""

from __future__ import annotations

import pytest

from support.capture.world import GOOD, World, good_flows, plain
from tidemill.capture.catalog.schema_versions import shard_schema_of
from tidemill.cli.verify.postgres import open_source_point

pytestmark = pytest.mark.postgres

HASTY = {
    "default_transaction_read_only": "on",
    "default_transaction_isolation": "serializable",
    "default_transaction_deferrable": "on",
    "quote_all_identifiers": "on",
    "statement_timeout": "100ms",
    "lock_timeout": "1ms",
    "transaction_timeout": "100ms",
    "idle_in_transaction_session_timeout": "50ms",
    "idle_session_timeout": "50ms",
}


async def test_f493_a_capture_is_set_up_copies_and_flows_whatever_its_role_has_as_defaults(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        role, owner = f"hasty_{world.name}", world.dsn
        await world.sql(*GOOD, "CREATE TABLE more (id int PRIMARY KEY, v text)")
        await world.sql("INSERT INTO more SELECT g, repeat('m', 500) || g FROM generate_series(1, 20000) g")
        await world.sql(f"CREATE ROLE {role} SUPERUSER LOGIN")
        for name, value in HASTY.items():
            await world.sql(f"ALTER ROLE {role} SET {name} = '{value}'")
        world.dsn = owner.replace("postgres@", f"{role}@")
        try:
            async with world.capture():
                await good_flows(world)
                await world.sql("UPDATE more SET v = 'x' WHERE id < 100", "DELETE FROM more WHERE id > 19990")
                await world.caught_up()
                assert await world.folded("more") == await plain(world, "more")
            async with open_source_point(world.dsn, ["public.more"], "nonce") as point:
                row = await world.table("public.more")
                assert row is not None
                chunks = [len(chunk) async for chunk in point.rows("public.more", shard_schema_of(row.columns))]
                assert sum(chunks) == 19990
        finally:
            world.dsn = owner
            await world.slot_dropped()
            await world.sql(f"DROP OWNED BY {role}", f"DROP ROLE {role}")
