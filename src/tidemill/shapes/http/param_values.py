"""Parses values of parameters: lists of columns, values of `$1 …`, counts. Each function adds problems to `errors`."""

from __future__ import annotations

from collections.abc import Iterable

import orjson

from tidemill.base.pgtypes.text import BLANKS
from tidemill.shapes.definition.planner import MAX_PARAMS, find_closing_quote, fold_identifier
from tidemill.shapes.log.log_offset import parse_number

Errors = dict[str, list[str]]

MAX_ROW_COUNT = (1 << 63) - 1
"""Maximum of LIMIT and OFFSET."""


def parse_column_names(text: str | None, field: str, errors: Errors) -> tuple[str, ...]:
    """Parse comma-separated names; a double-quoted name keeps its case, commas and doubled quotes."""
    if not text:
        return ()
    names: list[str] = []
    at = 0
    while at <= len(text):
        if text[at : at + 1] == '"':
            end = find_closing_quote(text, at)
            if end < 0 or text[end + 1 : end + 2] not in ("", ","):
                errors[field] = ["Invalid quoted identifier"]
                return ()
            names.append(text[at + 1 : end].replace('""', '"'))
            at = end + 2
        else:
            end = text.find(",", at)
            end = len(text) if end < 0 else end
            names.append(fold_identifier(text[at:end].strip(BLANKS)))
            at = end + 1
    if not all(names):
        errors[field] = ["Invalid zero-length delimited identifier"]
    return tuple(dict.fromkeys(names))


def parse_query_params(items: Iterable[tuple[str, str]], field: str, errors: Errors) -> tuple[str, ...]:
    """Parse field[1]=a&field[2]=b, or field={"1":"a","2":"b"}; numbers must start at 1."""
    found: dict[str, str] = {}
    whole = ""
    for name, value in items:
        if name.startswith(f"{field}[") and name.endswith("]"):
            found[name[len(field) + 1 : -1]] = value
        elif name == field:
            whole = value
    decoded: object = None
    if whole:
        try:
            decoded = orjson.loads(whole)
        except orjson.JSONDecodeError:
            decoded = whole
    return parse_numbered_values(decoded, field, errors, found)


def parse_numbered_values(
    given: object, field: str, errors: Errors, more: dict[str, str] | None = None
) -> tuple[str, ...]:
    """Convert {"1": a, "2": b} or [a, b] to (a, b), as text. None = not given."""
    if given is None:
        given = {}
    if isinstance(given, list | dict) and len(given) > MAX_PARAMS:
        errors[field] = [f"too many parameters: limit={MAX_PARAMS}. Send an array and use = ANY($1)."]
        return ()
    if isinstance(given, list):
        given = {str(index): value for index, value in enumerate(given, 1)}
    if not isinstance(given, dict) or not all(isinstance(value, str | int | float) for value in given.values()):
        errors[field] = ["Params must be a JSON object of numbers to strings"]
        return ()
    found = {**(more or {}), **{str(key): _value_text(value) for key, value in given.items()}}
    if any("\0" in value for value in found.values()):
        errors[field] = ["a parameter contains a zero byte, which PostgreSQL's text cannot"]
        return ()
    if set(found) != {str(index) for index in range(1, len(found) + 1)}:
        errors[field] = ["Parameters must be numbered sequentially, starting from 1"]
        return ()
    return tuple(found[str(index)] for index in range(1, len(found) + 1))


def _value_text(value: str | int | float) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def parse_row_count(given: object, field: str, errors: Errors) -> int | None:
    """Parse a number of rows, as JSON or as text; None and "" = not given."""
    if given is None or given == "":
        return None
    found = parse_number(given) if isinstance(given, str) else given
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= MAX_ROW_COUNT:
        errors[field] = ["must be a number of rows, 0 or more"]
        return None
    return found
