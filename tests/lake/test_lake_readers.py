"""Foreign readers find exactly the rows of each table, at each published time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from support.lake.readers import ForeignReader
from support.lake.world import LakeWorld, contents, rows_of
from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.shards.handle import LogShard

SCHEMA = ShardSchema((Column("id", "int64"), Column("name", "string"), Column("small", "int16")), ("id",))


@pytest.fixture(scope="module", params=["pyiceberg", "duckdb"])
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForeignReader]:
    found = ForeignReader(request.param, tmp_path_factory.mktemp(request.param))
    yield found
    found.close()


async def append(shard: LogShard, rows: list[tuple[int, str | None, int, int]], time: int) -> None:
    """Append rows of (id, name, small, diff) at `time`."""
    _, upper = await shard.frontiers()
    table = pa.table(
        {
            "id": pa.array([r[0] for r in rows], pa.int64()),
            "name": pa.array([r[1] for r in rows], pa.string()),
            "small": pa.array([r[2] for r in rows], pa.int16()),
            TIME: pa.array([time] * len(rows), pa.int64()),
            DIFF: pa.array([r[3] for r in rows], pa.int64()),
        }
    )
    parts = [await shard.write_part(table)] if rows else []
    await shard.compare_and_append(upper, time + 1, parts, "")


def row(key: int, version: int) -> tuple[int, str | None, int]:
    return key, None if key % 7 == 0 else f"{key}-{version}", key % 1000


@pytest.mark.parametrize("format", [2, 3])
@pytest.mark.parametrize("percent", [0, 1, 50, 100])
async def test_deleted_rows_are_gone(reader: ForeignReader, tmp_path: Path, percent: int, format: int) -> None:
    world = LakeWorld(tmp_path, format=format)
    shard = await world.table(schema=SCHEMA)
    await append(shard, [(*row(k, 1), 1) for k in range(3000)], 1)
    publisher = await world.publisher()
    first = await world.publish(publisher)
    await append(shard, [(*row(k, 1), -1) for k in range(3000) if k % 100 < percent], 2)
    await world.publish(publisher)
    location = await world.location()
    assert rows_of(reader.read(location)) == await contents(shard, 2)
    assert first.metadata.current is not None
    assert rows_of(reader.read(location, first.metadata.current.snapshot_id)) == await contents(shard, 1)
