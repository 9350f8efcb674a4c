"""TLS socket with the four methods that `Connection` uses, and the connection over it.

Invariant (same bytes again): OpenSSL must be called again with the very bytes that it could not send, so the current
piece is retained until it is sent, even if more data is queued in the meantime.

Invariant (no hidden data): decrypted bytes that are not read yet do not make the socket readable, so a connection that
stops reading early schedules another read.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Final

from tidemill.kafka.net.connection import Connection

_PIECE_BYTES: Final = 64 << 10
"""Bytes per send: four TLS records.

Smaller buffers are joined up to this size, because each would become a separate record.
"""


class TlsSocket:
    """TLS side of a socket.

    `on_secured` is called once, when the handshake has ended and before the first byte is returned.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, on_secured: Callable[[TlsSocket], None]) -> None:
        self._tls = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        self._on_secured = on_secured
        self._piece: memoryview | bytes | None = None
        self.secured = False
        self.wants_write = False

    def fileno(self) -> int:
        return self._tls.fileno()

    def pending(self) -> int:
        return self._tls.pending() if self.secured else 0

    def certificate(self) -> bytes | None:
        """Return the client's certificate as DER, or None if it sent none. The handshake has verified it."""
        return self._tls.getpeercert(binary_form=True)

    def recv_into(self, room: memoryview) -> int:
        """Receive decrypted bytes, after the handshake. Raises BlockingIOError, OSError."""
        self.wants_write = False
        try:
            if not self.secured:
                self._tls.do_handshake()
                self.secured = True
                self._on_secured(self)
            return self._tls.recv_into(room)
        except ssl.SSLWantReadError as error:
            raise BlockingIOError from error
        except ssl.SSLWantWriteError as error:
            self.wants_write = True
            raise BlockingIOError from error

    def sendmsg(self, pieces: Sequence[memoryview]) -> int:
        """Send the current piece. Raises BlockingIOError, OSError."""
        if self._piece is None:
            self._piece = _next_piece(pieces)
        try:
            sent = self._tls.send(self._piece)
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError) as error:
            raise BlockingIOError from error
        self._piece = None
        return sent

    def close(self) -> None:
        """Close the socket without a TLS close notification, which a dead peer would delay."""
        self._tls.close()


def _next_piece(pieces: Sequence[memoryview]) -> memoryview | bytes:
    if len(pieces) == 1 or len(pieces[0]) >= _PIECE_BYTES:
        return pieces[0][:_PIECE_BYTES]
    joined = bytearray()
    for piece in pieces:
        joined += piece[: _PIECE_BYTES - len(joined)]
        if len(joined) >= _PIECE_BYTES:
            break
    return bytes(joined)


class TlsConnection(Connection):
    def __init__(self, sock: TlsSocket, *rest: Any) -> None:
        super().__init__(sock, *rest)  # type: ignore[arg-type]  # the four methods
        self._tls = sock
        self._called = False

    def resume(self) -> None:
        super().resume()
        self._schedule_pending_read()

    def _readable(self) -> None:
        super()._readable()
        if self._tls.wants_write and not self.closed:
            self._loop.add_writer(self._sock.fileno(), self._writable)
        self._schedule_pending_read()

    def _writable(self) -> None:
        super()._writable()
        if self._tls.wants_write and not self.closed and not self.paused:
            self._readable()

    def _schedule_pending_read(self) -> None:
        """Schedule a read if decrypted bytes are pending, because they do not make the socket readable."""
        if not self._called and not self.closed and not self.paused and self._tls.pending():
            self._called = True
            self._loop.call_soon(self._read_pending)

    def _read_pending(self) -> None:
        self._called = False
        if not self.closed and not self.paused:
            self._readable()
