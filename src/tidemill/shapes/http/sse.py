"""Live updates as server-sent events: one `data:` line per item, `: keep-alive` when quiet, closed after a while.

The client is up to date when the stream starts, or received an up-to-date item before, so nothing is sent until there
is news. Every batch ends with an up-to-date item whose LSN is where the client resumes (`<lsn>_0`, after that
transaction: log_offset.py). A client that was more than one chunk behind gets everything, and then the stream is
closed, so that it returns to cacheable requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator

from starlette.responses import StreamingResponse
from starlette.types import Message, Send

from tidemill.shapes.definition.permissions import Grant
from tidemill.shapes.http.params import ShapeParams
from tidemill.shapes.http.responses import PIECE_BYTES, STALL_TIMEOUT_S, StalledReaderError, build_shape_headers
from tidemill.shapes.live_shape import LiveShape
from tidemill.shapes.log.chunks import split_chunk
from tidemill.shapes.log.items import up_to_date_item
from tidemill.shapes.log.log_offset import LogOffset
from tidemill.shapes.memory_budget import OverBudgetError
from tidemill.shapes.service import ShapeService

EVENT_END = b"\n\n"
KEEP_ALIVE = b": keep-alive" + EVENT_END


def event_stream_response(service: ShapeService, shape: LiveShape, params: ShapeParams) -> StreamingResponse:
    assert params.offset is not None
    settings = service.settings
    headers = build_shape_headers(shape, params, params.offset, False, service.clock, service.rand, settings)
    headers["cache-control"] = f"public, max-age={max(1, int(settings.sse_s) - 1)}"
    headers["x-accel-buffering"] = "no"
    stream = _event_frames(service, shape, params.offset, params.right)
    return _EventStream(stream, 200, headers, media_type="text/event-stream")


class _EventStream(StreamingResponse):
    async def stream_response(self, send: Send) -> None:
        """Send the stream. Raises StalledReaderError if the client reads nothing for STALL_TIMEOUT_S.

        One timer checks this for the whole stream; it fires no earlier than a send could be that old.
        """
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle
        since_s: float | None = None

        async def timed_send(message: Message) -> None:
            nonlocal since_s
            since_s = loop.time()
            await send(message)
            since_s = None

        def check_stalled() -> None:
            nonlocal timer
            now_s = loop.time()
            if since_s is not None and now_s - since_s >= STALL_TIMEOUT_S:
                limit.reschedule(now_s)
            else:
                timer = loop.call_at((now_s if since_s is None else since_s) + STALL_TIMEOUT_S, check_stalled)

        timer = loop.call_later(STALL_TIMEOUT_S, check_stalled)
        try:
            async with asyncio.timeout(None) as limit:
                await super().stream_response(timed_send)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise StalledReaderError(f"the client reads nothing: stalled_s={STALL_TIMEOUT_S}.") from error
        finally:
            timer.cancel()


class _NewsTimer:
    """Waits for news of one stream. There are thousands of waits, and nearly all end with news: one timer serves them,
    and is set again only if it fires too early."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._news: asyncio.Future[None]
        self._due_s = 0.0

    async def wait_for_news(self, news: asyncio.Future[None], for_s: float) -> bool:
        """Return whether there is news within `for_s`. `news` is done either way."""
        self._news, self._due_s, self._came = news, self._loop.time() + for_s, True
        if self._timer is None or self._timer.when() > self._due_s:
            self.close()
            self._timer = self._loop.call_at(self._due_s, self._check_deadline)
        await news
        return self._came

    def _check_deadline(self) -> None:
        self._timer = None
        if self._news.done():
            return  # the next wait sets the timer
        if self._loop.time() < self._due_s:
            self._timer = self._loop.call_at(self._due_s, self._check_deadline)
        else:
            self._came = False
            self._news.set_result(None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _render_frames(items: Iterable[bytes]) -> Iterator[bytes]:
    """Yield one `data:` line per item, in pieces of about PIECE_BYTES."""
    held = bytearray()
    for item in split_chunk(items):
        held += b"data: " + item + EVENT_END
        if len(held) >= PIECE_BYTES:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


async def _event_frames(
    service: ShapeService, shape: LiveShape, offset: LogOffset, right: Grant
) -> AsyncIterator[bytes]:
    """Yield the events. The stream ends when the grant does, or if there is no memory for reading; a new request then
    gets the reason."""
    settings, clock = service.settings, service.clock
    deadline = clock.monotonic_s() + settings.sse_s
    quiet = _NewsTimer()
    behind: bool | None = None
    try:
        while not shape.has_ended and right.is_valid(clock.now_ms()):
            news = shape.subscribe()
            try:
                shared_frames = shape.shared_frames
                if shared_frames is not None and shared_frames.after == offset and behind is not None:
                    offset = shared_frames.end
                    yield shared_frames.frames
                elif behind is None or shape.log.end > offset.read:
                    chunk = await shape.fetch(offset)
                    if shape.has_ended:
                        return
                    if behind is None:
                        behind = not chunk.complete
                    if chunk.items or not chunk.complete:
                        after, offset = offset, chunk.end
                        control = [up_to_date_item(offset.tx)] if chunk.complete else []
                        for number, piece in enumerate(_render_frames([*chunk.items, *control])):
                            if chunk.complete and not number and piece.endswith(control[0] + EVENT_END):
                                shape.share_frames(after, offset, piece)
                            yield piece
                        if chunk.complete and (behind or clock.monotonic_s() >= deadline):
                            return
                        del chunk  # counted as memory while it is referenced
                        continue
                left_s = deadline - clock.monotonic_s()
                if left_s <= 0:
                    return
                if not await quiet.wait_for_news(
                    news, min(left_s, settings.keep_alive_s, right.remaining_s(clock.now_ms()))
                ):
                    yield KEEP_ALIVE
            finally:
                news.cancel()
    except OverBudgetError:
        return
    finally:
        quiet.close()
