"""GET, OPTIONS and DELETE /v1/shape; GET /v1/health; GET /api/shapes, the list of live shapes.

One request: check the secret → take a place → parse → plan against the table → find the shape the handle names →
wait for its initial rows → answer a chunk, or wait for news.

A handle that is unknown, dropped, or of another definition answers 409 with the current handle, always
of a live shape: the client starts over there.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence

import orjson
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidemill.base.errors import Invalid, Missing, TidemillError, Unavailable
from tidemill.base.tasks import is_fault, sentence
from tidemill.shapes.budget import Full
from tidemill.shapes.http import sse
from tidemill.shapes.http.admission import Admission, Slot
from tidemill.shapes.http.disconnect import Disconnect, wait_any
from tidemill.shapes.http.origins import Origins
from tidemill.shapes.http.params import BadRequest, ShapeParams, parse
from tidemill.shapes.http.respond import (
    BASE_HEADERS,
    error_response,
    etag,
    items_response,
    must_refetch,
    shape_headers,
)
from tidemill.shapes.items import up_to_date
from tidemill.shapes.live import LiveShape
from tidemill.shapes.offsets import LogOffset
from tidemill.shapes.plan import FieldError
from tidemill.shapes.service import ShapeService

_log = structlog.get_logger()

Handler = Callable[[Request], Awaitable[Response]]


def shape_routes(service: ShapeService) -> list[Route]:
    """Routes to mount at the root of the node's application."""
    endpoint = _ShapeEndpoint(service)
    origins = Origins(service.settings.allowed_origins)

    def served(handler: Handler) -> _Served:
        return _Served(handler, origins)

    return [
        Route("/v1/shape", served(endpoint.guarded(endpoint.get)), methods=["GET", "HEAD"]),
        Route("/v1/shape", served(endpoint.guarded(endpoint.delete)), methods=["DELETE"]),
        Route("/v1/shape", served(endpoint.options), methods=["OPTIONS"]),
        Route("/v1/health", served(endpoint.health), methods=["GET"]),
        Route("/api/shapes", served(endpoint.guarded(endpoint.live_shapes)), methods=["GET"]),
    ]


class _Served:
    """An ASGI application: one handler's answers, sent with what the origin may read, in the place of `_SLOT`."""

    def __init__(self, handler: Handler, origins: Origins) -> None:
        self._handler = handler
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            response = await self._handler(request)
            response.headers.update(self._origins.headers(request.headers.get("origin", "")))
            await response(scope, receive, send)
        finally:
            slot: Slot | None = scope.pop(_SLOT, None)
            if slot is not None:
                slot.release()


_SLOT = "tidemill.shapes.slot"


