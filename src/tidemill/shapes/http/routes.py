"""GET, POST, OPTIONS and DELETE /v1/shape; GET /v1/health; GET /api/shapes, the list of live shapes.

One request: check the secret, or what it may read (`authorization`) → reserve a place → parse → plan against the table
→ find the shape of the handle → wait for its initial rows → respond with a chunk, or wait for news. Its grant is
checked again after every wait.

A handle that is unknown, dropped, or of another definition gets 409 with the current handle, always that of a live
shape: the client starts again with it.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Awaitable, Callable, Sequence

import orjson
import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidemill.base.clock import Rand
from tidemill.base.errors import UnavailableError
from tidemill.shapes.definition.definition import ShapeDefinition
from tidemill.shapes.definition.permissions import AccessDeniedError, Grant
from tidemill.shapes.http import sse, subsets
from tidemill.shapes.http.authorization import NAME_PARAM, ShapeAuthorizer, client_host, is_signed, requester_of
from tidemill.shapes.http.connections import AdmissionControl, AdmissionSlot, DisconnectWatcher, wait_any
from tidemill.shapes.http.error_status import ErrorResponder, has_position, store_grant, store_held_handle, stored_grant
from tidemill.shapes.http.params import BadRequestError, ShapeParams, check_utf8, parse_params
from tidemill.shapes.http.responses import (
    BASE_HEADERS,
    AllowedOrigins,
    build_etag,
    build_shape_headers,
    error_response,
    items_response,
    limit_cache_control,
    must_refetch,
)
from tidemill.shapes.http.subset_params import MAX_BODY_BYTES
from tidemill.shapes.live_shape import LiveShape
from tidemill.shapes.log.chunks import Chunk, ResponseMemory
from tidemill.shapes.log.items import up_to_date_item
from tidemill.shapes.log.log_offset import LogOffset
from tidemill.shapes.memory_budget import OverBudgetError
from tidemill.shapes.service import ShapeService

_log = structlog.get_logger()

BODY_TIMEOUT_S = 20.0
"""Time limit for receiving the body of a POST."""

Handler = Callable[[Request], Awaitable[Response]]


def shape_routes(service: ShapeService, grants: ShapeAuthorizer | None = None) -> list[Route]:
    """Return routes to mount at the root of the node's application. `grants`: server-defined shapes and signed URLs."""
    endpoint = _ShapeEndpoint(service, grants or ShapeAuthorizer(service.clock))
    origins = AllowedOrigins(service.settings.allowed_origins)

    def wrap_handler(handler: Handler) -> _HandlerApp:
        return _HandlerApp(handler, origins, service.rand)

    return [
        Route("/v1/shape", wrap_handler(endpoint.with_error_responses(endpoint.get)), methods=["GET", "HEAD"]),
        Route("/v1/shape", wrap_handler(endpoint.with_error_responses(endpoint.post)), methods=["POST"]),
        Route("/v1/shape", wrap_handler(endpoint.with_error_responses(endpoint.delete)), methods=["DELETE"]),
        Route("/v1/shape", wrap_handler(endpoint.options), methods=["OPTIONS"]),
        Route("/v1/shape", wrap_handler(endpoint.other_method)),
        Route("/v1/health", wrap_handler(endpoint.health), methods=["GET"]),
        Route("/v1/health", wrap_handler(endpoint.options), methods=["OPTIONS"]),
        Route("/api/shapes", wrap_handler(endpoint.with_error_responses(endpoint.live_shapes)), methods=["GET"]),
    ]


