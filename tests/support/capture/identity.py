"""Replica identities of tables, and topics whose values lack unchanged columns."""

from __future__ import annotations

import json

from support.capture.world import World


async def identity(world: World, table: str) -> str:
    ((found,),) = await world.select(f"SELECT relreplident::text FROM pg_class WHERE oid = '{table}'::regclass")
    return str(found)


async def exact(world: World, table: str) -> None:
    """The topic, read as its record format says, is what SELECT says."""
    await world.caught_up()
    rows = await world.select(f"SELECT row_to_json(t)::text FROM {table} t")
    wanted = {row["id"]: row for row in (json.loads(text) for (text,) in rows)}
    assert {row["id"]: row for row in (await world.folded(table)).values()} == wanted


async def left_in_database(world: World) -> list[tuple[object, ...]]:
    return await world.select(
        f"SELECT pubname::text FROM pg_publication UNION ALL SELECT slot_name::text FROM pg_replication_slots"
        f" WHERE slot_name = 'tidemill_{world.name}'"
    )
