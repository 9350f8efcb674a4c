"""Determines from a request's query and client what it may read: plain shapes, server-defined shapes, signed URLs.

    table=…               as the client requests; the node in front checks its access rules for the table
    shape=NAME            the server's definition, bound to the client's claims
    signature=…           the definition in the query, if it is the signed one

- Invariant (no unknown parameters): a query that names a shape, or is signed, has only known parameters, each at most
  once. So no other component can interpret a parameter that was not checked here.
- Invariant (one interpretation): every component that inspects a query uses the functions of this module: for the
  table, for the names, and for whether it is signed.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

import msgspec
from starlette.datastructures import QueryParams
from starlette.types import Scope

from tidemill.base.clock import Clock
from tidemill.security.audit import Audit
from tidemill.shapes.definition.permissions import AccessDeniedError, Grant, Requester
from tidemill.shapes.definition.planner import ShapeRequest
from tidemill.shapes.definition.server_defined import FromClaim, ServerDefinedShape
from tidemill.shapes.definition.signed_urls import SigningKeys, canonical_request, is_signature_valid
from tidemill.shapes.http.param_values import Errors
from tidemill.shapes.http.params import BadRequestError, parse_definition
from tidemill.shapes.http.subset_params import SUBSET_PREFIX
from tidemill.shapes.log.log_offset import parse_number

REQUESTER_SCOPE_KEY: Final = "tidemill.asker"
"""Key of the ASGI scope with the authenticated client (`permissions.Requester`). Absent = authentication is off."""

NAME_PARAM: Final = "shape"
SIGNATURE_PARAM: Final = "signature"
SIGNED_PARAMS: Final = frozenset({"expires", "key", SIGNATURE_PARAM})
PROTOCOL_PARAMS: Final = frozenset(
    {"offset", "handle", "live", "live_sse", "experimental_live_sse", "cursor", "log", "expired_handle", "cache-buster"}
)
SECRET_PARAMS: Final = frozenset({"secret", "api_secret"})
NARROWING_PARAMS: Final = frozenset({"where", "columns", "queryable_columns"})
DEFINING_PARAMS: Final = NARROWING_PARAMS | {"table", "replica"}


def requester_of(scope: Scope) -> Requester | None:
    found = scope.get(REQUESTER_SCOPE_KEY)
    return found if isinstance(found, Requester) else None


def client_host(scope: Scope) -> str:
    return str(scope["client"][0]) if scope.get("client") else ""


def is_signed(query: QueryParams) -> bool:
    return SIGNATURE_PARAM in query


def check_secret(query: QueryParams, secret: str) -> None:
    """Raise AccessDeniedError if a secret is configured and the query has another one."""
    given = query.get("secret") or query.get("api_secret") or ""
    if secret and not hmac.compare_digest(given.encode("utf-8", "replace"), secret.encode()):
        raise AccessDeniedError(401, "Unauthorized - Invalid API secret")


class ShapeAuthorizer:
    """The server's definitions and signing keys. Raises InvalidError for a definition that could never be served."""

    def __init__(
        self, clock: Clock, named: Iterable[ServerDefinedShape] = (), signing: SigningKeys | None = None
    ) -> None:
        self._clock = clock
        self._named = {shape.name: shape for shape in named}
        self._signing = signing or SigningKeys()
        self.audit = Audit(clock)
        for shape in self._named.values():
            shape.check_servable()

    @property
    def used_claims(self) -> frozenset[str]:
        """Names of the claims that definitions use: no other claims of a token are needed."""
        params = (param for shape in self._named.values() for param in shape.params)
        return frozenset(param.name for param in params if isinstance(param, FromClaim))

    def requested_table(self, query: QueryParams) -> str:
        """Return the table whose node serves the request; "" if any node may answer that it does not exist."""
        if NAME_PARAM in query:
            found = self._named.get(query[NAME_PARAM])
            return found.table if found is not None else ""
        return query.get("table", "")

    def authorize(self, query: QueryParams, asker: Requester | None, host: str = "") -> Grant:
        """Return what a request may read. Raises AccessDeniedError, BadRequestError."""
        if is_signed(query):
            return self._verify_signed(query, host)
        right = Grant()
        if asker is not None:
            right = Grant(fresh_ms=asker.ends_ms, ends_ms=asker.ends_ms, allowed=asker.allowed)
        if NAME_PARAM not in query:
            return right
        shape = self._named.get(query[NAME_PARAM])
        if shape is None:
            raise AccessDeniedError(404, "the shape does not exist.")
        request = _bind_server_defined(shape, query, asker)
        return msgspec.structs.replace(
            right, request=request, name=shape.name, narrowed=shape.narrow, takes=shape.client_param_count > 0
        )

    # -- signed URLs -------------------------------------------------------------------------------

    def _verify_signed(self, query: QueryParams, host: str) -> Grant:
        errors = find_unexpected_params(
            query, PROTOCOL_PARAMS | SECRET_PARAMS | DEFINING_PARAMS | SIGNED_PARAMS, params=True
        )
        if errors:
            raise BadRequestError(errors)
        expires_s = parse_number(query.get("expires", ""))
        key_id = query.get("key", "")
        key = self._signing.keys.get(key_id)
        asked = parse_definition(query, errors)
        if errors or not asked.table:
            raise BadRequestError(errors or {"table": ["can't be blank"]})
        request = canonical_request(asked)
        if (
            key is None
            or expires_s is None
            or not is_signature_valid(request, expires_s, key_id, key, query[SIGNATURE_PARAM])
        ):
            self._audit_refusal(
                host, key_id, "unknown key id" if key is None else "the definition, key or expiry differs"
            )
            raise AccessDeniedError(
                401, "the signature is invalid.", fix="Change only the protocol parameters of a signed URL."
            )
        now_ms, leeway_ms = self._clock.now_ms(), self._signing.leeway_s * 1000
        fresh_ms = expires_s * 1000
        if fresh_ms + leeway_ms <= now_ms:
            self._audit_refusal(host, key_id, "expired")
            raise AccessDeniedError(401, f"the signed URL expired at {_format_time(expires_s)}.", fix="Get a new one.")
        if fresh_ms - leeway_ms - now_ms > self._signing.max_s * 1000:
            self._audit_refusal(host, key_id, "expires too far in the future")
            raise AccessDeniedError(
                401, f"the signed URL expires too far in the future: limit_s={self._signing.max_s}."
            )
        return Grant(request, signed=True, fresh_ms=fresh_ms, ends_ms=fresh_ms + leeway_ms)

    def _audit_refusal(self, host: str, key_id: str, reason: str) -> None:
        self.audit.log_refusal("shape.signature_refused", (host, key_id, reason), host=host, key=key_id, reason=reason)


