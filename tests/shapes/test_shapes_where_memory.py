"""Memory of clauses: what a where clause builds on one row is bounded, however its parts are nested, and what an order
builds for rows that wait is counted."""

from __future__ import annotations

import tracemalloc

import pyarrow as pa
import pytest

from tidemill.shapes.definition.subset import SubsetRequest, SubsetScope, compile_subset
from tidemill.shapes.log.chunks import ResponseMemory
from tidemill.shapes.log.row_writer import RowWriter
from tidemill.shapes.memory_budget import Budget
from tidemill.shapes.shards.subsets import SubsetRowReader, _HeldBytes
from tidemill.shapes.where import EvaluationError, Type, WhereError, compile_where

LONG = "t" * 150_000
TAGS = "{" + ",".join("a" * 49_000) + "}"
ROW = {"t": LONG, "u": "u", "tags": TAGS}
COLUMNS = {"t": Type("text"), "u": Type("text"), "tags": Type("text", array=True)}


def listed(part: str, count: int, between: str = ",") -> str:
    return between.join([part] * count)


def nested(start: str, innermost: str, end: str = ")", depth: int = 40) -> str:
    return start * depth + innermost + end * depth


TEXTS = [
    f"concat({listed('t', 9_900)})",
    listed("t", 40, "||"),
    nested(f"concat({listed('t', 30)}) || (", "u"),
    nested("lower(t) || (", "u"),
    nested("concat(lower(t), ", "u"),
    nested("btrim(lower(t), ", "u"),
    nested("greatest(concat(t, u) COLLATE \"C\", ", "u"),
    "array_to_string(tags, t)",
    "array_to_string(ARRAY[NULL, NULL] || tags, '', t || t || t) || array_to_string(array_replace(tags, 'a', t), '')",
]  # fmt: skip
ARRAYS = [
    f"ARRAY[{listed('lower(t)', 4_000)}]",
    f"ARRAY[{listed('lower(t)', 4_000)}]::text[]",
    nested("array_append(", "tags", ", lower(t))"),
    nested("trim_array(tags, 48000) || (", "tags"),
    nested("array_remove(tags, array_to_string(", "tags", ", ''))", 20),
    nested("string_to_array(u || ',' || u, ',') || (tags || (", "tags", "))", 20),
]


def peak_bytes(expression: str) -> int:
    where = compile_where(expression, (), COLUMNS)
    tracemalloc.start()
    try:
        with pytest.raises(EvaluationError, match="limited to 4194304 characters"):
            where.matches(ROW)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", TEXTS)
def test_a_clause_builds_only_so_much_text_on_a_row(text: str) -> None:
    assert peak_bytes(f"length({text}) > 0") < 32 << 20


@pytest.mark.parametrize("array", ARRAYS)
def test_a_clause_builds_only_so_many_elements_on_a_row(array: str) -> None:
    assert peak_bytes(f"cardinality({array}) > 0") < 128 << 20


@pytest.mark.parametrize("between", ["NULL", "'t'"])
def test_a_text_of_many_elements_is_not_split(between: str) -> None:
    where = compile_where(f"cardinality(string_to_array(t || t, {between})) > 0", (), COLUMNS)
    with pytest.raises(EvaluationError, match="more than 100000 elements"):
        where.matches(ROW)


def test_what_a_clause_builds_is_counted_for_each_row() -> None:
    joined = f"length(concat({listed('t', 25)})) > 0"
    many = f"length(t || u) > 0 AND {listed('length(lower(t)) > 0', 500, ' AND ')} AND tags || u <> tags"
    for expression in (joined, f"{many} AND length(concat({listed('t', 20)})) > 0", f"u = ANY(tags || u) AND {joined}"):
        where = compile_where(expression, (), COLUMNS)
        for _ in range(3):
            assert where.matches(ROW)


def test_constants_build_only_so_much_text() -> None:
    with pytest.raises(WhereError, match="can never be evaluated: texts and arrays"):
        compile_where("t = ANY(string_to_array(array_to_string($1::text[], $2), 'b'))", (TAGS, LONG), COLUMNS)


@pytest.mark.parametrize("limit", [None, 3])
def test_the_values_by_which_waiting_rows_are_ordered_are_counted(limit: int | None) -> None:
    scope = SubsetScope("shard", "t", {"id": Type("int8"), "t": Type("text")}, (), 0)
    order = f"concat({listed('t', 500)})"
    subset = compile_subset(SubsetRequest(order_by=order, limit=limit), scope)
    reading = SubsetRowReader(("id", "t"), RowWriter("shard", "t", ("id",), ("id",)), None, subset)
    table = pa.table({"id": pa.array(range(600), pa.int64()), "t": [f"{number:03}" * 10 for number in range(600)]})
    budget = Budget(1 << 30)
    rows, held = ResponseMemory(budget, Budget(1 << 30), 1 << 30), _HeldBytes(budget)
    most = max(budget.used_bytes for _ in reading._read_ordered(table, rows, held))
    assert most > 499 * 500 * 30
    held.release_all()
    rows.release()
    assert budget.used_bytes == 0
