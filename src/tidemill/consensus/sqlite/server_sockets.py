"""The sequencer's sockets: one client's connection, and the listening one."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from tidemill.base.errors import InvalidError
from tidemill.consensus.sqlite import protocol, socket_address


class Connection:
    """`answers` wait for the end of the round, `out` for the socket; `waits`: request id → log."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.splitter = protocol.Splitter()
        self.answers: list[protocol.Said] = []
        self.out = bytearray()
        self.client = ""
        self.closed = False
        self.waits: dict[int, str] = {}


def listen(database: Path) -> tuple[socket.socket, str]:
    """Bind the best address that works; returns the socket and the path to unlink at the end.

    The caller holds the lock, so whatever lies at any of the addresses is stale.
    """
    reasons = []
    with socket_address.addresses(database, create=True) as candidates:
        for path in candidates:
            with contextlib.suppress(FileNotFoundError, OSError):
                os.unlink(path)
        for path in candidates:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                os.fchmod(listener.fileno(), 0o600)  # Linux gives the name this mode at once, not a moment later
                listener.bind(path)
                os.chmod(path, 0o600)
                listener.listen(128)
                return listener, os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
            except OSError as error:
                listener.close()
                reasons.append(f"{path}: {error}")
    raise InvalidError(
        f"No Unix socket can be made for the database: database={database} reasons={reasons}.",
        fix="Put the database in a directory on a local file system, with a shorter path.",
    )
