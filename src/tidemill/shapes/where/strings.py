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
    """A LIKE pattern (escape character backslash) as a regular expression. Raises EvaluationError.

    What lies between two % may as well match at its first place, for all that follows could only have less room. So
    those pieces are atomic, and never tried again: else a pattern of a few % takes years on a row of a hundred bytes.
    """
    first, *rest = _pieces(pattern)
    if not rest:
        return re.compile(first, re.DOTALL)
    *middle, last = rest
    return re.compile(first + "".join(f"(?>.*?{piece})" for piece in middle) + ".*" + last, re.DOTALL)


def _pieces(pattern: str) -> list[str]:
    """What lies before, between and behind the %, as regular expressions of fixed length."""
    pieces = [""]
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
            if at >= len(pattern):
                raise EvaluationError("LIKE pattern must not end with escape character")
            pieces[-1] += re.escape(pattern[at])
        elif char == "%":
            pieces.append("")
        else:
            pieces[-1] += "." if char == "_" else re.escape(char)
        at += 1
    return pieces


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
