"""Non-blocking connection over one socket, on the event loop's readiness callbacks.

asyncio's transports do not fit: on Python 3.11 `writelines` joins its buffers, and a slow peer costs a move of the
whole backlog at every send. Here requests are received into buffers of their own size (`framing`), and responses are
sent by `sendmsg` from the very buffers that `topics` returned. Under TLS the socket is a `tls_socket.TlsSocket`.

Invariant (callbacks): `on_frames` and `on_lost` are called from the event loop, `on_lost` exactly once.

Invariant (pause): the socket of a paused connection is not read, not even by one byte.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence

from tidemill.base.runtime.coop import CoopBudget
from tidemill.kafka.net.framing import Frame, FrameReader
from tidemill.kafka.schema.primitives import MalformedFrameError
from tidemill.objects.store import Buffer

_READS_PER_TURN = 8
"""Receives before other connections get their turn."""
_GATHER_MAX = 512
"""Buffers per sendmsg; Linux accepts at most 1024."""


class Connection:
    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        reader: FrameReader,
        pace: CoopBudget,
        on_frames: Callable[[list[Frame]], None],
        on_lost: Callable[[Exception | None], None],
    ) -> None:
        self._sock = sock
        self._loop = loop
        self._reader = reader
        self._pace = pace
        self._on_frames = on_frames
        self._on_lost = on_lost
        self._out: deque[memoryview] = deque()
        self._paused = True
        self._closed = False
        self.unsent_bytes = 0
        self.received_bytes = 0
        self.sent_bytes = 0
        self.on_drained: Callable[[], None] | None = None
        self.on_growth: Callable[[], None] | None = None
        """Called before a frame allocates more memory; it may pause the connection."""

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def paused(self) -> bool:
        return self._paused

    def pause(self) -> None:
        if not self._paused and not self._closed:
            self._paused = True
            self._loop.remove_reader(self._sock.fileno())

    def resume(self) -> None:
        """Start to read the socket: of a new connection, or after `pause`."""
        if self._paused and not self._closed:
            self._paused = False
            self._loop.add_reader(self._sock.fileno(), self._readable)

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Send as much as the socket accepts now and queue the rest. The buffers must not change until sent."""
        if self._closed:
            return
        was_idle = not self._out
        for buffer in buffers:
            if len(buffer):
                view = memoryview(buffer)
                self._out.append(view)
                self.unsent_bytes += len(view)
        if was_idle and self._out:
            self._flush()
            if self._out and not self._closed:
                self._loop.add_writer(self._sock.fileno(), self._writable)

    def close(self, error: Exception | None = None) -> None:
        """Close the connection and drop unsent data. Idempotent."""
        if self._closed:
            return
        self._closed = True
        descriptor = self._sock.fileno()
        self._loop.remove_reader(descriptor)
        self._loop.remove_writer(descriptor)
        self._out.clear()
        self.unsent_bytes = 0
        try:
            self._on_lost(error)
        finally:
            self._sock.close()

    def _readable(self) -> None:
        for _ in range(_READS_PER_TURN):
            if self._pace.is_used_up:
                return  # the remaining data makes the socket readable again in the next turn
            if self.on_growth is not None and self._reader.growth_bytes:
                self.on_growth()
                if self._paused:
                    return
            room = self._reader.buffer()
            wanted = len(room)
            try:
                count = self._sock.recv_into(room)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.close(error)
                return
            finally:
                room.release()
            if count == 0:
                self.close()
                return
            self.received_bytes += count
            try:
                frames = self._reader.add_received(count)
            except MalformedFrameError as error:
                self.close(error)
                return
            if frames:
                self._on_frames(frames)
            if self._paused or self._closed or (count < wanted and not self._reader.has_partial):
                return

    def _writable(self) -> None:
        self._flush()
        if not self._closed and not self._out:
            self._loop.remove_writer(self._sock.fileno())
            if self.on_drained is not None:
                self.on_drained()

    def _flush(self) -> None:
        out = self._out
        while out:
            pieces = list(out) if len(out) <= _GATHER_MAX else [out[i] for i in range(_GATHER_MAX)]
            try:
                sent = self._sock.sendmsg(pieces)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.close(error)
                return
            self.unsent_bytes -= sent
            self.sent_bytes += sent
            while sent:
                first = out[0]
                if sent >= len(first):
                    sent -= len(first)
                    out.popleft()
                else:
                    out[0] = first[sent:]
                    return
