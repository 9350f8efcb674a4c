"""Schemas in Spark's DDL, compared with Spark's own parser, and as StructTypes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tidemill.base.errors import InvalidError
from tidemill.shards.api import Column, ShardSchema
from tidemill.shards.parts.schema import check_schema
from tidemill.spark.ddl import NESTED, OTHERS, TYPES, parse_column, parse_ddl
from tidemill.spark.types import columns_of, stream_schema

OUR_OWN = {"JSON", "BOOL"}
WORDS = sorted({*TYPES, *NESTED, *OTHERS} - OUR_OWN)
CLAUSES = ["NOT NULL", "not\nnull", "! null", "COMMENT 'it''s'", "comment \"a, b\"", "comment 'x' 'y'", "COMMENT r'\\'",
           "NOT NULL COMMENT '\\'>'", "NULL", "DEFAULT 3", "COLLATE utf8_binary", "COLLATE UTF8_LCASE"]  # fmt: skip
TOKENS = ["a", "int", "`a b`", "(", ")", "5", "2", ",", ":", "<", ">", "not", "null", "comment", "'x'", "--", "/*",
          "*/", "struct", "timestamp", "with", "without", "local", "time", "zone", "decimal", "collate", "\n", "!",
          "."]  # fmt: skip


def any_case(word: str) -> st.SearchStrategy[str]:
    return st.sampled_from([word, word.lower(), word.capitalize()])


SPACES = st.sampled_from([" ", "  ", "\n", "\t ", "\u00a0", " /* a /* b */ c */ ", " -- none\n"])
NAMES = st.one_of(
    st.sampled_from(["a", "b", "key", "int", "not", "select", "comment", "_x", "1a", "1", "1L", "1e3", "1e3L", "2_0"]),
    st.text("ab_01ELDF", min_size=1, max_size=4),
    st.text(min_size=1, max_size=4).map(lambda name: "`" + name.replace("`", "``") + "`"),
)
PARAMETERS = st.lists(st.integers(0, 40).map(str), min_size=1, max_size=3).map(lambda of: f"({' , '.join(of)})")
SCALAR = st.one_of(
    st.sampled_from(WORDS).flatmap(any_case),
    st.tuples(st.sampled_from(WORDS).flatmap(any_case), PARAMETERS).map("".join),
    st.sampled_from(["array<int>", "struct<x: int>", "map<int, int>", "timestamp without time zone", "timestamp(6)",
                     "TIMESTAMP WITH LOCAL TIME ZONE", "decimal(38,38)", "decimal(05, 2)", "timestamp_ntz(6)"]),
)  # fmt: skip


def nested(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    field = st.tuples(NAMES, st.sampled_from([":", " ", " : "]), inner, SPACES, st.sampled_from(["", *CLAUSES]))
    return st.one_of(
        st.tuples(any_case("ARRAY"), st.just("<"), inner, SPACES, st.just(">")).map("".join),
        st.tuples(any_case("MAP"), st.just("< "), SCALAR, st.just(","), inner, st.just(">")).map("".join),
        st.lists(field.map("".join), max_size=3).map(lambda fields: f"struct<{','.join(fields)}>"),
    )


TYPE = st.recursive(SCALAR, nested, max_leaves=4)


@st.composite
def column(draw: st.DrawFn, colon: bool) -> str:
    clause = draw(st.one_of(st.just(""), st.sampled_from(CLAUSES)))
    between = (":" if draw(st.booleans()) else " ") if colon else draw(SPACES)
    return draw(NAMES) + between + draw(TYPE) + draw(SPACES) + clause


@st.composite
def schema(draw: st.DrawFn) -> str:
    colon = draw(st.booleans())
    text = ",".join(draw(st.lists(column(colon), min_size=1, max_size=3)))
    return f"struct<{text}>" if draw(st.integers(0, 4)) == 0 else text


def ours(text: str) -> list[tuple[str, str]] | None:
    """Return the columns, or None if they are refused, as a table without columns is."""
    try:
        return [(c.name, c.type) for c in parse_ddl(text)] or None
    except InvalidError:
        return None


def sparks(text: str) -> list[tuple[str, str]] | None:
    """Return the columns that Spark reads from the text, or None if tables cannot have them."""
    from pyspark.sql.types import StructType, _parse_datatype_string

    try:
        found = _parse_datatype_string(text)
        if not isinstance(found, StructType) or "collate" in found.simpleString():
            return None
        columns = columns_of(found)
        for one in columns:
            check_schema(ShardSchema((Column("k", "int64"), Column("x", one.type)), ("k",)))
    except Exception:  # the parser's, or a type that tables do not have
        return None
    return [(c.name, c.type) for c in columns] or None


@pytest.mark.spark
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(text=schema() | st.lists(st.sampled_from(TOKENS), max_size=10).map(" ".join))
@example("a int comment 'x' not null")
@example("a: int -- the end")
@example("struct<a: int -- the end\n>")
@example("struct<a: int> , b int")
@example("struct int, array string")
@example("a \u0131nt")
@example("a timestamp(3), b timestamp_ltz(6)")
@example("a struct<x: int> -- the end\n")
@example("a: int, b struct<x: int> -- the end\n")
@example("a int, b: int")
@example("a varchar(99999999999)")
@example("a int /*+ hint */")
@example("a decimal(0,0)")
@example("a char(5) collate utf8_binary")
@example("a " + "array<" * 8 + "int" + ">" * 8)
@example("a " + "array<" * 9 + "int" + ">" * 9)
@example("a map<string, struct<x: array<double> not null comment 'c', `y z` decimal(3)>>")
@example("a struct<x: int, x: int>")
@example("a struct<>")
@example("a map<double, int>")
@example("")
def test_a_schema_means_what_it_means_to_spark(spark: Any, text: str) -> None:
    assert ours(text) == sparks(text)


@pytest.mark.parametrize(
    ("text", "named"),
    [("a interval day to second", "'interval'"),
     ("s string collate UTF8_LCASE", "'string collate UTF8_LCASE'"), ("a time(3)", "'time'"),
     ("v variant", "'variant'"), ("a varchar", "'varchar'"), ("a int(3)", "'int(3)'"), ("a strong", "'strong'")],
)  # fmt: skip
def test_a_type_that_tables_do_not_have_is_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(InvalidError) as refused:
        parse_ddl(text)
    assert f"type={named}" in refused.value.message and refused.value.fix


@pytest.mark.parametrize(
    ("text", "said"),
    [("a array<interval day>", "type='interval'"), ("a map<double, int>", "key=float64"),
     ("a array<json>", "json is not supported inside"), ("a struct<x int, x int>", "names a field twice"),
     ("a struct<`x\"` int>", "cannot have this name"), ("a struct<>", "at least one field"),
     ("a " + "array<" * 50_000 + "int" + ">" * 50_000, "nested too deeply"),
     ("a struct<" + ", ".join(f"f{n} int" for n in range(501)) + ">", "too many fields")],
)  # fmt: skip
def test_a_nested_type_that_tables_do_not_have_is_refused_with_what_to_do(text: str, said: str) -> None:
    with pytest.raises(InvalidError, match=said) as refused:
        parse_ddl(text)
    assert refused.value.fix and len(refused.value.message) < 500


def test_a_nested_column_is_no_part_of_a_key() -> None:
    with pytest.raises(InvalidError, match=r"cannot be part of a key: column=k type=array<int32>"):
        stream_schema("k array<int>, v int", "k")


def test_nested_types_have_one_spelling() -> None:
    (found,) = parse_ddl("a MAP<string, struct<x: array<tinyint>, `y z` decimal(3) comment 'c'>>")
    assert found.type == "map<string,struct<x:array<int16>,`y z`:decimal(3,0)>>"
    assert parse_column("a array<int64>").type == "array<int64>"


def test_names_that_older_pipelines_wrote_without_backquotes_are_still_read() -> None:
    assert [(c.name, c.type) for c in parse_ddl("größe int, j JSON, b bool")] == [
        ("größe", "int32"), ("j", "json"), ("b", "bool")
    ]  # fmt: skip


def test_a_column_to_add_is_written_the_same_way_with_a_default() -> None:
    assert parse_column("price decimal(6,2) default 0").default == "0"
    assert parse_column("`a b` varchar(3) DEFAULT 'it''s {x}'").default == "it's {x}"
    assert (parse_column("n int16").type, parse_column("n int default null").default) == ("int16", None)
    for wrong in ("n", "n int 3", "n int16(", "n int default"):
        with pytest.raises(InvalidError):
            parse_column(wrong)


def test_a_struct_type_is_a_schema() -> None:
    from pyspark.sql import types as t

    found = t.StructType().add("id", t.LongType(), False).add("n", t.VarcharType(9)).add("d", t.DecimalType(6, 2))
    assert stream_schema(found, "id") == stream_schema("id bigint, n varchar(9), d decimal(6,2)", "id")
    assert stream_schema(found.simpleString(), ["id"]) == stream_schema(found, ("id",))
    for bad, named in (
        (t.ArrayType(t.DayTimeIntervalType()), "array<interval day to second>"),
        (t.StringType("UTF8_LCASE"), "collate UTF8_LCASE"),
    ):
        with pytest.raises(InvalidError, match=f"column=x type=.*{named}"):
            stream_schema(t.StructType().add("x", bad), "x")
    with pytest.raises(InvalidError, match="not a schema"):
        stream_schema(t.LongType(), "x")  # type: ignore[arg-type]


def test_a_schema_is_parsed_without_spark() -> None:
    program = "import sys; from tidemill.spark import Pipeline; p = Pipeline('p')\n"
    program += "p.table('t', p.topic('t', key='k', schema='k bigint NOT NULL, v decimal(6,2)'))\n"
    program += "sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
