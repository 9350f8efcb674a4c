"""granian, embedded in this process's event loop, on a socket that is already bound and with renewable certificates.

granian has no public interface for either. It binds its own socket with SO_REUSEPORT, which lets two servers share a
port unnoticed. Its reload lets two workers accept for seconds, and ends the server over a connection that stays. So
`EmbeddedServer` overrides and reads internals of granian's server. No other module may use them.

`check_version` compares the installed granian with the tested releases, and checks that the internals exist. A node
with another granian ends at its start instead of at its first renewal. To support a new release: run the tests of the
HTTP server with it, then extend VERSIONS and the range in pyproject.toml.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import socket
from pathlib import Path
from typing import Any, Final

from starlette.types import ASGIApp

from tidemill.base.config.listeners import TlsSection
from tidemill.base.errors import InvalidError, UnavailableError

VERSIONS: Final = ("2.8",)
"""Releases (major and minor version) with which the tests of the HTTP server pass."""
_FIX: Final = f"Install granian {' or '.join(VERSIONS)}, as in requirements.lock."

try:
    from granian import __version__ as granian_version
    from granian._granian import SocketHolder
    from granian.constants import HTTPModes, Interfaces, SSLProtocols
    from granian.http import HTTP1Settings
    from granian.server.embed import AsyncWorker, Server
except ImportError as error:
    raise InvalidError(f"unsupported granian: error={error}.", fix=_FIX) from error

BACKLOG: Final = 1024
WORKER_START_CHECK_S = 0.1
"""Time within which a worker that cannot serve has ended."""
_PARAMETERS: Final = {
    "_init_shared_socket": ("self",),
    "_spawn_worker": ("self", "idx", "target", "callback_loader"),
    "build_ssl_context": ("self", "cert", "key", "password", "proto", "ca", "crl", "client_verify"),
}
_ATTRIBUTES: Final = ("_ssp", "_sfd", "_shd", "wrks", "interrupt_children", "main_loop_interrupt")


def check_version(version: str = granian_version, server: type[Any] = Server) -> None:
    """Raise InvalidError unless this module knows the internals of the installed granian."""
    if ".".join(version.split(".")[:2]) not in VERSIONS:
        raise InvalidError(f"unsupported granian: version={version}.", fix=_FIX)
    for name, expected in _PARAMETERS.items():
        method = getattr(server, name, None)
        found = tuple(inspect.signature(method).parameters) if method is not None else ()
        if found != expected:
            raise InvalidError(f"unsupported granian: version={version} method={name} parameters={found}.", fix=_FIX)


class EmbeddedServer(Server):  # type: ignore[misc]
    """Server on a bound socket. `serve()` and `stop()` are granian's own."""

    def __init__(self, listening: socket.socket, **settings: Any) -> None:
        """Raise InvalidError when granian's server lacks an attribute that this module uses."""
        self._listening = listening
        super().__init__(**settings)
        if missing := [name for name in _ATTRIBUTES if not hasattr(self, name)]:
            raise InvalidError(
                f"unsupported granian: version={granian_version} missing={','.join(missing)}.",
                fix=_FIX,
            )

    @property
    def accepting(self) -> bool:
        """Return whether a worker accepts connections."""
        return bool(self.wrks)

    def _init_shared_socket(self) -> None:
        # Each worker closes its descriptor when it ends.
        self._ssp, self._sfd = None, os.dup(self._listening.fileno())
        self._shd = SocketHolder(self._sfd, False, BACKLOG)  # type: ignore[call-arg]

    async def renew(self, tls: TlsSection) -> None:
        """Start another worker for new connections; the former one ends with its existing connections.

        Raises UnavailableError when the new worker does not start; the former one continues.
        """
        options = _tls_options(tls)
        self.build_ssl_context(
            options["ssl_cert"], options["ssl_key"], None, options["ssl_protocol_min"], None, [], False
        )
        self._init_shared_socket()
        fresh: AsyncWorker = self._spawn_worker(0, self._spawn_asgi_worker, self.target)
        fresh.interrupt_by_parent = True  # its end does not end the server before it serves
        fresh.start()
        try:
            await asyncio.wait({fresh._task}, timeout=WORKER_START_CHECK_S)
        finally:
            # Also after a cancellation: a stop of the server stops the workers in `wrks`.
            if fresh._task.done():
                os.close(self._sfd)
            else:
                fresh.interrupt_by_parent = False
                (former,) = self.wrks
                self.wrks[:] = [fresh]
                former.terminate()
        if fresh._task.done():
            raise UnavailableError(f"the HTTP server did not restart: error={fresh._task.exception()!r}.")


def embedded_server(
    listening: socket.socket,
    app: ASGIApp,
    tls: TlsSection | None,
    *,
    connections: int,
    header_timeout_s: float,
    head_bytes: int,
) -> EmbeddedServer:
    """Return a server of `app` on `listening`, which is bound. It accepts at most `connections` at a time."""
    logging.getLogger("_granian").setLevel(logging.ERROR)
    address, port = listening.getsockname()[:2]
    return EmbeddedServer(
        listening,
        target=app,
        address=address,
        port=port,
        interface=Interfaces.ASGINL,
        http=HTTPModes.http1,
        websockets=False,
        backlog=BACKLOG,
        backpressure=connections,
        http1_settings=HTTP1Settings(
            header_read_timeout=int(header_timeout_s * 1000),
            max_buffer_size=head_bytes,
        ),
        log_enabled=False,
        **_tls_options(tls),
    )


def _tls_options(tls: TlsSection | None) -> dict[str, Any]:
    if tls is None:
        return {}
    least = {"1.2": SSLProtocols.tls12, "1.3": SSLProtocols.tls13}[tls.min_version]
    return {"ssl_cert": Path(tls.certificate), "ssl_key": Path(tls.key), "ssl_protocol_min": least}
