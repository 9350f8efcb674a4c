"""A captured table's records, decoded and appended to a shard."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from support.capture.world import World
from tidemill.shards.api import TIME, Column, ShardSchema
from tidemill.shards.handle import LogShard
from tidemill.shards.registry import open_shard
from tidemill.spark.decode.captured import Captured, CapturedDecoder
from tidemill.spark.decode.records import Records
from tidemill.spark.ingest.sources import captured_schema
from tidemill.spark.merge.commands import Commands
from tidemill.spark.merge.mirror import Mirror
from tidemill.spark.merge.resolve import resolve
from tidemill.topics.batch import Record
from tidemill.topics.batch.records import columns_from_fields


async def schema_of(world: World, table: str) -> ShardSchema:
    found = await world.table(f"public.{table}")
    assert found is not None
    return captured_schema(found)


async def decoded(
    world: World, table: str, records: list[Record], schema: ShardSchema | None = None
) -> tuple[tuple[Column, ...], Captured]:
    schema = schema or await schema_of(world, table)
    fields = columns_from_fields([r.key for r in records], [r.value for r in records])
    times = np.full(len(records), 1000, dtype=np.int64)
    return schema.columns, CapturedDecoder(schema, f"public.{table}").decode(Records("topic", 0, times, fields))


class Stored:
    """A stored shard, and the effect of a pipeline's steps on it."""

    def __init__(self, shard: LogShard) -> None:
        self.shard = shard
        self._mirror = Mirror(shard.schema)

    @classmethod
    async def of(cls, world: World, name: str, schema: ShardSchema) -> Stored:
        return cls(await open_shard(world.consensus, world.objects, world.clock, world.rand, name, schema))

    async def step(self, commands: Commands) -> pa.Table:
        """The updates that the commands, all of time 1000, come to; they are appended at the next time."""
        lower = self._mirror.upper
        rows = commands.rows.set_column(
            commands.rows.schema.get_field_index(TIME), TIME, pa.array([lower] * len(commands), pa.int64())
        )
        found = resolve(self.shard.schema, Commands(rows), self._mirror, lower, lower + 1)
        parts = (await self.shard.write_part(found.updates),) if found.updates.num_rows else ()
        await self.shard.compare_and_append(lower, lower + 1, parts, f"step-{lower}")
        self._mirror.advance(found.changes, lower, lower + 1)
        return found.updates

    async def contents(self) -> pa.Table:
        return await self.shard.snapshot(self._mirror.upper - 1)
