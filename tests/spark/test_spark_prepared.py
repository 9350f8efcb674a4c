"""Prepared plans of derived functions, in real Spark: they equal the function on every round's rows, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from support.spark.known_clicks import Clicks
from tidemill.shards.api import Column
from tidemill.shards.parts.schema import arrow_type
from tidemill.spark import Pipeline
from tidemill.spark.derived import function_call
from tidemill.spark.derived.derivation import Derivation
from tidemill.spark.derived.prepared_plan import JobRanError, NotPreparedError, PreparedPlan, small_session
from tidemill.spark.types import spark_schema

pytestmark = pytest.mark.spark

LEFT = (Column("k", "int64"), Column("name", "string"), Column("at", "timestamp"), Column("day", "date"))
RIGHT = (Column("k", "int32"), Column("amount", "decimal(18,2)"), Column("share", "float64"), Column("raw", "binary"))
Function = Callable[..., Any]


def left_rows(*keys: int | None) -> pa.Table:
    moment = datetime(2026, 3, 29, 1, 30, tzinfo=UTC)
    rows = [(k, None if k == 3 else f"n{n}", moment, date(2026, 3, 28 + n % 2)) for n, k in enumerate(keys)]
    return rows_of(LEFT, rows)


def right_rows(*keys: int | None) -> pa.Table:
    return rows_of(RIGHT, [(k, Decimal(n * 11) / 100, n / 4, bytes([n])) for n, k in enumerate(keys)])


def rows_of(columns: tuple[Column, ...], rows: list[tuple[Any, ...]]) -> pa.Table:
    schema = pa.schema([(c.name, arrow_type(c.type)) for c in columns])
    return pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema=schema)


ROUNDS = (
    (left_rows(), right_rows()),
    (left_rows(1, 2, 3, None, 2), right_rows(2, 2, 4, None)),
    (left_rows(*range(50), *range(20)), right_rows()),
    (left_rows(5), right_rows(*range(40), *range(9))),
)
"""Rows of the two inputs in consecutive rounds; the first has none."""


def joined(_: Any, left: Any, right: Any) -> Any:
    from pyspark.sql import functions as f

    seen = left.groupBy("k").agg(f.count("*").alias("n"), f.max("at").alias("last"), f.collect_set("name").alias("x"))
    sold = right.groupBy("k").agg(f.sum("amount").alias("amount"), f.avg("share").alias("share"))
    return seen.withColumn("x", f.array_join(f.sort_array("x"), ",")).join(sold, "k", "full_outer")


def filtered(_: Any, left: Any, right: Any) -> Any:
    from pyspark.sql import functions as f

    hours = f.date_format("at", "yyyy-MM-dd HH:mm").alias("hour")  # in the session's time zone
    return left.filter("k > 1 and name is not null").select("k", hours, "day", f.lit(None).cast("string").alias("z"))


def total(_: Any, left: Any, right: Any) -> Any:
    from pyspark.sql import functions as f

    return right.agg(f.count("*").alias("n"), f.sum("amount").alias("amount"), f.max("raw").alias("raw"))


def with_itself(_: Any, left: Any, right: Any) -> Any:
    pairs = left.alias("a").join(left.alias("b"), "day").selectExpr("a.k as k", "b.name as other")
    return pairs.union(right.selectExpr("cast(k as long)", "hex(raw)")).distinct()


def ranked(spark: Any, left: Any, right: Any) -> Any:
    left.createOrReplaceTempView("prepared_left")
    return spark.sql(
        "select * from (select k, name, row_number() over (partition by k order by name) as place from prepared_left) "
        "where place < 3 order by k, place limit 7"
    )


@pytest.mark.parametrize("function", [joined, filtered, total, with_itself, ranked])
def test_a_prepared_plan_equals_the_function_in_every_round(spark: Any, function: Function) -> None:
    schemas = [spark_schema(LEFT), spark_schema(RIGHT)]
    plan = PreparedPlan(spark, small_session(spark), function, schemas)
    scheduler, results = spark.sparkContext._jsc.sc().dagScheduler(), []
    for rows in (*ROUNDS, ROUNDS[1]):
        frames = [spark.createDataFrame(given, schema) for given, schema in zip(rows, schemas, strict=True)]
        expected = function(spark, *frames).toArrow()
        jobs = scheduler.numTotalJobs()
        found = plan.run(rows)
        assert scheduler.numTotalJobs() == jobs + 1
        assert found.schema == expected.schema
        results.append(sorted(found.to_pylist(), key=repr))
        assert results[-1] == sorted(expected.to_pylist(), key=repr)
    assert results[1] == results[4] != results[3]


def by_time(_: Any, left: Any, right: Any) -> Any:
    return left.selectExpr("k", "current_date() as today")


def by_chance(_: Any, left: Any, right: Any) -> Any:
    return left.selectExpr("k", "rand() as chance")


def by_subquery(spark: Any, left: Any, right: Any) -> Any:
    left.createOrReplaceTempView("prepared_left")
    right.createOrReplaceTempView("prepared_right")
    return spark.sql("select k from prepared_left where k > (select max(k) from prepared_right)")


def by_other_rows(spark: Any, left: Any, right: Any) -> Any:
    return left.join(spark.range(10).withColumnRenamed("id", "k"), "k")


def by_range(_: Any, left: Any, right: Any) -> Any:
    return left.select("k").repartitionByRange(3, "k")


def by_broadcast(_: Any, left: Any, right: Any) -> Any:
    from pyspark.sql.functions import broadcast

    return left.join(broadcast(right), "k").select("k")


def by_python(_: Any, left: Any, right: Any) -> Any:
    from pyspark.sql import functions as f

    return left.select(f.udf(lambda name: name, "string")("name").alias("k"))


@pytest.mark.parametrize(
    ("function", "because"),
    [
        (by_time, "CURRENT_LIKE"),
        (by_chance, "not deterministic"),
        (by_subquery, "PLAN_EXPRESSION"),
        (by_other_rows, "RangeExec"),
        (by_range, "several partitions"),
        (by_broadcast, "BroadcastExchangeExec|BroadcastHashJoinExec"),
        (by_python, "PYTHON_UDF"),
    ],
)
def test_what_another_run_would_compute_differently_is_not_prepared(
    spark: Any, function: Function, because: str
) -> None:
    with pytest.raises(NotPreparedError, match=because):
        PreparedPlan(spark, small_session(spark), function, [spark_schema(LEFT), spark_schema(RIGHT)])


def test_a_function_that_reads_rows_is_not_prepared_even_if_it_hides_the_error(spark: Any) -> None:
    def hides(_: Any, left: Any) -> Any:
        try:
            many = left.count() > 2
        except Exception:
            many = False
        return left.selectExpr("k", f"{many} as many")

    with pytest.raises(JobRanError):
        PreparedPlan(spark, small_session(spark), hides, [spark_schema(LEFT)])


@pytest.mark.parametrize("eager", [False, True])
def test_rounds_equal_the_function_whether_or_not_it_is_prepared(
    harbour: Any, spark: Any, tmp_path: Path, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function is called once for all rounds of few rows, unless it looks at the rows itself. A plan that fails is
    replaced by the function in the same round."""
    clicks, p, calls = Clicks(harbour), Pipeline("p"), [0]

    @p.derived("counts", key="product", inputs="clicks", by="product")
    def counts(_: Any, clicks: Any) -> Any:
        calls[0] += 1
        if eager:
            clicks.count()
        return clicks.groupBy("product").count()

    derived = Derivation(harbour.portal, harbour.stores, spark, p.derived_tables["counts"], tmp_path / "m" / "counts")

    def round_of(keys: range, product: int | None) -> None:
        clicks.change(keys, product)
        assert derived.recompute()
        found = {row["product"]: row["count"] for row in harbour.contents("counts", clicks.upper - 1)}
        assert found == clicks.expected()

    clicks.change(range(100), 1)
    derived.open()
    rounds: list[tuple[range, int | None]] = [(range(7), 2), (range(3, 9), None), (range(0, 40, 3), 11), (range(9), 4)]
    for keys, product in rounds:
        round_of(keys, product)
    assert calls[0] == (1 + 1 + len(rounds) if eager else 2)
    assert ("cannot be called" in derived.function.not_prepared) == eager
    if eager:
        return

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as patched:
        patched.setattr(PreparedPlan, "run", fail)
        round_of(range(50, 60), 7)
    assert "planted" in derived.function.not_prepared
    monkeypatch.setattr(function_call, "SMALL_BYTES", 0)
    round_of(range(50, 60), 8)
    assert calls[0] == 4
