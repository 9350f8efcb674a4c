"""Predicates over columns: the same result as a SQL engine, and what is not supported is refused with its place."""

from __future__ import annotations

import datetime
import math
import random
import re
from decimal import Decimal
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.base.errors import InvalidError
from tidemill.shards.api import Column
from tidemill.shards.parts.schema import arrow_type
from tidemill.spark.predicates.predicate import compile_predicate

COLUMNS = (
    Column("i", "int32"),
    Column("l", "int64"),
    Column("d", "decimal(12,2)"),
    Column("f", "float64"),
    Column("r", "float32"),
    Column("s", "string"),
    Column("b", "bool"),
    Column("day", "date"),
    Column("at", "timestamp"),
    Column("wall", "timestamp_ntz"),
    Column("doc", "json"),
    Column("blob", "binary"),
    Column("Odd name", "int64"),
)
VALUES: dict[str, list[Any]] = {
    "i": [-3, 0, 1, 7, 1_000],
    "l": [-3, 0, 1, 7, 2**53 + 1],
    "d": [Decimal("-3.00"), Decimal("0.10"), Decimal("1.00"), Decimal("7.25")],
    "f": [-3.0, 0.1, 1.0, math.nan, math.inf, -0.0],
    "s": ["", "a", "A", "abc", "a\nc", "é", "7", "\\", "a\\", "a\\c", "%a", "a%c", "a_c", "A.\\b", "a\\\\c"],
    "b": [True, False],
    "day": [datetime.date(2026, 1, 2), datetime.date(2026, 1, 3)],
    "wall": [datetime.datetime(2026, 1, 2, 3, 4, 5), datetime.datetime(2026, 1, 3)],
}
LITERALS = {
    "i": ["-3", "0", "7", "1.5"],
    "f": ["0.1", "-3", "1e0", "'NaN'"],
    "s": ["'a'", "'abc'", "''", "'it''s'"],
    "b": ["true", "false", "NULL"],
    "day": ["'2026-01-02'", "DATE '2026-01-03'"],
    "wall": ["'2026-01-02 03:04:05'", "TIMESTAMP '2026-01-03 00:00:00'"],
}
NUMBERS = ("i", "l", "d", "f")


def evaluate(text: str, **values: list[Any]) -> list[bool | None]:
    mine = [c for c in COLUMNS if c.name in values]
    arrays = {c.name: pa.array(values[c.name], arrow_type(c.type)) for c in mine}
    rows = len(next(iter(values.values())))
    return list(compile_predicate(text, mine).evaluate(arrays, rows).to_pylist())


def random_pattern(rand: random.Random) -> str:
    """Return a pattern of LIKE in which a backslash is the escape character."""
    pieces = ["%", "_", "a", "A", "c", ".", "é", r"\\", r"\%", r"\_", r"\c"]
    found = "".join(rand.choices(pieces, k=rand.randint(0, 3)))
    return rand.choice(["a_c", found, f"%{found}", f"{found}%", f"%{found}%"])


def with_escape(text: str) -> str:
    """Return the expression for DuckDB, in which LIKE has no escape character unless one is named."""
    return re.sub(r"(LIKE '[^']*')", r"\1 ESCAPE '\\'", text)


def random_test(rand: random.Random) -> str:
    kind = rand.choice(["number", "number", "s", "b", "day", "wall", "null", "in", "between", "like", "sum"])
    operator = rand.choice(["=", "<>", "!=", "<", "<=", ">", ">="])
    if kind == "null":
        return f"{rand.choice(sorted(VALUES))} IS {rand.choice(['', 'NOT '])}NULL"
    if kind == "b":
        return rand.choice(["b", "b = true", "b IS TRUE", "b IS NOT FALSE", "(b IS UNKNOWN)", "NOT b"])
    if kind == "like":
        return f"s {rand.choice(['', 'NOT '])}{rand.choice(['LIKE', 'ILIKE'])} '{random_pattern(rand)}'"
    if kind == "sum":
        a, b = rand.choice(["i", "d"]), rand.choice(["i", "d", "2", "0.5"])
        return f"{a} {rand.choice('+-*')} {b} {operator} {rand.choice(['0', 'i', 'd', '1.10'])}"
    name = rand.choice(NUMBERS) if kind in ("number", "in", "between") else kind
    values = LITERALS["f" if name == "f" else "i"] if name in NUMBERS else LITERALS[name]
    if kind == "in":
        return f"{name} {rand.choice(['', 'NOT '])}IN ({', '.join(rand.sample(values, 3))})"
    if kind == "between":
        return f"{name} {rand.choice(['', 'NOT '])}BETWEEN {rand.choice(values)} AND {rand.choice(values)}"
    other = rand.choice([*values, *(NUMBERS if kind == "number" else ())])
    return f"{name} {operator} {other}"


