"""Nested columns in real Spark: derived tables, both readers, changes, and writes of frames."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException

from support.spark.frames import config, save
from support.spark.wide_table import merge
from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.shards.parts.row_hash import hash_rows
from tidemill.shards.parts.schema import check_schema, contents_schema, update_schema
from tidemill.spark import Pipeline, read
from tidemill.spark.derived.derivation import Derivation
from tidemill.spark.source.changes import ChangesReader
from tidemill.spark.source.options import SourceOptions
from tidemill.spark.table_reader import frame_at
from tidemill.spark.types import local_frame, spark_schema

pytestmark = pytest.mark.spark
__all__ = ["config"]

COLUMNS = (
    Column("tags", "array<string>"),
    Column("who", "struct<name:string,sizes:array<int16>,at:timestamp,`d y`:array<timestamp_ntz>>"),
    Column("m", "map<string,struct<f:float64,d:decimal(5,2)>>"),
    Column("k", "int32"),
)
SCHEMA = check_schema(ShardSchema(COLUMNS, ("k",)))


def value(key: int) -> dict[str, Any]:
    inner = [("a", {"f": float("nan"), "d": None}), ("b", None), ("é", {"f": -0.0, "d": None})]
    return {
        "tags": None if key % 5 == 0 else ["x", None][: key % 3],
        "who": None if key % 7 == 0 else {"name": None, "sizes": [key % 100, None], "at": key, "d y": [key, None]},
        "m": None if key % 4 == 0 else inner[: key % 4],
        "k": key,
    }


def rows(keys: range) -> pa.Table:
    return pa.Table.from_pylist([value(key) for key in keys], contents_schema(SCHEMA))


def append(harbour: Any, lower: int, table: pa.Table, diff: int, name: str = "odd") -> None:
    call, shard = harbour.portal.call, harbour.portal.call(harbour.stores.shard(name, SCHEMA))
    for column, number in ((TIME, lower), (DIFF, diff)):
        table = table.append_column(column, pa.array([number] * table.num_rows, pa.int64()))
    part = call(shard.write_part(table.cast(update_schema(SCHEMA))))
    call(shard.compare_and_append(lower, lower + 1, (part,), f"{lower}"))


def texts(table: pa.Table) -> list[str]:
    """Return rows as texts by which all values differ, NaN and −0.0 too."""
    same = table.select(contents_schema(SCHEMA).names).cast(contents_schema(SCHEMA))
    return sorted(map(repr, same.to_pylist()))


def test_derived_tables_have_nested_columns(spark: Any, harbour: Any, tmp_path: Path) -> None:
    p = Pipeline("p")

    @p.derived("same", key="k", inputs=("odd",))
    def same(spark: Any, odd: Any) -> Any:
        return odd

    @p.derived("nested", key="k", inputs=("odd",), by="k")
    def nested(spark: Any, odd: Any) -> Any:
        from pyspark.sql import functions as f

        return odd.groupBy("k").agg(f.collect_list("who").alias("all"), f.map_from_arrays(
            f.array(f.lit("z"), f.lit("a")), f.array(f.lit(1), f.first("k"))).alias("by_name"))  # fmt: skip

    derived = {
        name: Derivation(harbour.portal, harbour.stores, spark, table, tmp_path / "driver" / "mirrors" / name)
        for name, table in p.derived_tables.items()
    }
    append(harbour, 0, rows(range(1, 20)), 1)
    for one in derived.values():
        one.open()
        assert one.recompute()
    append(harbour, 1, rows(range(1, 4)), -1)
    append(harbour, 2, rows(range(30, 33)), 1)
    expected = pa.concat_tables([rows(range(4, 20)), rows(range(30, 33))])
    for one in derived.values():
        assert one.recompute() and one.writer is not None
    call = harbour.portal.call
    assert texts(call(derived["same"].writer.shard.snapshot(2))) == texts(expected)  # type: ignore[union-attr]
    shard = derived["nested"].writer.shard  # type: ignore[union-attr]
    assert {c.name: c.type for c in shard.schema.columns} == {
        "k": "int32", "all": f"array<{COLUMNS[1].type}>", "by_name": "map<string,int32>"
    }  # fmt: skip
    found = {row["k"]: row for row in call(shard.snapshot(2)).to_pylist()}
    assert sorted(found) == sorted(expected.column("k").to_pylist())
    assert found[5]["by_name"] == [("a", 5), ("z", 1)] and found[7]["all"] == []
    assert found[8]["all"][0]["sizes"] == [8, None]


def test_a_small_input_with_nested_columns_goes_on_after_a_deletion(spark: Any, harbour: Any, tmp_path: Path) -> None:
    p = Pipeline("p")

    @p.derived("sizes", key="k", inputs=("odd",))
    def sizes(spark: Any, odd: Any) -> Any:
        return odd.selectExpr(
            "k", "coalesce(size(m), 0) AS n", "current_date() AS day"
        )  # the day prevents a prepared plan

    one = Derivation(harbour.portal, harbour.stores, spark, p.derived_tables["sizes"], tmp_path / "driver" / "mirrors")
    every = rows(range(1, 30))
    append(harbour, 0, every, 1)
    one.open()
    assert one.recompute()
    deleted = int(np.argmin(hash_rows(every, ["k"])))
    append(harbour, 1, every.slice(deleted, 1), -1)
    assert one.recompute() and one.function.not_prepared
    wanted = {key: len(value(key)["m"] or ()) for key in range(1, 30) if key != deleted + 1}
    assert {row["k"]: row["n"] for row in harbour.contents("sizes")} == wanted
    shard, where = harbour.shard("odd"), {"objects": harbour.urls.objects, "consensus": harbour.urls.consensus}
    frame, because = frame_at(spark, harbour.portal, harbour.stores, shard, 1, where, again=True)
    assert not because and texts(frame.toArrow()) == texts(harbour.portal.call(shard.snapshot(1)))


def test_slices_of_nested_values_become_frames(spark: Any) -> None:
    columns = [
        Column("lists", "array<array<timestamp>>"),
        Column("structs", "struct<a:array<struct<x:int32>>,m:map<string,timestamp_ntz>>"),
        Column("maps", "map<int32,array<timestamp>>"),
    ]
    at = datetime(2026, 3, 8, 2, 30)
    inner = {"a": [None, {"x": 1}], "m": [("n", at), ("o", None)]}
    given = [
        {"lists": [None, [at, None]], "structs": {"a": None, "m": None}, "maps": [(1, None), (2, [at])]},
        {"lists": None, "structs": None, "maps": None},
        {"lists": [[]], "structs": inner, "maps": []},
        {"lists": [None, [at]], "structs": {"a": [], "m": []}, "maps": [(1, [None])]},
    ]
    whole = pa.Table.from_pylist(given, contents_schema(ShardSchema((*columns, Column("k", "int32")), ("k",))))
    whole = whole.drop_columns("k")
    within = [pa.StructArray.from_arrays([c.chunk(0).slice(1)], ["c"]) for c in whole.columns]
    for rows in (whole.slice(1), whole.slice(3), whole.slice(4), pa.concat_tables([whole.slice(1, 2), whole.slice(2)]),
                 pa.table([pa.chunked_array([], c.type) for c in whole.columns], schema=whole.schema)):  # fmt: skip
        assert local_frame(spark, rows, spark_schema(columns)).toArrow().to_pylist() == rows.to_pylist()
    sliced_within = [Column(c.name, f"struct<c:{c.type}>") for c in columns]
    table = pa.table(within, names=[c.name for c in columns])
    assert local_frame(spark, table, spark_schema(sliced_within)).toArrow().to_pylist() == table.to_pylist()


def test_spark_reads_nested_columns_from_files_and_through_the_source(
    spark: Any, harbour: Any, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tidemill.shards.read import read_plan

    append(harbour, 0, rows(range(3000)), 1)
    merge(harbour, "odd", 0)
    append(harbour, 1, rows(range(0, 3000, 9)), -1)
    wanted = texts(harbour.portal.call(harbour.shard("odd").snapshot(1, 10)))
    monkeypatch.setattr(read_plan, "SMALL_BYTES", 0)
    frame = read(spark, "odd", config=config)
    assert "parquet" in frame._jdf.queryExecution().toString()
    assert texts(frame.toArrow()) == wanted
    assert frame.where("array_contains(tags, 'x') and k < 10").count() == sum(
        "x" in (value(k)["tags"] or []) and k % 9 != 0 for k in range(10)
    )
    source = spark.read.format("tidemill").option("config", config)
    assert texts(source.load("odd").toArrow()) == wanted
    schema = frame.schema.add(TIME, "long").add(DIFF, "long")
    urls = {"objects": harbour.urls.objects, "consensus": harbour.urls.consensus}
    changes = ChangesReader(SourceOptions({"table": "odd", "changes": "true", **urls}), schema)
    end = changes.latestOffset(changes.initialOffset(), changes.getDefaultReadLimit())
    found = [batch for part in changes.partitions({"ts": 0}, end) for batch in changes.read(part)]
    seen = pa.Table.from_batches(found)
    assert texts(seen) == wanted and set(seen.column(DIFF).to_pylist()) == {1}


def test_a_frame_with_nested_columns_is_written_with_maps_in_order(spark: Any, harbour: Any, config: str) -> None:
    frame = spark.sql("SELECT 1 AS k, map('b', 1, 'a', 2) AS m, array(named_struct('x', 1S)) AS s")
    save(frame, config, "new", key="k")
    shard = harbour.shard("new")
    assert {c.name: c.type for c in shard.schema.columns} == {
        "k": "int32", "m": "map<string,int32>", "s": "array<struct<x:int16>>"
    }  # fmt: skip
    upper = harbour.portal.call(shard.frontiers())[1]
    assert harbour.portal.call(shard.snapshot(upper - 1)).to_pylist() == [
        {"k": 1, "m": [("a", 2), ("b", 1)], "s": [{"x": 1}]}
    ]
    with pytest.raises(AnalysisException, match="cannot be part of a key: column=m"):
        save(frame, config, "other", key="m")
    again = spark.sql("SELECT 1 AS k, map('a', 2, 'b', 1) AS m, array(named_struct('x', 1S)) AS s")
    save(again, config, "new")
    updates = harbour.portal.call(shard.snapshot(harbour.portal.call(shard.frontiers())[1] - 1))
    assert updates.num_rows == 1