def _bind_server_defined(shape: ServerDefinedShape, query: QueryParams, asker: Requester | None) -> ShapeRequest:
    """Return the request of a server-defined shape. Raises AccessDeniedError, BadRequestError."""
    allowed = PROTOCOL_PARAMS | SECRET_PARAMS | {NAME_PARAM} | (NARROWING_PARAMS if shape.narrow else frozenset())
    errors = find_unexpected_params(query, allowed, params=shape.narrow or shape.client_param_count > 0)
    if errors:
        raise BadRequestError(errors)
    claims = asker.claims if asker is not None else None
    own = parse_definition(query, errors)
    if shape.narrow:
        for field, columns in (("columns", own.columns), ("queryable_columns", own.queryable)):
            hidden = shape.hidden_columns(columns)
            if hidden:
                errors[field] = [f"The following columns are not found on the table: {', '.join(hidden)}"]
    elif len(own.params) != shape.client_param_count and "params" not in errors:
        errors["params"] = [f"this shape takes {shape.client_param_count} parameters, numbered from 1"]
    if errors:
        raise BadRequestError(errors)
    values = shape.bind_params(claims, own.params)
    if shape.narrow:
        return shape.narrowed_request(values, own)
    return shape.fixed_request(values, own.log_mode)


def find_unexpected_params(query: QueryParams, allowed: frozenset[str], *, params: bool) -> Errors:
    """Return an error for each parameter that is repeated or not allowed. `params`: values, as `params` or `params[n]`,
    are allowed."""
    errors: Errors = {}
    seen: set[str] = set()
    for name, _ in query.multi_items():
        if name in seen:
            errors[name[:100]] = ["is given more than once"]
        seen.add(name)
        value = params and (name == "params" or (name.startswith("params[") and name.endswith("]")))
        if not (name in allowed or name.startswith(SUBSET_PREFIX) or value):
            errors[name[:100]] = ["is not allowed here"]
    return errors


def _format_time(time_s: int) -> str:
    try:
        return datetime.fromtimestamp(time_s, UTC).isoformat().replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return str(time_s)
