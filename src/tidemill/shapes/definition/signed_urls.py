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

from tidemill.base.config.sections import NAME
from tidemill.shapes.definition.planner import ShapeRequest, parse_shard_name, parse_table_name

HMAC_LABEL: Final = b"tidemill shape url 1\n"
CANONICAL_SHARD: Final = "shard:"
"""Prefix of a shard's name in the canonical form, which signatures cover: it never changes."""


class SigningKeys(msgspec.Struct, frozen=True):
    """Keys by id: the current one, and earlier ones that are still accepted. Their values are never shown, not even by
    `repr`."""

    keys: Mapping[str, str] = {}
    max_s: int = 7 * 86_400
    leeway_s: int = 30

    def __repr__(self) -> str:
        return f"Signing(keys={sorted(self.keys)}, max_s={self.max_s}, leeway_s={self.leeway_s})"


def canonical_request(request: ShapeRequest) -> ShapeRequest:
    """Return the canonical form of a request. Raises FieldError for an invalid table name."""
    columns = tuple(sorted(set(request.columns)))
    # a URL that fixes the columns also fixes the columns that a subset may query
    queryable = tuple(sorted(set(request.queryable))) or columns
    return msgspec.structs.replace(
        request, table=_canonical_table(request.table), columns=columns, queryable=queryable, within=None
    )


def _canonical_table(text: str) -> str:
    shard = parse_shard_name(text)
    if shard is not None:
        return CANONICAL_SHARD + shard
    capture, colon, rest = text.partition(":")
    named = bool(colon) and NAME.match(capture) is not None
    parts = (part.replace('"', '""') for part in parse_table_name(rest if named else text))
    return (f"{capture}:" if named else "") + ".".join(f'"{part}"' for part in parts)


def _table_for_url(canonical: str) -> str:
    """Return a spelling of the canonical table for people to read: the signature covers the canonical form."""
    name = canonical.removeprefix(CANONICAL_SHARD)
    return canonical if name == canonical or name.startswith('"') else f"tidemill.{name}"


def sign_request(request: ShapeRequest, expires_s: int, key_id: str, key: str) -> str:
    """Return the signature of a canonical request, in lower-case hex."""
    said = (
        *(request.table, request.where, request.params, request.columns, request.queryable),
        *(request.replica, request.log_mode, expires_s, key_id),
    )
    return hmac.new(key.encode(), HMAC_LABEL + msgspec.json.encode(said), hashlib.sha256).hexdigest()


def is_signature_valid(request: ShapeRequest, expires_s: int, key_id: str, key: str, given: str) -> bool:
    """Return whether the signature is correct, in constant time."""
    wanted = sign_request(request, expires_s, key_id, key)
    return hmac.compare_digest(wanted.encode(), given.encode("utf-8", "replace"))


def signed_url_params(request: ShapeRequest, expires_s: int, key_id: str, key: str) -> list[tuple[str, str]]:
    """Return the query parameters of the URL of a canonical request, including the signature."""
    found = [("table", _table_for_url(request.table))]
    if request.where:
        found.append(("where", request.where))
    found += [(f"params[{number}]", value) for number, value in enumerate(request.params, 1)]
    if request.columns:
        found.append(("columns", _quoted_list(request.columns)))
    if request.queryable != request.columns:
        found.append(("queryable_columns", _quoted_list(request.queryable)))
    if request.replica != "default":
        found.append(("replica", request.replica))
    if request.log_mode != "full":
        found.append(("log", request.log_mode))
    found += [("expires", str(expires_s)), ("key", key_id)]
    return [*found, ("signature", sign_request(request, expires_s, key_id, key))]


def _quoted_list(columns: tuple[str, ...]) -> str:
    return ",".join('"' + name.replace('"', '""') + '"' for name in columns)
