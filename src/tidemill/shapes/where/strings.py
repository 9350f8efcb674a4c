"""Operators on text: joining, and LIKE with its patterns."""

from __future__ import annotations

import operator
import re
from functools import lru_cache

from tidemill.shapes.where.expressions import BOOL, TEXT, Expression, resolve, strict
from tidemill.shapes.where.operators import no_operator
from tidemill.shapes.where.types import EvaluationError, Type, WhereError


def concat(left: Expression, right: Expression, location: str) -> Expression:
    left, right = resolve(left, TEXT, location), resolve(right, TEXT, location)
    if left.type.array or right.type.array or left.type.name != "text" or right.type.name != "text":
        raise WhereError(f"{location}only text can be joined: {left.type} || {right.type}", fix="Cast both to text.")
    ordered = left.type.ordered and right.type.ordered
    return Expression(Type("text", ordered=ordered), strict(operator.add, left, right))


@lru_cache(maxsize=1024)
def like_pattern(pattern: str) -> re.Pattern[str]:
    """A LIKE pattern (escape character backslash) as a regular expression. Raises EvaluationError."""
    out: list[str] = []
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
            if at >= len(pattern):
                raise EvaluationError("LIKE pattern must not end with escape character")
            out.append(re.escape(pattern[at]))
        elif char == "%":
            out.append(".*")
        elif char == "_":
            out.append(".")
        else:
            out.append(re.escape(char))
        at += 1
    return re.compile("".join(out), re.DOTALL)


def like(name: str, left: Expression, right: Expression, location: str) -> Expression:
    """`name` is ~~, !~~, ~~* or !~~*."""
    left, right = resolve(left, TEXT, location), resolve(right, TEXT, location)
    for side in (left, right):
        if side.type.array or side.type.name not in ("text", "bpchar"):
            raise no_operator(name, left.type, right.type, location)
    wanted = not name.startswith("!")
    fold = name.endswith("*")

    def match(text: str, pattern: str) -> bool:
        if fold:
            text, pattern = text.lower(), pattern.lower()
        return (like_pattern(pattern).fullmatch(text) is not None) is wanted

    return Expression(BOOL, strict(match, left, right))
