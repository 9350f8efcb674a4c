"""Responds to a request for a shape: plan it against the table → find the shape of the handle → wait for its initial
rows → respond with a chunk, or wait for news. The grant of the request is checked again after every wait.

A handle that is unknown, dropped, or of another definition gets 409 with the current handle, always that of a live
shape: the client starts again with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from tidemill.base.errors import UnavailableError
from tidemill.shapes.http import sse
from tidemill.shapes.http.connections import DisconnectWatcher, wait_any
from tidemill.shapes.http.error_status import has_position, store_held_handle
from tidemill.shapes.http.params import BadRequestError, ShapeParams
from tidemill.shapes.http.responses import build_etag, build_shape_headers, items_response, must_refetch
from tidemill.shapes.live_shape import LiveShape
from tidemill.shapes.log.chunks import Chunk
from tidemill.shapes.log.items import up_to_date_item
from tidemill.shapes.log.log_offset import LogOffset
from tidemill.shapes.service import ShapeService

CHUNK_KEY = "tidemill.shapes.chunk"
"""Key in the scope of a request. It keeps the chunk of the response referenced, and so counted as memory, until the
last byte is sent."""


class ShapeResponder:
    def __init__(self, service: ShapeService) -> None:
        self._service = service
        self._settings = service.settings
        self._quiet_answers = 0

    async def respond(self, request: Request, params: ShapeParams) -> Response:
        store_held_handle(request, params)
        plan = await self._service.plan_request(params.request, waits=not has_position(params))
        shape = self._service.open_shape(plan)
        if params.handle and params.handle != shape.handle:
            return must_refetch(shape.handle, True)
        if not await shape.wait_loaded(self._settings.load_timeout_s):
            raise UnavailableError("the initial rows are not ready yet.")
        self._check_grant(params)
        if shape.error is not None:
            raise shape.error
        if shape.has_ended:
            return await self._respond_must_refetch(params)
        if params.offset is None:
            return self._respond_now(shape, params)
        if not self._service.has_reached(shape, params.offset):
            return await self._wait_for_offset(request, shape, params)
        if params.live:
            if params.sse:
                return sse.event_stream_response(self._service, shape, params)
            return await self._long_poll(request, shape, params)
        return await self._respond_chunk(request, shape, params)

    def _check_grant(self, params: ShapeParams) -> None:
        """Raise AccessDeniedError if the grant has ended."""
        params.right.check_valid(self._service.clock.now_ms())

    async def _respond_must_refetch(self, params: ShapeParams) -> Response:
        """Plan again and return 409: the shape may have ended because its table was replaced or dropped."""
        plan = await self._service.plan_request(params.request, waits=not has_position(params))
        return must_refetch(self._service.open_shape(plan).handle, bool(params.handle))

    def _shape_headers(self, shape: LiveShape, params: ShapeParams, end: LogOffset, current: bool) -> dict[str, str]:
        service = self._service
        return build_shape_headers(shape, params, end, current, service.clock, service.rand, self._settings)

    def _respond_now(self, shape: LiveShape, params: ShapeParams) -> Response:
        headers = self._shape_headers(shape, params, shape.log.end, True) | {"cache-control": "no-cache"}
        return items_response([up_to_date_item(self._service.last_seen(shape))], headers, False)

    async def _respond_chunk(self, request: Request, shape: LiveShape, params: ShapeParams) -> Response:
        assert params.offset is not None
        chunk = await shape.fetch(params.offset)
        if shape.has_ended:
            return await self._respond_must_refetch(params)
        request.scope[CHUNK_KEY] = chunk
        items, current = list(chunk.items), chunk.complete and not params.is_initial
        has_data = bool(items)
        if current:
            items.append(up_to_date_item(max(self._service.last_seen(shape), chunk.end.tx)))
        headers = self._shape_headers(shape, params, chunk.end, current)
        return _etag_response(request, build_etag(shape, params, chunk.end, current), items, headers, has_data)

    async def _long_poll(self, request: Request, shape: LiveShape, params: ShapeParams) -> Response:
        assert params.offset is not None
        deadline = self._service.clock.monotonic_s() + self._settings.long_poll_s
        answer = await self._respond_if_news(request, shape, params)  # a client that is behind need not wait
        if answer is not None:
            return answer
        async with DisconnectWatcher(request) as disconnect:
            while True:
                news = shape.subscribe()
                try:
                    answer = await self._respond_if_news(request, shape, params)
                    if answer is not None:
                        return answer
                    left_s = deadline - self._service.clock.monotonic_s()
                    if left_s <= 0:
                        return self._respond_no_news(shape, params)
                    await wait_any({news, disconnect.future}, min(left_s, self._grant_remaining_s(params)))
                    if disconnect.has_happened:
                        return Response(status_code=499)
                finally:
                    news.cancel()

    async def _respond_if_news(self, request: Request, shape: LiveShape, params: ShapeParams) -> Response | None:
        """Return the response if there is news or the shape has ended, otherwise None."""
        assert params.offset is not None
        self._check_grant(params)
        if shape.has_ended:
            return await self._respond_must_refetch(params)
        chunk = await shape.fetch(params.offset)
        if shape.has_ended:
            return await self._respond_must_refetch(params)
        return self._respond_news(request, shape, params, chunk) if chunk.items or not chunk.complete else None

    def _grant_remaining_s(self, params: ShapeParams) -> float:
        return params.right.remaining_s(self._service.clock.now_ms())

    def _respond_news(self, request: Request, shape: LiveShape, params: ShapeParams, chunk: Chunk) -> Response:
        request.scope[CHUNK_KEY] = chunk
        out = list(chunk.items)
        if chunk.complete:
            out.append(up_to_date_item(chunk.end.tx))
        headers = self._shape_headers(shape, params, chunk.end, chunk.complete)
        return _etag_response(request, build_etag(shape, params, chunk.end, chunk.complete), out, headers, True)

    def _respond_no_news(self, shape: LiveShape, params: ShapeParams) -> Response:
        """Return a response without news: 200 with only the up-to-date item."""
        assert params.offset is not None
        self._quiet_answers += 1
        headers = self._shape_headers(shape, params, params.offset, True)
        headers["etag"] = build_etag(shape, params, params.offset, True, self._quiet_answers)
        return items_response([up_to_date_item(self._service.last_seen(shape))], headers, False)

    def _may_become_valid(self, shape: LiveShape, offset: LogOffset) -> bool:
        """Return whether the offset may become valid: a client may have read beyond what was durable before a restart,
        and the stream repeats the same offsets."""
        return shape.restored and offset.tx > self._service.last_seen(shape)

    async def _wait_for_offset(self, request: Request, shape: LiveShape, params: ShapeParams) -> Response:
        """Handle a client that is ahead of this log: wait for half a poll, then reject it."""
        assert params.offset is not None
        deadline = self._service.clock.monotonic_s() + self._settings.long_poll_s / 2
        async with DisconnectWatcher(request) as disconnect:
            while not self._service.has_reached(shape, params.offset):
                left_s = deadline - self._service.clock.monotonic_s()
                if left_s <= 0 and self._may_become_valid(shape, params.offset):
                    raise UnavailableError("the changes up to this offset are being read again after a restart.")
                if left_s <= 0:
                    raise BadRequestError({"offset": ["out of bounds for this shape"]})
                news = shape.subscribe()
                await wait_any({news, disconnect.future}, min(left_s, self._grant_remaining_s(params)))
                news.cancel()
                self._check_grant(params)
                if disconnect.has_happened:
                    return Response(status_code=499)
                if shape.has_ended:
                    return await self._respond_must_refetch(params)
        if params.live and not params.sse:
            return await self._long_poll(request, shape, params)
        if params.sse:
            return sse.event_stream_response(self._service, shape, params)
        return await self._respond_chunk(request, shape, params)


def _etag_response(
    request: Request, tag: str, items: Sequence[bytes], headers: dict[str, str], has_data: bool
) -> Response:
    """Return 304 if the client already has the response, so that a revalidating cache treats its copy as fresh."""
    headers["etag"] = tag
    if _is_etag_match(",".join(request.headers.getlist("if-none-match")), tag):
        return Response(status_code=304, headers=headers)
    return items_response(items, headers, has_data)


def _is_etag_match(header: str, tag: str) -> bool:
    """Return whether If-None-Match matches: RFC 9110 §13.1.2, weak comparison."""
    return any(part.strip().removeprefix("W/") in (tag, "*") for part in header.split(",")) if header else False
