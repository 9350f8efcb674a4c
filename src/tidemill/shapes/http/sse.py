"""Live updates as server-sent events: one `data:` line per item, `: keep-alive` when quiet, closed after a while.

Every batch ends with an up-to-date item whose LSN is where the client resumes (`<lsn>_0`), so items of that
one transaction may be delivered again. A client that was more than one chunk behind gets everything and is
closed, so that it goes back to cacheable requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence

from starlette.responses import StreamingResponse
from starlette.types import Message, Send

from tidemill.shapes.http.disconnect import wait_any
from tidemill.shapes.http.params import ShapeParams
from tidemill.shapes.http.respond import shape_headers
from tidemill.shapes.http.sending import PIECE_BYTES, STALLED_S, StalledReader
from tidemill.shapes.items import up_to_date
from tidemill.shapes.live import LiveShape
from tidemill.shapes.log import split_chunk
from tidemill.shapes.offsets import LogOffset
from tidemill.shapes.service import ShapeService

KEEP_ALIVE = b": keep-alive\n\n"


def response(service: ShapeService, shape: LiveShape, params: ShapeParams) -> StreamingResponse:
    assert params.offset is not None
    settings = service.settings
    headers = shape_headers(shape, params, params.offset, False, service.clock, service.rand, settings)
    headers["cache-control"] = f"public, max-age={max(1, int(settings.sse_s) - 1)}"
    headers["x-accel-buffering"] = "no"
    stream = _events(service, shape, params.offset)
    return _EventStream(stream, 200, headers, media_type="text/event-stream")


class _EventStream(StreamingResponse):
    async def stream_response(self, send: Send) -> None:
        """Raises StalledReader when the client takes nothing for STALLED_S."""

        async def patiently(message: Message) -> None:
            try:
                async with asyncio.timeout(STALLED_S):
                    await send(message)
            except TimeoutError as error:
                raise StalledReader(f"the reader takes nothing: stalled_s={STALLED_S}.") from error

        await super().stream_response(patiently)


def _frames(items: Sequence[bytes]) -> Iterator[bytes]:
    """One `data:` line an item, in pieces of about PIECE_BYTES."""
    held = bytearray()
    for item in split_chunk(items):
        held += b"data: " + item + b"\n\n"
        if len(held) >= PIECE_BYTES:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


async def _events(service: ShapeService, shape: LiveShape, offset: LogOffset) -> AsyncIterator[bytes]:
    settings, clock = service.settings, service.clock
    deadline = clock.monotonic_s() + settings.sse_s
    chunk = shape.log.read(offset)
    behind = not chunk.complete
    greeted = False
    while not shape.gone:
        news = shape.subscribe()
        try:
            chunk = shape.log.read(offset)
            offset = chunk.end
            if chunk.items or not greeted:
                greeted = True
                control = [up_to_date(offset.tx if chunk.items else _resume(service, shape, offset))]
                for piece in _frames([*chunk.items, *(control if chunk.complete else ())]):
                    yield piece
                if chunk.complete and behind:
                    return
                continue
            left_s = deadline - clock.monotonic_s()
            if left_s <= 0:
                return
            await wait_any({news}, min(left_s, settings.keep_alive_s))
            if not news.done():
                yield KEEP_ALIVE
        finally:
            news.cancel()


def _resume(service: ShapeService, shape: LiveShape, offset: LogOffset) -> int:
    """Without items the client must not resume before what it has: never below the transaction it asked from."""
    return max(service.last_seen(shape), offset.tx)