class _HandlerApp:
    """An ASGI application that sends one handler's responses with CORS headers. Resources that the handler registers by
    `_release_after_response` are released after the last byte."""

    def __init__(self, handler: Handler, origins: AllowedOrigins, rand: Rand) -> None:
        self._handler = handler
        self._origins = origins
        self._rand = rand

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        held: list[AdmissionSlot | ResponseMemory] = scope.setdefault(_RESOURCES_KEY, [])
        try:
            response = await self._handler(request)
            cors = self._origins.headers(request.headers.get("origin", ""))
            cors["x-request-id"] = self._request_id(request)
            response.raw_headers += [(name.encode(), value.encode("latin-1")) for name, value in cors.items()]
            await response(scope, receive, send)
        finally:
            scope.pop(_CHUNK_KEY, None)
            while held:
                held.pop().release()

    def _request_id(self, request: Request) -> str:
        """Return the request's id: the client's, so that both sides can find the request by it, or a new one."""
        given = request.headers.get("x-request-id", "")
        return given if _REQUEST_ID.fullmatch(given) else f"{self._rand.below(1 << 64):016x}"


_RESOURCES_KEY = "tidemill.shapes.resources"
_CHUNK_KEY = "tidemill.shapes.chunk"
"""Keeps the chunk of a response referenced, and so counted as memory, until its last byte is sent."""
_HEADER_NAMES = re.compile(r"[A-Za-z0-9-]+( *, *[A-Za-z0-9-]+){0,63}")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/=+-]{1,128}")


def _release_after_response(request: Request, thing: AdmissionSlot | ResponseMemory) -> None:
    request.scope[_RESOURCES_KEY].append(thing)


