"""The sequencer's sockets: one client's connection, and the listening one."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from tidemill.base.errors import InvalidError
from tidemill.consensus.sqlite import protocol, socket_address


class ClientConnection:
    """A client's connection. `answers` wait for the round's end, `out` for the socket; `waits`: request id → log."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.splitter = protocol.FrameSplitter()
        self.answers: list[protocol.Message] = []
        self.out = bytearray()
        self.client = ""
        self.closed = False
        self.waits: dict[int, str] = {}


def bind_listener(database: Path) -> tuple[socket.socket, str]:
    """Bind the best address that works; return the socket, and the path to unlink at the end.

    The caller holds the lock, so a file at any of the addresses is stale. Raises InvalidError.
    """
    reasons = []
    with socket_address.socket_paths(database, create=True) as candidates:
        for path in candidates:
            with contextlib.suppress(FileNotFoundError, OSError):
                os.unlink(path)
        for path in candidates:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                os.fchmod(listener.fileno(), 0o600)  # so that the path has this mode from its creation on (Linux)
                listener.bind(path)
                os.chmod(path, 0o600)
                listener.listen(128)
                return listener, os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
            except OSError as error:
                listener.close()
                reasons.append(f"{path}: {error}")
    raise InvalidError(
        f"no Unix socket can be created for the database: database={database} reasons={reasons}.",
        fix="Put the database in a directory on a local file system, with a shorter path.",
    )
