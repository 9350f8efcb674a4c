"""PostgreSQL's types and texts: the column type of each, and no silent change of a value."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.base.errors import InvalidError
from tidemill.base.pgtypes.text import read_bytea
from tidemill.shards.api import Column
from tidemill.shards.parts.pg_columns import DATE_INFINITY, TIMESTAMP_INFINITY, cast_text, column_for, parse_column


@pytest.mark.parametrize(
    ("type_name", "expected"),
    [
        ("smallint", "int16"),
        ("integer", "int32"),
        ("bigint", "int64"),
        ("boolean", "bool"),
        ("real", "float32"),
        ("double precision", "float64"),
        ("numeric(12,2)", "decimal(12,2)"),
        ("numeric(5,0)", "decimal(5,0)"),
        ("numeric", "string"),
        ("numeric(3,-2)", "string"),
        ("numeric(2,5)", "string"),
        ("numeric(50,2)", "string"),
        ("date", "date"),
        ("timestamp with time zone", "timestamp"),
        ("timestamp(3) with time zone", "timestamp"),
        ("timestamp without time zone", "timestamp_ntz"),
        ("timestamp(3) without time zone", "timestamp_ntz"),
        ("timestamp", "timestamp_ntz"),
        ("time without time zone", "string"),
        ("bytea", "binary"),
        ("jsonb", "json"),
        ("json", "json"),
        ("uuid", "string"),
        ("character varying(20)", "string"),
        ("inet", "string"),
        ("integer[]", "array<int32>"),
        ("public.mood", "string"),
    ],
)
def test_column_for(type_name: str, expected: str) -> None:
    assert column_for("c", type_name) == Column("c", expected)


def parsed(values: list[str | None], type_name: str) -> list[Any]:
    array = parse_column(values, Column("c", type_name))
    if pa.types.is_temporal(array.type):
        return array.view(pa.int64() if pa.types.is_timestamp(array.type) else pa.int32()).to_pylist()  # type: ignore[no-any-return]
    return array.to_pylist()  # type: ignore[no-any-return]


def us(*fields: int) -> int:
    delta = datetime(*fields, tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)  # type: ignore[arg-type, misc]
    return (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds


def test_timestamps_with_without_zone_and_beyond_the_calendar() -> None:
    assert parsed(["2026-11-21 03:43:00.123456+00", None], "timestamp") == [us(2026, 11, 21, 3, 43, 0, 123456), None]
    assert parsed(["2026-11-21 03:43:00.1+05:30"], "timestamp") == [us(2026, 11, 20, 22, 13, 0, 100000)]
    assert parsed(["2026-11-21 03:43:00"], "timestamp") == [us(2026, 11, 21, 3, 43)]
    assert parsed(["infinity", "-infinity"], "timestamp") == [TIMESTAMP_INFINITY, -TIMESTAMP_INFINITY]
    assert parsed(["0001-12-31 23:59:59.5+00 BC"], "timestamp") == [us(1, 1, 1) - 500_000]
    assert parsed(["10000-01-01 00:00:00-01", "1970-01-01 00:00:00+00"], "timestamp") == [253402304400000000, 0]


def test_dates() -> None:
    day = (date(2026, 11, 21) - date(1970, 1, 1)).days
    assert parsed(["2026-11-21", None], "date") == [day, None]
    assert parsed(["infinity", "-infinity", "2026-11-21"], "date") == [DATE_INFINITY, -DATE_INFINITY, day]
    assert parsed(["0001-12-31 BC", "10000-01-01"], "date") == [-719163, 2932897]


def test_scalars() -> None:
    assert parsed(["t", "f", None], "bool") == [True, False, None]
    assert parsed([None, None], "bool") == [None, None]
    assert parsed([], "int32") == []
    assert parsed(["-32768", None], "int16") == [-32768, None]
    assert parsed(["1.50", "-0.05", None], "decimal(5,2)") == [Decimal("1.50"), Decimal("-0.05"), None]
    assert parsed(["1e+300", "Infinity", "-Infinity"], "float64") == [1e300, float("inf"), float("-inf")]
    assert str(parsed(["NaN"], "float64")) == "[nan]"
    assert parsed(["\\xdeadbeef", "\\x", None], "binary") == [b"\xde\xad\xbe\xef", b"", None]
    assert parsed(['{"a": 1}', None], "json") == ['{"a": 1}', None]


@pytest.mark.parametrize(
    ("type_name", "bad"),
    [
        ("int16", "40000"),
        ("int32", "x"),
        ("bool", "yes"),
        ("decimal(5,2)", "1.234"),
        ("decimal(5,2)", "NaN"),
        ("date", "21.11.2026"),
        ("date", "2026-02-31"),
        ("timestamp", "2026-02-31 00:00:00+00"),
        ("timestamp", "2026-11-21 24:00:01+00"),
        ("timestamp", "2026-13-01 00:00:00+00"),
        ("timestamp", "294276-12-31 00:00:00+00"),
        ("binary", "abc"),
        ("binary", "\\xzz"),
    ],
)
def test_a_bad_value_is_named_with_its_column(type_name: str, bad: str) -> None:
    with pytest.raises(InvalidError, match="column=c") as caught:
        parse_column([None, bad], Column("c", type_name))
    assert repr(bad) in caught.value.message


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.none() | st.binary(max_size=5).map(lambda b: "\\x" + b.hex())),
    st.lists(st.sampled_from(["\\x", "\\xAb", "\\x0 a", "\\x0", "x", "", "\\", "\\y00", "\\x0g", "\\xé"]), max_size=1),
    st.integers(0, 9),
)
def test_binary_by_columns_is_binary_by_values(values: list[str | None], odd: list[str], at: int) -> None:
    values[at:at] = odd
    expected: list[bytes | None] | None
    try:
        expected = [None if v is None else read_bytea(v) for v in values]
    except ValueError:
        expected = None
    text = pa.array(["before", *values], pa.string())[1:]
    try:
        assert cast_text(text, "binary").to_pylist() == expected
    except pa.ArrowInvalid:
        assert odd
    if expected is None:
        with pytest.raises(InvalidError):
            parse_column(values, Column("c", "binary"))
    else:
        assert parse_column(values, Column("c", "binary")).to_pylist() == expected


@settings(max_examples=200, deadline=None)
@given(st.lists(st.none() | st.datetimes(timezones=st.just(UTC)), max_size=5))
def test_any_instant_reads_back(values: list[datetime | None]) -> None:
    text = [None if v is None else f"{v:%Y}".rjust(4, "0") + f"{v:-%m-%d %H:%M:%S.%f}+00" for v in values]
    assert parse_column(text, Column("c", "timestamp")).to_pylist() == values
