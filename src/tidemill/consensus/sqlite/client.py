"""The asyncio client of a sequencer, which may be a thread of this process or of another one.

    submit → pending (not sent) → sent → answered
    connection lost:  not sent → sent on the next connection;  sent read → sent again;  sent write → UnknownOutcomeError
    orderly goodbye:  unanswered requests were not executed → sent again

Requests of one turn of the event loop are sent in one write; answers of one read wake all their callers.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import (
    ClosedError,
    CorruptError,
    InvalidError,
    MissingError,
    StoreRolledBackError,
    TidemillError,
    UnavailableError,
    UnknownOutcomeError,
    to_unavailable,
)
from tidemill.base.runtime.tasks import Tasks
from tidemill.consensus.client_base import ConsensusClientBase, run_supervised
from tidemill.consensus.history_check import check_history
from tidemill.consensus.operations import AnyOp, HeadOfLog, Wait
from tidemill.consensus.rollback_detection import RollbackDetector
from tidemill.consensus.sqlite import host_election, lock_holders, protocol, sockets
from tidemill.consensus.sqlite.connection import SequencerConnection, connect_to_sequencer

NO_SEQUENCER_TIMEOUT_S = 15.0
"""Time without a sequencer after which an operation ends with UnavailableError."""

ANSWER_TIMEOUT_S = 30.0
"""Silence of a sequencer after which the client breaks the connection."""

GREETING_TIMEOUT_S = 5.0
"""Timeout of the greeting.

A socket whose owner is stopped, or of which only a leftover copy is open, accepts but does not answer.
"""

LOCK_CHECK_AFTER_S = 1.0
"""Time without a greeting after which a client checks who holds the lock: a stopped process is named, not waited for.
"""

SLOW_AFTER_S = 2.0
"""Time without a sequencer or an answer after which `trouble` reports it."""

REFUSED_AFTER_S = 0.8
"""Age from which a rejected write counts as trouble, measured from the start of that write.

