"""PostgreSQL's array text: `{1,NULL,"a \\"b\\""}`, nested braces, optional `[l:u]=` bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tidemill.shapes.where.types import EvaluationError

ARRAY_CHARS = 100_000
"""Read character by character: 20 ms."""


def read_array(text: str, read: Callable[[str], Any]) -> list[Any]:
    """Parse array text; elements go through `read`, NULL becomes None. Raises EvaluationError."""
    if len(text) > ARRAY_CHARS:
        raise EvaluationError(f"an array of more than {ARRAY_CHARS} characters is not supported in a where clause")
    body = text.strip()
    if body.startswith("[") and "=" in body:
        body = body.split("=", 1)[1].strip()
    if not body.startswith("{"):
        raise EvaluationError(f'malformed array literal: "{text}"')
    value, end = _braces(body, 0, read)
    if end != len(body):
        raise EvaluationError(f'malformed array literal: "{text}"')
    return value


def _braces(body: str, start: int, read: Callable[[str], Any]) -> tuple[list[Any], int]:
    items: list[Any] = []
    at = start + 1
    while True:
        at = _skip_space(body, at)
        if at >= len(body):
            raise EvaluationError(f'malformed array literal: "{body}"')
        if body[at] == "}" and not items:
            return items, at + 1
        item, at = _item(body, at, read)
        items.append(item)
        at = _skip_space(body, at)
        if at < len(body) and body[at] == ",":
            at += 1
        elif at < len(body) and body[at] == "}":
            return items, at + 1
        else:
            raise EvaluationError(f'malformed array literal: "{body}"')


def _item(body: str, at: int, read: Callable[[str], Any]) -> tuple[Any, int]:
    if body[at] == "{":
        return _braces(body, at, read)
    if body[at] == '"':
        text, at = _quoted(body, at + 1)
        return read(text), at
    out: list[str] = []
    while at < len(body) and body[at] not in ",}":
        if body[at] in '{"':
            raise EvaluationError(f'malformed array literal: "{body}"')
        if body[at] == "\\":
            at += 1
        out.append(body[at : at + 1])
        at += 1
    text = "".join(out).rstrip()
    if not text:
        raise EvaluationError(f'malformed array literal: "{body}"')
    return (None if text.upper() == "NULL" else read(text)), at


def _quoted(body: str, at: int) -> tuple[str, int]:
    out: list[str] = []
    while at < len(body):
        char = body[at]
        if char == '"':
            return "".join(out), at + 1
        if char == "\\":
            at += 1
            char = body[at : at + 1]
        out.append(char)
        at += 1
    raise EvaluationError(f'malformed array literal: "{body}"')


def _skip_space(body: str, at: int) -> int:
    while at < len(body) and body[at].isspace():
        at += 1
    return at


def flatten(items: list[Any]) -> list[Any]:
    """Elements of a possibly nested array, in storage order: what ANY and ALL compare with."""
    out: list[Any] = []
    for item in items:
        if isinstance(item, list):
            out.extend(flatten(item))
        else:
            out.append(item)
    return out
