"""Foreign readers find exactly the rows of each table, at each published time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from support.lake.readers import BY_SNAPSHOT, BY_TAG, WITHOUT_VECTORS, ForeignReader, ReadError, plain_types
from support.lake.world import LakeWorld, contents, rows_of
from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.shards.compaction.compaction import compact_once
from tidemill.shards.handle import LogShard
from tidemill.shards.parts.pg_columns import parse_column

pytestmark = [pytest.mark.lake, pytest.mark.processes]

SCHEMA = ShardSchema((Column("id", "int64"), Column("name", "string"), Column("small", "int16")), ("id",))


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
    if reader.name in BY_SNAPSHOT:
        assert rows_of(reader.read(location, first.metadata.current.snapshot_id)) == await contents(shard, 1)


@pytest.mark.parametrize("name", WITHOUT_VECTORS)
async def test_a_reader_without_deletion_vectors_refuses_them(
    open_reader: Callable[[str], ForeignReader], name: str, tmp_path: Path
) -> None:
    """A later release may read them: then it joins READERS."""
    world = LakeWorld(tmp_path, format=3)
    shard = await world.table(schema=SCHEMA)
    await append(shard, [(*row(k, 1), 1) for k in range(3000)], 1)
    await append(shard, [(*row(k, 1), -1) for k in range(10)], 2)
    await world.publish(await world.publisher())
    with pytest.raises(ReadError, match=r"(?i)parquet"):
        open_reader(name).read(await world.location())


async def test_an_empty_table_has_columns_and_no_rows(reader: ForeignReader, tmp_path: Path) -> None:
    world = LakeWorld(tmp_path, format=reader.format)
    shard = await world.table(schema=SCHEMA)
    await append(shard, [], 1)
    await world.publish(await world.publisher())
    found = reader.read(await world.location())
    assert (found.column_names, found.num_rows) == (["id", "name", "small"], 0)


async def test_an_evolved_table_has_its_defaults_and_wider_types(
    reader: ForeignReader, tmp_path: Path, format: int
) -> None:
    world = LakeWorld(tmp_path, format=format)
    shard = await world.table(schema=SCHEMA)
    await append(shard, [(*row(k, 1), 1) for k in range(500)], 1)
    first = await world.publish(await world.publisher())
    default = "was" if format == 3 else None
    columns = (Column("id", "int64"), Column("name", "string"), Column("small", "int32"))
    shard = await world.table(schema=ShardSchema((*columns, Column("note", "string", default)), ("id",)))
    table = pa.table(
        {
            "id": pa.array([3, 3, 900], pa.int64()),
            "name": pa.array([row(3, 1)[1], "new", "new"]),
            "small": pa.array([3, 1 << 20, 7], pa.int32()),
            "note": pa.array([default, "is", None]),
            TIME: pa.array([2, 2, 2], pa.int64()),
            DIFF: pa.array([-1, 1, 1], pa.int64()),
        }
    )
    await shard.compare_and_append(2, 3, [await shard.write_part(table)], "")
    publisher = await world.publisher()
    second = await world.publish(publisher)
    location = await world.location()
    assert rows_of(reader.read(location)) == await contents(shard, 2)
    assert first.metadata.current is not None and second.metadata.current is not None
    assert [s.schema_id for s in second.metadata.snapshots] == [1, second.metadata.current_schema_id]
    if reader.name not in BY_SNAPSHOT:
        return
    earlier = reader.read(location, first.metadata.current.snapshot_id)
    assert earlier.num_rows == 500
    assert set(earlier.column("id").to_pylist()) == set(range(500))


async def test_each_time_is_read_by_its_tag(reader: ForeignReader, tmp_path: Path) -> None:
    world = LakeWorld(tmp_path, format=reader.format)
    shard, publisher = await world.table(schema=SCHEMA), await world.publisher()
    for time in (10, 20, 30):
        await append(shard, [(*row(time, 1), 1)], time)
        await world.publish(publisher)
    await append(shard, [], 40)
    await world.publish(publisher)
    location = await world.location()
    if reader.name not in BY_TAG:
        with pytest.raises(ReadError, match=r"snapshots? "):
            reader.read(location, tag="t30")
        return
    for time in (10, 20, 30, 40):
        assert rows_of(reader.read(location, tag=f"t{time}")) == await contents(shard, time)


TYPES = (
    "bool", "int16", "int32", "int64", "float32", "float64", "string", "json", "binary", "date", "timestamp",
    "timestamp_ntz", "decimal(5,2)", "decimal(18,0)", "decimal(38,10)",
)  # fmt: skip
VALUES: list[dict[str, str | None]] = [
    dict.fromkeys(TYPES, None),
    dict(zip(TYPES, (
        "t", "-32768", "-2147483648", "-9223372036854775808", "-0", "-0", "", "{}", "\\x", "1970-01-01",
        "1970-01-01 00:00:00+00", "1969-12-31 23:59:59.999999", "-999.99", "-999999999999999999",
        "-9999999999999999999999999999.9999999999",
    ), strict=True)),
    dict(zip(TYPES, (
        "f", "32767", "2147483647", "9223372036854775807", "NaN", "Infinity", "ß\x01'\"\\", "[null, \"ä\"]",
        "\\x00ff0a", "9999-12-31", "9999-12-31 23:59:59.999999+00", "0001-01-01 00:00:00", "0.01",
        "123456789012345678", "0.0000000001",
    ), strict=True)),
]  # fmt: skip


@pytest.mark.parametrize("inline", [False, True])
async def test_all_types_have_their_values(reader: ForeignReader, tmp_path: Path, inline: bool) -> None:
    """Rows of parts, and with `inline` rows that are written for the reader."""
    columns = [Column(f"c {kind}", kind) for kind in TYPES]
    world = LakeWorld(tmp_path, format=reader.format)
    shard = await world.table(schema=ShardSchema((Column("id", "int64"), *columns), ("id",)))
    count = 3 if inline else 3000
    arrays = {
        column.name: parse_column([VALUES[k % 3][column.type] for k in range(count)], column) for column in columns
    }
    table = pa.table(
        {
            "id": pa.array(range(count), pa.int64()),
            **arrays,
            TIME: pa.array([1] * count, pa.int64()),
            DIFF: pa.array([1] * count, pa.int64()),
        }
    )
    part = await shard.write_part(table)
    assert (part.object_key == "") == inline
    await shard.compare_and_append(0, 2, [part], "")
    await world.publish(await world.publisher())
    location = await world.location()
    # Iceberg's row-wise Java reader, which other engines use too, refuses files with unsigned columns.
    for options in ({}, {"vectorized": False}) if reader.name == "spark" else ({},):
        found = reader.read(location, **options)
        wanted = reader.shown(plain_types(await shard.snapshot(1)))
        assert found.schema.types == wanted.schema.types
        assert rows_of(found) == rows_of(wanted)


async def test_copies_of_rows_and_rows_inline_in_the_log_are_present(reader: ForeignReader, tmp_path: Path) -> None:
    world = LakeWorld(tmp_path, format=reader.format)
    shard = await world.table(schema=ShardSchema(SCHEMA.columns, ()))
    await append(shard, [(*row(k, 1), 1 + k % 3) for k in range(2000)], 1)
    await append(shard, [(*row(k, 1), -1) for k in range(0, 2000, 5)], 2)
    await append(shard, [(*row(1, 1), 1)], 3)
    publisher = await world.publisher()
    stored = await world.publish(publisher)
    assert stored.loose is not None and stored.loose.num_rows > 1000
    assert rows_of(reader.read(await world.location())) == await contents(shard, 3)


async def test_columns_named_as_metadata_columns_are_read_under_another_name(
    reader: ForeignReader, tmp_path: Path
) -> None:
    world = LakeWorld(tmp_path, format=reader.format)
    schema = ShardSchema((Column("id", "int64"), Column("_pos", "string"), Column("_file", "int16")), ("id",))
    shard = await world.table(schema=schema)
    table = pa.table(
        {
            "id": pa.array(range(2000), pa.int64()),
            "_pos": pa.array([f"p{k}" for k in range(2000)]),
            "_file": pa.array([7] * 2000, pa.int16()),
            TIME: pa.array([1] * 2000, pa.int64()),
            DIFF: pa.array([1] * 2000, pa.int64()),
        }
    )
    await shard.compare_and_append(0, 2, [await shard.write_part(table)], "")
    await world.publish(await world.publisher())
    found = reader.read(await world.location())
    assert found.column_names == ["id", "_pos_", "_file_"]
    assert rows_of(found) == await contents(shard, 1)


async def test_vectors_stay_right_while_parts_merge_and_more_is_deleted(reader: ForeignReader, tmp_path: Path) -> None:
    world = LakeWorld(tmp_path, format=reader.format)
    shard, publisher = await world.table(schema=SCHEMA), await world.publisher()
    await append(shard, [(*row(k, 0), 1) for k in range(4000)], 1)
    version = dict.fromkeys(range(4000), 0)
    for time in range(2, 12):
        changed = range(time, 4000, 37)
        rows = [(*row(k, version[k]), -1) for k in changed]
        version.update(dict.fromkeys(changed, time))
        await append(shard, rows + [(*row(k, time), 1) for k in changed], time)
        if time % 4 == 0:
            await shard.downgrade_since("retention", 1, time - 2)
            await compact_once(shard, world.objects, world.rand)
        world.clock.advance(30_000)
        await world.publish(publisher)
        assert rows_of(reader.read(await world.location())) == await contents(shard, time)