def random_expression(rand: random.Random, depth: int) -> str:
    if depth == 0:
        return random_test(rand)
    a, b = random_expression(rand, depth - 1), random_expression(rand, depth - 1)
    return rand.choice([f"{a} AND {b}", f"{a} OR {b}", f"NOT ({a})", f"({a} OR {b}) AND {a}", f"NOT {b}"])


@settings(max_examples=10)
@given(st.integers(0, 2**32))
def test_a_random_expression_has_the_value_that_a_sql_engine_gives_it(seed: int) -> None:
    rand = random.Random(seed)
    texts = [random_expression(rand, rand.randint(0, 2)) for _ in range(25)]
    rows = [{name: rand.choice([None, *some]) for name, some in VALUES.items()} for _ in range(20)]
    mine = [c for c in COLUMNS if c.name in VALUES]
    table = pa.Table.from_pylist(rows, pa.schema([(c.name, arrow_type(c.type)) for c in mine]))
    with duckdb.connect() as db:
        db.register("rows", table)
        wanted = db.execute(f"SELECT {', '.join(f'({with_escape(text)})' for text in texts)} FROM rows").fetchall()
    arrays = {name: table.column(name).chunk(0) for name in table.column_names}
    for number, text in enumerate(texts):
        found = compile_predicate(text, mine).evaluate(arrays, len(rows)).to_pylist()
        assert found == [row[number] for row in wanted], text


def test_null_is_unknown_and_violates_no_check() -> None:
    found = compile_predicate("l >= 0", COLUMNS)
    arrays = {"l": pa.array([1, -1, None])}
    assert found.evaluate(arrays, 3).to_pylist() == [True, False, None]
    assert found.false_mask(arrays, 3).tolist() == [False, True, False]
    assert found.true_mask(arrays, 3).tolist() == [True, False, False]
    assert found.columns == {"l"}


def test_integers_and_decimals_are_exact_and_never_overflow() -> None:
    big = 2**63 - 1
    assert evaluate("l * l > 0 AND l + 1 > l AND l = 9223372036854775807", l=[big]) == [True]
    assert evaluate("abs(l) > 0", l=[-(2**63)]) == [True]
    assert evaluate("l = 9007199254740993.0", l=[2**53 + 1]) == [True]
    assert evaluate("-l < 99999999999999999999", l=[-(2**63)]) == [True]
    assert evaluate("l <= 1e18", l=[10**18, 10**18 + 1]) == [True, False]
    assert evaluate("l = 25E-1 * 4e0 AND d = 1e-1 AND f < 1e300", l=[10], d=[Decimal("0.10")], f=[1e299]) == [True]


def test_a_list_of_numbers_has_the_type_of_a_real_and_a_single_number_has_not() -> None:
    """PostgreSQL resolves the types so: SELECT 0.1::real IN (0.1, 0.2) is true, and 0.1::real = 0.1 is false."""
    for text, wanted in (
        ("r IN (0.1, 0.2)", True),
        ("r NOT IN (0.1, 1)", False),
        ("r IN (0.1, NULL)", True),
        ("r IN (0.1, f)", False),
        ("r IN (0.1, 1e300)", False),
        ("r IN (0.1)", False),
        ("r = 0.1", False),
        ("r BETWEEN 0.1 AND 0.1", False),
        ("f IN (0.1, 0.2)", True),
    ):
        assert evaluate(text, r=[0.1], f=[0.1]) == [wanted], text


