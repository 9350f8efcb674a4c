"""One client connection: requests begin in order, run concurrently, are answered in order.

    frame ─► read header ─► begin(request)  ── plain call: reservations happen here, in request order (K1)
                                  │
                            awaitable ─► done ─► slot filled ─► filled slots leave from the front (K2)

S1  `begin` of a request is called before `begin` of any later request of the connection, and before any
    task or await.
S2  A slot leaves the queue only from the front; a request without a response (acks=0) has no slot.
S3  The frame is released after its work has ended, even when the client is gone (K3).
S4  Reading stops while too much is under way or unsent, and starts again at half of that (K4).
S5  While a request stalls (`Stall`), nothing behind it begins and nothing is read.
S6  A read (Fetch) begins only while few others of the connection run and its answers find room.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog

from tidemill.base.tasks import Tasks
from tidemill.kafka import handlers
from tidemill.kafka.connection import Connection
from tidemill.kafka.context import Context
from tidemill.kafka.frame import Frame, FrameReader
from tidemill.kafka.handlers.k18_api_versions import unsupported_version
from tidemill.kafka.pool import BufferPool
from tidemill.kafka.request import API_VERSIONS, Reply, Request, Stall, peek, read_request, response_head
from tidemill.kafka.schema.wire import BadFrame
from tidemill.objects.store import Buffer

log = structlog.get_logger()

_READS_AT_ONCE = 4
"""Fetches of one connection that run together; real clients send one at a time."""


class Budget:
    """Request bytes under way in the whole process. Sessions that wait for room are called when there is some."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._waiting: set[Session] = set()
        self.used_bytes = 0

    @property
    def exhausted(self) -> bool:
        return self.used_bytes > self._limit_bytes

    def wait(self, session: Session) -> None:
        self._waiting.add(session)

    def give(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes
        if self._waiting and self.used_bytes <= self._limit_bytes // 2:
            waiting, self._waiting = self._waiting, set()
            for session in waiting:
                session.consider_reading()

    def forget(self, session: Session) -> None:
        self._waiting.discard(session)


class _Slot:
    __slots__ = ("response", "size")

    def __init__(self) -> None:
        self.response: list[Buffer] | None = None
        self.size = 0


class Session:
    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        context: Context,
        pool: BufferPool,
        budget: Budget,
        tasks: Tasks,
        on_end: Callable[[Session], None],
    ) -> None:
        self._context = context
        self._budget = budget
        self._tasks = tasks
        self._on_end = on_end
        self._peer = peer
        self._slots: deque[_Slot] = deque()
        self._abandonable: set[asyncio.Task[Any]] = set()
        self._bytes = 0
        self._requests = 0
        self._backlog: deque[Frame] = deque()
        """Received and not begun: empty but for the moment, or while a request stalls."""
        self._stalled = False
        self._answered_bytes = 0
        """In slots that wait for an earlier one."""
        self._reads = asyncio.Semaphore(_READS_AT_ONCE)
        self._room = asyncio.Event()
        self._room.set()
        self._reader = FrameReader(pool, context.settings.request_bytes_max)
        self._heard_s = context.clock.monotonic_s()
        self._heard_bytes = 0
        self._connection = Connection(sock, asyncio.get_running_loop(), self._reader, self._frames, self._lost)
        self._connection.on_drained = self.consider_reading
        self._connection.resume()

    def expired(self, now_s: float) -> str:
        """Why to close this connection now, or "": a frame that stopped half way, or long silence."""
        received, settings = self._connection.received_bytes, self._context.settings
        if received != self._heard_bytes or self._requests or self._connection.paused:
            self._heard_bytes, self._heard_s = received, now_s
            return ""
        silent_s = now_s - self._heard_s
        if self._reader.partial and silent_s > settings.frame_timeout_s:
            return "a frame stopped half way"
        return "idle" if silent_s > settings.idle_timeout_s else ""

    def close(self, error: Exception | None = None) -> None:
        self._connection.close(error)

    def consider_reading(self) -> None:
        """Pause or resume by S4."""
        settings = self._context.settings
        unsent = self._answered_bytes + self._connection.unsent_bytes
        held = self._bytes + unsent
        if unsent > settings.connection_bytes_max:
            self._room.clear()
        else:
            self._room.set()
        if (
            held > settings.connection_bytes_max
            or self._requests >= settings.connection_requests_max
            or self._budget.exhausted
            or self._stalled
        ):
            self._connection.pause()
            if self._budget.exhausted:
                self._budget.wait(self)
        elif held <= settings.connection_bytes_max // 2:
            self._connection.resume()

    def _frames(self, frames: list[Frame]) -> None:
        self._backlog += frames
        if not self._stalled:
            self._work_off()

    def _work_off(self) -> None:
        """Begin what has been received, in order, up to a request that stalls."""
        while self._backlog and not self._connection.closed:
            try:
                self._begin(self._backlog[0])
            except Stall as stall:
                self._stalled = True
                self._tasks.spawn(self._wait_out(stall), name="kafka.stall")
                break
            except BadFrame as error:
                self._connection.close(error)
            except Exception as error:
                # Nobody knows who still reads the frame: it is dropped, its buffer never used again (S3).
                self._backlog.popleft()
                log.error("kafka.request_broke", peer=self._peer, error=repr(error), exc_info=error)
                self._connection.close(error)
            else:
                self._backlog.popleft()
        self.consider_reading()

    async def _wait_out(self, stall: Stall) -> None:
        try:
            async with asyncio.timeout(self._context.settings.stall_timeout_s):
                await stall.until
        except TimeoutError:
            self._connection.close(TimeoutError("the catalogue could not be read in time"))
        self._stalled = False
        self._work_off()

    def _begin(self, frame: Frame) -> None:
        key, version, correlation_id = peek(frame.view)
        api = handlers.APIS.get(key)
        if api is None or not api.min_version <= version <= api.max_version:
            if key != API_VERSIONS:
                raise BadFrame(f"request of an API or version that was not offered: key={key} version={version}.")
            self._answer(self._new_slot(), key, 0, correlation_id, [unsupported_version()])
            frame.release()
            return
        request = read_request(frame.view, key, version, correlation_id)
        work = api.begin(self._context, request)
        size = len(frame.view)
        self._bytes += size
        self._requests += 1
        self._budget.used_bytes += size
        slot = self._new_slot() if request.answered else None
        if isinstance(work, asyncio.Future):
            work.add_done_callback(lambda done: self._done(done, request, slot, frame))
        else:
            waiting = self._read(work, slot) if api.abandon and slot is not None else _wait(work)
            task = self._tasks.spawn(waiting, name=f"kafka.{api.name}")
            if api.abandon:
                self._abandonable.add(task)

            def ended(done: asyncio.Future[Reply]) -> None:
                if isinstance(work, Coroutine):
                    work.close()
                self._done(done, request, slot, frame)

            task.add_done_callback(ended)

    async def _read(self, work: Awaitable[Reply], slot: _Slot) -> Reply:
        """Wait for a turn and for room (S6), then for the work, and count its answer before the next one's turn."""
        async with self._reads:
            await self._room.wait()
            reply = await work
            self._count(slot, reply)
            self.consider_reading()
            return reply

    def _new_slot(self) -> _Slot:
        slot = _Slot()
        self._slots.append(slot)
        return slot

    def _done(self, done: asyncio.Future[Reply], request: Request, slot: _Slot | None, frame: Frame) -> None:
        self._abandonable.discard(done)
        size = len(frame.view)
        frame.release()
        self._bytes -= size
        self._requests -= 1
        self._budget.give(size)
        if self._connection.closed:
            if not done.cancelled():
                done.exception()
            return
        error = None if done.cancelled() else done.exception()
        if done.cancelled() or error is not None:
            log.warning(
                "kafka.request_failed",
                peer=self._peer,
                key=request.key,
                version=request.version,
                client_id=request.client_id,
                error=repr(error),
            )
            self._connection.close()
            return
        if slot is not None:
            self._answer(slot, request.key, request.version, request.correlation_id, done.result())
        self.consider_reading()

    def _answer(self, slot: _Slot, key: int, version: int, correlation_id: int, body: list[Buffer]) -> None:
        self._count(slot, body)
        slot.response = [response_head(key, version, correlation_id, slot.size), *body]
        self._send_ready()

    def _count(self, slot: _Slot, body: list[Buffer]) -> None:
        """Idempotent."""
        self._answered_bytes -= slot.size
        slot.size = sum(map(len, body))
        self._answered_bytes += slot.size

    def _send_ready(self) -> None:
        ready: list[Buffer] = []
        while self._slots and self._slots[0].response is not None:
            slot = self._slots.popleft()
            ready += slot.response or ()
            self._answered_bytes -= slot.size
        if ready:
            self._connection.send(ready)

    def _lost(self, error: Exception | None) -> None:
        if isinstance(error, BadFrame):
            log.warning("kafka.bad_frame", peer=self._peer, error=str(error))
        elif error is not None and not isinstance(error, ConnectionError):
            log.info("kafka.connection_closed", peer=self._peer, reason=str(error))
        for task in list(self._abandonable):
            task.cancel()
        self._slots.clear()
        for frame in self._backlog:
            frame.release()
        self._backlog.clear()
        self._budget.forget(self)
        self._on_end(self)


async def _wait(work: Awaitable[Reply]) -> Reply:
    return await work
