"""Each deletion vector has a separate file: foreign readers mistake several vectors of one file."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from support.lake.readers import ForeignReader
from support.lake.world import LakeWorld, contents, rows_of
from tidemill.lake.format.position_deletes import PATH_FIELD
from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.shards.handle import LogShard

IDS = ShardSchema((Column("id", "int64"),), ("id",))


async def append(shard: LogShard, ids: range | list[int], time: int, diff: int) -> None:
    _, upper = await shard.frontiers()
    columns = {TIME: [time] * len(ids), DIFF: [diff] * len(ids)}
    table = pa.table({name: pa.array(values, pa.int64()) for name, values in {"id": list(ids), **columns}.items()})
    await shard.compare_and_append(upper, time + 1, [await shard.write_part(table)], "")


@pytest.mark.lake
@pytest.mark.processes
async def test_a_large_vector_is_not_applied_to_the_file_of_a_small_one(reader: ForeignReader, tmp_path: Path) -> None:
    """DuckDB 1.5.5 returned 2,000 rows of 3,999 when both vectors were in one file."""
    world = LakeWorld(tmp_path, format=reader.format)
    shard = await world.table(schema=IDS)
    await append(shard, range(3000), 1, 1)
    await append(shard, range(3000, 6000), 2, 1)
    await append(shard, [*range(2000), 5500], 3, -1)
    await world.publish(await world.publisher())
    assert rows_of(reader.read(await world.location())) == await contents(shard, 3)


async def test_only_the_vector_that_changed_is_written_again(tmp_path: Path) -> None:
    world = LakeWorld(tmp_path)
    shard, publisher = await world.table(schema=IDS), await world.publisher()
    for first in range(0, 9000, 3000):
        await append(shard, range(first, first + 3000), first // 3000 + 1, 1)
    await append(shard, [1, 3001, 6001], 4, -1)
    await world.publish(publisher)
    before = {meta.key async for meta in world.objects.list("lake/") if meta.key.endswith(".puffin")}
    await append(shard, [3002], 5, -1)
    world.clock.advance(30_000)
    await world.publish(publisher)
    after = {meta.key async for meta in world.objects.list("lake/") if meta.key.endswith(".puffin")}
    assert (len(before), len(after - before)) == (3, 1)


@pytest.mark.parametrize("format", [2, 3])
async def test_each_file_of_deletes_names_its_data_file_in_its_bounds(tmp_path: Path, format: int) -> None:
    """pyiceberg reads a file of deletes without bounds for every data file, and Polars refuses one of format 2."""
    world = LakeWorld(tmp_path, format=format)
    shard = await world.table(schema=IDS)
    for first in (0, 3000):
        await append(shard, range(first, first + 3000), first + 1, 1)
    await append(shard, [1, 3001], 5000, -1)
    stored = await world.publish(await world.publisher())
    deletes = [entry.file for group in stored.deletes for entry in group.entries.values()]
    assert len(deletes) == 2
    for file in deletes:
        assert file.referenced is not None
        assert file.lower == file.upper == {PATH_FIELD: file.referenced.encode()}