class _ShapeEndpoint:
    def __init__(self, service: ShapeService) -> None:
        self._service = service
        self._settings = service.settings
        self._admission = Admission(service.settings.max_initial, service.settings.max_existing)
        self._quiet_answers = 0

    def guarded(self, handler: Handler) -> Handler:
        """Check the secret, and turn errors of any type into the protocol's answers."""

        async def handle(request: Request) -> Response:
            secret = self._settings.secret
            if secret and not hmac.compare_digest(_secret_of(request).encode(), secret.encode()):
                return error_response(401, "Unauthorized - Invalid API secret")
            try:
                return await handler(request)
            except BadRequest as error:
                return error_response(400, "Invalid request", error.errors)
            except FieldError as error:
                return error_response(400, "Invalid request", {error.field: [str(error)]})
            except Missing as error:
                return error_response(400, "Invalid request", {"table": [str(error)]})
            except Invalid as error:
                # What the database refuses while it reads the initial rows: the clause compiled, a row breaks it.
                field = "where" if request.query_params.get("where") else "table"
                return error_response(400, "Invalid request", {field: [str(error)]})
            except Full as error:
                return error_response(503, str(error), retry_after_s=error.retry_after_s)
            except Unavailable as error:
                return error_response(503, str(error), retry_after_s=1)
            except TidemillError as error:
                _log.error("shape request failed", error=str(error))
                return error_response(500, "Internal error")
            except BaseException as error:  # THE boundary of a request: whatever it is, it is this request's
                if not is_fault(error):
                    raise
                _log.error("shape request failed", error=sentence(error), exc_info=error)
                return error_response(500, "Internal error")

        return handle

    def _busy(self, message: str) -> Response:
        return error_response(503, message, retry_after_s=6 + self._service.rand.below(5))

    async def options(self, request: Request) -> Response:
        headers = {**BASE_HEADERS, "access-control-allow-headers": "*", "access-control-max-age": "86400"}
        return Response(status_code=204, headers=headers)

    async def health(self, request: Request) -> Response:
        headers = {**BASE_HEADERS, "cache-control": "no-cache, no-store, must-revalidate"}
        status = self._service.health
        code = {"active": 200, "starting": 202}.get(status, 503)
        return Response(orjson.dumps({"status": status}), code, headers, media_type="application/json")

    async def live_shapes(self, request: Request) -> Response:
        headers = {**BASE_HEADERS, "cache-control": "no-cache"}
        return Response(orjson.dumps(self._service.shapes()), 200, headers, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        if not self._settings.allow_delete:
            return error_response(405, "DELETE is not enabled.")
        handle = request.query_params.get("handle", "")
        shape = self._service.by_handle(handle)
        if shape is None and not handle and request.query_params.get("table"):
            merged = [*request.query_params.multi_items(), ("offset", "-1")]
            params = parse(type(request.query_params)(merged))
            shape = self._service.current((await self._service.plan(params.request)).definition)
        if shape is None:
            return error_response(404, "Shape not found")
        self._service.delete(shape)
        return Response(status_code=202, headers={**BASE_HEADERS, "cache-control": "no-cache"})

    async def get(self, request: Request) -> Response:
        params = parse(request.query_params)
        initial = params.initial or params.offset is None
        slot = self._admission.take(initial)
        if slot is None:
            return self._busy(f"Concurrent {'initial' if initial else 'existing'} requests exceeded.")
        request.scope[_SLOT] = slot
        return await self._get(request, params)

    async def _get(self, request: Request, params: ShapeParams) -> Response:
        plan = await self._service.plan(params.request)
        shape = self._service.open(plan)
        if params.handle and params.handle != shape.handle:
            return must_refetch(shape.handle, True)
        if not await shape.wait_loaded(self._settings.load_timeout_s):
            return error_response(503, "The initial rows are not ready yet.", retry_after_s=1)
        if shape.error is not None:
            raise shape.error
        if shape.gone:
            return await self._refetch(params)
        if params.offset is None:
            return self._now(shape, params)
        if not self._service.covers(shape, params.offset):
            return await self._out_of_bounds(request, shape, params)
        if params.live:
            if params.sse:
                return sse.response(self._service, shape, params)
            return await self._long_poll(request, shape, params)
        return self._chunk(request, shape, params)

    async def _refetch(self, params: ShapeParams) -> Response:
        """Planned anew: what ended the shape may be that its table is another one now, or none."""
        plan = await self._service.plan(params.request)
        return must_refetch(self._service.open(plan).handle, bool(params.handle))

    def _headers(self, shape: LiveShape, params: ShapeParams, end: LogOffset, current: bool) -> dict[str, str]:
        service = self._service
        return shape_headers(shape, params, end, current, service.clock, service.rand, self._settings)

    def _now(self, shape: LiveShape, params: ShapeParams) -> Response:
        headers = self._headers(shape, params, shape.log.end, True) | {"cache-control": "no-cache"}
        return items_response([up_to_date(self._service.last_seen(shape))], headers, False)

    def _chunk(self, request: Request, shape: LiveShape, params: ShapeParams) -> Response:
        assert params.offset is not None
        chunk = shape.log.read(params.offset)
        items, current = list(chunk.items), chunk.complete and not params.initial
        has_data = bool(items)
        if current:
            items.append(up_to_date(max(self._service.last_seen(shape), chunk.end.tx)))
        headers = self._headers(shape, params, chunk.end, current)
        tag = etag(shape, params, chunk.end, None)
        headers["etag"] = tag
        if _matches(request.headers.get("if-none-match", ""), tag):
            return Response(status_code=304, headers=headers)
        return items_response(items, headers, has_data)

    async def _long_poll(self, request: Request, shape: LiveShape, params: ShapeParams) -> Response:
        assert params.offset is not None
        deadline = self._service.clock.monotonic_s() + self._settings.long_poll_s
        async with Disconnect(request) as disconnect:
            while True:
                news = shape.subscribe()
                try:
                    if shape.gone:
                        return await self._refetch(params)
                    chunk = shape.log.read(params.offset)
                    if chunk.items or not chunk.complete:
                        return self._news(shape, params, chunk.items, chunk.end, chunk.complete)
                    left_s = deadline - self._service.clock.monotonic_s()
                    if left_s <= 0:
                        return self._quiet(shape, params)
                    await wait_any({news, disconnect.future}, left_s)
                    if disconnect.happened:
                        return Response(status_code=499)
                finally:
                    news.cancel()

    def _news(
        self, shape: LiveShape, params: ShapeParams, items: Sequence[bytes], end: LogOffset, complete: bool
    ) -> Response:
        out = list(items)
        if complete:
            out.append(up_to_date(end.tx))
        headers = self._headers(shape, params, end, complete)
        headers["etag"] = etag(shape, params, end, None)
        return items_response(out, headers, True)

    def _quiet(self, shape: LiveShape, params: ShapeParams) -> Response:
        """Nothing came: 200 with only the up-to-date item."""
        assert params.offset is not None
        self._quiet_answers += 1
        headers = self._headers(shape, params, params.offset, True)
        headers["etag"] = etag(shape, params, params.offset, self._quiet_answers)
        return items_response([up_to_date(self._service.last_seen(shape))], headers, False)

    async def _out_of_bounds(self, request: Request, shape: LiveShape, params: ShapeParams) -> Response:
        """The client is ahead of this log: wait half a poll for it to come, then refuse."""
        assert params.offset is not None
        deadline = self._service.clock.monotonic_s() + self._settings.long_poll_s / 2
        async with Disconnect(request) as disconnect:
            while not self._service.covers(shape, params.offset):
                left_s = deadline - self._service.clock.monotonic_s()
                if left_s <= 0:
                    raise BadRequest({"offset": ["out of bounds for this shape"]})
                news = shape.subscribe()
                await wait_any({news, disconnect.future}, left_s)
                news.cancel()
                if disconnect.happened:
                    return Response(status_code=499)
                if shape.gone:
                    return await self._refetch(params)
        if params.live and not params.sse:
            return await self._long_poll(request, shape, params)
        return sse.response(self._service, shape, params) if params.sse else self._chunk(request, shape, params)


def _secret_of(request: Request) -> str:
    return request.query_params.get("secret") or request.query_params.get("api_secret") or ""


def _matches(header: str, tag: str) -> bool:
    """RFC 9110 §13.1.2, weak comparison."""
    return any(part.strip().removeprefix("W/") in (tag, "*") for part in header.split(",")) if header else False
