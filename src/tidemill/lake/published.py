"""Published tables, as the catalogue shows them: a table that was never published is published when it is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.base.errors import MissingError
from tidemill.lake.catalogue import PublishedTable
from tidemill.lake.common_time import common_sources
from tidemill.lake.pointer import load_table
from tidemill.lake.publish.stored import LakeStores
from tidemill.lake.publisher import ReadPipelines, publish_now
from tidemill.shards.registry import list_created_shards, shard_exists


class LakeTables:
    """Implementation of `catalogue.routes.PublishedTables`."""

    def __init__(self, stores: LakeStores, read_pipelines: ReadPipelines) -> None:
        self._stores = stores
        self._read_pipelines = read_pipelines

    async def list_names(self) -> Sequence[str]:
        return [created.name for created in await list_created_shards(self._stores.consensus)]

    async def load(self, table: str) -> PublishedTable:
        consensus, objects = self._stores.consensus, self._stores.objects
        try:
            found = await load_table(consensus, objects, table)
        except MissingError:
            if not await shard_exists(consensus, table):
                raise
            await publish_now(self._stores, table, common_sources(await self._read_pipelines()))
            found = await load_table(consensus, objects, table)
        return PublishedTable(found.location, found.metadata)
