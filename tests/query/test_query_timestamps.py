"""Timestamps with and without a time zone as each reader's own types: Arrow, DuckDB, Polars, and filters on them."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from support.query.world import World
from tidemill.base.errors import InvalidError
from tidemill.shards.api import DIFF, TIME, Column, ShardSchema

SCHEMA = ShardSchema(
    (Column("k", "timestamp_ntz"), Column("clock", "timestamp_ntz"), Column("at", "timestamp")), ("k",)
)
NINE = 9 * 3_600_000_000
INFINITE = 2**63 - 1
NUMBERS = [0, NINE, -NINE, INFINITE, -INFINITE]


def fill(world: World) -> None:
    async def run() -> None:
        shard = await world.stores.shard("t", SCHEMA)
        zoneless = pa.array(NUMBERS, pa.int64()).cast(pa.timestamp("us"))
        rows = {"k": zoneless, "clock": zoneless, "at": zoneless.cast(pa.timestamp("us", "UTC"))}
        of_each = {TIME: pa.array([9] * len(NUMBERS), pa.int64()), DIFF: pa.array([1] * len(NUMBERS), pa.int64())}
        await shard.compare_and_append(0, 10, [await shard.write_part(pa.table({**rows, **of_each}))], "")
        await shard.aclose()

    world.portal.call(run())


def found(world: World, where: Any) -> list[int]:
    table = world.cluster.table("t").to_arrow(where=where)
    return sorted(table.column("k").cast(pa.int64()).to_pylist())


def test_every_reader_has_its_own_two_types_and_the_same_numbers(world: World) -> None:
    fill(world)
    world.merge(9, "t")
    table = world.cluster.table("t")
    arrow = table.to_arrow()
    assert [f.type for f in arrow.schema] == [pa.timestamp("us"), pa.timestamp("us"), pa.timestamp("us", "UTC")]
    assert sorted(arrow.column("clock").cast(pa.int64()).to_pylist()) == sorted(NUMBERS)
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'America/New_York'")
        table.to_duckdb(connection)
        kinds = connection.execute('SELECT DISTINCT typeof(clock), typeof("at") FROM t').fetchall()
        assert kinds == [("TIMESTAMP", "TIMESTAMP WITH TIME ZONE")]
        texts = connection.execute("SELECT CAST(clock AS VARCHAR) FROM t ORDER BY clock").fetchall()
        assert [text for (text,) in texts] == [
            "-infinity", "1969-12-31 15:00:00", "1970-01-01 00:00:00", "1970-01-01 09:00:00", "infinity",
        ]  # fmt: skip
        assert connection.execute("SELECT count(*) FROM t WHERE clock = '1970-01-01 09:00:00'").fetchall() == [(1,)]
    polars = pytest.importorskip("polars")
    assert table.to_polars().schema["clock"] == polars.Datetime("us")
    assert table.to_polars().schema["at"] == polars.Datetime("us", "UTC")


def test_filters_compare_what_is_alike(world: World) -> None:
    fill(world)
    midnight = datetime(1970, 1, 1)
    assert found(world, [("clock", ">", midnight)]) == [NINE, INFINITE]
    assert found(world, [("k", "=", midnight)]) == [0], "the key's hash leads there"
    assert found(world, [[("k", "=", midnight)], [("clock", "in", [datetime(1970, 1, 1, 9)])]]) == [0, NINE]
    assert found(world, pc.field("clock") <= pa.scalar(midnight)) == [-INFINITE, -NINE, 0]
    assert found(world, [("at", ">", midnight.replace(tzinfo=UTC))]) == [NINE, INFINITE]
    zoned = midnight.replace(tzinfo=UTC)
    for value in (zoned, [midnight, zoned], pa.scalar(zoned)):
        where = [("clock", "in" if isinstance(value, list) else ">", value)]
        for given in (where, [where]):
            with pytest.raises(InvalidError, match="column clock is a time without a zone"):
                found(world, given)


def test_a_date_key_equals_an_instant_by_its_date_in_utc(world: World) -> None:
    async def run() -> None:
        shard = await world.stores.shard("d", ShardSchema((Column("day", "date"), Column("n", "int64")), ("day",)))
        rows = {"day": pa.array([date(2025, 12, 31), date(2026, 1, 1)]), "n": pa.array([31, 1])}
        of_each = {TIME: pa.array([9, 9], pa.int64()), DIFF: pa.array([1, 1], pa.int64())}
        await shard.compare_and_append(0, 10, [await shard.write_part(pa.table({**rows, **of_each}))], "")
        await shard.aclose()

    world.portal.call(run())
    evening = datetime(2025, 12, 31, 19, tzinfo=timezone(timedelta(hours=-5)))
    for same in (evening, evening.astimezone(UTC)):
        for where in ([("day", "=", same)], pc.field("day") == pa.scalar(same)):
            assert world.cluster.table("d").to_arrow(where=where).column("n").to_pylist() == [1]
