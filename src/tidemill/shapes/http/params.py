"""Parses the query string of /v1/shape. Unknown parameters are ignored, as the protocol requires.

table     orders, public.orders, "Odd Name"; shard.<name> or shard:<name> for a shard. Required unless a server-defined
          shape or a signature determines the request (`permissions.Grant`)
offset    required: -1, now, or the electric-offset of an earlier response; for a subset `now` is the default
handle    required unless offset is -1 or now
live      true | false; not with -1 or now
live_sse  needs live; experimental_live_sse is the older name
cursor    cache buster of live requests
where, params[n] (or params as a JSON object), columns, queryable_columns, replica, log, secret
subset__…, or the body of a POST: `subset_params`
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote_to_bytes

import msgspec
from starlette.datastructures import QueryParams

from tidemill.base.errors import InvalidError
from tidemill.shapes.definition.permissions import Grant
from tidemill.shapes.definition.planner import ShapeRequest
from tidemill.shapes.definition.subset import SubsetRequest
from tidemill.shapes.http.param_values import Errors, parse_column_names, parse_query_params
from tidemill.shapes.http.subset_params import decode_body, subset_from_body, subset_from_query
from tidemill.shapes.log.log_offset import BEFORE_ALL, LogOffset, parse_number

REQUIRED_MESSAGE = "can't be blank"


class BadRequestError(InvalidError):
    """Error 400; `errors` is field → messages."""

    def __init__(self, errors: Mapping[str, list[str]]) -> None:
        super().__init__("Invalid request")
        self.errors = dict(errors)


class ShapeParams(msgspec.Struct, frozen=True):
    """Parsed parameters of one request. `offset` None means now."""

    request: ShapeRequest
    offset: LogOffset | None
    handle: str
    live: bool
    sse: bool
    cursor: int | None
    subset: SubsetRequest | None = None
    right: Grant = Grant()

    @property
    def is_initial(self) -> bool:
        return self.offset == BEFORE_ALL


def check_utf8(query: bytes) -> None:
    """Raise BadRequestError if the query is not UTF-8: decoding with replacements would give another text, and another
    shape."""
    try:
        unquote_to_bytes(query).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequestError({_invalid_param_name(query): ["is not UTF-8"]}) from error


def _invalid_param_name(query: bytes) -> str:
    """Return the name of the first parameter that is not UTF-8."""
    for part in query.split(b"&"):
        whole = unquote_to_bytes(part).decode("utf-8", "replace")
        if "\ufffd" in whole and whole.encode() != unquote_to_bytes(part):
            return whole.partition("=")[0]
    return "query"


def parse_params(query: QueryParams, body: bytes | None = None, right: Grant | None = None) -> ShapeParams:
    """Parse the parameters of a request.

    `body`: that of a POST, which requests a subset. `right`: what the request may read. Raises BadRequestError with all
    invalid fields.
    """
    errors: Errors = {}
    right = right or Grant()
    subset = subset_from_query(query, errors) if body is None else subset_from_body(decode_body(body, errors), errors)
    if right.request is None and not query.get("table"):
        errors["table"] = [REQUIRED_MESSAGE]
    offset = _parse_offset(query.get("offset") or (None if subset is None else "now"), errors)
    handle = query.get("handle", "")
    starts = offset is None or offset == BEFORE_ALL
    if not starts and not handle and "offset" not in errors:
        errors["handle"] = ["can't be blank when offset != -1"]
    live = _parse_flag(query, "live", errors)
    sse = _parse_flag(query, "live_sse", errors) or _parse_flag(query, "experimental_live_sse", errors)
    if live and starts and "offset" not in errors:
        errors["live"] = ["can't be true when offset == -1 or now"]
    if sse and not live:
        errors["live_sse"] = ["can't be true unless live is also true"]
    if live and subset is not None:
        errors["live"] = ["can't be true for a subset"]
    request = right.request or parse_definition(query, errors)
    cursor_text = query.get("cursor", "")
    if errors:
        raise BadRequestError(errors)
    return ShapeParams(request, offset, handle, live, sse, parse_number(cursor_text), subset, right)


def parse_definition(query: QueryParams, errors: Errors) -> ShapeRequest:
    """Parse the parameters that define the shape. The result is not valid if `errors` is not empty."""
    replica = _parse_choice(query, "replica", ("default", "full"), errors)
    log_mode = _parse_choice(query, "log", ("full", "changes_only"), errors)
    return ShapeRequest(
        query.get("table", ""),
        query.get("where", ""),
        parse_query_params(query.multi_items(), "params", errors),
        parse_column_names(query.get("columns"), "columns", errors),
        "full" if replica == "full" else "default",
        "changes_only" if log_mode == "changes_only" else "full",
        parse_column_names(query.get("queryable_columns"), "queryable_columns", errors),
    )


def _parse_offset(text: str | None, errors: Errors) -> LogOffset | None:
    if text is None or text == "":
        errors["offset"] = [REQUIRED_MESSAGE]
        return None
    if text == "now":
        return None
    try:
        return LogOffset.parse(text)
    except InvalidError:
        errors["offset"] = ["has invalid format"]
        return None


def _parse_flag(query: QueryParams, name: str, errors: Errors) -> bool:
    text = query.get(name, "false").lower()
    if text not in ("true", "false", "1", "0", ""):
        errors[name] = ["is invalid"]
    return text in ("true", "1")


def _parse_choice(query: QueryParams, name: str, allowed: tuple[str, str], errors: Errors) -> str:
    text = query.get(name, allowed[0])
    if text not in allowed:
        errors[name] = [f"is invalid, must be one of: {', '.join(allowed)}"]
    return text
