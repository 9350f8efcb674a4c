"""The query string of GET /v1/shape, checked. Unknown parameters are ignored, as the protocol asks.

table     required: orders, public.orders, "Odd Name"; shard.<name> or shard:<name> for a shard
offset    required: -1, now, or the electric-offset of an earlier answer
handle    required unless offset is -1 or now
live      true | false; not with -1 or now
live_sse  needs live; experimental_live_sse is the older name
cursor    cache buster of live requests
where, params[n] (or params as a JSON object), columns, replica, log, secret
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import orjson
from starlette.datastructures import QueryParams

from tidemill.base.errors import Invalid
from tidemill.shapes.offsets import BEFORE_ALL, LogOffset, number
from tidemill.shapes.plan import ShapeRequest, closing_quote

REQUIRED = "can't be blank"


class BadRequest(Invalid):
    """400; `errors` is field → messages."""

    def __init__(self, errors: Mapping[str, list[str]]) -> None:
        super().__init__("Invalid request")
        self.errors = dict(errors)


class ShapeParams(msgspec.Struct, frozen=True):
    """`offset` None means now."""

    request: ShapeRequest
    offset: LogOffset | None
    handle: str
    live: bool
    sse: bool
    cursor: int | None

    @property
    def initial(self) -> bool:
        return self.offset == BEFORE_ALL


def parse(query: QueryParams) -> ShapeParams:
    """Raises BadRequest with every wrong field at once."""
    errors: dict[str, list[str]] = {}
    table = query.get("table", "")
    if not table:
        errors["table"] = [REQUIRED]
    offset = _offset(query.get("offset"), errors)
    handle = query.get("handle", "")
    starts = offset is None or offset == BEFORE_ALL
    if not starts and not handle and "offset" not in errors:
        errors["handle"] = ["can't be blank when offset != -1"]
    live = _flag(query, "live", errors)
    sse = _flag(query, "live_sse", errors) or _flag(query, "experimental_live_sse", errors)
    if live and starts and "offset" not in errors:
        errors["live"] = ["can't be true when offset == -1 or now"]
    if sse and not live:
        errors["live_sse"] = ["can't be true unless live is also true"]
    columns = _columns(query.get("columns"), errors)
    params = _params(query, errors)
    replica = _choice(query, "replica", ("default", "full"), errors)
    log_mode = _choice(query, "log", ("full", "changes_only"), errors)
    cursor_text = query.get("cursor", "")
    if errors:
        raise BadRequest(errors)
    request = ShapeRequest(
        table,
        query.get("where", ""),
        params,
        columns,
        "full" if replica == "full" else "default",
        "changes_only" if log_mode == "changes_only" else "full",
    )
    return ShapeParams(request, offset, handle, live, sse, number(cursor_text))


def _offset(text: str | None, errors: dict[str, list[str]]) -> LogOffset | None:
    if text is None or text == "":
        errors["offset"] = [REQUIRED]
        return None
    if text == "now":
        return None
    try:
        return LogOffset.parse(text)
    except Invalid:
        errors["offset"] = ["has invalid format"]
        return None


def _flag(query: QueryParams, name: str, errors: dict[str, list[str]]) -> bool:
    text = query.get(name, "false").lower()
    if text not in ("true", "false", "1", "0", ""):
        errors[name] = ["is invalid"]
    return text in ("true", "1")


def _choice(query: QueryParams, name: str, allowed: tuple[str, str], errors: dict[str, list[str]]) -> str:
    text = query.get(name, allowed[0])
    if text not in allowed:
        errors[name] = [f"is invalid, must be one of: {', '.join(allowed)}"]
    return text


def _columns(text: str | None, errors: dict[str, list[str]]) -> tuple[str, ...]:
    """Comma-separated names; a double-quoted name keeps its case, commas and doubled quotes."""
    if not text:
        return ()
    names: list[str] = []
    at = 0
    while at <= len(text):
        if text[at : at + 1] == '"':
            end = closing_quote(text, at)
            if end < 0 or text[end + 1 : end + 2] not in ("", ","):
                errors["columns"] = ["Invalid quoted identifier"]
                return ()
            names.append(text[at + 1 : end].replace('""', '"'))
            at = end + 2
        else:
            end = text.find(",", at)
            end = len(text) if end < 0 else end
            names.append(text[at:end].strip().lower())
            at = end + 1
    if not all(names):
        errors["columns"] = ["Invalid zero-length delimited identifier"]
    return tuple(dict.fromkeys(names))


def _params(query: QueryParams, errors: dict[str, list[str]]) -> tuple[str, ...]:
    """params[1]=a&params[2]=b, or params={"1":"a","2":"b"}; numbers must run from 1."""
    found: dict[str, str] = {}
    for name, value in query.items():
        if name.startswith("params[") and name.endswith("]"):
            found[name[len("params[") : -1]] = value
    if query.get("params"):
        try:
            decoded = orjson.loads(query["params"])
        except orjson.JSONDecodeError:
            decoded = None
        if isinstance(decoded, list):
            decoded = {str(index): value for index, value in enumerate(decoded, 1)}
        if not isinstance(decoded, dict) or not all(isinstance(value, str | int | float) for value in decoded.values()):
            errors["params"] = ["Params must be a JSON object of numbers to strings"]
            return ()
        found |= {str(key): _text(value) for key, value in decoded.items()}
    if set(found) != {str(number) for number in range(1, len(found) + 1)}:
        errors["params"] = ["Parameters must be numbered sequentially, starting from 1"]
        return ()
    return tuple(found[str(number)] for number in range(1, len(found) + 1))


def _text(value: str | int | float) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
