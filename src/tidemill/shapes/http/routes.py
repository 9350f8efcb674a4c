"""GET, POST, OPTIONS and DELETE /v1/shape; GET /v1/health; GET /api/shapes, the list of live shapes.

One request: check the secret, or what it may read (`authorization`) → reserve a place → parse → respond with the shape
(`shape_responder`) or with a subset (`subsets`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable

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
from tidemill.shapes.http import subsets
from tidemill.shapes.http.authorization import (
    NAME_PARAM,
    ShapeAuthorizer,
    check_secret,
    client_host,
    is_signed,
    requester_of,
)
from tidemill.shapes.http.connections import AdmissionControl, AdmissionSlot
from tidemill.shapes.http.error_status import ROUTING_ERROR_KEY, ErrorResponder, store_grant, stored_grant
from tidemill.shapes.http.params import ShapeParams, check_utf8, parse_params
from tidemill.shapes.http.responses import (
    BASE_HEADERS,
    AllowedOrigins,
    error_response,
    limit_cache_control,
)
from tidemill.shapes.http.shape_responder import CHUNK_KEY, ShapeResponder
from tidemill.shapes.http.subset_params import MAX_BODY_BYTES
from tidemill.shapes.live_shape import LiveShape
from tidemill.shapes.log.chunks import ResponseMemory
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
            scope.pop(CHUNK_KEY, None)
            while held:
                held.pop().release()

    def _request_id(self, request: Request) -> str:
        """Return the request's id: the client's, so that both sides can find the request by it, or a new one."""
        given = request.headers.get("x-request-id", "")
        return given if _REQUEST_ID.fullmatch(given) else f"{self._rand.below(1 << 64):016x}"


_RESOURCES_KEY = "tidemill.shapes.resources"
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
        self._responder = ShapeResponder(service)

    def with_error_responses(self, handler: Handler) -> Handler:
        """Convert errors of any type into the protocol's responses."""

        async def handle(request: Request) -> Response:
            try:
                return self._limit_cache_age(request, await handler(request))
            except BaseException as error:  # the boundary of a request: any exception concerns this request only
                return self._refusing.respond(request, error)

        return handle

    def _authorize(self, request: Request) -> Grant:
        """Return what a request for a shape may read; a signature replaces the secret. Raises AccessDeniedError,
        BadRequestError, and the error of routing."""
        query = request.query_params
        if not is_signed(query):
            check_secret(query, self._settings.secret)
        check_utf8(request.scope["query_string"])
        right = self._grants.authorize(query, requester_of(request.scope), client_host(request.scope))
        store_grant(request, right)
        if ROUTING_ERROR_KEY in request.scope:
            raise request.scope[ROUTING_ERROR_KEY]
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
        check_secret(request.query_params, self._settings.secret)
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
        return await self._responder.respond(request, params)


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
