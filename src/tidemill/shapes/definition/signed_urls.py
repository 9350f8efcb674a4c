"""Signed URLs of shapes: a URL grants one definition until a time, to any client that has it. Pure.

    GET /v1/shape?table=public.orders&where=w_id = $1&params[1]=7&expires=1800000000&key=k1&signature=<hex>

    signature = HMAC-SHA256(key, LABEL + JSON [table, where, params, columns, queryable, replica, log, expires, key id])

- Invariant (canonical form): the signature covers the canonical form of the parameters' meaning, not their text: order,
  percent-encoding and spelling do not matter. Everything that defines the shape is included.
- Invariant (serve what was verified): the request to serve is built from the verified form, and from nothing else.
- Invariant (bounded lifetime): a URL that expires later than `max_s` from now is invalid even with a correct signature.
  Clocks may differ by `leeway_s`.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Final

import msgspec

from tidemill.base.config.section import NAME
from tidemill.shapes.definition.planner import ShapeRequest, shard_name, split_table

LABEL: Final = b"tidemill shape url 1\n"


class Signing(msgspec.Struct, frozen=True):
    """Keys by id: the current one, and earlier ones that are still accepted. Their values are never shown, not even by
    `repr`."""

    keys: Mapping[str, str] = {}
    max_s: int = 7 * 86_400
    leeway_s: int = 30

    def __repr__(self) -> str:
        return f"Signing(keys={sorted(self.keys)}, max_s={self.max_s}, leeway_s={self.leeway_s})"


def canonical(request: ShapeRequest) -> ShapeRequest:
    """Return the canonical form of a request. Raises FieldError for an invalid table name."""
    columns = tuple(sorted(set(request.columns)))
    # a URL that fixes the columns also fixes the columns that a subset may query
    queryable = tuple(sorted(set(request.queryable))) or columns
    return msgspec.structs.replace(
        request, table=_table(request.table), columns=columns, queryable=queryable, within=None
    )


def _table(text: str) -> str:
    shard = shard_name(text)
    if shard is not None:
        return f"shard:{shard}"
    capture, colon, rest = text.partition(":")
    named = bool(colon) and NAME.match(capture) is not None
    parts = (part.replace('"', '""') for part in split_table(rest if named else text))
    return (f"{capture}:" if named else "") + ".".join(f'"{part}"' for part in parts)


def signature(request: ShapeRequest, expires_s: int, key_id: str, key: str) -> str:
    """Return the signature of a canonical request, in lower-case hex."""
    said = (
        *(request.table, request.where, request.params, request.columns, request.queryable),
        *(request.replica, request.log_mode, expires_s, key_id),
    )
    return hmac.new(key.encode(), LABEL + msgspec.json.encode(said), hashlib.sha256).hexdigest()


def fits(request: ShapeRequest, expires_s: int, key_id: str, key: str, given: str) -> bool:
    """Return whether the signature is correct, in constant time."""
    wanted = signature(request, expires_s, key_id, key)
    return hmac.compare_digest(wanted.encode(), given.encode("utf-8", "replace"))


def parameters(request: ShapeRequest, expires_s: int, key_id: str, key: str) -> list[tuple[str, str]]:
    """Return the query parameters of the URL of a canonical request, including the signature."""
    found = [("table", request.table)]
    if request.where:
        found.append(("where", request.where))
    found += [(f"params[{number}]", value) for number, value in enumerate(request.params, 1)]
    if request.columns:
        found.append(("columns", _names(request.columns)))
    if request.queryable != request.columns:
        found.append(("queryable_columns", _names(request.queryable)))
    if request.replica != "default":
        found.append(("replica", request.replica))
    if request.log_mode != "full":
        found.append(("log", request.log_mode))
    found += [("expires", str(expires_s)), ("key", key_id)]
    return [*found, ("signature", signature(request, expires_s, key_id, key))]


def _names(columns: tuple[str, ...]) -> str:
    return ",".join('"' + name.replace('"', '""') + '"' for name in columns)
