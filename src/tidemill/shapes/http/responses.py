"""Responses of the shape endpoint: bodies, headers, and cache lifetimes, as in Electric's HTTP API.

offset -1                public, max-age=604800, s-maxage=3600, stale-while-revalidate=2629746    cache.initial_s
later, not live          public, max-age=60, stale-while-revalidate=300                  cache.later_s, .stale_s
live long poll           public, max-age=5, stale-while-revalidate=5                              cache.live_s
live event stream        public, max-age = its length − 1
409                      public, max-age=60 (1 without a handle in the request), must-revalidate
other errors             no-store, for surrogates too
now, subset, health,
DELETE                   no-cache

No response is fresh, or served stale, for longer than its grant (`permissions.Grant`).

Bodies are sent in pieces. The server accepts one piece at a time and waits for its client, so a client that does not
read costs the socket's buffers and no copy of the response. A client without progress for a while is disconnected.

`AllowedOrigins` decides which web pages may read responses in a browser (CORS). Requests without Origin do not come
from a page.

*                          every page
https://shop.example       pages of exactly this origin
http://localhost:*         pages of this scheme and host, on any port
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence

import orjson
import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tidemill import __version__
from tidemill.base.clock import Clock, Rand
from tidemill.shapes.http.params import ShapeParams
from tidemill.shapes.live_shape import LiveShape
from tidemill.shapes.log.chunks import SEPARATOR
from tidemill.shapes.log.items import MUST_REFETCH
from tidemill.shapes.log.log_offset import LogOffset
from tidemill.shapes.settings import CacheAges, ShapeSettings

EXPOSED_HEADERS = (
    "electric-cursor, electric-handle, electric-offset, electric-schema, electric-up-to-date, "
    "electric-has-data, electric-snapshot, electric-internal-known-error, etag, retry-after, x-request-id"
)
BASE_HEADERS = {
    "access-control-expose-headers": EXPOSED_HEADERS,
    "access-control-allow-methods": "GET, POST, HEAD, DELETE, OPTIONS",
    "electric-server": f"tidemill/{__version__}",
}
CURSOR_EPOCH_MS = 1_728_432_000_000
"""2024-10-09T00:00:00Z, the epoch of cursors."""

NO_STORE = {"cache-control": "no-store", "surrogate-control": "no-store"}


def build_cache_control(params: ShapeParams, ages: CacheAges) -> str:
    if params.live:
        return f"public, max-age={ages.live_s}, stale-while-revalidate={ages.live_s}"
    if params.is_initial:
        return f"public, max-age=604800, s-maxage={ages.initial_s}, stale-while-revalidate=2629746"
    return f"public, max-age={ages.later_s}, stale-while-revalidate={ages.stale_s}"


def limit_cache_control(header: str, left_s: float) -> str:
    """Limit a cache-control header so that no cache serves the response, fresh or stale, after `left_s`."""
    if left_s < 1:
        return "no-store"
    found = dict(part.strip().partition("=")[::2] for part in header.split(","))
    for name in ("max-age", "s-maxage"):
        if name in found:
            found[name] = str(min(int(found[name]), int(left_s)))
    stale = "stale-while-revalidate"
    if stale in found:
        ages = [int(found[name]) for name in ("max-age", "s-maxage") if name in found]
        found[stale] = str(min(int(found[stale]), int(left_s) - max(ages, default=0)))
    return ", ".join(f"{name}={value}" if value else name for name, value in found.items())


def next_cursor(now_ms: int, sent: int | None, interval_s: float, rand: Rand) -> int:
    """Return the seconds since 2024-10-09, rounded up to the interval; always above the cursor that was sent.

    Clients that poll within one interval get the same cursor, so a cache can coalesce them. A repeated cursor would let
    a cache serve one response forever.
    """
    interval = max(1, int(interval_s))
    elapsed_s = max(0, now_ms - CURSOR_EPOCH_MS) // 1000
    cursor = (elapsed_s // interval + 1) * interval
    if sent is not None and cursor <= sent:
        cursor = sent + 1 + rand.below(3600)
    return cursor


def build_shape_headers(
    shape: LiveShape,
    params: ShapeParams,
    end: LogOffset,
    up_to_date: bool,
    clock: Clock,
    rand: Rand,
    settings: ShapeSettings,
) -> dict[str, str]:
    headers = {**BASE_HEADERS, "electric-handle": shape.handle, "electric-offset": str(end)}
    if up_to_date:
        headers["electric-up-to-date"] = ""
    if params.live:
        cursor = next_cursor(clock.now_ms(), params.cursor, settings.long_poll_s, rand)
        headers["electric-cursor"] = str(cursor)
    else:
        headers["electric-schema"] = shape.schema_json.decode("utf-8")
    headers["cache-control"] = build_cache_control(params, settings.cache)
    return headers


def build_etag(
    shape: LiveShape, params: ShapeParams, end: LogOffset, current: bool, unchanged: int | None = None
) -> str:
    """Return `"handle:request:response"`.

    A response without news adds a counter, so it never validates. A response that does not end up to date has another
    tag than one with the same items that does: a chunk that ended at the log's end may be followed by more later.
    """
    asked = "now" if params.offset is None else str(params.offset)
    tail = "" if unchanged is None else f":{unchanged}"
    return f'"{shape.handle}:{asked}:{end}{tail}{"" if current else ":more"}"'


def items_response(items: Sequence[bytes], headers: Mapping[str, str], has_data: bool) -> Response:
    return ItemsResponse(items, 200, {**headers, "electric-has-data": "true" if has_data else "false"})


def must_refetch(new_handle: str, had_handle: bool) -> Response:
    """Return 409: the handle is not, or no longer, one of this shape's; the new one is in the header."""
    headers = {
        **BASE_HEADERS,
        "electric-handle": new_handle,
        "cache-control": f"public, max-age={60 if had_handle else 1}, must-revalidate",
    }
    return Response(MUST_REFETCH, 409, headers, media_type="application/json")