A rejection that does not recur with a later write is no trouble. A write that waited for a lock until the busy timeout
(`schema.BUSY_MS`) is trouble immediately.
"""

PROOF_OPS = 256
"""Operations of one frame while a client compares the history: other clients are served in between."""

SWEEP_S = 1.0
BACKOFF_FIRST_S = 0.002
BACKOFF_MOST_S = 0.1

log = structlog.get_logger()


class _PendingRequest:
    __slots__ = ("future", "op", "sent", "started_s")

    def __init__(self, op: AnyOp | protocol.Hello, future: asyncio.Future[Any], started_s: float) -> None:
        self.op = op
        self.future = future
        self.sent = False
        self.started_s = started_s


class SqliteConsensus(ConsensusClientBase):
    """`api.Consensus` over a SQLite file. One object per event loop; `start` before use."""

    def __init__(self, database: Path, clock: Clock, rand: Rand) -> None:
        self._database = Path(os.path.realpath(database))
        self._clock = clock
        self._rand = rand
        self._name = rand.nonce()
        self._generation = host_election.generation
        self._pending: dict[int, _PendingRequest] = {}
        self._unsent: list[int] = []
        self._last_id = 0
        self._link: SequencerConnection | None = None
        self._flushing = False
        self._goodbye = False
        self._away_s = 0.0  # since when there is no sequencer; only while there is no `_link`
        self._misled_at_s = float("-inf")
        self._served = False
        self._sequencer_life = ""
        """The last life that continued what this client had seen."""
        self._reason = ""
        self._refusal = ""
        self._refused_s = 0.0  # start of the first rejected write
        self._closed = False
        self.seen = RollbackDetector(f"sqlite:{self._database}")
        self._broken: TidemillError | None = None
        self._tasks = Tasks(self._task_failed)
        self._seat: host_election.HostElection | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Attach, connect, and host the sequencer if no process does.

        Raises InvalidError, CorruptError or UnavailableError.
        """
        self._loop = asyncio.get_running_loop()
        self._seat = host_election.attach_client(self._database, self._clock)
        self._away_s = self._loop.time()
        self._tasks.spawn(
            run_supervised("consensus-sqlite-link", self._stay_connected, self._report_fault),
            name="consensus-sqlite-link",
        )
        self._sweeper = self._loop.call_later(SWEEP_S, self._expire_requests)
        try:
            # Any answer suffices: it proves that a sequencer serves, here or elsewhere.
            await self._submit(HeadOfLog(""))
        except BaseException:
            await self.aclose()
            raise
        self._served = True

    # requests ------------------------------------------------------------------------------------

    def _enqueue(self, op: AnyOp) -> tuple[int, asyncio.Future[Any]]:
        """Enqueue `op`. A plain function, so that the order of the calls is the order of sending."""
        if self._closed:
            raise ClosedError("this consensus client was closed.")
        if self._broken is not None:
            raise self._broken
        if self._generation != host_election.generation:
            raise ClosedError(
                "this consensus client belongs to the parent process.", fix="Open a client after the fork."
            )
        self._last_id += 1
        future: asyncio.Future[Any] = self._loop.create_future()
        self._pending[self._last_id] = _PendingRequest(op, future, self._loop.time())
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
                self._link.transport.write(protocol.encode_frames([(0, protocol.CancelWait(request_id))]))

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
            link.transport.write(self._encode_batch(batch))

    def _encode_batch(self, batch: list[tuple[int, object]]) -> bytes:
        """Encode a batch. A request that cannot be encoded is rejected; the others are sent."""
        try:
            return protocol.encode_frames(batch)
        except Exception:
            coded = []
            for request in batch:
                try:
                    coded.append(protocol.encode_frames([request]))
                except Exception as error:
                    refused = InvalidError(f"the operation cannot be encoded: reason={error!r}.")
                    self._fail_request(self._pending.pop(request[0], None), refused)
            return b"".join(coded)

    def _handle_answer(self, answer: protocol.Answer) -> None:
        if answer.outcome == protocol.GOODBYE_OUTCOME:
            self._goodbye = True
            return
        pending = self._pending.pop(answer.id, None)
        if pending is None or pending.future.done():
            return
        try:
            if answer.outcome == protocol.OK:
                result: Any = protocol.decode_result(pending.op, answer)
                if pending.op.writes:
                    self._refusal = ""
                pending.future.set_result(result)
                return
            error = protocol.decode_error(pending.op, answer)
        except Exception as unread:
            said = f"the sequencer's answer cannot be read: op={type(pending.op).__name__} reason={unread}."
            self._fail_request(pending, UnknownOutcomeError(said) if pending.op.writes else UnavailableError(said))
            raise
        if isinstance(error, UnavailableError | UnknownOutcomeError | CorruptError):
            if not self._refusal:
                self._refused_s = pending.started_s
            self._refusal = error.message
        pending.future.set_exception(error)

    def _handle_unreadable_answer(self, error: Exception) -> None:
        self._misled_at_s = self._loop.time()
        self._reason = f"the sequencer's answer cannot be read: {error}"
        log.error("an answer of the sequencer cannot be read", database=str(self._database), reason=str(error))

    def _fail_request(self, pending: _PendingRequest | None, error: TidemillError) -> None:
        if pending is not None and not pending.future.done():
            pending.future.set_exception(error)

    # the connection ------------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        backoff_s = BACKOFF_FIRST_S
        while True:
            link, refused = await connect_to_sequencer(
                self._database, lambda: SequencerConnection(self._handle_answer, self._handle_unreadable_answer)
            )
            self._reason = refused or self._reason
            if link is not None and await self._admit(link):
                served_s = self._loop.time()
                self._link, self._reason = link, ""
                try:
                    self._flush()
                    await link.lost
                finally:
                    link.abort()
                    self._link, self._away_s = None, self._loop.time()
                    self._settle_lost_connection()
                if self._misled_at_s < served_s:
                    backoff_s = BACKOFF_FIRST_S
                    continue
            else:
                self._try_host()
            await asyncio.sleep(self._rand.uniform(backoff_s / 2, backoff_s))
            backoff_s = min(backoff_s * 1.6, BACKOFF_MOST_S)

    async def _admit(self, link: SequencerConnection) -> bool:
        """Return whether requests may be sent on this connection; else it is aborted.

        Greet the sequencer. If it has another life, prove that it continues what this client has seen, before anything
        else is sent: its database may be an older copy that other processes have written past since.
        """
        self._goodbye = False  # one of an earlier connection says nothing about this one
        admitted = False
        try:
            life = await self._greet(link)
            if life is not None and self._sequencer_life not in ("", life):
                await check_history(self.seen, lambda ops: self._ask_all(link, ops))
            admitted = life is not None
        except StoreRolledBackError as error:
            self._fail_all(error)  # and every later call raises it
            admitted = True
        except UnavailableError as error:
            self._reason = error.message
        finally:
            if not admitted:
                link.abort()
        if admitted and life is not None:
            self._sequencer_life = life
        return admitted

    async def _ask_all(self, link: SequencerConnection, ops: Sequence[AnyOp]) -> list[Any]:
        """Send operations that only read, ahead of all requests that wait, and return their results, or MissingError or
        CorruptError in the place of one. Raises UnavailableError if the connection breaks or is silent.
        """
        found: list[Any] = []
        for at in range(0, len(ops), PROOF_OPS):
            found += await self._send_and_wait(link, ops[at : at + PROOF_OPS])
        return found

    async def _send_and_wait(self, link: SequencerConnection, ops: Sequence[AnyOp]) -> list[Any]:
        assert link.transport is not None
        asked = {self._last_id + number: op for number, op in enumerate(ops, 1)}
        self._last_id += len(asked)
        mine = {key: _PendingRequest(op, self._loop.create_future(), self._loop.time()) for key, op in asked.items()}
        self._pending |= mine
        try:
            for each in mine.values():
                each.sent = True
            link.transport.write(protocol.encode_frames(list(asked.items())))
            futures = [each.future for each in mine.values()]
            results: asyncio.Future[Any] = asyncio.gather(*futures, return_exceptions=True)
            lost: asyncio.Future[Any] = link.lost
            await asyncio.wait([results, lost], timeout=ANSWER_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if not results.done():
                raise UnavailableError(f"the sequencer ended during the greeting: database={self._database}.")
        finally:
            for key, each in mine.items():
                self._pending.pop(key, None)
                each.future.cancel()
        found: list[Any] = results.result()
        for result in found:
            if isinstance(result, BaseException) and not isinstance(result, MissingError | CorruptError):
                raise to_unavailable(result) if isinstance(result, TidemillError) else result
        return found

    async def _greet(self, link: SequencerConnection) -> str | None:
        """Send Hello and wait for the answer; return the sequencer's life, or None without one.

        The sequencer answers after it ended our earlier connection and dropped its unread requests. Nothing
        else is sent before, so a stale socket never causes an UnknownOutcomeError.
        """
        assert link.transport is not None
        hello = protocol.Hello(protocol.WIRE_VERSION, self._name)
        pending = self._pending[0] = _PendingRequest(hello, self._loop.create_future(), self._loop.time())
        link.transport.write(protocol.encode_frames([(0, hello)]))
        deadline_s = self._loop.time() + GREETING_TIMEOUT_S
        try:
            done: set[asyncio.Future[Any]] = set()
            while not done and self._loop.time() < deadline_s and not self._is_host_stopped():
                done, _ = await asyncio.wait(
                    [pending.future, link.lost], timeout=LOCK_CHECK_AFTER_S, return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            self._pending.pop(0, None)
        if not pending.future.done():
            return None
        error = pending.future.exception()
        if isinstance(error, InvalidError):
            self._reason = error.message
            self._fail_all(to_unavailable(error) if self._served else error)
        return str(pending.future.result()) if error is None else None

    def _try_host(self) -> None:
        assert self._seat is not None
        try:
            self._seat.try_host()
            failure = self._seat.pop_failure()
        except TidemillError as error:
            failure = error
        except (OSError, RuntimeError) as error:
            failure = UnavailableError(f"this process cannot host the sequencer: reason={error}.")
        if isinstance(failure, InvalidError) and self._served:
            failure = to_unavailable(failure)
        if failure is not None:
            self._reason = failure.message
            if isinstance(failure, InvalidError | CorruptError) or not self._served:
                # Opening again would fail the same way: report it to all callers instead of letting them time out.
                self._fail_all(failure)
        elif not self._seat.is_hosting:
            self._is_host_stopped()

    def _is_host_stopped(self) -> bool:
        """Return whether the process that should serve this client is visibly stopped.

        A client that is just starting fails immediately. One that was served before waits as usual, since the process
        may continue. A dead process is waited for: on a busy machine its threads, and with them the lock, end later.
        """
        if self._loop.time() - self._away_s < LOCK_CHECK_AFTER_S:
            return False
        held = lock_holders.lock_holders(sockets.lock_path(self._database))
        stopped = next((holder for holder in held if holder.state not in ("", lock_holders.DEAD)), None)
        if stopped is None:
            return False
        self._reason = f"the process that holds its lock is stopped: {stopped}"
        if not self._served:
            self._fail_all(
                UnavailableError(
                    f"the process that serves the database is stopped: database={self._database} {stopped}.",
                    fix=f"Resume it (kill -CONT {stopped.pid}) or kill it.",
                )
            )
        return True

    def _settle_lost_connection(self) -> None:
        goodbye, self._goodbye = self._goodbye, False
        for request_id, pending in list(self._pending.items()):
            if not pending.sent:
                continue
            if pending.op.writes and not goodbye:
                del self._pending[request_id]
                if not pending.future.done():
                    pending.future.set_exception(
                        UnknownOutcomeError(f"the connection broke before the answer: op={type(pending.op).__name__}.")
                    )
            else:
                pending.sent = False
        self._unsent = list(self._pending)

    def _expire_requests(self) -> None:
        self._sweeper = self._loop.call_later(SWEEP_S, self._expire_requests)
        now_s = self._loop.time()
        for request_id, pending in list(self._pending.items()):
            age_s = now_s - pending.started_s
            if isinstance(pending.op, (Wait, protocol.Hello)):
                continue
            if age_s < NO_SEQUENCER_TIMEOUT_S:
                break
            if not pending.sent:
                del self._pending[request_id]
                if not pending.future.done():
                    pending.future.set_exception(
                        UnavailableError(
                            f"no sequencer answers for the database: database={self._database} last={self._reason!r}"
                            f" {lock_holders.describe_lock_holder(sockets.lock_path(self._database))}.",
                            fix="Look for a stopped process that holds the lock file next to the database.",
                        )
                    )
            elif age_s > ANSWER_TIMEOUT_S and self._link is not None:
                if not pending.op.writes:
                    # Otherwise it would be sent again forever. A write is settled when its connection is.
                    del self._pending[request_id]
                    said = f"the sequencer does not answer: database={self._database} waited_s={age_s:.0f}."
                    self._fail_request(pending, UnavailableError(said))
                self._link.abort()
                return

    def _fail_all(self, error: TidemillError) -> None:
        """Fail all requests with `error`, except writes that were sent: their outcome is unknown."""
        for pending in self._pending.values():
            if pending.future.done():
                continue
            doubtful = pending.sent and pending.op.writes
            pending.future.set_exception(
                UnknownOutcomeError(f"no answer came before the client ended: {error.message}") if doubtful else error
            )
        self._pending.clear()
        self._unsent.clear()

    def trouble(self) -> str:
        if self.seen.lost is not None:
            return self.seen.lost.message
        if self._closed or self._broken is not None:
            return self._broken.message if self._broken is not None else "this consensus client was closed."
        now_s = self._loop.time()
        if self._link is None and now_s - self._away_s > SLOW_AFTER_S:
            return f"no sequencer answers for the database: database={self._database} last={self._reason!r}."
        waited_s = max((now_s - p.started_s for p in self._pending.values() if not isinstance(p.op, Wait)), default=0.0)
        if waited_s > SLOW_AFTER_S:
            who = lock_holders.describe_delaying_process(self._database)
            return f"the sequencer is slow to answer: database={self._database} waited_s={waited_s:.0f} {who}."
        return self._refusal if now_s - self._refused_s > REFUSED_AFTER_S else ""

    def _report_fault(self, fault: str) -> None:
        self._reason = fault

    def _task_failed(self, name: str, error: BaseException) -> None:
        """Fail the client. Only an error that ends the process gets here: `kept` restarts the loop after any other."""
        self._broken = UnavailableError(f"the consensus client failed: task={name} reason={error!r}.")
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
        self._fail_all(ClosedError("this consensus client was closed."))
        seat, self._seat = self._seat, None
        if seat is not None:
            await asyncio.to_thread(host_election.detach_client, seat)
