"""PostgreSQL's text of arrays: split by columns and one by one, as PostgreSQL itself reads and prints it."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.base.errors import InvalidError
from tidemill.shards.api import Column, ShardSchema
from tidemill.shards.nested.pg_arrays import DimensionsError, split_array, split_arrays
from tidemill.shards.parts.pg_columns import cast_text, column_for, columns_for, parse_column, with_existing_types
from tidemill.shards.parts.schema import contents_schema
from tidemill.shards.parts.schema_evolution import SchemaChanges, convert_to_schema, evolve_schema

SPLIT: dict[str, list[str | None]] = {
    "{}": [],
    "{1,NULL,-3}": ["1", None, "-3"],
    "{NULL}": [None],
    '{"NULL",null,""}': ["NULL", "null", ""],
    '{"a,b","{}","q\\"\\\\"," "}': ["a,b", "{}", 'q"\\', " "],
    '{é😀,"line\nbreak"}': ["é😀", "line\nbreak"],
    "[0:1]={1,2}": ["1", "2"],
    "[-1:-1]={}": [],
    '{"2026-01-01 00:00:00",infinity}': ["2026-01-01 00:00:00", "infinity"],
}


def test_texts_are_split_alone_and_by_columns_at_any_place_of_an_array() -> None:
    assert {text: split_array(text) for text in SPLIT} == SPLIT
    texts = pa.array([None, *SPLIT, None, "{1,2}"], pa.string())
    for start in range(len(texts) + 1):
        lists, wrong = split_arrays(texts[start:])
        assert lists.to_pylist() == [None, *SPLIT.values(), None, ["1", "2"]][start:] and not wrong.any()
        lists.validate(full=True)


@pytest.mark.parametrize(
    "text", ["", "1", "{", "{1", "{1,", "{1,}", "{,}", '{"a}', '{"a"b}', "{1}2", "{1}}", "[0:1]", '{"a\\"}']
)
def test_another_text_is_none_of_an_array(text: str) -> None:
    with pytest.raises(ValueError, match=r"begin|end|follows"):
        split_array(text)
    lists, wrong = split_arrays(pa.array(["{1}", text]))
    assert (lists.to_pylist(), wrong.tolist()) == ([["1"], None], [False, True])
    with pytest.raises(InvalidError, match="not a array<string>: column=c"):
        parse_column(["{1}", text], Column("c", "array<string>"))


@pytest.mark.parametrize("text", ["{{1,2},{3,4}}", "[0:0][1:2]={{1,2}}", '{{"a b"}}'])
def test_an_array_of_more_dimensions_is_refused_with_the_way_out(text: str) -> None:
    with pytest.raises(DimensionsError):
        split_array(text)
    with pytest.raises(pa.ArrowInvalid):
        cast_text(pa.array([text]), "array<string>")
    with pytest.raises(InvalidError, match=r"more than one dimension: column=c value=.*as_text='c'"):
        parse_column(["{}", text], Column("c", "array<string>"))


def test_an_element_that_its_type_cannot_hold_is_named_with_the_column() -> None:
    with pytest.raises(InvalidError, match=r"not a decimal\(6,2\): column=c value='NaN'"):
        parse_column(["{1.50}", "{1.50,NaN}"], Column("c", "array<decimal(6,2)>"))
    found = parse_column(["{1.50,NULL}", None, "{}"], Column("c", "array<decimal(6,2)>"))
    assert found.to_pylist() == [[Decimal("1.50"), None], None, []]


@pytest.mark.parametrize(
    ("type_name", "expected"),
    [
        ("smallint[]", "array<int16>"),
        ("oid[]", "array<int64>"),
        ("numeric(12,2)[]", "array<decimal(12,2)>"),
        ("numeric[]", "array<string>"),
        ("timestamp(3) with time zone[]", "array<timestamp>"),
        ("timestamp without time zone[]", "array<timestamp_ntz>"),
        ("character varying(20)[]", "array<string>"),
        ("json[]", "array<string>"),
        ("jsonb[]", "array<string>"),
        ('public."my mood"[]', "array<string>"),
        ('"odd[]"', "string"),
        ("box[]", "string"),
        ("gis.geometry(Point,4326)[]", "string"),
        ("geography[]", "string"),
        ("int2vector", "string"),
    ],
)
def test_the_column_of_an_array(type_name: str, expected: str) -> None:
    assert column_for("c", type_name) == Column("c", expected)
    assert column_for("c", type_name, arrays=False) == Column("c", "string")


class Described:
    def __init__(self, name: str, type_name: str, key_index: int = -1) -> None:
        self.name, self.type_name, self.key_index = name, type_name, key_index


def test_an_array_in_a_key_and_every_array_of_a_table_without_one_is_text() -> None:
    tags, ids = Described("tags", "text[]"), Described("ids", "integer[]", 0)
    assert [c.type for c in columns_for([tags, ids])] == ["array<string>", "string"]
    assert [c.type for c in columns_for([tags])] == ["string"]


def test_an_existing_shard_keeps_the_text_that_it_has() -> None:
    have = ShardSchema((Column("a", "string"), Column("b", "array<int32>"), Column("c", "json")), ("a",))
    wanted = (
        Column("a", "array<string>"),
        Column("b", "array<int64>"),
        Column("c", "array<int32>"),
        Column("d", "date"),
    )
    assert [c.type for c in with_existing_types(wanted, have)] == ["string", "array<int64>", "array<int32>", "date"]


def test_rows_of_before_an_added_column_have_its_array() -> None:
    schema = ShardSchema((Column("id", "int32"),), ("id",))
    adds = (
        Column("tags", "array<string>", '{a,"b c",NULL}'),
        Column("none", "array<date>", "{}"),
        Column("x", "array<bool>"),
    )
    added = evolve_schema(schema, SchemaChanges(add=adds))
    rows = convert_to_schema(added, pa.table({"id": pa.array([1, 2], pa.int32())}), contents_schema(added))
    assert rows.drop_columns("id").to_pylist() == [{"tags": ["a", "b c", None], "none": [], "x": None}] * 2
    assert evolve_schema(added, SchemaChanges(add=adds)) is added
    with pytest.raises(InvalidError, match=r"column=n value='\{\{1\}\}'"):
        evolve_schema(schema, SchemaChanges(add=(Column("n", "array<int32>", "{{1}}"),)))


elements = st.none() | st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=6)
words = elements | st.sampled_from(["NULL", "null", "", " ", "{", "}", ",", '"', "\\", '\\"', "a\nb", "[1:1]="])


@pytest.mark.postgres
def test_every_list_of_texts_is_what_postgres_prints(postgres_dsn: str) -> None:
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:

        @settings(deadline=None)
        @given(st.lists(st.lists(words, max_size=5), min_size=1, max_size=5))
        def check(values: list[list[str | None]]) -> None:
            fields = ", ".join("%s::text[]::text" for _ in values)
            (texts,) = connection.execute(f"SELECT {fields}".encode(), values).fetchall()
            assert [split_array(text) for text in texts] == values
            assert split_arrays(pa.array(texts))[0].to_pylist() == values

        check()


NUMBERS: dict[str, Any] = {
    "integer[]": st.integers(-(2**31), 2**31 - 1),
    "double precision[]": st.floats(),
    "boolean[]": st.booleans(),
    "bytea[]": st.binary(max_size=5),
    "numeric(12,2)[]": st.decimals(-1000, 1000, places=2, allow_nan=False),
}


@pytest.mark.postgres
@pytest.mark.parametrize("type_name", NUMBERS)
def test_every_list_of_scalars_is_what_postgres_prints(postgres_dsn: str, type_name: str) -> None:
    column = column_for("c", type_name)
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:

        @settings(deadline=None)
        @given(st.lists(st.none() | st.lists(st.none() | NUMBERS[type_name], max_size=4), min_size=1, max_size=4))
        def check(values: list[list[Any] | None]) -> None:
            fields = ", ".join(f"%s::{type_name}::text" for _ in values)
            (texts,) = connection.execute(f"SELECT {fields}".encode(), values).fetchall()
            assert repr(parse_column(list(texts), column).to_pylist()) == repr(values)
            assert repr(cast_text(pa.array(texts, pa.string()), column.type).to_pylist()) == repr(values)

        check()
