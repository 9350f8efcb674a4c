"""Columns with a default that Iceberg cannot express: files without them are rewritten, then published."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from support.lake.readers import BY_SNAPSHOT, ForeignReader
from support.lake.world import LakeWorld, contents, rows_of
from tidemill.base.errors import UnavailableError
from tidemill.lake.format.schema import oldest_version
from tidemill.shards.api import DIFF, TIME, Column, SchemaEvolvedError, ShardSchema
from tidemill.shards.compaction.compaction import compact_once
from tidemill.shards.handle import LogShard
from tidemill.shards.parts.schema_evolution import SchemaChanges

SCHEMA = ShardSchema((Column("id", "int64"), Column("name", "string")), ("id",))
ADDED = {3: Column("tags", "array<string>", '{a,"b c"}'), 2: Column("grade", "int32", "5")}
"""An added column whose default the format cannot express, by format."""
ROWS = 3000


async def append(shard: LogShard, ids: range, time: int, **more: pa.Array) -> None:
    """Append an insertion per id, in a part that is an object."""
    columns = {
        "id": pa.array(ids, pa.int64()),
        "name": pa.array([f"{key} at {time}" for key in ids]),
        **more,
        TIME: pa.array([time] * len(ids), pa.int64()),
        DIFF: pa.array([1] * len(ids), pa.int64()),
    }
    _, upper = await shard.frontiers()
    part = await shard.write_part(pa.table(columns))
    assert part.object_key
    await shard.compare_and_append(upper, time + 1, [part], "")


async def rewrite(world: LakeWorld, format: int) -> int:
    """Run maintenance's merges to their end; return their number."""
    shard, count = await world.table(), 0
    oldest = partial(oldest_version, version=format)
    while await compact_once(shard, world.objects, world.rand, oldest_version=oldest) is not None:
        count += 1
    return count


@pytest.mark.lake
@pytest.mark.processes
async def test_old_rows_have_the_default_in_every_reader(reader: ForeignReader, tmp_path: Path, format: int) -> None:
    world = LakeWorld(tmp_path, format=format)
    shard = await world.table(schema=SCHEMA)
    await append(shard, range(ROWS), 1)
    first = await world.publish(await world.publisher())
    await shard.evolve(SchemaChanges(add=(ADDED[format],)))
    with pytest.raises(UnavailableError, match=f"column={ADDED[format].name} .* batches=1 bytes="):
        await world.publish(await world.publisher())
    assert await rewrite(world, format) == 1
    new = {3: pa.array([None, ["n"], []], pa.list_(pa.string())), 2: pa.array([None, 7, 8], pa.int32())}[format]
    values = {ADDED[format].name: pa.concat_arrays([new] * ROWS)}
    shard = await world.table()
    await append(shard, range(ROWS, 4 * ROWS), 2, **values)
    await world.publish(await world.publisher())
    location = await world.location()
    found = reader.read(location)
    assert rows_of(found) == await contents(shard, 2)
    default = {3: ["a", "b c"], 2: 5}[format]
    assert found.column(ADDED[format].name).to_pylist().count(default) == ROWS
    if reader.name in BY_SNAPSHOT:
        assert first.metadata.current is not None
        earlier = reader.read(location, first.metadata.current.snapshot_id)
        assert sorted(earlier.column("id").to_pylist()) == list(range(ROWS))


async def test_the_earlier_publication_stays_until_every_file_is_rewritten(tmp_path: Path) -> None:
    world = LakeWorld(tmp_path)
    shard = await world.table(schema=SCHEMA)
    await append(shard, range(ROWS), 1)
    publisher = await world.publisher()
    await world.publish(publisher)
    await append(shard, range(ROWS, 2 * ROWS), 2)
    await shard.evolve(SchemaChanges(add=(ADDED[3],)))
    with pytest.raises(SchemaEvolvedError):
        await append(shard, range(2 * ROWS, 3 * ROWS), 3)  # so no file without the column comes later
    with pytest.raises(UnavailableError, match=r"batches=2 .* table compact t"):
        await world.publish(publisher)
    assert (await publisher.load()).pointer.time_ms == 1
    assert (await rewrite(world, 3), await rewrite(world, 3)) == (1, 0)
    assert (await world.publish(await world.publisher())).pointer.rows == 2 * ROWS


async def test_rows_that_are_inline_in_the_log_need_no_rewriting(tmp_path: Path) -> None:
    world = LakeWorld(tmp_path)
    shard = await world.table(schema=SCHEMA)
    table = pa.table({"id": pa.array([1]), "name": ["one"], TIME: pa.array([1]), DIFF: pa.array([1])})
    await shard.compare_and_append(0, 2, [await shard.write_part(table)], "")
    await shard.evolve(SchemaChanges(add=(ADDED[3],)))
    stored = await world.publish(await world.publisher())
    assert stored.loose is not None and stored.loose.to_pylist() == [{"id": 1, "name": "one", "tags": ["a", "b c"]}]
