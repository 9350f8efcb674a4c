"""One ASGI application on one address, served by granian inside this process's event loop.

Owns the listening socket: it is bound here, without SO_REUSEPORT, so a taken port is an error and port 0
gives a free one. Does not own the application.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import structlog

from tidemill.base.errors import Invalid, Unavailable
from tidemill.base.tasks import FailureHandler, Tasks, sentence
from tidemill.node.http_crowds import CHECK_S, close_crowds
from tidemill.node.http_limits import Bounded, HttpLimits

_log = structlog.get_logger()

BACKLOG = 1024
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 2.0
"""Requests under way may finish for this long; close what holds them (live shapes) before the server."""


class HttpServer:
    """`start()` binds and serves; `aclose()` stops, also with requests under way."""

    def __init__(
        self,
        app: Any,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        on_failure: FailureHandler,
        limits: HttpLimits | None = None,
    ) -> None:
        self._limits = limits or HttpLimits()
        self.bounded = Bounded(app, self._limits)
        self._host = host
        self.port = port
        self._socket: socket.socket | None = None
        self._server: Any = None
        self._tasks = Tasks(on_failure)
        self._serving: asyncio.Task[Any] | None = None

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}"

    def _bind(self) -> socket.socket:
        """Raises Invalid when the address is not ours to take."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((self._host, self.port))
            listening.listen(BACKLOG)
        except OSError as error:
            listening.close()
            raise Invalid(
                f"cannot listen: key=node.http address={self._host}:{self.port} error={error.strerror}.",
                fix="Set node.http to a free address, or stop what listens there.",
            ) from error
        listening.setblocking(False)
        return listening

    async def start(self) -> int:
        """Bind and serve; returns the port. Raises Invalid for a taken port."""
        from granian.constants import HTTPModes, Interfaces
        from granian.http import HTTP1Settings

        self._socket = self._bind()
        self.port = int(self._socket.getsockname()[1])
        logging.getLogger("_granian").setLevel(logging.ERROR)
        self._server = _embedded_server(
            self._socket,
            target=self.bounded,
            address=self._host,
            port=self.port,
            interface=Interfaces.ASGINL,
            http=HTTPModes.http1,
            websockets=False,
            backlog=BACKLOG,
            backpressure=self._limits.within_descriptors(),
            http1_settings=HTTP1Settings(
                header_read_timeout=int(self._limits.header_timeout_s * 1000),
                max_buffer_size=self._limits.header_bytes,
            ),
            log_enabled=False,
        )
        self._serving = self._tasks.spawn(self._server.serve(), name="http")
        await self._answering()
        self._tasks.spawn(self._keep_crowds_away(), name="http-crowds")
        return self.port

    async def _keep_crowds_away(self) -> None:
        """Once a second, off the loop. What goes wrong there is told, and tried again."""
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                closed = await asyncio.to_thread(close_crowds, self.port, self._limits.address_connections)
            except Exception as error:
                _log.error("connections not counted", error=sentence(error))
                continue
            if closed:
                _log.warning("connections closed", count=closed, limit=self._limits.address_connections)

    async def _answering(self) -> None:
        """Return when a connection is taken; raises Unavailable when the server ended instead."""
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        assert self._serving is not None
        while not self._server.wrks:
            if self._serving.done():
                raise Unavailable(f"the HTTP server ended: error={self._serving.exception()!r}.")
            if asyncio.get_running_loop().time() > deadline:
                raise Unavailable("the HTTP server did not start in time.")
            await asyncio.sleep(0.005)

    async def aclose(self) -> None:
        """Stop listening and serving. Idempotent."""
        if self._server is not None:
            self._server.stop()
            if self._socket is not None:
                self._socket.detach()  # granian closes the descriptor it was given; closing it twice could hit another
                self._socket = None
            if self._serving is not None:
                await asyncio.wait({self._serving}, timeout=STOP_TIMEOUT_S)
            self._server = None
        await self._tasks.aclose()
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _embedded_server(listening: socket.socket, **settings: Any) -> Any:
    """granian's embedded server on a socket that we bound.

    It would bind one itself, with SO_REUSEPORT, which lets two servers share a port unnoticed. The hook
    that makes its socket is private to granian, so this is the one place that knows it.
    """
    from granian._granian import SocketHolder
    from granian.server.embed import Server

    class OnSocket(Server):  # type: ignore[misc]
        def _init_shared_socket(self) -> None:
            self._ssp = None
            self._shd = SocketHolder(listening.fileno(), False, BACKLOG)  # type: ignore[call-arg]
            self._sfd = listening.fileno()

    return OnSocket(**settings)
