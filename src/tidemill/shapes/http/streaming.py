"""Answers in pieces. The server takes one piece at a time and waits for its reader, so a client that does not read
costs the socket's buffers and no copy of what it was to get; after a while without progress it is cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tidemill.shapes.log.log import SEPARATOR

PIECE_BYTES = 64 << 10
SMALL_BYTES = 16 << 10
"""An answer of so much goes out as one: the socket's buffers take it."""

STALLED_S = 30.0
"""A reader that takes nothing for so long is gone."""

SLOWEST_S = 600.0
"""No answer takes longer, also to one who reads a byte now and then: what it is made of stays in memory meanwhile."""

_log = structlog.get_logger()


class StalledReaderError(Exception):
    """Ends the connection: an answer that was begun cannot be taken back."""


class ItemsResponse(Response):
    """A JSON array of `items`, each JSON itself, or several joined by SEPARATOR; `opening` and `closing` hold it."""

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
        """Raises StalledReaderError."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self._size <= SMALL_BYTES:
            whole = self._opening + SEPARATOR.join(self._items) + self._closing
            await send({"type": "http.response.body", "body": whole, "more_body": False})
            return
        try:
            async with asyncio.timeout(SLOWEST_S):
                for piece in pieces(self._items, self._opening, self._closing):
                    async with asyncio.timeout(STALLED_S):
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError as error:
            raise StalledReaderError(f"the reader takes nothing: stalled_s={STALLED_S}.") from error


def pieces(items: Sequence[bytes], opening: bytes = b"[", closing: bytes = b"]") -> Iterator[bytes]:
    """`opening`, the items joined, `closing`, in pieces of about PIECE_BYTES."""
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