def error_response(
    status: int, message: str, errors: Mapping[str, list[str]] | None = None, *, retry_after_s: int = 0
) -> Response:
    body: dict[str, object] = {"message": message}
    if errors:
        body["errors"] = errors
    headers = {**BASE_HEADERS, **NO_STORE}
    if status == 503:
        headers["electric-internal-known-error"] = "true"
        headers["retry-after"] = str(retry_after_s)
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


class AllowedOrigins:
    def __init__(self, allowed: Sequence[str]) -> None:
        self._all = "*" in allowed
        self._exact = frozenset(origin.rstrip("/").lower() for origin in allowed if not origin.endswith(":*"))
        self._any_port = frozenset(origin[:-2].lower() for origin in allowed if origin.endswith(":*"))

    def is_allowed(self, origin: str) -> bool:
        origin = origin.lower()
        if self._all or origin in self._exact or origin in self._any_port:
            return True
        host, separator, port = origin.rpartition(":")
        return bool(separator) and port.isascii() and port.isdigit() and host in self._any_port

    def headers(self, origin: str) -> dict[str, str]:
        """Return the CORS headers of a response to a request from `origin` ("" = none). Caches must store one response
        per origin."""
        if self._all:
            return {"access-control-allow-origin": "*"}
        found = {"vary": "Origin"}
        if origin and self.is_allowed(origin):
            found["access-control-allow-origin"] = origin
        return found


PIECE_BYTES = 64 << 10
SMALL_BYTES = 16 << 10
"""Responses up to this size are sent in one piece: they fit into the socket's buffers."""

STALL_TIMEOUT_S = 30.0
"""Time after which a client that reads nothing is disconnected."""

RESPONSE_TIMEOUT_S = 600.0
"""Time limit of any response, also for a client that reads a byte now and then: its data stays in memory for that
time."""

_log = structlog.get_logger()


class StalledReaderError(Exception):
    """Ends the connection: a response that has started cannot be replaced by an error."""


class ItemsResponse(Response):
    """A JSON array of `items`, each one JSON itself or several joined by SEPARATOR, between `opening` and `closing`."""

    def __init__(
        self,
        items: Sequence[bytes],
        status_code: int,
        headers: Mapping[str, str],
        opening: bytes = b"[",
        closing: bytes = b"]",
    ) -> None:
        size = len(opening) + len(closing) + sum(map(len, items)) + len(SEPARATOR) * max(0, len(items) - 1)
        headers = {**headers, "content-length": str(size)}
        super().__init__(None, status_code, headers, media_type="application/json")
        self._size = size
        self._items = items
        self._opening = opening
        self._closing = closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response. Raises StalledReaderError."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self._size <= SMALL_BYTES:
            whole = self._opening + SEPARATOR.join(self._items) + self._closing
            await send({"type": "http.response.body", "body": whole, "more_body": False})
            return
        try:
            async with asyncio.timeout(RESPONSE_TIMEOUT_S):
                for piece in split_pieces(self._items, self._opening, self._closing):
                    async with asyncio.timeout(STALL_TIMEOUT_S):
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError as error:
            raise StalledReaderError(f"the client reads nothing: stalled_s={STALL_TIMEOUT_S}.") from error


def split_pieces(items: Sequence[bytes], opening: bytes = b"[", closing: bytes = b"]") -> Iterator[bytes]:
    """Yield `opening`, the items joined, and `closing`, in pieces of about PIECE_BYTES."""
    held = bytearray(opening)
    for number, item in enumerate(items):
        if number:
            held += SEPARATOR
        start = 0
        while start < len(item):
            taken = item[start : start + PIECE_BYTES - len(held)] if len(held) < PIECE_BYTES else b""
            held += taken
            start += len(taken)
            if len(held) >= PIECE_BYTES:
                yield bytes(held)
                held.clear()
    held += closing
    yield bytes(held)
