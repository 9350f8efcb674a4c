"""Parameters of a subset: in the query of a GET, or in the JSON body of a POST.

GET     subset__where, subset__params (a JSON object, or subset__params[n]), subset__limit, subset__offset,
        subset__order_by; subset__where_expr and subset__order_by_expr repeat the same as trees, and are not needed
POST    {"where": …, "params": {"1": …}, "limit": n, "offset": n, "order_by": …}, or the same under "subset"

Nothing else is read from a body: the shape itself is named in the query, where proxies see it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
from starlette.datastructures import QueryParams

from tidemill.shapes.definition.subset import SubsetRequest
from tidemill.shapes.http.param_values import Errors, count, numbered, query_params

PREFIX = "subset__"
FIELDS = ("where", "limit", "offset", "order_by")
BODY_BYTES = 1 << 20
"""Largest body of a POST; 413 beyond. A clause takes 64 KiB at most, so most of it is for parameter values."""

Value = str | int | float | bool | None


class _Fields(msgspec.Struct, frozen=True):
    where: str | None = None
    params: list[Value] | dict[str, Value] | None = None
    limit: int | str | None = None
    offset: int | str | None = None
    order_by: str | None = None


class Body(_Fields, frozen=True):
    """The body, decoded by its types: unknown fields are skipped, however large they are."""

    subset: _Fields | None = None


_AT = re.compile(r"`\$(?:\.subset)?\.(where|params|limit|offset|order_by)\b")


def decode_body(data: bytes, errors: Errors) -> _Fields:
    """Decode a body; an empty one requests all rows."""
    try:
        body = msgspec.json.decode(data if data.strip() else b"{}", type=Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        found = _AT.search(str(error))
        errors[f"{PREFIX}{found.group(1)}" if found else "body"] = [str(error)]
        return _Fields()
    return body.subset or body


def of_query(query: QueryParams, errors: Errors) -> SubsetRequest | None:
    """Return the subset of a query, None if it requests none."""
    if not any(name.startswith(PREFIX) for name in query):
        return None
    params = query_params(query.multi_items(), f"{PREFIX}params", errors)
    return _checked({**query, f"{PREFIX}params": None}, params, errors)


def of_body(body: _Fields, errors: Errors) -> SubsetRequest:
    params = numbered(body.params, f"{PREFIX}params", errors)
    return _checked({f"{PREFIX}{name}": getattr(body, name) for name in FIELDS}, params, errors)


def _checked(given: Mapping[str, object], params: tuple[str, ...], errors: Errors) -> SubsetRequest:
    return SubsetRequest(
        _string(given, "where", errors),
        params,
        count(given.get(f"{PREFIX}limit"), f"{PREFIX}limit", errors),
        count(given.get(f"{PREFIX}offset"), f"{PREFIX}offset", errors),
        _string(given, "order_by", errors),
    )


def _string(given: Mapping[str, object], name: str, errors: Errors) -> str:
    value = given.get(f"{PREFIX}{name}")
    if value is None:
        return ""
    if not isinstance(value, str):
        errors[f"{PREFIX}{name}"] = ["must be a string"]
        return ""
    return value
