"""Live updates as server-sent events: one `data:` line per item, `: keep-alive` when quiet, closed after a while.

Who asks is up to date, or was told to be; so nothing is said until there is something. Every batch ends with an
up-to-date item whose LSN is where the client resumes (`<lsn>_0`, behind that transaction: offsets.py). A client that
was more than one chunk behind gets everything and is closed, so that it goes back to cacheable requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import suppress

from starlette.responses import StreamingResponse
from starlette.types import Message, Send

from tidemill.shapes.budget import Full
from tidemill.shapes.http.disconnect import wait_any
from tidemill.shapes.http.params import ShapeParams
from tidemill.shapes.http.respond import shape_headers
from tidemill.shapes.http.sending import PIECE_BYTES, STALLED_S, StalledReader
from tidemill.shapes.items import up_to_date
from tidemill.shapes.live import LiveShape
from tidemill.shapes.log import split_chunk
from tidemill.shapes.offsets import LogOffset
from tidemill.shapes.rights import Right
from tidemill.shapes.service import ShapeService

KEEP_ALIVE = b": keep-alive\n\n"


def response(service: ShapeService, shape: LiveShape, params: ShapeParams) -> StreamingResponse:
    assert params.offset is not None
    settings = service.settings
    headers = shape_headers(shape, params, params.offset, False, service.clock, service.rand, settings)
    headers["cache-control"] = f"public, max-age={max(1, int(settings.sse_s) - 1)}"
    headers["x-accel-buffering"] = "no"
    stream = _events(service, shape, params.offset, params.right)
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


def _frames(items: Iterable[bytes]) -> Iterator[bytes]:
    """One `data:` line an item, in pieces of about PIECE_BYTES."""
    held = bytearray()
    for item in split_chunk(items):
        held += b"data: " + item + b"\n\n"
        if len(held) >= PIECE_BYTES:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


async def _events(service: ShapeService, shape: LiveShape, offset: LogOffset, right: Right) -> AsyncIterator[bytes]:
    """Ends with the right (RI2), and where there is no room for what is read: whoever comes again is told why."""
    settings, clock = service.settings, service.clock
    deadline = clock.monotonic_s() + settings.sse_s
    with suppress(Full):
        behind: bool | None = None
        while not shape.gone and right.holds(clock.now_ms()):
            news = shape.subscribe()
            try:
                chunk = await shape.log.fetch(offset)
                if shape.gone:
                    return
                if behind is None:
                    behind = not chunk.complete
                offset = chunk.end
                if chunk.items or not chunk.complete:
                    control = [up_to_date(offset.tx)]
                    for piece in _frames([*chunk.items, *(control if chunk.complete else ())]):
                        yield piece
                    if chunk.complete and (behind or clock.monotonic_s() >= deadline):
                        return
                    del chunk  # it is counted for as long as somebody has it
                    continue
                left_s = deadline - clock.monotonic_s()
                if left_s <= 0:
                    return
                await wait_any({news}, min(left_s, settings.keep_alive_s, right.left_s(clock.now_ms())))
                if not news.done():
                    yield KEEP_ALIVE
            finally:
                news.cancel()
