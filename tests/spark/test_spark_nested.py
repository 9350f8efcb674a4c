"""Columns of nested types in topics of JSON objects: both decoders, and the operator."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.base.errors import InvalidError
from tidemill.shards.api import TIME, ShardSchema
from tidemill.spark import Pipeline
from tidemill.spark.decode.records import Records
from tidemill.spark.decode.stream import StreamDecoder
from tidemill.spark.derived.derivation import check_groups
from tidemill.spark.formats.record_format import declare_topic
from tidemill.spark.merge.commands import ORDER
from tidemill.spark.predicates.predicate import compile_predicate
from tidemill.spark.types import stream_schema
from tidemill.topics.batch import Record, decode_columns, encode_batch

DDL = """id bigint, tags array<string>, `at s` array<timestamp>, deep array<array<decimal(5,2)>>,
         who struct<name: string, n: int, x: float, `day d`: date, more: array<struct<f: double, b: boolean>>>"""
MAPS = "id bigint, m map<string, double>, n map<int, array<struct<a: int>>>"


def decode(ddl: str, *values: bytes) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows, and the reasons of the dead letters."""
    _, columns = decode_columns(encode_batch([Record(b"k", value) for value in values], base_offset=0))
    decoder = StreamDecoder(stream_schema(ddl, "id"))
    commands, dead = decoder.decode(Records("t", 0, columns.offsets, columns))
    commands.rows.validate(full=True)
    return commands.rows.to_pylist(), dead.column("reason").to_pylist()


def contents_text(row: dict[str, Any]) -> str:
    return repr({name: value for name, value in row.items() if name not in (TIME, ORDER)})


NUMBERS = st.sampled_from(["0", "-0", "-0.0", "1", "2.50", "1e2", "-1e-3", "1234.5", "1e39", "1e400", "NaN", "true",
                           "[]", '"7.5"', "null", "3000000000"])  # fmt: skip
TEXTS = st.sampled_from(['"a"', '""', '"-0,"', '"\\ud800"', '"2026-11-22"', '"2026-02-30"', '"2026-11-22T01:02:03Z"',
                         '"2026-11-22T01:02:03.5+02:00"', "null", "5", '"é\\n"', "{}", "1700000000000"])  # fmt: skip
VALUES = st.one_of(NUMBERS, TEXTS, st.sampled_from(["true", "false"]))


