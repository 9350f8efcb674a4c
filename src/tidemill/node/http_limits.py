"""What one HTTP server gives away at most: connections, time for headers, sizes, and requests of one address.

connections         granian stops accepting at `connections`; the rest waits in the kernel's queue
header_timeout_s    a connection without a whole request head for so long is closed, idle ones too (slow loris)
header_bytes        request line and headers, 431 beyond; a URL of more than 64 KiB is 414
body_bytes          of a request, 413 beyond
address_connections connections of one address; what is beyond is closed within a second (http_crowds)
per_address         requests of one address under way at once, 503 beyond, long polls and streams included
"""

from __future__ import annotations

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemill.base import descriptors

RETRY_AFTER_S = 5


class HttpLimits(msgspec.Struct, frozen=True):
    connections: int = 4_096
    per_address: int = 1_000
    address_connections: int = 2_048
    header_timeout_s: float = 20.0
    header_bytes: int = 128 << 10
    body_bytes: int = 1 << 20

    def within_descriptors(self) -> int:
        """Connections within the share that HTTP has of the process's descriptors."""
        return min(self.connections, descriptors.current().http)


class Bounded:
    """ASGI middleware: `per_address` and `body_bytes`."""

    def __init__(self, app: ASGIApp, limits: HttpLimits) -> None:
        self._app = app
        self._limits = limits
        self.under_way: dict[str, int] = {}
        self.refused = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _declared(scope) > self._limits.body_bytes:
            await _too_large(send)
            return
        client = scope.get("client")
        address = str(client[0]) if client else ""
        if self.under_way.get(address, 0) >= self._limits.per_address:
            self.refused += 1
            await _refuse(send, 503, b'{"message":"Too many requests of this address are under way."}')
            return
        self.under_way[address] = self.under_way.get(address, 0) + 1
        body = _Body(receive, send, self._limits.body_bytes)
        try:
            await self._app(scope, body.receive, body.send)
        finally:
            left = self.under_way[address] - 1
            if left:
                self.under_way[address] = left
            else:
                del self.under_way[address]


class _Body:
    """A body without a declared length is cut off where it passes the limit. The application sees a client that went
    away, and whatever it answers to that is 413 to the client, which is still there."""

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
            await _too_large(self._send)


def _declared(scope: Scope) -> int:
    length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    return int(length) if length.isdigit() and len(length) < 20 else 0


async def _too_large(send: Send) -> None:
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
