"""Responses sent in pieces. The server accepts one piece at a time and waits for its client, so a client that does not
read costs the socket's buffers and no copy of the response. A client without progress for a while is disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tidemill.shapes.log.log import SEPARATOR

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
