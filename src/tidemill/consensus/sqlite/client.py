"""The asyncio client of a sequencer, which may be a thread of this process or of another one.

    submit → pending (not sent) → sent → answered
    connection lost:  not sent → sent on the next connection;  sent read → sent again;  sent write → Unknown
    orderly goodbye:  whatever was not answered was not executed → sent again

Requests of one turn of the loop leave in one write; answers of one read wake all their callers.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import Closed, Corrupt, Invalid, TidemillError, Unavailable, Unknown
from tidemill.base.tasks import Tasks
from tidemill.consensus.commands import AnyOp, HeadOfLog, Wait
from tidemill.consensus.facade import Facade
from tidemill.consensus.sqlite import address, frames, hosting

UNSENT_AFTER_S = 15.0
"""An operation that found no sequencer for this long ends as Unavailable."""

UNANSWERED_AFTER_S = 30.0
"""A sequencer silent for this long is given up: the connection is broken on purpose."""

GREETING_S = 5.0
"""A socket whose owner is stopped, or that only a leftover copy keeps open, accepts but does not answer."""

SWEEP_S = 1.0
BACKOFF_FIRST_S = 0.002
BACKOFF_MOST_S = 0.1


class _Pending:
    __slots__ = ("future", "op", "sent", "started_s")

    def __init__(self, op: AnyOp | frames.Hello, future: asyncio.Future[Any], started_s: float) -> None:
        self.op = op
        self.future = future
        self.sent = False
        self.started_s = started_s


class _Link(asyncio.Protocol):
    """One connection. Reports to its client; knows nothing of retries."""

    def __init__(self, client: SqliteConsensus) -> None:
        self._client = client
        self._splitter = frames.Splitter()
        self.transport: asyncio.Transport | None = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._splitter.feed(data):
                for answer in frames.decode_answers(body):
                    self._client._answered(answer)
        except Corrupt:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class SqliteConsensus(Facade):
    """`api.Consensus` over a SQLite file. One object per event loop; `start` before use."""

    def __init__(self, database: Path, clock: Clock, rand: Rand) -> None:
        self._database = Path(os.path.realpath(database))
        self._clock = clock
        self._rand = rand
        self._name = rand.nonce()
        self._generation = hosting.generation
        self._pending: dict[int, _Pending] = {}
        self._unsent: list[int] = []
        self._last_id = 0
        self._link: _Link | None = None
        self._flushing = False
        self._goodbye = False
        self._reason = ""
        self._closed = False
        self._broken: TidemillError | None = None
        self._tasks = Tasks(self._task_failed)
        self._seat: hosting.Seat | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Attach, connect, and host the sequencer if nobody does. Raises Invalid, Corrupt or Unavailable."""
        self._loop = asyncio.get_running_loop()
        self._seat = hosting.attach(self._database, self._clock)
        self._tasks.spawn(self._stay_connected(), name="consensus-sqlite-link")
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
        try:
            # Any answer will do: a sequencer serves, here or elsewhere.
            await self._submit(HeadOfLog(""))
        except BaseException:
            await self.aclose()
            raise

    # requests ------------------------------------------------------------------------------------

    def _enqueue(self, op: AnyOp) -> tuple[int, asyncio.Future[Any]]:
        """Order is decided here, in a plain call."""
        if self._closed:
            raise Closed("This consensus client was closed.")
        if self._broken is not None:
            raise self._broken
        if self._generation != hosting.generation:
            raise Closed("This consensus client belongs to the parent process.", fix="Open a client after the fork.")
        self._last_id += 1
        future: asyncio.Future[Any] = self._loop.create_future()
        self._pending[self._last_id] = _Pending(op, future, self._loop.time())
        self._unsent.append(self._last_id)
        self._flush_soon()
        return self._last_id, future

    async def _submit(self, op: AnyOp) -> Any:
        return await self._enqueue(op)[1]

    async def _wait(self, op: Wait, timeout_s: float) -> bool:
        request_id, future = self._enqueue(op)
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                return bool(await future)
        except TimeoutError:
            return False
        finally:
            pending = self._pending.pop(request_id, None)
            if pending is not None and pending.sent and self._link is not None and self._link.transport is not None:
                self._link.transport.write(frames.encode([(0, frames.Forget(request_id))]))

    def _flush_soon(self) -> None:
        if not self._flushing and self._link is not None:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        link = self._link
        if link is None or link.transport is None or link.transport.is_closing():
            return
        batch: list[tuple[int, object]] = []
        for request_id in self._unsent:
            pending = self._pending.get(request_id)
            if pending is None:
                continue
            if pending.future.done():
                del self._pending[request_id]
                continue
            pending.sent = True
            batch.append((request_id, pending.op))
        self._unsent.clear()
        if batch:
            link.transport.write(frames.encode(batch))

    def _answered(self, answer: frames.Answer) -> None:
        if answer.outcome == frames.BYE:
            self._goodbye = True
            return
        pending = self._pending.pop(answer.id, None)
        if pending is None:
            return
        if pending.future.done():
            return
        if answer.outcome == frames.OK:
            pending.future.set_result(frames.decode_result(pending.op, answer))
        else:
            pending.future.set_exception(frames.decode_error(pending.op, answer))

    # the connection ------------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        backoff_s = BACKOFF_FIRST_S
        while True:
            link = await self._connect()
            if link is not None and await self._greeted(link):
                backoff_s = BACKOFF_FIRST_S
                self._link = link
                self._flush()
                await link.lost
                self._link = None
                self._settle_lost()
                continue
            if link is not None:
                link.abort()
            self._host()
            await asyncio.sleep(self._rand.uniform(backoff_s / 2, backoff_s))
            backoff_s = min(backoff_s * 1.6, BACKOFF_MOST_S)

    async def _greeted(self, link: _Link) -> bool:
        """Say hello and wait for the answer: by then the sequencer has ended what our earlier connection left behind.

        Nothing else is sent before, so a socket that nobody serves any more costs no Unknown.
        """
        assert link.transport is not None
        hello = frames.Hello(frames.WIRE_VERSION, self._name)
        pending = self._pending[0] = _Pending(hello, self._loop.create_future(), self._loop.time())
        link.transport.write(frames.encode([(0, hello)]))
        try:
            async with asyncio.timeout(GREETING_S):
                await asyncio.wait([pending.future, link.lost], return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            return False
        finally:
            self._pending.pop(0, None)
        if not pending.future.done():
            return False
        error = pending.future.exception()
        if isinstance(error, Invalid):
            self._fail_all(error)
        return error is None

    async def _connect(self) -> _Link | None:
        with address.addresses(self._database, create=False) as candidates:
            for path in candidates:
                try:
                    async with asyncio.timeout(5):
                        _, link = await self._loop.create_unix_connection(lambda: _Link(self), path)
                    return link
                except (OSError, TimeoutError):
                    continue
        return None

    def _host(self) -> None:
        assert self._seat is not None
        try:
            self._seat.try_host()
            failure = self._seat.take_failure()
        except Invalid as error:
            failure = error
        if isinstance(failure, (Invalid, Corrupt)):
            # Opening again would fail the same way: say so to everybody instead of timing out.
            self._fail_all(failure)
        elif failure is not None:
            self._reason = failure.message

    def _settle_lost(self) -> None:
        goodbye, self._goodbye = self._goodbye, False
        for request_id, pending in list(self._pending.items()):
            if not pending.sent:
                continue
            if pending.op.writes and not goodbye:
                del self._pending[request_id]
                if not pending.future.done():
                    pending.future.set_exception(
                        Unknown(f"The connection broke before the answer: op={type(pending.op).__name__}.")
                    )
            else:
                pending.sent = False
        self._unsent = list(self._pending)

    def _sweep(self) -> None:
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
        now_s = self._loop.time()
        for request_id, pending in list(self._pending.items()):
            age_s = now_s - pending.started_s
            if isinstance(pending.op, (Wait, frames.Hello)):
                continue
            if age_s < UNSENT_AFTER_S:
                break
            if not pending.sent:
                del self._pending[request_id]
                if not pending.future.done():
                    pending.future.set_exception(
                        Unavailable(
                            f"No sequencer answers for the database: database={self._database} last={self._reason!r}.",
                            fix="Look for a stopped process that holds the lock file beside it.",
                        )
                    )
            elif age_s > UNANSWERED_AFTER_S and self._link is not None:
                self._link.abort()
                return

    def _fail_all(self, error: TidemillError) -> None:
        """Everybody hears `error`, except writes that were sent: of those nobody knows."""
        for pending in self._pending.values():
            if pending.future.done():
                continue
            doubtful = pending.sent and pending.op.writes
            pending.future.set_exception(
                Unknown(f"No answer came before the end: {error.message}") if doubtful else error
            )
        self._pending.clear()
        self._unsent.clear()

    def _task_failed(self, name: str, error: BaseException) -> None:
        self._broken = Unavailable(f"The consensus client broke: task={name} reason={error!r}.")
        self._fail_all(self._broken)

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._tasks.aclose()
        if self._link is not None:
            self._link.abort()
        self._fail_all(Closed("This consensus client was closed."))
        seat, self._seat = self._seat, None
        if seat is not None:
            await asyncio.to_thread(hosting.detach, seat)