class _ShapeEndpoint:
    def __init__(self, service: ShapeService, grants: ShapeAuthorizer) -> None:
        self._service = service
        self._grants = grants
        self._refusing = ErrorResponder(service, grants)
        self._settings = service.settings
        self._admission = AdmissionControl(service.settings.max_initial, service.settings.max_existing)
        self._quiet_answers = 0

    def with_error_responses(self, handler: Handler) -> Handler:
        """Convert errors of any type into the protocol's responses."""

        async def handle(request: Request) -> Response:
            try:
                return self._limit_cache_age(request, await handler(request))
            except BaseException as error:  # the boundary of a request: any exception concerns this request only
                return self._refusing.respond(request, error)

        return handle

    def _check_secret(self, request: Request) -> None:
        secret = self._settings.secret
        if secret and not hmac.compare_digest(_secret_of(request).encode("utf-8", "replace"), secret.encode()):
            raise AccessDeniedError(401, "Unauthorized - Invalid API secret")

    def _authorize(self, request: Request) -> Grant:
        """Return what a request for a shape may read; a signature replaces the secret. Raises AccessDeniedError,
        BadRequestError."""
        query = request.query_params
        if not is_signed(query):
            self._check_secret(request)
        check_utf8(request.scope["query_string"])
        right = self._grants.authorize(query, requester_of(request.scope), client_host(request.scope))
        store_grant(request, right)
        return right

    def _limit_cache_age(self, request: Request, response: Response) -> Response:
        """Limit the cache lifetime of a response to that of its grant."""
        right = stored_grant(request)
        if right is None or right.fresh_ms is None:
            return response
        kept = response.headers.get("cache-control")
        if kept is not None:
            left_s = (right.fresh_ms - self._service.clock.now_ms()) / 1000
            response.headers["cache-control"] = limit_cache_control(kept, left_s)
        return response

    def _busy_error(self, message: str) -> OverBudgetError:
        return OverBudgetError(message, 6 + self._service.rand.below(5))

    async def options(self, request: Request) -> Response:
        asked = request.headers.get("access-control-request-headers", "")
        # "*" does not include Authorization.
        allowed = asked if _HEADER_NAMES.fullmatch(asked) else "*"
        headers = {**BASE_HEADERS, "access-control-allow-headers": allowed, "access-control-max-age": "86400"}
        return Response(status_code=204, headers=headers)

    async def other_method(self, request: Request) -> Response:
        return self._not_allowed(f"{request.method} is not supported for shapes.")

    def _not_allowed(self, message: str) -> Response:
        response = error_response(405, message)
        response.headers["allow"] = f"GET, HEAD, POST, OPTIONS{', DELETE' if self._settings.allow_delete else ''}"
        return response

    async def health(self, request: Request) -> Response:
        headers = {**BASE_HEADERS, "cache-control": "no-cache, no-store, must-revalidate"}
        status = self._service.health
        code = {"active": 200, "starting": 202}.get(status, 503)
        return Response(orjson.dumps({"status": status}), code, headers, media_type="application/json")

    async def live_shapes(self, request: Request) -> Response:
        self._check_secret(request)
        headers = {**BASE_HEADERS, "cache-control": "no-cache"}
        return Response(orjson.dumps(self._service.shapes()), 200, headers, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        right = self._authorize(request)
        if not self._settings.allow_delete:
            return self._not_allowed("DELETE is not enabled.")
        if right.signed:
            raise AccessDeniedError(403, "a signed URL does not allow DELETE.")
        query = request.query_params
        handle = query.get("handle", "")
        shape = self._service.find_by_handle(handle)
        # A handle grants nothing: an authenticated client, or a request that names a shape, can only end what it names.
        judged = NAME_PARAM in query or (
            bool(query.get("table")) and (not handle or requester_of(request.scope) is not None)
        )
        if judged and (shape is not None or not handle):
            params = parse_params(type(query)([*query.multi_items(), ("offset", "-1")]), right=right)
            named = (await self._service.plan_request(params.request)).definition
            if not handle:
                shape = self._service.find_current(named)
            elif shape is not None and not _is_requested_shape(shape, named, whole=right.is_server_defined):
                shape = None
        if shape is None:
            return error_response(404, "Shape not found")
        self._service.delete(shape)
        return Response(status_code=202, headers={**BASE_HEADERS, "cache-control": "no-cache"})

    async def get(self, request: Request) -> Response:
        params = parse_params(request.query_params, right=self._authorize(request))
        self._reserve_slot(request, params.is_initial or params.offset is None or params.subset is not None)
        return await self._respond_get(request, params)

    async def post(self, request: Request) -> Response:
        """Read a subset: its parameters are in the body, which may be longer than a URL."""
        right = self._authorize(request)
        self._reserve_slot(request, True)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await _read_body(request)
        except TimeoutError as error:
            raise UnavailableError("the body was not received in time.") from error
        except ClientDisconnect:
            return error_response(400, "The body is incomplete.")
        if body is None:
            return error_response(413, f"The body is too large: limit_bytes={MAX_BODY_BYTES}.")
        return await self._respond_get(request, parse_params(request.query_params, body, right))

    def _reserve_slot(self, request: Request, initial: bool) -> None:
        """Reserve a place for the request until it ends. Raises OverBudgetError."""
        slot = self._admission.reserve(initial)
        if slot is None:
            raise self._busy_error(f"Concurrent {'initial' if initial else 'existing'} requests exceeded.")
        _release_after_response(request, slot)

    async def _respond_get(self, request: Request, params: ShapeParams) -> Response:
        if params.subset is not None:
            rows = ResponseMemory(self._service.budget, self._service.subsets, self._settings.subset_bytes)
            _release_after_response(request, rows)
            try:
                return await subsets.respond_subset(self._service, request, params, rows)
            except TimeoutError as error:
                raise self._busy_error("The subset was not read in time.") from error
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
        request.scope[_CHUNK_KEY] = chunk
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
        request.scope[_CHUNK_KEY] = chunk
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


def _is_requested_shape(shape: LiveShape, named: ShapeDefinition, *, whole: bool) -> bool:
    """Return whether the shape is the named one, or, unless `whole`, one of the same table."""
    return shape.definition == named if whole else shape.definition.source == named.source


async def _read_body(request: Request) -> bytes | None:
    """Read the body; return None if it is larger than MAX_BODY_BYTES."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            return None
    return bytes(body)


def _secret_of(request: Request) -> str:
    return request.query_params.get("secret") or request.query_params.get("api_secret") or ""


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
