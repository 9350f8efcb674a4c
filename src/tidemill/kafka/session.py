"""One client connection: requests begin in order, run concurrently, are answered in order.

    frame ─► read header ─► begin(request)  ── plain call: reservations happen here, in request order (K1)
                                  │
                            awaitable ─► done ─► slot filled ─► filled slots leave from the front (K2)

S1  `begin` of a request is called before `begin` of any later request of the connection, and before any
    task or await.
S2  A slot leaves the queue only from the front; a request without a response (acks=0) has no slot.
S3  The frame is released after its work has ended, even when the client is gone (K3).
S4  Reading stops while too much is under way or unsent, and starts again at half of that (K4).
S5  While a request stalls (`Stall`), or others have used up this turn of the loop, nothing behind it begins and nothing
    is read.
S6  Of every API but Produce `Api.at_once` requests of the connection are worked on together (Kafka: one of all), and a
    read (Fetch) begins only when its answers find room: what later ones take of memory and of the loop waits. Reads
    that run together have room together, however large their answers become (`KafkaSettings.reads_at_once`).
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
from tidemill.kafka.budget import Budget
from tidemill.kafka.connection import Connection
from tidemill.kafka.context import Context
from tidemill.kafka.frame import Frame, FrameReader
from tidemill.kafka.handlers.k18_api_versions import unsupported_version
from tidemill.kafka.pool import BufferPool
from tidemill.kafka.request import API_VERSIONS, Reply, Request, Stall, peek, read_request, response_head
from tidemill.kafka.schema.wire import BadFrame, begin_request
from tidemill.objects.store import Buffer

log = structlog.get_logger()

PRODUCE = 0
OTHER_REQUEST_BYTES = 4 << 20
"""Only Produce carries records; all else that is larger was never meant."""


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
        number: int,
    ) -> None:
        self._number = number
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
        self._turns: dict[int, asyncio.Semaphore] = {}
        """By API (S6)."""
        self._room = asyncio.Event()
        self._room.set()
        self._reader = FrameReader(pool, context.settings.request_bytes_max, self._hold)
        self._heard_s = self._swept_s = self.took_s = context.clock.monotonic_s()
        self._heard_bytes = self._taken_bytes = 0
        self._frame_number = 0
        self._frame_age_s = 0.0
        self._connection = Connection(
            sock, asyncio.get_running_loop(), self._reader, context.beginnings, self._frames, self._lost
        )
        self._connection.on_drained = self._connection.on_growth = self.consider_reading
        self._connection.resume()

    def expired(self, now_s: float) -> str:
        """Why to close this connection now, or "". Asked by the sweep, every few seconds.

        A frame has `frame_timeout_s` of the time in which we read, and twice that in all: what our own limits make it
        wait is not its fault, but whoever holds memory for so long gives it back.
        """
        connection, reader, settings = self._connection, self._reader, self._context.settings
        passed_s, self._swept_s = now_s - self._swept_s, now_s
        if connection.sent_bytes != self._taken_bytes or not connection.unsent_bytes:
            self._taken_bytes, self.took_s = connection.sent_bytes, now_s
        elif now_s - self.took_s > settings.frame_timeout_s:
            return "the client takes no answers"
        if not reader.partial or reader.frames_begun != self._frame_number:
            self._frame_number, self._frame_age_s = reader.frames_begun, 0.0
        else:
            self._frame_age_s += passed_s / 2 if connection.paused else passed_s
            if self._frame_age_s > settings.frame_timeout_s:
                return "a frame was not whole in time"
        if connection.received_bytes != self._heard_bytes or self._requests or connection.paused:
            self._heard_bytes, self._heard_s = connection.received_bytes, now_s
        return "idle" if now_s - self._heard_s > settings.idle_timeout_s else ""

    def close(self, error: Exception | None = None) -> None:
        self._connection.close(error)

    def consider_reading(self) -> None:
        """Pause or resume by S4."""
        settings = self._context.settings
        unsent = self._answered_bytes + self._connection.unsent_bytes
        held = self._bytes + unsent
        self._budget.answers(self, unsent)
        if unsent > settings.connection_bytes_max:
            self._room.clear()
        else:
            self._room.set()
        if (
            held > settings.connection_bytes_max
            or self._requests >= settings.connection_requests_max
            or self._stalled
            or not self._budget.may_read(self, self._reader.growth_bytes)
        ):
            self._connection.pause()
        elif held <= settings.connection_bytes_max // 2:
            self._connection.resume()

    def _hold(self, delta: int) -> None:
        """The buffer of the unfinished frame (B1)."""
        if delta < 0:
            self._budget.received(self, -delta)
        else:
            self._budget.receiving(self, delta)

    def _frames(self, frames: list[Frame]) -> None:
        for frame in frames:
            self._take(len(frame.view))
        self._backlog += frames
        if not self._stalled:
            self._work_off()

    def _take(self, size: int) -> None:
        self._bytes += size
        self._requests += 1
        self._budget.take(size)

    def _give(self, frame: Frame) -> None:
        """Nobody reads it any more. The buffer may be used again unless `frame` was released or is lost (S3)."""
        self._bytes -= len(frame.view)
        self._requests -= 1
        self._budget.give(len(frame.view))

    def _work_off(self) -> None:
        """Begin what has been received, in order, up to a request that stalls."""
        beginnings = self._context.beginnings
        while self._backlog and not self._connection.closed:
            if beginnings.due:
                self._hold_back(beginnings.rest())
                break
            try:
                reserving = self._begin(self._backlog[0])
            except Stall as stall:
                self._stalled = True
                self._tasks.spawn(self._wait_out(stall), name="kafka.stall")
                break
            except BadFrame as error:
                self._connection.close(error)
            except Exception as error:
                # Nobody knows who still reads the frame: it is dropped, its buffer never used again (S3).
                self._give(self._backlog.popleft())
                log.error("kafka.request_broke", peer=self._peer, error=repr(error), exc_info=error)
                self._connection.close(error)
            else:
                self._backlog.popleft()
                if reserving is not None:
                    self._hold_back(reserving)
                    break
        self.consider_reading()

    def _hold_back(self, until: Awaitable[None]) -> None:
        self._stalled = True
        self._tasks.spawn(self._wait_held_back(until), name="kafka.held_back")

    async def _wait_held_back(self, until: Awaitable[None]) -> None:
        try:
            await until
        except BaseException as error:
            self._connection.close(ConnectionAbortedError(f"a request broke while it began: {error!r}"))
            raise
        self._stalled = False
        self._work_off()

    async def _wait_out(self, stall: Stall) -> None:
        try:
            async with asyncio.timeout(self._context.settings.stall_timeout_s):
                await stall.until
        except TimeoutError:
            self._connection.close(TimeoutError("the catalogue could not be read in time"))
        except BaseException as error:
            # Also a `looked` future that was cancelled: nothing behind it may begin, so the connection ends.
            self._connection.close(ConnectionAbortedError(f"a request could not begin: {error!r}"))
            raise
        self._stalled = False
        self._work_off()

    def _begin(self, frame: Frame) -> Awaitable[None] | None:
        """What must end before anything else of the connection begins, if anything. Raises BadFrame, Stall."""
        begin_request()
        key, version, correlation_id = peek(frame.view)
        api = handlers.APIS.get(key)
        if api is None or not api.min_version <= version <= api.max_version:
            if key != API_VERSIONS:
                raise BadFrame(f"request of an API or version that was not offered: key={key} version={version}.")
            self._answer(self._new_slot(), key, 0, correlation_id, [unsupported_version()])
            self._give(frame)
            frame.release()
            return None
        if key != PRODUCE and len(frame.view) > OTHER_REQUEST_BYTES:
            raise BadFrame(f"request too large for its API: key={key} bytes={len(frame.view)}.")
        request = read_request(frame.view, key, version, correlation_id)
        request.sender = self._number
        work = api.begin(self._context, request)
        slot = self._new_slot() if request.answered else None
        if isinstance(work, asyncio.Future):
            work.add_done_callback(lambda done: self._done(done, request, slot, frame))
        else:
            at_once = min(api.at_once, self._context.settings.reads_at_once) if api.abandon else api.at_once
            turns = self._turns.get(key) or self._turns.setdefault(key, asyncio.Semaphore(at_once))
            waiting = self._in_turn(work, turns, slot if api.abandon else None)
            task = self._tasks.spawn(waiting, name=f"kafka.{api.name}")
            if api.abandon:
                self._abandonable.add(task)

            def ended(done: asyncio.Future[Reply]) -> None:
                if isinstance(work, Coroutine):
                    work.close()
                self._done(done, request, slot, frame)

            task.add_done_callback(ended)
        return request.reserving

    async def _in_turn(self, work: Awaitable[Reply], turns: asyncio.Semaphore, reads: _Slot | None) -> Reply:
        """S6. The answer of a read waits for room, and counts before the next one's turn."""
        async with turns:
            if reads is None:
                return await work
            await self._room.wait()
            reply = await work
            self._count(reads, reply)
            self.consider_reading()
            return reply

    def _new_slot(self) -> _Slot:
        slot = _Slot()
        self._slots.append(slot)
        return slot

    def _done(self, done: asyncio.Future[Reply], request: Request, slot: _Slot | None, frame: Frame) -> None:
        self._abandonable.discard(done)
        self._give(frame)
        frame.release()
        if self._connection.closed:
            if not done.cancelled():
                done.exception()
            return
        error = None if done.cancelled() else done.exception()
        if isinstance(error, BadFrame):
            self._connection.close(error)
            return
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
        self._reader.drop()
        for frame in self._backlog:
            self._give(frame)
            frame.release()
        self._backlog.clear()
        self._budget.forget(self)
        self._on_end(self)
