"""ShapeWorld whose stream comes from the capture room, and whose shards from the shards room."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Self

import psycopg
from starlette.applications import Starlette

from support.shapes.world import Client, ShapeWorld
from support.waiting import until
from tidemill.base.clock import Rand, SystemClock
from tidemill.capture.config import CaptureConfig
from tidemill.capture.session.capture import Capture
from tidemill.consensus.memory import MemoryConsensus
from tidemill.metastore.catalogue import Catalogue
from tidemill.metastore.factory import create_metastore
from tidemill.node.http.server import HttpServer
from tidemill.objects.memory import MemoryObjects
from tidemill.shapes import ShapeService, shape_routes
from tidemill.shards.bindings.remap import LogRemap
from tidemill.shards.registry import open_shard
from tidemill.topics.local_topics import LocalTopics


class RealWorld(ShapeWorld):
    table_poll_s = 5.0
    tables: tuple[str, ...] = ("*",)
    fragment_changes = 5
    copy_again = True
    copy_again_pause_s = 300.0
    more: Mapping[str, Any] = {}
    """Further keys of the capture's configuration."""

    async def __aenter__(self) -> Self:
        clock, rand = SystemClock(), Rand()
        self.consensus, self.objects = MemoryConsensus(clock), MemoryObjects(clock)
        self.metastore = create_metastore(self.consensus, self.objects, clock, rand)
        catalogue = self.catalogue = Catalogue(self.metastore, clock, rand)
        self.db = await psycopg.AsyncConnection.connect(self.dsn, autocommit=True)
        await self.db.execute(self._ddl)
        self.topics = LocalTopics(self.consensus, self.objects, catalogue, clock=clock, rand=rand)
        name = self.dsn.rpartition("/")[2]
        config = CaptureConfig(
            name=name, dsn=self.dsn, tables=self.tables, linger_ms=10, binding_interval_ms=20,
            fragment_changes=self.fragment_changes, table_poll_s=self.table_poll_s, copy_again=self.copy_again,
            copy_again_pause_s=self.copy_again_pause_s,
            **self.more,
        )  # fmt: skip
        remap = LogRemap(self.consensus, config.remap_name, clock, rand)
        self.capture = Capture(
            config, topics=self.topics, catalogue=catalogue, remap=remap, clock=clock, rand=rand, tracker=self.tracker
        )
        self.slot = config.slot
        self.service = ShapeService(clock, rand, self.tracker, self.settings)
        self.capture.add_tap(self.service.add_database(name, self.dsn, self.capture.relations, self.capture))

        async def opener(shard: str) -> Any:
            return await open_shard(self.consensus, self.objects, clock, rand, shard)

        self.service.add_shards(opener)
        self.server = HttpServer(Starlette(routes=list(shape_routes(self.service))), on_failure=lambda *_: None)
        await self.server.start()
        self._running = asyncio.ensure_future(self.capture.run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.capture.aclose()
        await asyncio.gather(self._running, return_exceptions=True)
        await self.service.aclose()
        await self.server.aclose()
        await self.topics.aclose()
        await self.metastore.aclose()
        await until(self.drop_slot)
        await self.db.close()

    async def drop_slot(self) -> bool:
        mine = "FROM pg_replication_slots WHERE slot_name = %s"
        await self.db.execute(f"SELECT pg_drop_replication_slot(slot_name) {mine} AND NOT active", (self.slot,))
        return not await (await self.db.execute(f"SELECT {mine}", (self.slot,))).fetchall()

    async def break_stream(self) -> None:
        await self.db.execute(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s AND active",
            (self.slot,),
        )


DDL = """
CREATE TABLE stock (w int, i int, qty int NOT NULL, note text, PRIMARY KEY (w, i));
INSERT INTO stock SELECT w, i, 100, CASE WHEN i % 7 = 0 THEN repeat(md5(i::text), 300) END
FROM generate_series(1, 3) w, generate_series(1, 50) i;
"""


async def shown(world: ShapeWorld, where: str) -> dict[str, dict[str, Any]]:
    cursor = await world.db.execute(f"SELECT w::text, i::text, qty::text, note FROM stock WHERE {where}")  # type: ignore[arg-type]
    return {
        f'"public"."stock"/"{w}"/"{i}"': {"w": w, "i": i, "qty": qty, "note": note}
        for w, i, qty, note in await cursor.fetchall()
    }


async def equal_in_the_end(world: ShapeWorld, client: Client, where: str) -> None:
    """Follow until a marker row has arrived, then compare with SELECT."""
    expected = await shown(world, where)
    await client.follow_until(lambda: client.rows == expected)
