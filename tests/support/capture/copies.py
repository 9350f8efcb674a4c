"""The copy of a table in chunks."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from support.capture.world import World
from tidemill.metastore.catalogue import TableCopy

PROGRAM = Path(__file__).with_name("process.py")

SMALL: dict[str, Any] = {"copy_chunk_blocks": 4, "table_poll_s": 0.1, "tables": ("a",)}


async def copy_of(world: World) -> TableCopy | None:
    row = await world.table("public.a")
    return row.copy if row is not None else None


async def as_folded(world: World) -> dict[str, dict[str, Any]]:
    return {f'{{"id":{i}}}': {"id": i, "v": v, "w": w} for i, v, w in await world.select("SELECT id, v, w FROM a")}


@contextlib.asynccontextmanager
async def stores() -> Any:
    """A world's stores, without a database."""
    world = World("postgresql://nowhere/x", name="x")
    world.topics = world.new_topics()
    try:
        yield world
    finally:
        await world.topics.aclose()
        await world.metastore.aclose()
