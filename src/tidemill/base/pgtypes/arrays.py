"""PostgreSQL's array text: `{1,NULL,"a \\"b\\""}`, nested braces, optional `[l:u]=` bounds. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tidemill.base.pgtypes.text import BLANKS, InvalidTextError

ARRAY_CHARS = 100_000
"""Length limit of an array's text, which takes about 20 ms to read."""

DIMENSIONS_MAX = 6

_FLAT = re.compile(r'\{([^{}"\\]*)\}\Z')
_BOUNDS = re.compile(r"(?:\[[+-]?[0-9]+(?::[+-]?[0-9]+)?\])+[ \t\n\r\f\v]*=[ \t\n\r\f\v]*")
_ITEM = re.compile(r'[ \t\n\r\f\v]*(?:([{},])|"((?:[^"\\]|\\.)*)"|((?:[^{},"\\]|\\.)+))[ \t\n\r\f\v]*', re.DOTALL)
_LOWER = re.compile(r"\[([+-]?[0-9]+)(:?)")
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


class BoundedArray(list[Any]):
    """An array with lower bounds other than 1, which are part of its value: `[2:3]={1,2}` is not `{1,2}`."""

    lower: tuple[int, ...] = ()


def read_array(text: str, read: Callable[[str], Any]) -> list[Any]:
    """Parse an array. Elements are parsed by `read`, NULL becomes None; `BoundedArray` if lower bounds other than 1 are
    given.

    Raises InvalidTextError, and the errors of `read`.
    """
    if len(text) > ARRAY_CHARS:
        raise InvalidTextError(f"an array of more than {ARRAY_CHARS} characters is not supported")
    body, whole, before = text.strip(BLANKS), list[Any](), ""
    flat = _FLAT.match(body)
    if flat:  # most arrays; twice as fast
        words = [word.strip(BLANKS) for word in flat[1].split(",")]
        if words == [""]:
            return []
        if "" in words:
            raise _malformed(text)
        return [None if word.upper() == "NULL" else read(word) for word in words]
    bounds = _BOUNDS.match(body)
    stack, at = [whole], bounds.end() if bounds else 0
    while at < len(body):
        found = _ITEM.match(body, at)
        if found is None:
            raise _malformed(text)
        mark, quoted, plain = found.groups()
        if not mark and before in ("{", ","):
            stack[-1].append(_element(quoted, plain, read))
        elif mark == "," and before in ("value", "}") and len(stack) > 1:
            pass
        elif mark == "{" and before in ("", "{", ",") and len(stack) <= DIMENSIONS_MAX:
            stack[-1].append([])
            stack.append(stack[-1][-1])
        elif mark == "}" and before in ("{", "}", "value") and len(stack) > 1:
            stack.pop()
        else:
            raise _malformed(text)
        before, at = mark or "value", found.end()
    if len(stack) > 1 or not whole:
        raise _malformed(text)
    found_lower = tuple(int(bound) if colon else 1 for bound, colon in _LOWER.findall(bounds[0])) if bounds else ()
    if not whole[0] or all(bound == 1 for bound in found_lower):
        return whole[0]  # type: ignore[no-any-return]
    bounded = BoundedArray(whole[0])
    bounded.lower = found_lower
    return bounded


def _element(quoted: str | None, plain: str | None, read: Callable[[str], Any]) -> Any:
    if plain is not None:
        plain = plain.rstrip(BLANKS)
        if plain.upper() == "NULL":
            return None
    text = quoted or plain or ""
    return read(_ESCAPED.sub(r"\1", text) if "\\" in text else text)


def _malformed(text: str) -> InvalidTextError:
    return InvalidTextError(f'malformed array literal: "{text}"')
