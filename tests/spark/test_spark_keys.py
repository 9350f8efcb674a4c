"""A key has one spelling in all its sources: a record, a tombstone, a function's rows, a DataFrame."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from support.spark.derived import Frame as Table
from support.spark.derived import derivation
from support.spark.frames import write
from support.spark.sinks import sink_of, writer
from tidemill.base.errors import InvalidError
from tidemill.shards.api import Column
from tidemill.shards.parts.key_hash import has_unnormalized_keys, normalize_keys
from tidemill.spark.decode import block_decoder as objects_module
from tidemill.spark.ingest.feed_sink import FeedSink
from tidemill.spark.ingest.sources import stream_feed
from tidemill.spark.types import spark_schema, stream_schema
from tidemill.spark.write.schema_match import WriteFrame

OTHER_NAN = struct.unpack("<d", struct.pack("<Q", 0xFFF8_0000_0000_0001))[0]
ONE_NAN = 0x7FF8_0000_0000_0000
ZEROS = ("-0.0", "0.0", "-0", "0", "-0e5", "0e-7", "-1e-400")


def bits(values: list[float]) -> list[int]:
    return np.array(values, np.float64).view(np.uint64).tolist()


def ratios_sink(harbour: Any, scratch: Path, ddl: str, key: str) -> FeedSink:
    s, schema = harbour.stores, stream_schema(ddl, key)
    feed = harbour.portal.call(stream_feed(s.catalogue, "ratios", schema))
    return sink_of(harbour, "topic/ratios", [writer(harbour, "ratios", schema, scratch, feed)])


@pytest.mark.parametrize("few", [0, 1 << 62])
@pytest.mark.parametrize("kind", ["double", "float"])
def test_zero_of_either_sign_is_one_key_of_a_topic(
    harbour: Any, tmp_path: Path, few: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects_module, "MIN_BLOCK_VALUES", few)
    topic = harbour.create_topic("ratios")
    sink = ratios_sink(harbour, tmp_path, f"r {kind}, v double", "r")
    for at, zero in enumerate(ZEROS):
        harbour.produce(topic, [(b"", b'{"r":%s,"v":%d}' % (zero.encode(), at)), (b"", b'{"r":1.5,"v":-0.0}')])
        harbour.mint("topic/ratios", 1_000 + at, topic)
        sink.process(sink.latest())
        rows = harbour.contents("ratios")
        assert [(row["r"], row["v"]) for row in rows] == [(0.0, float(at)), (1.5, 0.0)]
        assert [math.copysign(1, row["r"]) for row in rows] == [1, 1] and math.copysign(1, rows[1]["v"]) == -1
    found = harbour.portal.call(harbour.shard("ratios").snapshot(harbour.upper("ratios") - 1, 10))
    assert duckdb.from_arrow(found).aggregate("count(*), count(DISTINCT r)").fetchall() == [(2, 2)]
    for at, zero in enumerate(ZEROS):
        harbour.produce(topic, [(b"", b'{"r":%s,"v":1}' % zero.encode()), (ZEROS[-1 - at].encode(), None)])
        harbour.mint("topic/ratios", 2_000 + at, topic)
        sink.process(sink.latest())
        assert [row["r"] for row in harbour.contents("ratios")] == [1.5], "a tombstone of either sign deletes it"


def test_a_key_of_several_columns_is_one_where_its_floats_are(harbour: Any, tmp_path: Path) -> None:
    topic = harbour.create_topic("ratios")
    sink = ratios_sink(harbour, tmp_path, "k string, r double, v long", "k,r")
    said = [b'{"k":"a","r":-0.0,"v":1}', b'{"k":"a","r":0,"v":2}', b'{"k":"b","r":-0.0,"v":3}']
    harbour.produce(topic, [(b"", one) for one in said])
    harbour.produce(topic, [(b'{"k":"b","r":0.0}', None)])
    harbour.mint("topic/ratios", 1_000, topic)
    sink.process(sink.latest())
    assert [(row["k"], row["v"]) for row in harbour.contents("ratios")] == [("a", 2)]


def test_a_table_with_a_key_that_no_record_spells_any_more_is_refused(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier release wrote the table. A record of the key would become its second row, and no tombstone would
    delete it."""
    topic = harbour.create_topic("ratios")
    sink = ratios_sink(harbour, tmp_path / "before", "r double, v double", "r")
    with monkeypatch.context() as earlier:
        earlier.setattr("tidemill.spark.decode.row_decoder.normalize_keys", lambda rows, key: rows)
        harbour.produce(topic, [(b"", b'{"r":-0.0,"v":1}'), (b"", b'{"r":2,"v":1}')])
        harbour.mint("topic/ratios", 1_000, topic)
        sink.process(sink.latest())
    assert bits([row["r"] for row in harbour.contents("ratios")]) == bits([-0.0, 2.0])
    with pytest.raises(
        InvalidError, match=r"an earlier release wrote, .*table=ratios.*tidemill table drop ratios --force"
    ):
        ratios_sink(harbour, tmp_path / "now", "r double, v double", "r")


