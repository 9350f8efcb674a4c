"""Server of one ASGI application on one address, run by granian inside this process's event loop.

The module owns the listening socket. It binds without SO_REUSEPORT, so a taken port is an error and port 0 gives a free
one. `embedded_granian` contains everything that needs granian's internals. `build_application` makes an application of
routes: a request that no route serves is refused as JSON, like every other refusal. Until all parts of the node are
ready, a `SwitchableApp` serves only early routes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence, Set
from typing import Any

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tidemill.base.address import Address
from tidemill.base.config.listeners import TlsSection
from tidemill.base.errors import InvalidError, UnavailableError
from tidemill.base.limits import LOOPBACK_ORIGINS
from tidemill.base.runtime.tasks import FailureHandler, Tasks, error_sentence
from tidemill.node.http.connection_limits import (
    CHECK_S,
    close_connections,
    close_descriptor_copies,
    close_excess_connections,
    list_connections,
)
from tidemill.node.http.limits import HEAD_BYTES, HttpLimits, LimitsMiddleware
from tidemill.security.tls import ServerCertificates

_log = structlog.get_logger()

BACKLOG = 1024
START_TIMEOUT_S = 10.0
RENEW_INTERVAL_S = 5.0
FORMER_CONNECTIONS_S = 60.0
"""Time for which the connections of a former worker may be used after its certificate was renewed."""
STOP_TIMEOUT_S = 2.0
"""Time that requests under way get to finish. Close what holds them (live shapes) before the server."""


class HttpServer:
    """HTTP server. `start()` binds and serves; `aclose()` stops, even with requests under way."""

    def __init__(
        self,
        app: Any,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        on_failure: FailureHandler,
        limits: HttpLimits | None = None,
        tls: TlsSection | None = None,
        origins: Sequence[str] = LOOPBACK_ORIGINS,
    ) -> None:
        """Initialise. `origins` are those of pages that may read why they are refused."""
        self._tls = tls
        self._certificates = ServerCertificates(tls) if tls is not None else None
        self._limits = limits or HttpLimits()
        self.bounded = LimitsMiddleware(app, self._limits, origins)
        self._host = host
        self.port = port
        self._socket: socket.socket | None = None
        self._server: Any = None
        self._tasks = Tasks(on_failure)
        self._serving: asyncio.Task[Any] | None = None
        self._renewed = False
        self._former: set[int] = set()
        """Connections of workers whose certificate was renewed, by the inode numbers of their sockets."""

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls else ''}://{Address(self._host, self.port)}"

    def _bind(self) -> socket.socket:
        """Bind and listen. Raises InvalidError when the address is not available."""
        address = Address(self._host, self.port)
        listening = socket.socket(address.family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(BACKLOG)
        except OSError as error:
            listening.close()
            raise InvalidError(
                f"cannot listen: key=node.http address={address} error={error.strerror}.",
                fix="Set node.http to a free address, or stop what listens there.",
            ) from error
        listening.setblocking(False)
        return listening

    async def start(self) -> int:
        """Bind and serve; return the port. Raises InvalidError for a taken port."""
        from tidemill.node.http.embedded_granian import check_version, embedded_server

        check_version()
        if self._certificates is not None:
            self._certificates.load()  # raises a sentence that says what is wrong

        self._socket = self._bind()
        self.port = int(self._socket.getsockname()[1])
        self._server = embedded_server(
            self._socket,
            self.bounded,
            self._tls,
            connections=self._limits.connection_limit(),
            header_timeout_s=self._limits.header_timeout_s,
            head_bytes=HEAD_BYTES,
        )
        self._serving = self._tasks.spawn(self._server.serve(), name="http")
        await self._wait_until_accepting()
        self._tasks.spawn(self._close_excess_connections(), name="http-crowds")
        return self.port

    async def watch_certificates(self, works: Callable[[], None]) -> None:
        """Renew the certificate whenever its files change, forever. New connections get the new certificate; existing
        ones retain theirs.

        Calls `works` while the files can be used. Raises InvalidError while they cannot; the former certificate then
        stays in use.
        """
        assert self._certificates is not None
        while True:
            if await asyncio.to_thread(self._certificates.reload_if_changed):
                self._renewed = True  # set before the await, which may be cancelled
                await self._server.renew(self._tls)
                former = await asyncio.to_thread(list_connections, self.port)
                self._former |= former
                self._tasks.spawn(self._close_former_connections(former), name="http-former")
                _log.info("http.certificates_renewed")
            works()
            await asyncio.sleep(RENEW_INTERVAL_S)

    async def _close_former_connections(self, former: Set[int]) -> None:
        await asyncio.sleep(FORMER_CONNECTIONS_S)
        await asyncio.to_thread(close_connections, self.port, former)
        self._former -= former

    async def _close_excess_connections(self) -> None:
        """Close excess connections once a second, off the loop. An error is logged, and the next round tries again."""
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                closed = await asyncio.to_thread(close_excess_connections, self.port, self._limits.address_connections)
            except Exception as error:
                _log.error("connections could not be counted", error=error_sentence(error))
                continue
            if closed:
                _log.warning("connections closed", count=closed, limit=self._limits.address_connections)

    async def _wait_until_accepting(self) -> None:
        """Return when a worker accepts connections. Raises UnavailableError when the server ended instead."""
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        assert self._serving is not None
        while not self._server.accepting:
            if self._serving.done():
                raise UnavailableError(f"the HTTP server ended: error={self._serving.exception()!r}.")
            if asyncio.get_running_loop().time() > deadline:
                raise UnavailableError("the HTTP server did not start in time.")
            await asyncio.sleep(0.005)

    async def aclose(self) -> None:
        """Stop listening and serving. Idempotent."""
        if self._server is not None:
            self._server.stop()
            close_connections(self.port, self._former)
            if self._serving is not None:
                await asyncio.wait({self._serving}, timeout=STOP_TIMEOUT_S)
            self._server = None
        await self._tasks.aclose()
        if self._socket is not None:
            if self._renewed and (self._serving is None or self._serving.done()):
                # granian may retain descriptors of renewed workers. `shutdown` is not an option: a worker that is
                # stopped before it serves misses the signal, and would call accept in a loop that uses a whole core.
                close_descriptor_copies(self._socket)
            self._socket.close()
            self._socket = None


def build_application(routes: Sequence[BaseRoute]) -> Starlette:
    return Starlette(
        routes=routes, exception_handlers={HTTPException: _http_error_response, Exception: _internal_error_response}
    )


def _http_error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = {404: "There is nothing at this path.", 405: f"This path does not support {request.method}."}
    headers = {**(error.headers or {}), "cache-control": "no-store"}
    return JSONResponse({"message": said.get(error.status_code, error.detail)}, error.status_code, headers)


def _internal_error_response(request: Request, error: Exception) -> Response:
    """Return the response for a handler that raised. Starlette raises the error again, and the server logs it."""
    return JSONResponse({"message": "Internal error"}, 500, {"cache-control": "no-store"})


class SwitchableApp:
    """ASGI application that can be exchanged while it is served: first the early routes, later all of them."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


def starting_routes(message: str) -> list[BaseRoute]:
    """Return routes that refuse every request with `message`, to be served before all parts are ready."""

    async def refuse(_: Request) -> Response:
        return JSONResponse({"message": message}, 503, headers={"retry-after": "1", "cache-control": "no-store"})

    return [Route("/{rest:path}", refuse, methods=["GET", "POST", "PUT", "DELETE"])]
