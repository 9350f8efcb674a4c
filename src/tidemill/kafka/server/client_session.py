"""Session of one client connection: requests begin in order, run concurrently and are answered in order.

    frame ─► read header ─► begin(request)  ── plain call: reservations happen here, in request order
                                  │
                            awaitable ─► done ─► slot filled ─► filled slots are sent from the front

Invariant (begin order): `begin` of a request is called before `begin` of any later request of the connection, and
before any task or await.

Invariant (answer order): a slot is removed from the queue only at the front; a request without a response (acks=0) has
no slot. All slots that are filled in one turn of the loop are sent together, so the answers to one commit cost one
write and wake their client once.

Invariant (frame lifetime): a frame is released after its work has ended, even if the client is gone.

Invariant (back-pressure): reading stops while too much is running or unsent, and resumes at half of that.

Invariant (stall): while a request stalls (`Stall`), or other requests have used up this turn of the loop, no later
request of the connection begins and nothing is read.

Invariant (concurrency): of every API but Produce, at most `Api.at_once` requests of the connection run concurrently
(Kafka runs one of all). A read (Fetch) begins only when there is room for its answer, so that later reads wait before
they use memory and loop time. The largest answers of concurrent reads fit together
(`KafkaSettings.concurrent_reads_max`). After a request that changes cluster metadata (a barrier) nothing begins until
it has ended, so a client that requests the changed object next, without waiting, sees it.

Invariant (throttling): while the client is muted (`request_quotas`) no request begins and nothing is read.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

import structlog

from tidemill.base.runtime.tasks import Tasks
from tidemill.kafka import handlers
from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import (
    API_VERSIONS,
    PlainOutcome,
    Reply,
    Request,
    Stall,
    peek_header,
    read_request,
    response_head,
)
from tidemill.kafka.api.sasl_step import advance_authentication
from tidemill.kafka.handlers.k18_api_versions import unsupported_version
from tidemill.kafka.net.connection import Connection
from tidemill.kafka.net.connection_limits import ClientTimeouts
from tidemill.kafka.net.framing import BufferPool, Frame, FrameReader
from tidemill.kafka.net.listener_security import (
    SASL_AUTHENTICATE,
    UNAUTHENTICATED_REQUEST_BYTES,
    ConnectionRejectedError,
    ListenerSecurity,
)
from tidemill.kafka.net.memory_budget import MemoryBudget
from tidemill.kafka.net.tls_socket import TlsConnection, TlsSocket
from tidemill.kafka.schema.primitives import I32, MalformedFrameError, reset_element_count
from tidemill.kafka.server.request_quotas import PRODUCE, ClientThrottle, Metered
from tidemill.objects.store import Buffer
from tidemill.security import quotas
from tidemill.security.scram import AuthenticationFailedError

log = structlog.get_logger()

OTHER_REQUEST_BYTES = 4 << 20
"""Largest request of any API but Produce: only Produce carries records."""


class _Slot:
    __slots__ = ("response", "size")

    def __init__(self) -> None:
        self.response: list[Buffer] | None = None
        self.size = 0


class SharedResources(NamedTuple):
    """Resources that all sessions of a server share."""

    pool: BufferPool
    budget: MemoryBudget
    tasks: Tasks


class ClientSession:
    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        context: Context,
        shared: SharedResources,
        on_end: Callable[[ClientSession], None],
        number: int,
        gate: ListenerSecurity,
    ) -> None:
        self._number = number
        self._gate = gate
        self.visitor = gate.identify(peer.rpartition(":")[0])
        self._context = context
        self._budget = budget = shared.budget
        self._tasks = shared.tasks
        self._on_end = on_end
        self._peer = peer
        self._slots: deque[_Slot] = deque()
        self._abandonable: set[asyncio.Task[Any]] = set()
        self._bytes = 0
        self._requests = 0
        self._backlog: deque[Frame] = deque()
        """Frames that are received but not begun: empty except within a call, or while a request stalls."""
        self._stalled = False
        self._throttle = ClientThrottle(context, self.visitor, lambda: self._connection.closed, self._begin_backlog)
        self._answered_bytes = 0
        """Bytes in slots that wait for an earlier slot."""
        self._turns: dict[int, asyncio.Semaphore] = {}
        """Semaphore of each API, for its limit of concurrent requests."""
        self._sending = False
        self._room = asyncio.Event()
        self._room.set()
        known = self.visitor.known
        first_bytes_max = context.settings.request_bytes_max if known else UNAUTHENTICATED_REQUEST_BYTES
        self._reader = FrameReader(shared.pool, first_bytes_max, self._count_buffer, budget.has_room)
        self._timeouts = ClientTimeouts(context.clock.monotonic_s())
        rest = (
            asyncio.get_running_loop(),
            self._reader,
            context.beginnings,
            self._receive_frames,
            self._connection_lost,
        )
        if gate.tls is None:
            self._connection = Connection(sock, *rest)
        else:
            self._connection = TlsConnection(TlsSocket(sock, gate.tls.context, self._secured), *rest)
        self._connection.on_drained = self._connection.on_growth = self.consider_reading
        self._connection.resume()

    @property
    def took_s(self) -> float:
        """Time at which the client last read answers, or had none to read."""
        return self._timeouts.took_s

    def close_reason(self, now_s: float) -> str:
        """Return why to close this connection now, or "". The sweep calls it every few seconds."""
        settings = self._context.settings
        if not self.visitor.known and self._timeouts.unauthenticated_too_long(now_s, settings):
            return "the client did not authenticate in time"
        return self._timeouts.close_reason(now_s, self._connection, self._reader, settings, busy=self._requests > 0)

    def close(self, error: Exception | None = None) -> None:
        self._connection.close(error)

    def consider_reading(self) -> None:
        """Pause or resume reading, by the running requests and unsent answers of this connection and of the process."""
        if self._connection.closed:
            return
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
            or self._throttle.muted
            or not self._budget.can_read(self, self._reader.growth_bytes)
        ):
            self._connection.pause()
        elif held <= settings.connection_bytes_max // 2:
            self._connection.resume()

    def _secured(self, sock: TlsSocket) -> None:
        self._gate.set_certificate_principal(self.visitor, sock)
        self._raise_size_limit()

    def _raise_size_limit(self) -> None:
        """Allow frames of full size once the client is authenticated. Idempotent."""
        if self.visitor.known:
            self._reader.request_bytes_max = self._context.settings.request_bytes_max

    def _count_buffer(self, delta: int) -> None:
        """Account for the buffer of the unfinished frame."""
        if delta < 0:
            self._budget.remove_receiving(self, -delta)
        else:
            self._budget.add_receiving(self, delta)

    def _receive_frames(self, frames: list[Frame]) -> None:
        for frame in frames:
            size = len(frame.view)
            self._bytes += size
            self._requests += 1
            self._budget.begin_request(size)
        self._backlog += frames
        if not self._throttle.muted:
            self._begin_backlog()

    def _end_frame(self, frame: Frame) -> None:
        """Stop counting a frame that is no longer read.

        The caller may then release the frame for reuse; after a fault it drops the frame instead.
        """
        self._bytes -= len(frame.view)
        self._requests -= 1
        self._budget.end_request(len(frame.view))

    def _begin_backlog(self) -> None:
        """Begin the received requests in order. A request that stalls also holds back the later ones."""
        if self._stalled:
            return
        beginnings = self._context.beginnings
        while self._backlog and not self._connection.closed and not self._throttle.muted:
            if beginnings.is_used_up:
                self._pause_until(beginnings.wait_for_turn())
                break
            try:
                reserving = self._begin_request(self._backlog[0])
            except Stall as stall:
                self._stalled = True
                self._tasks.spawn(self._wait_stall(stall), name="kafka.stall")
                break
            except (MalformedFrameError, ConnectionRejectedError) as error:
                self._close_after_answers(error)
            except Exception as error:
                # Unfinished work may still read the frame, so it is dropped and its buffer is never reused.
                self._end_frame(self._backlog.popleft())
                log.error("kafka.request_broke", peer=self._peer, error=repr(error), exc_info=error)
                self._close_after_answers(error)
            else:
                self._backlog.popleft()
                if reserving is not None:
                    self._pause_until(reserving)
                    break
        self.consider_reading()

    def _pause_until(self, until: Awaitable[None]) -> None:
        self._stalled = True
        self._tasks.spawn(self._wait_pause(until), name="kafka.held_back")

    async def _wait_pause(self, until: Awaitable[None]) -> None:
        try:
            await until
        except BaseException as error:
            self._close_after_answers(ConnectionAbortedError(f"a request failed while it began: {error!r}"))
            raise
        self._stalled = False
        self._begin_backlog()

    async def _wait_stall(self, stall: Stall) -> None:
        try:
            async with asyncio.timeout(self._context.settings.stall_timeout_s):
                await stall.until
        except TimeoutError:
            self._close_after_answers(TimeoutError("the catalogue could not be read in time"))
        except BaseException as error:
            # This includes a cancelled `looked` future: no later request may begin, so the connection ends.
            self._close_after_answers(ConnectionAbortedError(f"a request could not begin: {error!r}"))
            raise
        self._stalled = False
        self._begin_backlog()

    def _begin_request(self, frame: Frame) -> Awaitable[None] | None:
        """Begin the request of one frame.

        Return an awaitable that must end before the next request of the connection begins, or None. Raises
        MalformedFrameError, Stall, ConnectionRejectedError.
        """
        if self.visitor.raw:
            return self._begin_raw(frame)
        reset_element_count()
        key, version, correlation_id = peek_header(frame.view)
        forbidden = self.visitor.rejection_reason(key, self._context.clock.monotonic_s())
        if forbidden:
            raise ConnectionRejectedError(forbidden)
        api = handlers.APIS.get(key)
        if api is None or not api.min_version <= version <= api.max_version:
            if key != API_VERSIONS:
                raise MalformedFrameError(
                    f"request of an API or version that is not supported: key={key} version={version}."
                )
            self._answer(self._new_slot(), key, 0, correlation_id, [unsupported_version()])
            self._end_frame(frame)
            frame.release()
            return None
        if key != PRODUCE and len(frame.view) > OTHER_REQUEST_BYTES:
            raise MalformedFrameError(f"request too large for its API: key={key} bytes={len(frame.view)}.")
        request = read_request(frame.view, key, version, correlation_id)
        request.sender, request.visitor = self._number, self.visitor
        clock, of_time = self._context.clock, self._context.quotas.limits.of_time
        began_s = clock.monotonic_s() if of_time else 0.0
        work = api.begin(self._context, request)
        if of_time:
            request.spent_s = clock.monotonic_s() - began_s
        if key == PRODUCE and not self._context.quotas.limits.is_empty:
            request.throttle_ms = self._throttle.charge(request, quotas.PRODUCE, len(frame.view))
        slot = self._new_slot() if request.answered else None
        if isinstance(work, PlainOutcome | asyncio.Future):
            work.add_done_callback(lambda done: self._request_done(done, request, slot, frame))
        else:
            abandoned = api.abandon and not request.is_kept
            at_once = min(api.at_once, self._context.settings.concurrent_reads_max) if api.abandon else api.at_once
            turns = self._turns.get(key) or self._turns.setdefault(key, asyncio.Semaphore(at_once))
            metered = Metered(work, clock) if of_time and isinstance(work, Coroutine) else None
            waiting = self._run_in_turn(metered or work, turns, slot if abandoned else None)
            task = self._tasks.spawn(waiting, name=f"kafka.{api.name}")
            if abandoned:
                self._abandonable.add(task)

            def ended(done: asyncio.Future[Reply]) -> None:
                if isinstance(work, Coroutine):
                    work.close()
                if metered is not None:
                    request.spent_s += metered.spent_s
                self._request_done(done, request, slot, frame)

            task.add_done_callback(ended)
            if api.barrier:
                request.reserving = _wait_ended(task)
        return request.reserving

    def _begin_raw(self, frame: Frame) -> Awaitable[None]:
        """Process a SASL message without a header, after SaslHandshake version 0. A failure ends the connection."""
        slot = self._new_slot()

        async def answer() -> Reply:
            step, _ = await advance_authentication(self._context, self.visitor, bytes(frame.view))
            return [I32.pack(len(step.reply)), step.reply]

        task = self._tasks.spawn(answer(), name="kafka.raw_sasl")

        def ended(done: asyncio.Future[Reply]) -> None:
            self._end_frame(frame)
            frame.release()
            error = asyncio.CancelledError() if done.cancelled() else done.exception()
            if error is not None:
                self._close_after_answers(
                    None if isinstance(error, AuthenticationFailedError) else ConnectionAbortedError(repr(error))
                )
            elif not self._connection.closed:
                self._raise_size_limit()
                self._count_answer(slot, done.result())
                slot.response = done.result()
                self._send_soon()
                self.consider_reading()

        task.add_done_callback(ended)
        return _wait_ended(task)

    async def _run_in_turn(self, work: Awaitable[Reply], turns: asyncio.Semaphore, reads: _Slot | None) -> Reply:
        """Run `work` when it has a turn. A read waits for room, and its answer is counted before the next turn."""
        async with turns:
            if reads is None:
                return await work
            await self._room.wait()
            reply = await work
            self._count_answer(reads, reply)
            self.consider_reading()
            return reply

    def _new_slot(self) -> _Slot:
        slot = _Slot()
        self._slots.append(slot)
        return slot

    def _request_done(
        self, done: asyncio.Future[Reply] | PlainOutcome, request: Request, slot: _Slot | None, frame: Frame
    ) -> None:
        if isinstance(done, asyncio.Task):
            self._abandonable.discard(done)
        self._end_frame(frame)
        frame.release()
        if self._connection.closed:
            if not done.cancelled():
                done.exception()
            return
        error = None if done.cancelled() else done.exception()
        if isinstance(error, MalformedFrameError | ConnectionRejectedError):
            self._close_after_answers(error)
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
            self._close_after_answers()
            return
        self._throttle.write_throttle(request, done.result())
        if slot is not None:
            self._answer(slot, request.key, request.version, request.correlation_id, done.result())
        if request.key == SASL_AUTHENTICATE:
            self._raise_size_limit()
        if self.visitor.rejected is not None:
            self._close_after_answers(ConnectionRejectedError(self.visitor.rejected) if self.visitor.rejected else None)
        if not self._sending:  # Otherwise it is considered after the send.
            self.consider_reading()

    def _answer(self, slot: _Slot, key: int, version: int, correlation_id: int, body: list[Buffer]) -> None:
        self._count_answer(slot, body)
        slot.response = [response_head(key, version, correlation_id, slot.size), *body]
        self._send_soon()

    def _count_answer(self, slot: _Slot, body: list[Buffer]) -> None:
        """Account for the answer of a slot. Idempotent."""
        self._answered_bytes -= slot.size
        slot.size = sum(map(len, body))
        self._answered_bytes += slot.size

    def _send_soon(self) -> None:
        if not self._sending and self._slots and self._slots[0].response is not None:
            self._sending = True
            asyncio.get_running_loop().call_soon(self._send_ready)

    def _send_ready(self) -> None:
        self._sending = False
        ready: list[Buffer] = []
        while self._slots and self._slots[0].response is not None:
            slot = self._slots.popleft()
            ready += slot.response or ()
            self._answered_bytes -= slot.size
        if ready:
            self._connection.send(ready)
            self.consider_reading()

    def _close_after_answers(self, error: Exception | None = None) -> None:
        """Close the connection after a client's fault; complete answers are sent first."""
        self._send_ready()
        self._connection.close(error)

    def _connection_lost(self, error: Exception | None) -> None:
        if isinstance(error, ssl.SSLError | ConnectionRejectedError) or (error is not None and not self.visitor.known):
            host = self.visitor.host
            self._context.audit.log_refusal("kafka.connection_not_secured", (host,), host=host, reason=str(error))
        elif isinstance(error, MalformedFrameError):
            log.warning("kafka.bad_frame", peer=self._peer, error=str(error))
        elif error is not None and not isinstance(error, ConnectionError):
            log.info("kafka.connection_closed", peer=self._peer, reason=str(error))
        for task in list(self._abandonable):
            task.cancel()
        self._slots.clear()
        self._reader.drop_partial()
        for frame in self._backlog:
            self._end_frame(frame)
            frame.release()
        self._backlog.clear()
        self._budget.remove_session(self)
        self._context.repeats.close_connection(self._number)
        self._on_end(self)


async def _wait_ended(task: asyncio.Task[Any]) -> None:
    await asyncio.wait([task])
