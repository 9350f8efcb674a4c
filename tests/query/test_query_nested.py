"""Nested columns as each reader's own types: Arrow, Polars, DuckDB, `tidemill sql`, and the page of a node."""

from __future__ import annotations

import json
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from support.query.world import World
from tidemill.base.errors import InvalidError
from tidemill.cli.sql import _run_query
from tidemill.shapes.shards.pg_text import text_columns
from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.shards.parts.schema import contents_schema

polars = pytest.importorskip("polars")

SCHEMA = ShardSchema(
    (
        Column("tags", "array<string>"),
        Column("who", "struct<name:string,sizes:array<int16>,`at s`:timestamp>"),
        Column("m", "map<string,decimal(5,2)>"),
        Column("id", "int64"),
    ),
    ("id",),
)
WHO = {"name": "a", "sizes": [1, None, -3], "at s": None}
ROWS: list[dict[str, Any]] = [
    {"tags": ["x", None], "who": WHO, "m": [("a", None), ("b", None)], "id": 1},
    {"tags": [], "who": None, "m": [], "id": 2},
    {"tags": None, "who": {"name": None, "sizes": None, "at s": None}, "m": None, "id": 3},
]


def fill(world: World) -> None:
    """Write the rows, of which the merge leaves the first two in a part for engines, and the last in an update."""

    async def run() -> None:
        shard = await world.stores.shard("t", SCHEMA)
        for upper, rows in ((10, ROWS[:2]), (20, ROWS[2:])):
            lower = (await shard.frontiers())[1]
            table = pa.Table.from_pylist(rows, contents_schema(SCHEMA))
            for name, value in ((TIME, upper - 1), (DIFF, 1)):
                table = table.append_column(name, pa.array([value] * len(rows), pa.int64()))
            await shard.compare_and_append(lower, upper, [await shard.write_part(table)], "")
        await shard.aclose()

    world.portal.call(run())
    world.merge(9, "t")


def test_every_reader_has_its_own_nested_types_and_the_same_values(world: World, monkeypatch: Any) -> None:
    from tidemill.shards.read import read_plan

    monkeypatch.setattr(read_plan, "SMALL_BYTES", 0)
    fill(world)
    table = world.cluster.table("t")
    arrow = table.to_arrow()
    assert arrow.schema == contents_schema(SCHEMA)
    assert sorted(arrow.to_pylist(), key=lambda row: row["id"]) == ROWS
    assert table.to_arrow(where=[("id", "=", 1)], columns=["who"]).to_pylist() == [{"who": WHO}]
    assert table.to_arrow(where=pc.field("tags").is_null(), columns=["id"]).to_pylist() == [{"id": 3}]
    with pytest.raises(InvalidError, match="the filter cannot be applied"):
        table.to_arrow(where=[("tags", "=", "x")])
    with duckdb.connect() as connection:
        table.to_duckdb(connection)
        kinds = connection.execute("SELECT typeof(tags), typeof(who), typeof(m) FROM t LIMIT 1").fetchall()
        assert kinds == [
            ("VARCHAR[]", 'STRUCT("name" VARCHAR, sizes SMALLINT[], "at s" TIMESTAMP WITH TIME ZONE)',
             "MAP(VARCHAR, DECIMAL(5,2))")
        ]  # fmt: skip
        found = connection.execute("SELECT tags, who, m, id FROM t ORDER BY id").fetchall()
        none = ROWS[2]["who"]
        assert found == [(["x", None], WHO, {"a": None, "b": None}, 1), ([], None, {}, 2), (None, none, None, 3)]
        assert connection.execute("SELECT id FROM t WHERE list_contains(tags, 'x')").fetchall() == [(1,)]
        columns, rows = _run_query(connection, "SELECT tags, m, who FROM t ORDER BY id LIMIT 1")
        assert (columns, rows[0][:2]) == (["tags", "m", "who"], (["x", None], {"a": None, "b": None}))
        assert rows[0][2] == "{'name': a, 'sizes': [1, NULL, -3], 'at s': NULL}"


def test_polars_has_the_same_values(world: World, monkeypatch: Any) -> None:
    from tidemill.shards.read import read_plan

    monkeypatch.setattr(read_plan, "SMALL_BYTES", 0)
    fill(world)
    table = world.cluster.table("t")
    scanned = table.scan_polars().sort("id").collect()
    assert scanned.equals(table.to_polars().sort("id"))
    assert scanned.schema["who"].fields[1].dtype == polars.List(polars.Int16)
    assert scanned["who"].to_list()[0] == WHO
    assert table.scan_polars().filter(polars.col("tags").list.len() == 2).select("id").collect()["id"].to_list() == [1]


def test_a_nested_value_is_shown_as_json() -> None:
    types = "array<struct<f:float32,b:bool,d:decimal(5,2),t:timestamp,n:timestamp_ntz,x:binary,m:map<int32,date>>>"
    schema = ShardSchema((Column("id", "int64"), Column("v", types)), ("id",))
    kind = contents_schema(schema).field("v").type
    inner = {"f": 0.1, "b": True, "d": None, "t": 1_500_000, "n": 0, "x": b"\x00", "m": [(-1, 0), (2, None)]}
    column = pa.chunked_array([pa.array([None, [], [inner, None]], kind).slice(1), pa.array([None], kind)])
    empty, full, null = text_columns(pa.table({"v": column}), ["v"])[0]
    assert (empty, null) == ("[]", None)
    assert full is not None and json.loads(full) == [
        {"f": 0.1, "b": True, "d": None, "t": "1970-01-01T00:00:01.5+00:00", "n": "1970-01-01T00:00:00", "x": "\\x00",
         "m": {"-1": "1970-01-01", "2": None}}, None
    ]  # fmt: skip
    special = pa.array([[float("nan"), float("-inf"), -0.0, 1e20]], pa.list_(pa.float64()))
    assert text_columns(pa.table({"v": special}), ["v"]) == [['["NaN","-Infinity",-0,1e+20]']]
