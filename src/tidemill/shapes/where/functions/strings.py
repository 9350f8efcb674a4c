"""Operators and functions on text: concatenation, LIKE, and the supported functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

import msgspec

from tidemill.shapes.where.case_folding import lower_function, upper_function
from tidemill.shapes.where.collations import decided_collation, with_common_collation
from tidemill.shapes.where.expressions import BOOL, TEXT, Expression, Row, count_built, resolve_unknown, strict
from tidemill.shapes.where.operators import operator_error
from tidemill.shapes.where.types import CHAR_BYTES, EvaluationError, Type, Value, WhereError


def compile_concatenation(left: Expression, right: Expression, location: str) -> Expression:
    left, right = resolve_unknown(left, TEXT, location), resolve_unknown(right, TEXT, location)
    if left.type.array or right.type.array or left.type.name != "text" or right.type.name != "text":
        raise WhereError(
            f"{location}only text can be concatenated: {left.type} || {right.type}", fix="Cast both to text."
        )
    if CHAR_BYTES in (left.type.most_bytes, right.type.most_bytes):
        raise WhereError(f'{location}operator is not unique: || of "char"', fix="Cast both to text.")
    type_ = with_common_collation(TEXT, left, right, location=location)
    return Expression(
        type_, strict(_join, left, right), constant=left.constant and right.constant,
        collated=left.collated or right.collated,
    )  # fmt: skip


def _join(left: str, right: str) -> str:
    count_built(len(left) + len(right))
    return left + right


class LikePattern:
    """A LIKE pattern (escape character backslash), ready to match texts.

    A piece between two % may be matched at its first position, as a later one would only leave less room for the rest.
    So pieces are searched one after the other without backtracking; with it, a pattern with a few % could take years on
    a row of a hundred bytes. Pieces without _ are searched in linear time.

    A pattern may end with the escape character. PostgreSQL raises an error if the comparison reaches it, and reports no
    match if the comparison ends before.
    """

    def __init__(self, pattern: str) -> None:
        pieces, self.unfinished = _split_pattern(pattern)
        first, *rest = [_Piece(piece) for piece in pieces]
        self._first = first
        self._rest = rest

    def matches(self, text: str) -> bool:
        """Return whether the text matches.

        Raises EvaluationError if pattern and text together are too long to compare quickly, or if the comparison
        reaches an escape character at the pattern's end.
        """
        if self.unfinished:
            if self._reaches_end(text):
                raise EvaluationError("LIKE pattern must not end with escape character")
            return False
        first, rest = self._first, self._rest
        if not rest:
            return len(text) == first.length and first.at(text, 0)
        *middle, last = rest
        if not first.at(text, 0):
            return False
        place, end = first.length, len(text) - last.length
        for piece in middle:
            place = piece.search(text, place, end)
            if place < 0:
                return False
        return place <= end and last.at(text, end)

    def _reaches_end(self, text: str) -> bool:
        """Return whether PostgreSQL's comparison reaches the pattern's end: after the last piece with text remaining,
        or within a run of wildcards. A run is only entered with text remaining."""
        place, end, in_run = self._first.length, len(text), False
        if not self._first.at(text, 0):
            return False
        if not self._rest:
            return place < end
        *middle, last = self._rest
        for piece in middle:
            if not in_run and place >= end:
                return False
            in_run = piece.only_wildcards
            place = piece.search(text, place, end)
            if place < 0:
                return False
        if not in_run and place >= end:
            return False
        return last.search(text, place, end if last.only_wildcards else end - 1) >= 0


class _Piece:
    """Literal text with _ as wildcard (None)."""

    def __init__(self, chars: list[str | None]) -> None:
        self.length = len(chars)
        self.only_wildcards = all(char is None for char in chars)
        literal = "".join(char for char in chars if char is not None)
        self._literal = literal if len(literal) == len(chars) else None
        if self._literal is None:
            escaped = ("." if char is None else re.escape(char) for char in chars)
            self._pattern = re.compile("".join(escaped), re.DOTALL)

    def at(self, text: str, place: int) -> bool:
        if self._literal is not None:
            return text.startswith(self._literal, place)
        return self._pattern.match(text, place) is not None

    def search(self, text: str, start: int, end: int) -> int:
        """Return the end of the first match between `start` and `end`; -1 = none."""
        if self._literal is not None:
            found = text.find(self._literal, start, max(start, end))
            return -1 if found < 0 else found + self.length
        if (end - start) * self.length > MAX_LIKE_STEPS:
            raise EvaluationError(f"LIKE with _ is too expensive on this row: text={len(text)} piece={self.length}")
        match = self._pattern.search(text, start, max(start, end))
        return -1 if match is None else match.end()


MAX_LIKE_STEPS = 1_000_000
"""Limit of positions times length for a piece with wildcards: 20 ms at worst."""

MAX_CACHED_PATTERN = 1_000
"""Longest pattern from a row that is cached, so that patterns of many rows do not use up memory."""

MAX_ROW_PATTERN = 10_000
"""Longest pattern from a row; longer ones are rejected, as preparing one takes milliseconds."""


@lru_cache(maxsize=1024)
def _cached_pattern(pattern: str) -> LikePattern:
    return LikePattern(pattern)


def prepare_pattern(pattern: str) -> LikePattern:
    """Return the prepared pattern. Raises EvaluationError."""
    if len(pattern) > MAX_ROW_PATTERN:
        raise EvaluationError(f"a LIKE pattern of more than {MAX_ROW_PATTERN} characters is not supported on rows")
    return _cached_pattern(pattern) if len(pattern) <= MAX_CACHED_PATTERN else LikePattern(pattern)


def _split_pattern(pattern: str) -> tuple[list[list[str | None]], bool]:
    """Split a pattern at each %; also return whether it ends with an escape character."""
    pieces: list[list[str | None]] = [[]]
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
            if at >= len(pattern):
                return pieces, True
            pieces[-1].append(pattern[at])
        elif char == "%":
            pieces.append([])
        else:
            pieces[-1].append(None if char == "_" else char)
        at += 1
    return pieces, False


def ends_with_escape(pattern: Expression) -> bool:
    """Return whether a constant pattern ends with an escape character, so that matching may fail."""
    text = _as_text(pattern).evaluate({})
    return text is not None and LikePattern(str(text)).unfinished


def compile_like(name: str, left: Expression, right: Expression, location: str) -> Expression:
    """Compile LIKE; `name` is ~~, !~~, ~~* or !~~*. Padded text keeps its padding as a value, and loses it as a
    pattern."""
    left, right = resolve_unknown(left, TEXT, location), resolve_unknown(right, TEXT, location)
    for side in (left, right):
        if side.type.array or side.type.name not in ("text", "bpchar"):
            raise operator_error(name, left.type, right.type, location)
    right = _as_text(right)
    wanted = not name.startswith("!")
    folding = decided_collation(left, right, location=location).folding
    fold = lower_function(folding, location) if name.endswith("*") else str
    known = right.evaluate({}) if right.constant else None
    if known is not None:
        fixed = LikePattern(fold(known))

        def match_fixed(text: str) -> bool:
            return fixed.matches(fold(text)) is wanted

        return Expression(BOOL, strict(match_fixed, left))

    def match(text: str, pattern: str) -> bool:
        return prepare_pattern(fold(pattern)).matches(fold(text)) is wanted

    return Expression(BOOL, strict(match, left, right))


_TRIMS: dict[str, Callable[[str, str], str]] = {"btrim": str.strip, "ltrim": str.lstrip, "rtrim": str.rstrip}
_ENDS = ("left", "right")
_LIKES = {"like": "~~", "notlike": "!~~"}
FUNCTIONS = ("lower", "upper", "length", "concat", *_TRIMS, *_ENDS, *_LIKES)


def compile_call(name: str, operands: Sequence[Expression], location: str) -> Expression:
    """Compile one of FUNCTIONS, on text only: the text of other types is specific to PostgreSQL. Raises WhereError."""
    if name in _ENDS and len(operands) == 2:
        operands = [resolve_unknown(operands[0], TEXT, location), resolve_unknown(operands[1], Type("int4"), location)]
    else:
        operands = [resolve_unknown(operand, TEXT, location) for operand in operands]
    kinds = ", ".join(str(operand.type) for operand in operands)
    constant = all(operand.constant for operand in operands)
    if name != "concat":
        operands = [_as_text(operand) for operand in operands]
    types = [operand.type.name if not operand.type.array else "array" for operand in operands]
    if not _accepts(name, types):
        raise WhereError(f"{location}function {name}({kinds}) does not exist.", fix="Cast to text.")
    first = operands[0]
    if name in _LIKES:
        return compile_like(_LIKES[name], operands[0], operands[1], location)
    type_ = msgspec.structs.replace(first.type, varying=False, most_bytes=0)
    if name == "length":
        return Expression(Type("int4"), strict(len, first), constant=constant)
    if name in ("lower", "upper"):
        fold = (lower_function if name == "lower" else upper_function)(first.type.folding, location)
        return Expression(type_, strict(fold, first), constant=constant, collated=first.collated)
    if name in _ENDS:
        part = strict(_prefix if name == "left" else _suffix, *operands)
        return Expression(type_, part, constant=constant, collated=first.collated)
    type_ = with_common_collation(TEXT, *operands, location=location)
    collated = any(each.collated for each in operands)
    if name in _TRIMS:
        trim = _TRIMS[name]
        if len(operands) == 1:
            return Expression(type_, strict(lambda text: trim(text, " "), first), constant=constant, collated=collated)
        return Expression(type_, strict(trim, *operands), constant=constant, collated=collated)
    tests = [operand.evaluate for operand in operands]

    def joined(row: Row) -> Value:
        texts: list[str] = []
        for test in tests:
            text = test(row)
            if text is not None:
                count_built(len(text))
                texts.append(text)
        return "".join(texts)

    return Expression(type_, joined, constant=constant, collated=collated)


def _accepts(name: str, types: Sequence[str]) -> bool:
    if name in _ENDS:
        return len(types) == 2 and types[0] == "text" and types[1] in ("int2", "int4")
    if name in _LIKES and len(types) != 2:
        return False
    most = {"concat": len(types)}.get(name, 2 if name in _TRIMS or name in _LIKES else 1)
    return 1 <= len(types) <= most and all(kind == "text" for kind in types)


def _as_text(operand: Expression) -> Expression:
    """Return padded text as text, without its padding."""
    if operand.type.name != "bpchar" or operand.type.array:
        return operand
    text = strict(lambda padded: padded.rstrip(" "), operand)
    return Expression(operand.type.with_name("text"), text, constant=operand.constant, collated=operand.collated)


def _prefix(text: str, count: int) -> str:
    return text[:count]


def _suffix(text: str, count: int) -> str:
    if count == -(1 << 31):  # PostgreSQL negates it, which is not an int4
        return text
    return text[len(text) - count :] if 0 <= count <= len(text) else text if count > 0 else text[-count:]