def arrays(of: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(st.just("null"), st.lists(of, max_size=3).map(lambda values: f"[{', '.join(values)}]"))


def objects(names: list[str], of: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pairs = st.lists(st.tuples(st.sampled_from(names), of), max_size=4)
    return pairs.map(lambda fields: "{" + ",".join(f'"{name}":{value}' for name, value in fields) + "}")


INNER = st.one_of(st.just("null"), objects(["f", "b", "other"], VALUES))
WHO = st.one_of(
    st.just("null"),
    st.tuples(objects(["name", "n", "x", "day d", "other"], VALUES), arrays(INNER)).map(
        lambda both: both[0][:-1] + ("," if len(both[0]) > 2 else "") + f'"more":{both[1]}}}'
    ),
)
RECORD = st.tuples(arrays(TEXTS), arrays(TEXTS), arrays(arrays(NUMBERS)), WHO, st.booleans())
GOOD = b'{"id":1,"tags":["a",null],"at s":[],"deep":[[1]],"who":{"n":1}}'


@settings(deadline=None, max_examples=60)
@given(rows=st.lists(RECORD, min_size=1, max_size=8))
def test_both_decoders_read_nested_values_alike(rows: list[tuple[str, str, str, str, bool]]) -> None:
    """A block of at least 64 records goes through Arrow's reader, a single record does not."""
    values = []
    for at, (tags, times, deep, who, has_who) in enumerate(rows):
        more = f', "who": {who}' if has_who else ""
        values.append(f'{{"id": {at}, "tags": {tags}, "at s": {times}, "deep": {deep}{more}}}'.encode())
    blocks, reasons = decode(DDL, *values, *[GOOD] * 64)
    alone = [decode(DDL, value) for value in values]
    one_by_one = [row for found, _ in alone for row in found]
    assert [contents_text(row) for row in blocks[: len(one_by_one)]] == [contents_text(row) for row in one_by_one]
    assert len(reasons) == sum(len(dead) for _, dead in alone)
    assert len(blocks) == len(one_by_one) + 64


def test_a_missing_field_is_null_and_another_one_is_ignored() -> None:
    (row,), dead = decode(DDL, b'{"id":1,"who":{"name":"a","zip":[1],"more":[{},null]},"tags":[]}')
    assert dead == [] and row["tags"] == [] and row["at s"] is None
    assert row["who"] == {"name": "a", "n": None, "x": None, "day d": None, "more": [{"f": None, "b": None}, None]}


def test_the_sign_of_zero_is_kept_inside() -> None:
    rows, _ = decode(DDL, b'{"id":-0,"who":{"n":-0,"x":-0 ,"more":[{"f":-0},{"f":-0.0},{"f":0}]}}')
    assert repr([rows[0]["id"], rows[0]["who"]["n"], rows[0]["who"]["x"]]) == "[0, 0, -0.0]"
    assert [repr(each["f"]) for each in rows[0]["who"]["more"]] == ["-0.0", "-0.0", "0.0"]


def test_a_map_is_stored_in_the_order_of_its_keys() -> None:
    one, two = (
        '{"id":1,"m":{"é":1,"z":null,"Z":2},"n":{"10":[],"9":null,"-1":[{"a":1},null]}}'.encode(),
        b'{"id":2,"m":{}}',
    )
    rows, dead = decode(MAPS, one, two)
    assert dead == []
    assert rows[0]["m"] == [("Z", 2.0), ("z", None), ("é", 1.0)]
    assert rows[0]["n"] == [(-1, [{"a": 1}, None]), (9, None), (10, [])]
    assert rows[1]["m"] == [] and rows[1]["n"] is None


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b'{"id":1,"m":{"a":1,"b":2,"a":3}}', "column=m: ValueError: a map has a key twice"),
        (b'{"id":1,"n":{"1":[],"01":[]}}', "the key of a map is not an integer: key='01'"),
        (b'{"id":1,"n":{"3000000000":[]}}', "column=n"),
        (b'{"id":1,"m":{"a":"x"}}', "Expected `float | null`, got `str`"),
        (b'{"id":1,"m":[1]}', "Expected `object | null`, got `array`"),
        (b'{"id":1,"m":' + b'{"a":' * 600 + b"1" + b"}" * 601, "nested deeper than 500"),
    ],
)
def test_a_nested_value_that_does_not_fit_is_a_dead_letter_alone(value: bytes, reason: str) -> None:
    rows, (said,) = decode(MAPS, b'{"id":5}', value, b'{"id":6,"m":{"a":1}}')
    assert reason in said and [row["id"] for row in rows] == [5, 6]


def test_a_decimal_out_of_range_inside_is_a_dead_letter() -> None:
    rows, (said,) = decode(DDL, b'{"id":1,"deep":[[999.99],null,[null]]}', b'{"id":2,"deep":[[1],[1000]]}')
    assert "column=deep" in said and "1000" in said
    assert json.dumps(rows[0]["deep"], default=str) == '[["999.99"], null, [null]]'


def test_a_nested_column_is_refused_by_name_where_values_are_compared() -> None:
    columns = stream_schema(DDL, "id").columns
    with pytest.raises(InvalidError, match=r"tags \(array<string>\) has a nested type"):
        compile_predicate("tags = 'a'", columns)
    with pytest.raises(InvalidError, match=r"values of this type have no order: .*sequence_by=tags"):
        declare_topic("t", "id", DDL, {"sequence_by": "tags"})
    p = Pipeline("p")

    @p.derived("d", key="tags", inputs=("odd",), by="tags")
    def d(spark: Any, odd: Any) -> Any:
        return odd

    schema = ShardSchema(columns, ("id",))
    with pytest.raises(InvalidError, match="nested type cannot group a table: table=d input=odd column=tags"):
        check_groups(p.derived_tables["d"], schema, {"odd": schema})