def test_values_of_timestamps_with_and_without_a_zone() -> None:
    at = datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC)
    assert evaluate("at >= '2026-01-02 05:00+02:00' AND at < '2026-01-02T03:00:01'", at=[at]) == [True]
    assert evaluate("r = 0.5", r=[0.5]) == [True]
    assert evaluate("doc IS NULL OR blob IS NULL", doc=["{}", None], blob=[b"", b""]) == [False, True]


def test_names_match_in_any_case_unless_they_are_quoted() -> None:
    assert evaluate('"Odd name" > 1 OR "Odd name" = 0', **{"Odd name": [2, 1, 0]}) == [True, False, True]
    assert evaluate("S ILIKE 'AB%' AND length(S) = 3 AND coalesce(s, 'x') <> ''", s=["abc", "b"]) == [True, False]
    assert evaluate("TRUE", s=["a", "b"]) == [True, True]


@pytest.mark.parametrize("operator", ["LIKE", "ILIKE"])
@pytest.mark.parametrize(
    ("value", "pattern", "wanted"),
    [
        (r"C:\temp\x", r"%\\temp%", True),
        (r"C:\temp\x", r"C:\\temp%", True),
        (r"C:\temp", r"%\\temp", True),
        (r"C:\\temp", r"%:\\temp", False),
        (r"C:\temp", r"C:\\temp", True),
        ("ab", r"%a\b", True),
        (r"a\b", r"%a\b", False),
        ("50%", r"%\%", True),
        ("505", r"%\%", False),
        ("a\n.b", r"a_.\b", True),
        ("a.b\n", r"\a.b", False),
        ("a_b", r"a\_%", True),
        ("axb", r"a\_%", False),
        ("\\", r"\\", True),
        ("(é)+", r"\(\é)+", True),
    ],
)
def test_a_backslash_in_a_pattern_of_like_escapes_the_next_character(
    operator: str, value: str, pattern: str, wanted: bool
) -> None:
    """PostgreSQL's results."""
    assert evaluate(f"s {operator} '{pattern}'", s=[value, None]) == [wanted, None]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("l / 2 > 0", "division is not supported at character 3"),
        ("l::text = '1'", "not supported at character 2"),
        ("l > 1 --1", "not supported at character 7: --"),
        ("l > 1 /* l > 2 */", "not supported at character 7: /*"),
        ("nope > 0", "no such column: column=nope"),
        ('"I" > 0', "no such column: column=I"),
        ("l", "is no condition"),
        ("l = 'x'", "'x' is not a value of type int64"),
        ("s = 1", "have different types"),
        ("doc = '{}'", "cannot be compared"),
        ("day > wall", "have different types"),
        ("wall > '2026-01-01 00:00+01'", "has a time zone"),
        ("(l > 0", ") is expected at the end"),
        ("l > 0 l", "not supported at character 7"),
        ("", "an operand is missing at the end"),
        ("l = (SELECT 1)", "not supported at character 6: SELECT"),
        ("upper(s) = 'A'", "function upper is not supported"),
        ("s LIKE s", "the pattern of LIKE is no text literal"),
        (r"s LIKE 'a%\'", "the pattern of LIKE ends with a backslash"),
        ("0 < l < 2", "a comparison of a comparison"),
        ("(" * 60 + "b" + ")" * 60, "nested deeper"),
        ("NOT " * 60 + "b", "nested deeper"),
        ("- " * 60 + "l > 0", "nested deeper"),
        ("l" + " * l" * 4 + " > 0", "digits"),
        ("f" + " + f" * 60 + " > 0", "operators in a row"),
        ("l IS 3", "IS is followed by"),
        ("length(l) > 0", "length cannot be applied"),
    ],
)
def test_what_is_not_supported_is_refused_with_its_place(text: str, said: str) -> None:
    with pytest.raises(InvalidError) as caught:
        compile_predicate(text, COLUMNS)
    assert said in caught.value.message


def test_thousands_of_alternatives_are_evaluated_in_a_loop() -> None:
    text = " OR ".join(["b"] * 1500)
    assert evaluate(text, b=[False, None, True]) == [False, None, True]
