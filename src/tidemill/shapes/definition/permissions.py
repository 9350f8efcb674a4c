"""Grants: the rows that one request may read, and until when. Pure.

A grant comes from the client's own parameters, the server's definition or a signature.

- Invariant (a handle grants nothing): the shape that is read follows from the request's definition alone. A handle of
  another definition is treated like an unknown handle.
- Invariant (re-checked): a grant is checked again after every wait, before rows are sent: it may have expired or been
  revoked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from tidemill.base.errors import InvalidError
from tidemill.shapes.definition.planner import ShapeRequest


class AccessDeniedError(InvalidError):
    """The request may not read what it names. `status`: 401, 403 or 404."""

    def __init__(self, status: int, message: str, *, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.status = status


def _always_allowed() -> bool:
    return True


class Requester(msgspec.Struct, frozen=True):
    """An authenticated client, as the node identified it.

    `claims`: those of its token. `ends_ms`: when the authentication expires, None = not before a stream would end.
    `allowed()` returns whether the access rules still allow the request.
    """

    principal: str
    claims: Mapping[str, object] = {}
    ends_ms: int | None = None
    allowed: Callable[[], bool] = _always_allowed


class Grant(msgspec.Struct, frozen=True):
    """The right of one request to read a shape.

    request     the request to serve; None = what the client's parameters say
    name        name of the server's definition, "" = none
    narrowed    a clause and columns of the client may be part of `request`
    takes       values of the client are part of `request`
    signed      a signature allows the request, whichever client sends it
    fresh_ms    time until which caches may keep responses, None = the usual time
    ends_ms     time at which the grant expires, None = never
    allowed     returns whether the access rules still allow the request
    """

    request: ShapeRequest | None = None
    name: str = ""
    narrowed: bool = False
    takes: bool = False
    signed: bool = False
    fresh_ms: int | None = None
    ends_ms: int | None = None
    allowed: Callable[[], bool] = _always_allowed

    @property
    def is_server_defined(self) -> bool:
        """True if the client does not define the rows; then the reason why one of them fails must not be shown to
        it."""
        return self.request is not None

    def remaining_s(self, now_ms: int) -> float:
        return float("inf") if self.ends_ms is None else (self.ends_ms - now_ms) / 1000

    def is_valid(self, now_ms: int) -> bool:
        return self.remaining_s(now_ms) > 0 and self.allowed()

    def check_valid(self, now_ms: int) -> None:
        """Raise AccessDeniedError if the grant has expired or was revoked."""
        if self.remaining_s(now_ms) <= 0:
            what = "the signed URL" if self.signed else "the authentication"
            raise AccessDeniedError(401, f"{what} has expired.", fix="Get a new one.")
        if not self.allowed():
            raise AccessDeniedError(403, "access to this shape was revoked.")