def test_a_table_whose_key_of_before_is_deleted_is_opened(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = harbour.create_topic("ratios")
    sink = ratios_sink(harbour, tmp_path / "before", "r double, v double", "r")
    with monkeypatch.context() as earlier:
        earlier.setattr("tidemill.spark.decode.row_decoder.normalize_keys", lambda rows, key: rows)
        for at, value in enumerate((b'{"r":-0.0,"v":1}', None)):
            harbour.produce(topic, [(b"-0.0", value), (b"", b'{"r":2,"v":1}')])
            harbour.mint("topic/ratios", 1_000 + at, topic)
            sink.process(sink.latest())
    sink.seats.tables[0].save()
    assert [row["r"] for row in harbour.contents("ratios")] == [2.0]
    ratios_sink(harbour, tmp_path / "before", "r double, v double", "r")


@pytest.mark.parametrize("old", [-0.0, OTHER_NAN])
def test_keys_of_another_spelling_are_told_apart(old: float) -> None:
    rows = pa.table({"r": pa.array([1.5, old, None]), "k": ["a", "b", "c"]})
    assert has_unnormalized_keys(rows, ("k", "r")) and not has_unnormalized_keys(rows, ("k",))
    assert not has_unnormalized_keys(normalize_keys(rows, ("r",)), ("r",))


class Rows(Table):
    @property
    def schema(self) -> Any:
        return spark_schema([Column("r", "float64"), Column("n", "int64")])


def result(*rows: tuple[float, int]) -> Any:
    keys, numbers = zip(*rows, strict=True)
    return Rows(pa.table({"r": pa.array(keys, pa.float64()), "n": pa.array(numbers, pa.int64())}))


def test_a_derived_table_and_a_dataframe_have_one_row_of_a_key(harbour: Any, tmp_path: Path) -> None:
    """Spark and DuckDB each group both zeros into one, and NaNs of any bits into one."""
    frame = WriteFrame("ratios", (Column("r", "float64"), Column("n", "int64")), ("r",))
    write(harbour, frame, [(-0.0, 1), (OTHER_NAN, 2)])
    write(harbour, frame, [(0.0, 3), (math.nan, 4)])
    assert sorted(row["n"] for row in harbour.contents("ratios")) == [3, 4]
    assert bits(sorted((row["r"] for row in harbour.contents("ratios")), key=math.isnan)) == [0, ONE_NAN]
    with pytest.raises(InvalidError, match="a key occurs twice"):
        write(harbour, frame, [(-0.0, 1), (0.0, 2)])

    rows = [(-0.0, 1), (OTHER_NAN, 2)]
    found = derivation(harbour, tmp_path, lambda _spark, _frame: result(*rows), "r")
    found.table = found.table.__class__("derived", ("r",), ("ratios",), 0.05, found.table.function)
    found.open()
    assert found.recompute()
    rows[:] = [(0.0, 1), (math.nan, 2)]
    write(harbour, frame, [(9.0, 9)])
    before = harbour.upper("derived") - 1
    assert found.recompute()
    assert harbour.contents("derived") != [] and str(harbour.contents("derived")) == str(
        harbour.contents("derived", before)
    )
    assert bits([row["r"] for row in harbour.contents("derived")]) == [0, ONE_NAN]
    rows[:] = [(-0.0, 1), (0.0, 2)]
    write(harbour, frame, [(10.0, 9)])
    assert found.recompute() and "twice=2" in found.omitted_rows_error, "a key that comes twice has no row (F322)"
    assert harbour.contents("derived") == []


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
def test_only_what_is_spelled_otherwise_is_changed(kind: pa.DataType) -> None:
    array = pa.array([-0.0, 0.0, None, math.inf, -math.inf, 5e-324, -1.5, math.nan], kind)
    table = pa.table({"k": pa.chunked_array([array.slice(0, 3), array.slice(3)]), "v": array})
    found = normalize_keys(table, ("k",))
    assert found.schema == table.schema and repr(found["v"].to_pylist()) == repr(table["v"].to_pylist())
    assert repr(found["k"].to_pylist()) == repr([0.0, *table["k"].to_pylist()[1:]])
    plain = pa.table({"k": pa.array([1.5, None], kind)})
    assert normalize_keys(plain, ("k",)).equals(plain)
    assert normalize_keys(pa.table({"k": [1, 2]}), ("k",)).equals(pa.table({"k": [1, 2]}))
