"""Records that cannot be read, in a stream of rows: a row of their own, the query's end, or left out."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.base.errors import InvalidError
from tidemill.shards.api import TIME, Column, ShardSchema
from tidemill.spark.decode.dead_letter_rows import DeadLetter, dead_letter_table
from tidemill.spark.merge.commands import LIVE, ORDER, PARTITION, RECORD_KEY, UNCHANGED, command_schema
from tidemill.spark.source.corrupt import CorruptRecordMode
from tidemill.spark.source.options import SourceOptions
from tidemill.spark.source.stream import RowReader, stream_columns
from tidemill.spark.types import spark_schema

SCHEMA = ShardSchema((Column("k", "int64"), Column("v", "string")), ("k",))


def commands(offsets: list[int]) -> pa.Table:
    rows = [{"k": n, "v": "x", TIME: 5, ORDER: n, PARTITION: 0, LIVE: True} for n in offsets]
    return pa.Table.from_pylist(rows, schema=command_schema(SCHEMA))


@settings(deadline=None)
@given(st.lists(st.integers(0, 9)), st.lists(st.tuples(st.integers(10, 19), st.binary(max_size=5)), max_size=5))
def test_every_record_is_a_row_once_and_the_schema_is_the_declared_one(good: list[int], bad: list[Any]) -> None:
    dead = dead_letter_table([DeadLetter("t", 2, offset, offset, 7, "no JSON", data) for offset, data in bad])
    corrupted = CorruptRecordMode.from_options(SourceOptions({}))
    found = corrupted.rows(commands(good), dead)
    names = [
        *(c.name for c in SCHEMA.columns),
        TIME,
        ORDER,
        PARTITION,
        LIVE,
        "_corrupt_record",
        "_corrupt_record_reason",
    ]
    assert found.schema.names == names
    assert found.schema.types[-2:] == [pa.binary(), pa.string()]
    rows = found.to_pylist()
    assert [r["k"] for r in rows if r[LIVE]] == good
    broken = [(r[ORDER], r["_corrupt_record"]) for r in rows if r[LIVE] is None]
    assert sorted(broken) == sorted(bad)
    assert all((r[TIME], r[PARTITION], r["k"], r["v"]) == (7, 2, None, None) for r in rows if r[LIVE] is None)


def test_a_batch_that_cannot_be_read_is_one_row_that_says_up_to_where() -> None:
    dead = dead_letter_table(
        [DeadLetter("t", 0, 3, 8, 7, "bad checksum", b"x"), DeadLetter("t", 0, 9, 9, 7, "no JSON", b"y")]
    )
    rows = CorruptRecordMode(column="c").rows(commands([]), dead).to_pylist()
    assert [r["c_reason"] for r in rows] == ["bad checksum last_offset=8", "no JSON"]


def test_the_other_modes_leave_out_or_fail_and_any_else_is_refused() -> None:
    dead = dead_letter_table([DeadLetter("t", 2, 4, 4, 7, "no JSON", b"x")])
    left_out = CorruptRecordMode.from_options(SourceOptions({"mode": "dropMalformed"}))
    assert (left_out.columns, left_out.rows(commands([1]), dead)) == ((), commands([1]))
    failing = CorruptRecordMode.from_options(SourceOptions({"mode": "failfast"}))
    assert failing.rows(commands([1]), dead.slice(0, 0)) == commands([1])
    with pytest.raises(
        InvalidError, match=r"cannot be read: topic=t partition=2 offset=4 \(no JSON\).*mode=PERMISSIVE"
    ):
        failing.rows(commands([1]), dead)
    with pytest.raises(InvalidError, match=r"no such mode: mode=strict\. Use one of PERMISSIVE"):
        CorruptRecordMode.from_options(SourceOptions({"mode": "strict"}))


def test_a_reader_gives_what_its_schema_says(harbour: Any) -> None:
    """A topic column with the name of our column is an error. With another name for ours both are present."""
    topic = harbour.create_topic("clicks")
    harbour.produce(topic, [(b"k", {"k": 1, "_corrupt_record": "mine"}), (b"", b"bad")])
    harbour.mint("topic/clicks", 10, topic)
    given = {"source": "topic/clicks", "schema": "k long, _corrupt_record string", "key": "k"}
    urls = {"objects": harbour.urls.objects, "consensus": harbour.urls.consensus}
    with pytest.raises(InvalidError, match="the topic already has a column of this name: column=_corrupt_record"):
        stream_columns(SourceOptions({**given, **urls}))
    options = SourceOptions({**given, **urls, "columnNameOfCorruptRecord": "bad"})
    reader = RowReader(options)
    (partition,) = reader.partitions({"ts": 0}, {"ts": 11})
    rows = [row for batch in reader.read(partition) for row in batch.to_pylist()]
    assert [(r["k"], r["_corrupt_record"], r["bad"]) for r in rows] == [(1, "mine", None), (None, None, b"bad")]
    assert list(rows[0]) == spark_schema(stream_columns(options)).fieldNames()


def test_an_update_that_leaves_values_out_is_a_row_of_the_declared_schema_that_says_so() -> None:
    """Regression: a column more than the schema given to Spark failed the query permanently."""
    good = commands([1, 2])
    left = pa.array([None, b'["v","w"]'], pa.binary())
    given = good.append_column(UNCHANGED, left).append_column(RECORD_KEY, pa.nulls(2, pa.binary()))
    none = dead_letter_table([])
    found = CorruptRecordMode().rows(given, none)
    assert found.schema.names == CorruptRecordMode().rows(good, none).schema.names
    assert found.column("_corrupt_record_reason").to_pylist() == [None, "left unchanged: v,w"]
    assert CorruptRecordMode("DROPMALFORMED").rows(given, none) == good.slice(0, 1)
    with pytest.raises(InvalidError, match=r"columns=v,w partition=0 offset=2\. Capture the table with whole rows"):
        CorruptRecordMode("FAILFAST").rows(given, none)
    whole = given.set_column(given.num_columns - 2, UNCHANGED, pa.nulls(2, pa.binary()))
    assert CorruptRecordMode("FAILFAST").rows(whole, none) == good
