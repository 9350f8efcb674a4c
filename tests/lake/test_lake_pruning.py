"""Readers skip files by the bounds of their key, and lose no row."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from support.lake.readers import ForeignReader
from support.lake.world import LakeWorld, rows_of
from tidemill.shards.api import DIFF, TIME, Column, ShardSchema

pytestmark = [pytest.mark.lake, pytest.mark.processes]

SCHEMA = ShardSchema((Column("name", "string"), Column("id", "int64"), Column("note", "string")), ("name", "id"))


async def test_a_filter_on_a_key_finds_every_row_of_files_with_bounds(reader: ForeignReader, tmp_path: Path) -> None:
    world = LakeWorld(tmp_path, format=reader.format)
    shard = await world.table(schema=SCHEMA)
    for time, first in enumerate(range(0, 6000, 2000), 1):
        ids = range(first, first + 2000)
        table = pa.table(
            {
                "name": pa.array([f"{'äxy'[time - 1]}{i}" for i in ids]),
                "id": pa.array(ids, pa.int64()),
                "note": pa.array([None] * 2000, pa.string()),
                TIME: pa.array([time] * 2000, pa.int64()),
                DIFF: pa.array([1] * 2000, pa.int64()),
            }
        )
        _, upper = await shard.frontiers()
        await shard.compare_and_append(upper, time + 1, [await shard.write_part(table)], "")
    stored = await world.publish(await world.publisher())
    files = [entry.file for group in stored.data for entry in group.entries.values()]
    assert sorted(int.from_bytes(file.lower[5], "little") for file in files if file.lower) == [0, 2000, 4000]
    location, whole = await world.location(), await shard.snapshot(3)
    for column, first, end in (("id", 1999, 2001), ("id", 5999, 9999), ("id", 7000, 8000), ("name", "x", "y1")):
        at = whole[column]
        want = whole.filter(pc.and_(pc.greater_equal(at, first), pc.less(at, end)))
        assert rows_of(reader.read(location, between=[column, first, end])) == rows_of(want), (column, first)


async def test_a_key_that_was_widened_is_found_in_files_from_before(reader: ForeignReader, tmp_path: Path) -> None:
    """The first manifest is listed again, with bounds of the narrower type."""
    world = LakeWorld(tmp_path, format=reader.format)
    for time, (kind, first) in enumerate((("int32", 0), ("int64", 1 << 40)), 1):
        shard = await world.table(schema=ShardSchema((Column("id", kind), Column("note", "string")), ("id",)))
        table = pa.table(
            {
                "id": pa.array(range(first, first + 2000), pa.int32() if kind == "int32" else pa.int64()),
                "note": pa.array([f"n{i}" for i in range(2000)]),
                TIME: pa.array([time] * 2000, pa.int64()),
                DIFF: pa.array([1] * 2000, pa.int64()),
            }
        )
        _, upper = await shard.frontiers()
        await shard.compare_and_append(upper, time + 1, [await shard.write_part(table)], "")
        stored = await world.publish(await world.publisher())
    bounds = [e.file.lower[4] for group in stored.data for e in group.entries.values() if e.file.lower]
    assert sorted(map(len, bounds)) == [4, 8]
    location, whole = await world.location(), await shard.snapshot(2)
    for first, end in ((0, 10), (1990, 1 << 41), (1 << 41, 1 << 42)):
        at = whole["id"]
        want = whole.filter(pc.and_(pc.greater_equal(at, first), pc.less(at, end)))
        assert rows_of(reader.read(location, between=["id", first, end])) == rows_of(want), first
