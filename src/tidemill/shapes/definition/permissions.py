"""What one request may see, and for how long: as its client says, as the server defines it, or as a signature. Pure.

RI1  A handle is no right: which shape is read follows from the request's definition alone, and a handle of another one
     is answered as one that never was.
RI2  A right is asked again behind every wait, before rows go out: it may have ended, or been taken away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from tidemill.base.errors import InvalidError
from tidemill.shapes.definition.planner import ShapeRequest


class AccessDeniedError(InvalidError):
    """The request has no right to what it asks for. `status`: 401, 403 or 404."""

    def __init__(self, status: int, message: str, *, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.status = status


def _always() -> bool:
    return True


class Requester(msgspec.Struct, frozen=True):
    """Who proved who they are, as the node found out. `claims`: of their token. `ends_ms`: when the proof does, None =
    it does not end before a stream would. `allowed()`: do the rules still allow what was asked?"""

    principal: str
    claims: Mapping[str, object] = {}
    ends_ms: int | None = None
    allowed: Callable[[], bool] = _always


class Grant(msgspec.Struct, frozen=True):
    """
    request     what is served; None = what the client's parameters say
    name        of the server's definition, "" = none
    narrowed    a clause and columns of the client's own may be part of `request`
    takes       values of the client's are part of `request`
    signed      a signature allows it, whoever asks
    fresh_ms    caches may keep answers until then, None = as ever
    ends_ms     when it ends, None = never
    allowed     do the rules still allow it?
    """

    request: ShapeRequest | None = None
    name: str = ""
    narrowed: bool = False
    takes: bool = False
    signed: bool = False
    fresh_ms: int | None = None
    ends_ms: int | None = None
    allowed: Callable[[], bool] = _always

    @property
    def defined(self) -> bool:
        """Somebody else than the client says which rows there are: why one of them fails is not its to know."""
        return self.request is not None

    def left_s(self, now_ms: int) -> float:
        return float("inf") if self.ends_ms is None else (self.ends_ms - now_ms) / 1000

    def holds(self, now_ms: int) -> bool:
        return self.left_s(now_ms) > 0 and self.allowed()

    def check(self, now_ms: int) -> None:
        """Raises AccessDeniedError where the right has ended (RI2)."""
        if self.left_s(now_ms) <= 0:
            what = "The signed URL" if self.signed else "The proof of who asks"
            raise AccessDeniedError(401, f"{what} has expired.", fix="Get a new one.")
        if not self.allowed():
            raise AccessDeniedError(403, "This shape may not be seen any more.")
