"""Expectations: named conditions of a table's rows, and what happens to a record whose row violates one.

A row violates an expectation if it is false. Unknown is no violation, as for SQL's CHECK: write `total IS NOT NULL` to
exclude nulls.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from re import Match

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidemill.base.errors import InvalidError
from tidemill.shards.api import ShardSchema
from tidemill.spark.predicates.predicate import compile_predicate

DEAD_LETTER, DROP, FAIL = "dead_letter", "drop", "fail"
ON_VIOLATION = (DEAD_LETTER, DROP, FAIL)
NAME_CHARS_MAX = 100
EXPECTATIONS_MAX = 100


_QUOTED_OR_SPACE = re.compile(r"""'[^']*'|"[^"]*"|\s+""")


class Expectation(msgspec.Struct, frozen=True):
    """`expression`: the declared text. Whitespace is significant in its literals and quoted names."""

    name: str
    expression: str

    @property
    def line(self) -> str:
        """The expression on one line: what is quoted has escapes for control characters."""
        return _QUOTED_OR_SPACE.sub(_on_one_line, self.expression).strip()


def _on_one_line(found: Match[str]) -> str:
    text = found[0]
    if text[0] not in "'\"":
        return " "
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class Expectations(msgspec.Struct, frozen=True):
    """Expectations of one table."""

    rules: tuple[Expectation, ...]
    on_violation: str = DEAD_LETTER

    def reason(self, violated: Iterable[int]) -> str:
        """Return the reason of a dead letter for the numbers of the violated expectations."""
        rules = (self.rules[number] for number in violated)
        return "; ".join(f"violates {rule.name}: {rule.line}" for rule in rules)


class Violations(msgspec.Struct, frozen=True, array_like=True):
    """Number of records of one time that violate expectation number `rule`."""

    time_ms: int
    rule: int
    count: int


class ExpectationCheck:
    """Compiled expectations of one table. Raises InvalidError if one does not fit the schema."""

    def __init__(self, schema: ShardSchema, expectations: Expectations) -> None:
        self.expectations = expectations
        self._predicates = [compile_predicate(rule.expression, schema.columns) for rule in expectations.rules]

    def violated(self, rows: pa.Table) -> npt.NDArray[np.bool_]:
        """Return whether each row violates each expectation. Shape (expectations, rows)."""
        used = {name for predicate in self._predicates for name in predicate.columns}
        arrays = {name: rows.column(name).combine_chunks() for name in used}
        return np.array([predicate.false_mask(arrays, rows.num_rows) for predicate in self._predicates], dtype=bool)


@lru_cache(maxsize=256)
def expectation_check(schema: ShardSchema, expectations: Expectations | None) -> ExpectationCheck | None:
    """Return the check, or None without expectations. Raises InvalidError."""
    return ExpectationCheck(schema, expectations) if expectations is not None else None


def declared_expectations(table: str, expect: Mapping[str, str], on_violation: str) -> Expectations | None:
    """Return the expectations of a declaration. Raises InvalidError."""
    if on_violation not in ON_VIOLATION:
        raise InvalidError(
            f"unknown on_violation: table={table} on_violation={on_violation}.",
            fix=f"Use one of: {', '.join(ON_VIOLATION)}.",
        )
    if not isinstance(expect, Mapping):
        raise InvalidError(
            f"expect names no conditions: table={table} expect={expect!r}.",
            fix='Give it as expect={"positive": "total >= 0"}.',
        )
    if len(expect) > EXPECTATIONS_MAX:
        raise InvalidError(f"too many expectations: table={table} count={len(expect)} max={EXPECTATIONS_MAX}.")
    for name, expression in expect.items():
        if not isinstance(name, str) or not name.strip() or len(name) > NAME_CHARS_MAX or not name.isprintable():
            raise InvalidError(
                f"invalid name of an expectation: table={table} expectation={str(name)[:NAME_CHARS_MAX]!r}.",
                fix=f"Use 1 to {NAME_CHARS_MAX} printable characters.",
            )
        if not isinstance(expression, str):
            raise InvalidError(f"expectation is no SQL text: table={table} expectation={name}.")
    if not expect:
        return None
    return Expectations(tuple(Expectation(name, text) for name, text in expect.items()), on_violation)


def count_violations(times: npt.NDArray[np.int64], violated: npt.NDArray[np.bool_]) -> tuple[Violations, ...]:
    """Return the counts by time. `violated` has shape (expectations, rows)."""
    out = []
    for rule, mask in enumerate(violated):
        at, counts = np.unique(times[mask], return_counts=True)
        out += [Violations(t, rule, n) for t, n in zip(at.tolist(), counts.tolist(), strict=True)]
    return tuple(out)
