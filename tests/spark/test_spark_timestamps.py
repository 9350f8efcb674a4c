"""Spark's TIMESTAMP and TIMESTAMP_NTZ are the two types of shards, written and read in a session of any time zone."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from structlog.testing import capture_logs

from support.spark.frames import config as config  # a fixture
from support.spark.frames import save
from support.spark.running import error_of, pipeline
from support.spark.wide_table import append, explained, merge
from support.waiting import eventually
from tidemill.cli.verify.postgres import SourceColumn
from tidemill.cli.verify.table import column_difference
from tidemill.shards.api import DIFF, Column, ShardSchema
from tidemill.shards.parts.schema import update_schema
from tidemill.spark import read

pytestmark = pytest.mark.spark

SCHEMA = ShardSchema(
    (Column("k", "timestamp_ntz"), Column("clock", "timestamp_ntz"), Column("at", "timestamp")), ("k",)
)
HOUR = 3_600_000_000


@pytest.fixture
def elsewhere(spark: Any) -> Iterator[Any]:
    """A session with a time zone other than UTC."""
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    yield spark
    spark.conf.set("spark.sql.session.timeZone", before)


def rows(hours: range, time: int) -> pa.Table:
    numbers = pa.array([hour * HOUR for hour in hours], pa.int64())
    clock, count = numbers.cast(pa.timestamp("us")), len(hours)
    columns = [clock, clock, numbers.cast(pa.timestamp("us", "UTC")), pa.array([time] * count), pa.array([1] * count)]
    return pa.table(columns, schema=update_schema(SCHEMA))


def test_a_plan_and_the_data_source_give_clocks_as_they_are_and_filter_them(harbour: Any, elsewhere: Any) -> None:
    spark = elsewhere
    append(harbour, "t", 5, rows(range(-20_000, 20_000), 3), schema=SCHEMA)
    merge(harbour, "t", 4)
    append(harbour, "t", 9, rows(range(20_000, 20_010), 7), schema=SCHEMA)
    where = {"objects": harbour.urls.objects, "consensus": harbour.urls.consensus}
    planned = read(spark, "t", **where)
    assert "parquet" in planned._jdf.queryExecution().toString().lower()
    asked = ("count(*)", "count_if(k > TIMESTAMP_NTZ '1970-01-01 09:00:00')", "count_if(clock = at)",
             "max_by(CAST(clock AS STRING), clock = TIMESTAMP_NTZ '1970-01-01 09:00:00')",
             "max_by(CAST(at AS STRING), clock = TIMESTAMP_NTZ '1970-01-01 09:00:00')")  # fmt: skip
    for frame in (planned, spark.read.format("tidemill").options(table="t", **where).load()):
        assert [f.dataType.simpleString() for f in frame.schema] == ["timestamp_ntz", "timestamp_ntz", "timestamp"]
        found = frame.selectExpr(*asked).first()
        # Spark itself compares the two by the session's zone.
        assert tuple(found) == (40_010, 20_000, 0, "1970-01-01 09:00:00", "1970-01-01 04:00:00")
    nine = planned.where("clock = TIMESTAMP_NTZ '1970-01-01 09:00:00'").toArrow()
    assert nine.column("k").cast(pa.int64()).to_pylist() == [9 * HOUR]


@pytest.mark.parametrize("clock", ["1971-04-25T03", "1971-04-25T02", "1971-10-31T01"])
def test_a_clock_near_one_that_the_sessions_zone_skips_or_repeats_is_replaced_alone(
    harbour: Any, elsewhere: Any, clock: str
) -> None:
    hour = (datetime.fromisoformat(clock) - datetime(1970, 1, 1)) // timedelta(hours=1)
    append(harbour, "t", 5, rows(range(-20_000, 20_000), 3), schema=SCHEMA)
    merge(harbour, "t", 4)
    new = rows(range(hour, hour + 1), 7)
    old = new.set_column(new.column_names.index(DIFF), new.schema.field(DIFF), pa.array([-1]))
    append(harbour, "t", 9, pa.concat_tables([old, new]), schema=SCHEMA)
    frame = read(elsewhere, "t", objects=harbour.urls.objects, consensus=harbour.urls.consensus)
    assert "LeftAnti" in explained(elsewhere, frame)
    found = sorted(frame.toArrow().column("k").cast(pa.int64()).to_pylist())
    assert found == [hour * HOUR for hour in range(-20_000, 20_000)]


def test_a_frame_writes_both_and_neither_in_place_of_the_other(harbour: Any, elsewhere: Any, config: str) -> None:
    spark = elsewhere
    frame = spark.sql("SELECT TIMESTAMP_NTZ '2026-01-02 03:04:05' AS k, TIMESTAMP '2026-01-02 03:04:05' AS at")
    save(frame, config, "t", key="k")
    assert [c.type for c in harbour.shard("t").schema.columns] == ["timestamp_ntz", "timestamp"]
    (found,) = harbour.contents("t")
    assert (str(found["k"]), str(found["at"])) == ("2026-01-02 03:04:05", "2026-01-02 08:04:05+00:00")
    save(frame.selectExpr("k", "at + INTERVAL 1 HOUR AS at"), config, "t")
    assert [str(row["at"]) for row in harbour.contents("t")] == ["2026-01-02 09:04:05+00:00"], "the key is found again"
    for wrong in (("k", "CAST(at AS TIMESTAMP_NTZ) AS at"), ("CAST(k AS TIMESTAMP) AS k", "at")):
        with pytest.raises(Exception, match=r"the DataFrame's columns differ from the table's"):
            save(frame.selectExpr(*wrong), config, "t", mergeSchema=True)


def test_a_frame_writes_both_within_nested_values(harbour: Any, elsewhere: Any, config: str) -> None:
    made = ("array(at) AS a", "named_struct('at', at, 'k', k) AS s", "map(2Y, at, 1Y, null) AS m", "array(-1Y) AS y")
    values = "SELECT TIMESTAMP_NTZ '2026-01-02 03:04:05' AS k, TIMESTAMP '2026-01-02 03:04:05' AS at"
    save(elsewhere.sql(values).selectExpr("k", *made), config, "t", key="k")
    assert [c.type for c in harbour.shard("t").schema.columns[1:]] == [
        "array<timestamp>", "struct<at:timestamp,k:timestamp_ntz>", "map<int16,timestamp>",
        "array<int16>",
    ]  # fmt: skip
    clock, at = datetime(2026, 1, 2, 3, 4, 5), datetime(2026, 1, 2, 8, 4, 5, tzinfo=UTC)
    (found,) = harbour.contents("t")
    assert found == {"k": clock, "a": [at], "s": {"at": at, "k": clock}, "m": [(1, None), (2, at)], "y": [-1]}
    elsewhere.conf.set("spark.sql.execution.arrow.useLargeVarTypes", "true")
    try:
        save(elsewhere.sql("SELECT 1 AS k, array('x') AS s, map('y', X'01') AS m"), config, "l", key="k")
    finally:
        elsewhere.conf.unset("spark.sql.execution.arrow.useLargeVarTypes")
    assert harbour.contents("l") == [{"k": 1, "s": ["x"], "m": [("y", b"\x01")]}]


TABLES = {"public.t": [("id", "integer", 0), ("clock", "timestamp without time zone", -1),
                       ("at", "timestamp with time zone", -1)]}  # fmt: skip
PIPELINE = 'def build(p):\n    p.table("t", p.capture("shop").table("t"))\n'
OLD = ShardSchema((Column("id", "int32"), Column("clock", "timestamp"), Column("at", "timestamp")), ("id",))


def commit(harbour: Any, topic: Any, time_ms: int, *values: tuple[int, str, str]) -> None:
    harbour.produce(topic, [({"id": i}, {"id": i, "clock": clock, "at": at}) for i, clock, at in values])
    harbour.mint("capture/shop", time_ms, topic)
    eventually(lambda: harbour.upper("t") == time_ms + 1)


def test_a_shard_of_before_goes_on_as_it_was_and_one_made_anew_has_the_new_type(harbour: Any, tmp_path: Path) -> None:
    topic = harbour.capture("shop", TABLES)["public.t"]
    harbour.portal.call(harbour.stores.shard("t", OLD))
    nine = "2026-01-02 09:00:00"
    with capture_logs() as logs, pipeline(harbour, tmp_path, PIPELINE):
        commit(harbour, topic, 1000, (1, nine, f"{nine}+00"), (2, "infinity", "-infinity"))
        assert not error_of(harbour, "shard:t") and harbour.shard("t").schema.columns == OLD.columns
        before = harbour.portal.call(harbour.shard("t").snapshot(1000)).sort_by("id")
        assert before.column("clock").cast(pa.int64())[0] == before.column("at").cast(pa.int64())[0]
        reported = [entry for entry in logs if "read as UTC" in entry["event"]]
        assert [(entry["shard"], entry["columns"]) for entry in reported] == [("t", ["clock"])]
    source = [SourceColumn(name, kind, "") for name, kind, _ in TABLES["public.t"]]
    assert column_difference(source, ["id"], harbour.shard("t").schema) == "", "verify takes it for what it is"
    harbour.drop_shard("t")
    with pipeline(harbour, tmp_path, PIPELINE):
        commit(harbour, topic, 2000, (3, nine, f"{nine}+00"))
        assert [c.type for c in harbour.shard("t").schema.columns] == ["int32", "timestamp_ntz", "timestamp"]
    after = harbour.portal.call(harbour.shard("t").snapshot(2000)).sort_by("id")
    clock, at = (after.column(name).cast(pa.int64()).to_pylist() for name in ("clock", "at"))
    assert clock == before.column("clock").cast(pa.int64()).to_pylist() + clock[:1]
    assert (clock[1], at[1]) == (2**63 - 1, 1 - 2**63)


def test_a_clock_of_a_shard_is_no_instant_because_its_source_says_so_now(harbour: Any, tmp_path: Path) -> None:
    swapped = [("id", "integer", 0), ("clock", "timestamp with time zone", -1), ("at", "timestamp with time zone", -1)]
    topic = harbour.capture("shop", TABLES)["public.t"]
    with pipeline(harbour, tmp_path, PIPELINE):
        commit(harbour, topic, 1000, (1, "2026-01-02 09:00:00", "2026-01-02 09:00:00+00"))
        new = harbour.capture_more("shop", {"public.t": swapped})["public.t"]
        harbour.produce(new, [({"id": 1}, {"id": 1, "clock": "2026-01-02 09:00:00+00", "at": None})])
        harbour.mint("capture/shop", 2000, topic, new)
        eventually(lambda: "clock timestamp_ntz→timestamp" in error_of(harbour, "shard:t"))
        assert harbour.upper("t") <= 2000
