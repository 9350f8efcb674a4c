"""DataFrames written into shards in a real session without an explicit registration of the data source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.spark.frames import config as config
from support.spark.frames import rows, save
from tidemill.base.errors import MissingError

pytestmark = pytest.mark.spark


def read(spark: Any, config: str, name: str) -> list[tuple[Any, ...]]:
    return rows(spark.read.format("tidemill").option("config", config).load(name))


def staged(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "objects" / "shards" / "staged").rglob("*") if path.is_file()]


def test_append_is_an_upsert_and_overwrite_the_contents(harbour: Any, spark: Any, config: str, tmp_path: Path) -> None:
    many = spark.range(60_000).selectExpr("id AS k", "concat('value ', id) AS v")
    save(many, config, "t", key="k")
    save(spark.createDataFrame([(1, "one"), (2, "value 2"), (-1, "new")], "k long, v string"), config, "t")
    found = spark.read.format("tidemill").option("config", config).load("t")
    assert found.count() == 60_001
    assert rows(found.where("k IN (-1, 1, 2, 3)")) == [(-1, "new"), (1, "one"), (2, "value 2"), (3, "value 3")]
    gone = found.where("k > 3").selectExpr("k", "true AS gone")
    save(gone, config, "t", delete="gone")
    assert read(spark, config, "t") == [(-1, "new"), (0, "value 0"), (1, "one"), (2, "value 2"), (3, "value 3")]
    upper = harbour.upper("t")
    save(
        spark.createDataFrame([("x", 1, 0.5)], "v string, k int, w double"), config, "t", "overwrite", mergeSchema=True
    )
    assert read(spark, config, "t") == [(1, "x", 0.5)]
    before = spark.read.format("tidemill").options(config=config, as_of=upper - 1).load("t")
    assert before.count() == 5 and before.where("w IS NOT NULL").count() == 0
    save(spark.createDataFrame([], "k long, v string, w double"), config, "t", "overwrite")
    assert read(spark, config, "t") == []
    assert not staged(tmp_path), "nothing stays behind"


def test_what_cannot_be_written_makes_no_shard(harbour: Any, spark: Any, config: str) -> None:
    frame = spark.range(60_000).selectExpr("id AS k", "concat('value ', id) AS v")
    with pytest.raises(Exception, match=r"no such table: table=t\. Set option key"):
        save(frame, config, "t")
    with pytest.raises(Exception, match=r"divide|DIVIDE_BY_ZERO"):
        save(frame.selectExpr("k", "1 / (k - 59999) AS v"), config, "t", key="k")
    with pytest.raises(Exception, match=r"a key occurs twice: k=77 "):
        save(frame.union(frame.where("k = 77")), config, "t", key="k")
    with pytest.raises(MissingError):
        harbour.shard("t")


def test_sql_inserts_through_a_view(harbour: Any, spark: Any, config: str) -> None:
    save(spark.createDataFrame([(1, "a"), (2, "b")], "k long, v string"), config, "t", key="k")
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW seen USING tidemill OPTIONS (shard 't', config '{config}')")
    spark.sql("INSERT INTO seen VALUES (2, 'c'), (3, 'd')")
    spark.sql("INSERT INTO seen (v, k) SELECT concat(v, '!'), k FROM seen WHERE k = 1")
    assert read(spark, config, "t") == [(1, "a!"), (2, "c"), (3, "d")]
    spark.sql("INSERT OVERWRITE seen VALUES (5, 'e')")
    assert read(spark, config, "t") == [(5, "e")]
    spark.sql("DROP VIEW seen")


def test_a_table_of_the_catalogue_takes_inserts_when_it_is_told_the_shard(
    harbour: Any, spark: Any, config: str
) -> None:
    save(spark.createDataFrame([(5, "e")], "k long, v string"), config, "t", key="k")
    spark.sql(f"CREATE TABLE stock USING tidemill OPTIONS (table 't', config '{config}')")
    try:
        save(spark.createDataFrame([(1, "a")], "k long, v string"), config, "other", key="k")
        spark.sql(f"INSERT INTO stock WITH (table = 't', config = '{config}') VALUES (6, 'f')")
        assert rows(spark.table("stock")) == [(5, "e"), (6, "f")]
        for said in ("INSERT INTO stock VALUES (7, 'g')", "INSERT INTO stock SELECT * FROM stock"):
            with pytest.raises(Exception, match=r"no table is named.*INSERT INTO t WITH \(table"):
                spark.sql(said)
        spark.table("stock").writeTo("stock").options(table="other", config=config).append()
        assert read(spark, config, "other") == [(1, "a"), (5, "e"), (6, "f")], "not into what it was read from"
    finally:
        spark.sql("DROP TABLE stock")
