"""Limits of an HTTP server: connections, time for headers, sizes, and requests per address.

    connections         granian stops accepting at `connections`; the rest waits in the kernel's queue
    header_timeout_s    a connection without a whole request head for this long is closed, idle ones too (slow loris)
    header_bytes        request line and headers, 431 beyond, so a URL may be nearly as long
    body_bytes          body of a request, 413 beyond
    address_connections connections per address; those beyond are closed within a second (`connection_limits`)
    per_address         concurrent requests per address, 503 beyond, long polls and streams included

Every refusal under /v1/ carries the headers of CORS, so that a page can read the reason: refusals of these limits, the
guard, the routing and the router. The exception is hyper, the parser below. It refuses without headers and body: 414
for a URL of 65,535 bytes or more, 431 for more than 100 headers or a head of more than HEAD_BYTES, 400 for bytes that
are not HTTP/1.1. Only HEAD_BYTES can be set.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemill.base.address import canonical_host
from tidemill.base.limits import LOOPBACK_ORIGINS
from tidemill.base.runtime import file_descriptors
from tidemill.shapes.http.responses import EXPOSED_HEADERS, AllowedOrigins

RETRY_AFTER_S = 5
HEAD_BYTES = 256 << 10
CORS_PREFIX = "/v1/"


class HttpLimits(msgspec.Struct, frozen=True):
    """Limits of one HTTP server; the module's docstring describes each."""

    connections: int = 4_096
    per_address: int = 1_000
    address_connections: int = 2_048
    header_timeout_s: float = 20.0
    header_bytes: int = 64 << 10
    body_bytes: int = 1 << 20

    def connection_limit(self) -> int:
        """Return the limit of connections, capped at HTTP's share of the process's descriptors."""
        return min(self.connections, file_descriptors.current_shares().http)


class LimitsMiddleware:
    """ASGI middleware, the outermost: enforces `header_bytes`, `per_address` and `body_bytes`, and adds CORS to
    refusals. It passes the client's address on in the notation that rules use."""

    def __init__(self, app: ASGIApp, limits: HttpLimits, origins: Sequence[str] = LOOPBACK_ORIGINS) -> None:
        self._app = app
        self._origins = AllowedOrigins(origins)
        self._limits = limits
        self._too_long = _message_body(
            f"The request head is too large: limit_bytes={limits.header_bytes}.",
            "Send many values as one array parameter (= ANY($1)), or request a subset by POST.",
        )
        self.under_way: dict[str, int] = {}
        self.refused = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"].startswith(CORS_PREFIX):
            send = _CorsSender(send, scope, self._origins).send
        if _head_size_bytes(scope) > self._limits.header_bytes:
            await _refuse(send, 431, self._too_long)
            return
        if _declared_length(scope) > self._limits.body_bytes:
            await _refuse_body(send)
            return
        client = scope.get("client")
        address = canonical_host(str(client[0])) if client else ""
        if client and address != client[0]:
            scope = {**scope, "client": (address, *client[1:])}
        if self.under_way.get(address, 0) >= self._limits.per_address:
            self.refused += 1
            await _refuse(send, 503, b'{"message":"Too many concurrent requests from this address."}')
            return
        self.under_way[address] = self.under_way.get(address, 0) + 1
        body = _LimitedBody(receive, send, self._limits.body_bytes)
        try:
            await self._app(scope, body.receive, body.send)
        finally:
            left = self.under_way[address] - 1
            if left:
                self.under_way[address] = left
            else:
                del self.under_way[address]


class _CorsSender:
    """Sender that adds the headers of CORS to an unsuccessful response that has none."""

    def __init__(self, send: Send, scope: Scope, origins: AllowedOrigins) -> None:
        self._send = send
        self._scope = scope
        self._origins = origins

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 300:
            headers = [*message["headers"]]
            if not any(name.lower() == b"access-control-expose-headers" for name, _ in headers):
                origin = next((value for name, value in self._scope["headers"] if name == b"origin"), b"")
                cors = {
                    **self._origins.headers(origin.decode("latin-1")),
                    "access-control-expose-headers": EXPOSED_HEADERS,
                }
                headers += [(name.encode(), value.encode("latin-1")) for name, value in cors.items()]
                message = {**message, "headers": headers}
        await self._send(message)


class _LimitedBody:
    """Body without a declared length, truncated where it passes the limit. The application sees a disconnected client;
    its response is replaced by 413 for the client, which is still connected."""

    def __init__(self, receive: Receive, send: Send, limit_bytes: int) -> None:
        self._receive = receive
        self._send = send
        self._left_bytes = limit_bytes
        self._answered = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._left_bytes -= len(message.get("body", b""))
            if self._left_bytes < 0:
                return {"type": "http.disconnect"}
        return message

    async def send(self, message: Message) -> None:
        if self._left_bytes >= 0 or self._answered:
            self._answered = True
            await self._send(message)
        elif message["type"] == "http.response.start":
            await _refuse_body(self._send)


def _message_body(*sentences: str) -> bytes:
    return msgspec.json.encode({"message": " ".join(sentences)})


def _head_size_bytes(scope: Scope) -> int:
    """Return the size of the head as sent, except for insignificant spaces."""
    query_bytes = len(scope["query_string"])
    line = len(scope["method"]) + len(scope.get("raw_path") or scope["path"]) + query_bytes + bool(query_bytes) + 14
    return line + sum([len(name) + len(value) + 4 for name, value in scope["headers"]])


def _declared_length(scope: Scope) -> int:
    length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    return int(length) if length.isdigit() and len(length) < 20 else 0


async def _refuse_body(send: Send) -> None:
    await _refuse(send, 413, b'{"message":"The request body is too large."}')


async def _refuse(send: Send, status: int, body: bytes) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        (b"retry-after", str(RETRY_AFTER_S).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
