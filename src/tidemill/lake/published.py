"""Published tables, as the catalogue shows them.

A table that was never published is published when it is loaded. So is one whose last publication is old: its files may
be deleted if it could not be published since (`table_publisher.hold_objects`), and the error says why. A publication
without a change writes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tidemill.base.errors import MissingError
from tidemill.lake.catalogue import PublishedTable
from tidemill.lake.common_time import common_sources
from tidemill.lake.pointer import load_table
from tidemill.lake.publish.stored import LakeStores
from tidemill.lake.publish.table_publisher import hold_period_ms
from tidemill.lake.publisher import ReadPipelines, publish_now
from tidemill.shards.registry import list_created_shards, shard_exists, table_of_tombstones


class LakeTables:
    """Implementation of `catalogue.routes.PublishedTables`.

    Requests publish one table at a time, and one table once per `lake.interval_s`: many readers of a large table that
    was never published evaluate it once, in the memory of one evaluation.
    """

    def __init__(self, stores: LakeStores, read_pipelines: ReadPipelines) -> None:
        self._stores = stores
        self._read_pipelines = read_pipelines
        self._publishing = asyncio.Lock()
        self._published_s: dict[str, float] = {}
        """Tables that a request published in the last interval, with the time."""

    async def list_names(self) -> Sequence[str]:
        created = await list_created_shards(self._stores.consensus)
        return [create.name for create in created if not table_of_tombstones(create.name)[0]]

    async def load(self, table: str) -> PublishedTable:
        stores = self._stores
        try:
            found = await load_table(stores.consensus, stores.objects, table)
        except MissingError:
            if not await shard_exists(stores.consensus, table):
                raise
            found = None
        if found is None or stores.clock.now_ms() - found.pointer.published_ms > hold_period_ms(stores.settings):
            async with self._publishing:
                await self._publish_unless_recent(table)
            found = await load_table(stores.consensus, stores.objects, table)
        return PublishedTable(found.location, found.metadata)

    async def _publish_unless_recent(self, table: str) -> None:
        oldest_s = self._stores.clock.monotonic_s() - self._stores.settings.interval_s
        self._published_s = {name: at_s for name, at_s in self._published_s.items() if at_s > oldest_s}
        if table not in self._published_s:
            await publish_now(self._stores, table, common_sources(await self._read_pipelines()))
            self._published_s[table] = self._stores.clock.monotonic_s()
