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
from tidemill.shapes.http.param_values import Errors, parse_numbered_values, parse_query_params, parse_row_count

SUBSET_PREFIX = "subset__"
BODY_FIELDS = ("where", "limit", "offset", "order_by")
MAX_BODY_BYTES = 1 << 20
"""Largest body of a POST; 413 beyond. A clause takes 64 KiB at most, so most of it is for parameter values."""

Value = str | int | float | bool | None


class _SubsetFields(msgspec.Struct, frozen=True):
    where: str | None = None
    params: list[Value] | dict[str, Value] | None = None
    limit: int | str | None = None
    offset: int | str | None = None
    order_by: str | None = None


class SubsetBody(_SubsetFields, frozen=True):
    """The body, decoded by its types: unknown fields are skipped, however large they are."""

    subset: _SubsetFields | None = None


_FIELD_PATH = re.compile(r"`\$(?:\.subset)?\.(where|params|limit|offset|order_by)\b")


def decode_body(data: bytes, errors: Errors) -> _SubsetFields:
    """Decode a body; an empty one requests all rows."""
    try:
        body = msgspec.json.decode(data if data.strip() else b"{}", type=SubsetBody)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        found = _FIELD_PATH.search(str(error))
        errors[f"{SUBSET_PREFIX}{found.group(1)}" if found else "body"] = [str(error)]
        return _SubsetFields()
    return body.subset or body


def subset_from_query(query: QueryParams, errors: Errors) -> SubsetRequest | None:
    """Return the subset of a query, None if it requests none."""
    if not any(name.startswith(SUBSET_PREFIX) for name in query):
        return None
    params = parse_query_params(query.multi_items(), f"{SUBSET_PREFIX}params", errors)
    return _build_request({**query, f"{SUBSET_PREFIX}params": None}, params, errors)


def subset_from_body(body: _SubsetFields, errors: Errors) -> SubsetRequest:
    params = parse_numbered_values(body.params, f"{SUBSET_PREFIX}params", errors)
    return _build_request({f"{SUBSET_PREFIX}{name}": getattr(body, name) for name in BODY_FIELDS}, params, errors)


def _build_request(given: Mapping[str, object], params: tuple[str, ...], errors: Errors) -> SubsetRequest:
    return SubsetRequest(
        _checked_string(given, "where", errors),
        params,
        parse_row_count(given.get(f"{SUBSET_PREFIX}limit"), f"{SUBSET_PREFIX}limit", errors),
        parse_row_count(given.get(f"{SUBSET_PREFIX}offset"), f"{SUBSET_PREFIX}offset", errors),
        _checked_string(given, "order_by", errors),
    )


def _checked_string(given: Mapping[str, object], name: str, errors: Errors) -> str:
    value = given.get(f"{SUBSET_PREFIX}{name}")
    if value is None:
        return ""
    if not isinstance(value, str):
        errors[f"{SUBSET_PREFIX}{name}"] = ["must be a string"]
        return ""
    return value
