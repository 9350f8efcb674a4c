"""Limits of a subset's clause, body and rows, and its silence about rows outside the shape; without a database."""

from __future__ import annotations

import pytest

from tidemill.base.errors import InvalidError
from tidemill.shapes.definition.planner import FieldError
from tidemill.shapes.definition.subset import Subset, SubsetRequest, SubsetScope, build_subset_sql, compile_subset
from tidemill.shapes.http.param_values import parse_numbered_values
from tidemill.shapes.http.subset_params import decode_body
from tidemill.shapes.log.chunks import ResponseMemory
from tidemill.shapes.memory_budget import Budget, OverBudgetError
from tidemill.shapes.where.compiler import MAX_VALUES_CHARS, compile_where
from tidemill.shapes.where.types import Type, WhereError

COLUMNS = {"f": Type("float8"), "n": Type("numeric"), "i": Type("int4"), "s": Type("text"), "a": Type("numeric", True)}


@pytest.mark.parametrize(
    "clause",
    ["f = n", "n < f", "f IS DISTINCT FROM n", "n BETWEEN 1 AND f", "f IN (n)", "f = ANY(a)", "s || s LIKE '%x'",
     "concat(s, s) = 'x'", "length(s) = 3", "i / i = 1"],
)  # fmt: skip
def test_what_may_fail_on_a_row_is_asked_of_the_shapes_own_rows_only(clause: str) -> None:
    own = compile_where("i = 1", [], COLUMNS)
    asked = Subset(compile_where(clause, [], COLUMNS, first_param=1), None, None, None)
    query, _ = build_subset_sql(["i"], "public.t", ["i"], own, asked)
    assert "CASE WHEN" in query, query


def test_what_cannot_fail_may_use_an_index() -> None:
    own = compile_where("i = 1", [], COLUMNS)
    asked = Subset(compile_where("n = 5 AND f < 2 AND s = 'x'", [], COLUMNS), None, None, None)
    assert "CASE" not in build_subset_sql(["i"], "public.t", ["i"], own, asked)[0]


@pytest.mark.parametrize("field", ["where", "order_by"])
@pytest.mark.parametrize(
    "clause", ["x > 1", "x = 'abc'", "x = true", "s < x", "t.x", "lower(x)", "x IS NULL", "x || x"]
)
def test_to_a_subset_columns_that_it_may_not_query_do_not_exist(clause: str, field: str) -> None:
    scope = SubsetScope("public", "t", COLUMNS, ("i", "s"), 0)
    texts = []
    for name in ("f", "n", "a", "g"):
        asked = SubsetRequest(**{field: clause.replace("x", name)})  # type: ignore[arg-type]
        with pytest.raises(FieldError) as refused:
            compile_subset(asked, scope)
        assert refused.value.field == f"subset__{field}"
        texts.append(str(refused.value).replace(f" {name}:", " x:").replace(f'"{name}"', '"x"'))
    assert set(texts) == {texts[-1]} and 'column "x" does not exist' in texts[-1]


def test_a_long_parameter_is_counted_each_time_it_is_used() -> None:
    value = "{" + "1," * 40_000 + "1}"
    once = compile_where("n = ANY($1)", [value], COLUMNS)
    assert once.matches({"n": "1"})
    uses = MAX_VALUES_CHARS // len(value) + 1
    with pytest.raises(WhereError, match="counted once per use"):
        compile_where(" OR ".join(["n > ANY($1)"] * uses), [value], COLUMNS)


def test_a_zero_byte_in_a_parameter_and_a_body_of_brackets_are_told_of_the_parameter() -> None:
    errors: dict[str, list[str]] = {}
    assert parse_numbered_values({"1": "a\0b"}, "params", errors) == () and "zero byte" in errors["params"][0]
    errors = {}
    decode_body(b'{"x":' + b"[" * 100_000, errors)
    assert list(errors) == ["body"]


def test_all_subsets_together_leave_most_of_the_memory_to_the_shapes() -> None:
    budget, share = Budget(1_000), Budget(250, whose="all subsets together")
    rows = [ResponseMemory(budget, share, 200) for _ in range(3)]
    rows[0].add([b"x" * 150])
    with pytest.raises(OverBudgetError, match="all subsets together"):
        rows[1].add([b"x" * 150])
    assert (budget.used_bytes, share.used_bytes) == (150, 150)
    with pytest.raises(InvalidError, match="too large"):
        rows[0].add([b"x" * 100])
    budget.reserve(800)
    with pytest.raises(OverBudgetError):
        rows[2].add([b"x" * 90])
    assert share.used_bytes == 150
    rows[0].release()
    rows[0].release()
    assert (budget.used_bytes, share.used_bytes) == (800, 0)
