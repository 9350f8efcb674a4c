"""One connection of a client to its sequencer, without retries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from tidemill.consensus.sqlite import protocol, sockets

CONNECT_S = 5.0

RECEIVE_BUFFER_BYTES = 256 << 10


class SequencerConnection(asyncio.BufferedProtocol):
    """Transport of one connection. `answered` receives each answer; `misled` receives the error of an unreadable one.

    An unreadable answer ends its connection. Answers are received into one buffer: a plain protocol would get a fresh
    object of as many bytes, cut to size, for each few hundred bytes.
    """

    def __init__(self, answered: Callable[[protocol.Answer], None], misled: Callable[[Exception], None]) -> None:
        self._answered = answered
        self._misled = misled
        self._splitter = protocol.FrameSplitter()
        self._room = memoryview(bytearray(RECEIVE_BUFFER_BYTES))
        self.transport: asyncio.Transport | None = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for body in self._splitter.feed(bytes(self._room[:nbytes])):
                for answer in protocol.decode_answers(body):
                    self._answered(answer)
        except Exception as error:
            # After an answer that cannot be read, for any reason, nothing on this connection is trusted.
            self._misled(error)
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


async def connect_to_sequencer(
    database: Path, make: Callable[[], SequencerConnection]
) -> tuple[SequencerConnection | None, str]:
    """Return (a link to a trusted sequencer, or None; the reason why a socket was rejected, or "")."""
    reason = ""
    with sockets.socket_paths(database, create=False) as candidates:
        for path in candidates:
            try:
                async with asyncio.timeout(CONNECT_S):
                    transport, link = await asyncio.get_running_loop().create_unix_connection(make, path)
                uid = sockets.peer_uid(transport.get_extra_info("socket"))
                if sockets.is_trusted_user(uid, database):
                    return link, ""
                reason = f"another user serves the socket: path={path} uid={uid}"
                link.abort()
            except (OSError, TimeoutError):
                continue
    return None, reason
