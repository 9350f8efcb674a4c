"""Reading shards in a real session without an explicit registration of the data source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from support.spark.frames import config as config
from support.spark.frames import rows
from tidemill.shards.api import DIFF, TIME, Column, HistoryLostError, ShardSchema
from tidemill.spark.source.batch import ShardReader
from tidemill.spark.source.options import SourceOptions
from tidemill.spark.types import spark_schema

pytestmark = pytest.mark.spark

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
SCHEMA = ShardSchema((Column("k", "int64"), Column("v", "string")), ("k",))
Row = tuple[int | None, str | None, int, int]


def append(harbour: Any, name: str, lower: int, upper: int, rows: list[Row], schema: ShardSchema = SCHEMA) -> None:
    """One batch of (k, v, time, diff)."""
    kinds = (pa.int64(), pa.string(), pa.int64(), pa.int64())
    columns = [pa.array(c, t) for c, t in zip(zip(*rows, strict=True), kinds, strict=True)] if rows else []
    table = pa.table(dict(zip(("k", "v", TIME, DIFF), columns, strict=False)))

    async def run() -> None:
        shard = await harbour.stores.shard(name, schema)
        parts = [await shard.write_part(table)] if rows else []
        await shard.compare_and_append(lower, upper, parts, "")

    harbour.portal.call(run())


def test_a_shard_is_read_by_name_and_configuration_in_every_way_spark_has(
    harbour: Any, spark: Any, config: str
) -> None:
    append(harbour, "t", 0, 10, [(1, "a", 5, 1), (2, "b", 6, 1)])
    append(harbour, "t", 10, 20, [(1, "a", 12, -1), (1, "c", 12, 1)])
    append(harbour, "empty", 0, 10, [])
    read = spark.read.format("tidemill").option("config", config)
    newest, before = [(1, "c"), (2, "b")], [(1, "a"), (2, "b")]
    assert rows(read.option("table", "t").load()) == rows(read.load("t")) == newest
    assert rows(spark.read.format("tidemill").options(shard="t", config=config).load()) == newest, "the earlier name"
    assert rows(read.option("as_of", "1970-01-01T00:00:00.011").load("t")) == before
    assert rows(spark.read.format("tidemill").options(config=config, AS_OF="latest").load("t")) == newest
    assert rows(spark.read.format("tidemill").option("config", config).schema("v string").load("t")) == [("b",), ("c",)]

    empty = spark.read.format("tidemill").option("config", config).load("empty")
    assert (empty.columns, empty.collect(), empty.count()) == (["k", "v"], [], 0)

    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW seen USING tidemill OPTIONS (table 't', config '{config}')")
    assert rows(spark.sql("SELECT v FROM seen WHERE k = 1")) == [("c",)]
    spark.sql(f"CREATE TABLE kept USING tidemill OPTIONS (path 't', config '{config}') COMMENT 'of a shard'")
    try:
        assert rows(spark.table("kept")) == newest
        assert rows(spark.sql("SELECT * FROM kept WITH (as_of = 11)")) == before
        append(harbour, "t", 20, 30, [(3, None, 25, 1)])
        assert rows(spark.table("kept")) == [*newest, (3, None)]
    finally:
        spark.sql("DROP TABLE kept")


@pytest.mark.parametrize(
    ("options", "schema", "said"),
    [
        ({"tabel": "t"}, None, "Did you mean table"),
        ({"table": "t", "shard": "u"}, None, "two tables are named: table=t shard=u"),
        ({"shard": "t", "as_of": "99"}, None, "time is not readable.*as_of=99"),
        ({"shard": "t", "rows": "true"}, None, "has no effect on a batch read: option=rows"),
        ({"shard": "t"}, "v long", "column=v wanted=bigint there=string"),
        ({"shard": "t"}, "w long", "column=w wanted=bigint there=no such column"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_sentence(
    harbour: Any, spark: Any, config: str, options: dict[str, str], schema: str | None, said: str
) -> None:
    append(harbour, "t", 0, 10, [(1, "a", 5, 1)])
    harbour.portal.call(harbour.shard("t").close())
    read = spark.read.format("tidemill").options(config=config, **options)
    with pytest.raises(Exception, match=said):
        (read.schema(schema) if schema else read).load().collect()


def test_a_large_shard_is_read_in_ranges_and_a_key_in_one(harbour: Any, spark: Any, config: str) -> None:
    count = 1_200_000
    k = np.arange(count)

    def batch(at: int, keys: Any, values: Any, diff: int) -> pa.Table:
        n = len(keys)
        columns = {"k": pa.array(keys), "v": pa.array(values), TIME: pa.array(np.full(n, at))}
        return pa.table({**columns, DIFF: pa.array(np.full(n, diff))})

    async def run() -> None:
        shard = await harbour.stores.shard("large", SCHEMA)
        await shard.compare_and_append(0, 10, [await shard.write_part(batch(5, k, ["a"] * count, 1))], "")
        changed = np.append(np.arange(0, count, 1000), 7)
        lost = await shard.write_part(batch(15, changed, ["a"] * len(changed), -1))
        won = await shard.write_part(batch(15, changed, ["b"] * len(changed), 1))
        await shard.compare_and_append(10, 20, [lost, won], "")

    harbour.portal.call(run())
    frame = spark.read.format("tidemill").option("config", config).load("large")
    assert frame.rdd.getNumPartitions() == 3
    seen = {r.v: (r["count(1)"], r["sum(k)"]) for r in frame.groupBy("v").agg({"*": "count", "k": "sum"}).collect()}
    changed = {7, *range(0, count, 1000)}
    assert seen == {"b": (1201, sum(changed)), "a": (count - 1201, count * (count - 1) // 2 - sum(changed))}

    assert {r.k for r in frame.where("k IN (7, 8, -1)").collect()} == {7, 8}


@pytest.mark.parametrize("pushdown", ["false", "true"])
def test_a_filter_of_one_query_says_nothing_about_the_next(
    harbour: Any, spark: Any, config: str, pushdown: str
) -> None:
    """Spark plans a frame once, in every session, and gives the same partitions to frames derived from it later."""
    append(harbour, "t", 0, 10, [(1, "a", 5, 1), (2, "b", 6, 1)])
    before = spark.conf.get(PUSHDOWN)
    try:
        spark.conf.set(PUSHDOWN, pushdown)
        frame = spark.read.format("tidemill").option("config", config).load("t")
        assert rows(frame.where("k = 1")) == [(1, "a")]
        assert rows(frame.select("*")) == [(1, "a"), (2, "b")]
        spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW filtered USING tidemill OPTIONS (shard 't', config '{config}')")
        assert rows(spark.sql("SELECT * FROM filtered WHERE k = 2")) == [(2, "b")]
        assert rows(spark.sql("SELECT * FROM filtered")) == [(1, "a"), (2, "b")]
    finally:
        spark.conf.set(PUSHDOWN, before)


def test_a_frame_says_so_when_what_it_planned_was_let_go(harbour: Any) -> None:
    append(harbour, "t", 0, 10, [(k, str(k * 7919**5), 5, 1) for k in range(9000)])
    urls = {"objects": harbour.urls.objects, "consensus": harbour.urls.consensus}
    reader = ShardReader(SourceOptions({"shard": "t", **urls}), spark_schema(SCHEMA.columns))
    (partition,) = reader.partitions()
    assert sum(batch.num_rows for batch in reader.read(partition)) == 9000

    async def let_go() -> None:
        for batch in await (await harbour.stores.shard("t")).batches(0):
            for part in batch.parts:
                await harbour.stores.objects.delete(part.object_key)

    harbour.portal.call(let_go())
    with pytest.raises(HistoryLostError, match="that this frame read at its first query"):
        list(reader.read(partition))


def stream(spark: Any, config: str, root: Path, name: str = "table", **options: Any) -> list[tuple[Any, ...]]:
    """Everything that came to this directory, after what is there now came too: (k, v, _time, _diff)."""
    frame = spark.readStream.format("tidemill").options(**{name: "t", **options}, changes=True, config=config).load()
    assert frame.columns == ["k", "v", TIME, DIFF]
    out = str(root / "out")
    query = frame.writeStream.format("parquet").option("checkpointLocation", str(root / "checkpoint"))
    query.trigger(availableNow=True).start(out).awaitTermination(60)
    return rows(spark.read.schema(frame.schema).parquet(out))


def test_a_changelog_is_the_contents_and_then_every_update_over_restarts(
    harbour: Any, spark: Any, config: str, tmp_path: Path
) -> None:
    append(harbour, "t", 0, 10, [(1, "a", 5, 1), (2, "b", 6, 1)])
    append(harbour, "t", 10, 20, [(1, "a", 12, -1), (1, "c", 12, 1)])
    first = [(1, "c", 19, 1), (2, "b", 19, 1)]
    assert stream(spark, config, tmp_path) == first
    append(harbour, "t", 20, 30, [(2, "b", 21, -1), (None, None, 25, 1)])
    append(harbour, "t", 30, 40, [(1, "c", 35, -1), (1, "d", 35, 1)])
    later = [(1, "c", 35, -1), (1, "d", 35, 1), (2, "b", 21, -1), (None, None, 25, 1)]
    assert stream(spark, config, tmp_path, max_rows=2) == sorted([*first, *later], key=repr)
    for name in ("table", "shard"):
        assert stream(spark, config, tmp_path, name) == sorted([*first, *later], key=repr), "nothing twice"
    assert stream(spark, config, tmp_path / "late", start=25) == [r for r in later if r[2] >= 25]

    append(harbour, "old", 0, 40, [(1, "a", 5, 1)])
    harbour.portal.call(harbour.shard("old").downgrade_since("keeper", 1, 30))
    with pytest.raises(Exception, match=r"history is lost: table=old .*since=30"):
        stream(spark, config, tmp_path / "lost", table="old", start=25)
