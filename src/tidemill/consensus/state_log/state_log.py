"""Replicated state on one fenced log: commands and rollups (`codec`), replayed by a pure `apply`.

Invariants:

- Exact state: `state` is the result of applying every command below `position`, all of them durable (`Replica`).
- Order: proposals take effect in the order in which they were called, and each receives its own outcome.
- Rejection: a command that `apply` rejects is in the log but changes nothing, here and at every replay. Its proposer
  receives the error.
- Rollup: the log starts at position 0 or at a rollup that contains everything before it. Only a rollup truncates.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple

import structlog

from tidemill.base.clock import Rand
from tidemill.base.errors import (
    ClosedError,
    ConflictError,
    CorruptError,
    FencedError,
    TidemillError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidemill.base.limits import MIB
from tidemill.base.runtime.tasks import Tasks
from tidemill.consensus.api import Consensus, LogRecord
from tidemill.consensus.state_log.replica import Replica, S, encode_command, encode_rollup

_log = structlog.get_logger()

BATCH_COMMANDS = 512
BATCH_BYTES = 4 * MIB

CONFLICT_PAUSE_S = 0.02
"""Bound of the random pause of racing writers. It grows with consecutive losses."""

RESOLVE_ATTEMPTS = 8
"""Number of attempts to learn the outcome of an unknown append before its proposers receive UnknownOutcomeError."""


class Applied(NamedTuple, Generic[S]):
    """Position of the command in the log, and the state directly after it."""

    position: int
    state: S


class _Proposal(Generic[S]):
    """A command that waits for its append.

    If `alone`, its `decide` must see the state directly before its own command, so it shares its append with no other.
    """

    __slots__ = ("alone", "command", "decide", "future")

    def __init__(
        self,
        decide: Callable[[S], bytes] | None,
        command: bytes,
        future: asyncio.Future[Applied[S]],
        *,
        alone: bool = True,
    ) -> None:
        self.decide = decide
        self.alone = alone and decide is not None
        self.command = command
        self.future = future


class _InFlight(NamedTuple, Generic[S]):
    nonce: str
    expected: int
    batch: list[_Proposal[S]]


@dataclass(frozen=True)
class StateMachine(Generic[S]):
    """State machine of a log: its empty state, its transition, and the codec of its rollups."""

    initial: Callable[[], S]
    apply: Callable[[S, bytes, int, int], S]
    """(state, command, position, term) → state; the last two are those of the command's record.

    Pure: no clock, randomness or I/O. Checks everything, then writes; may change and return the same object. A
    TidemillError rejects the command and must leave the state unchanged. Any other exception is a bug and breaks the
    StateLog.
    """
    encode: Callable[[S], bytes | Awaitable[bytes]]
    """Encode the state for a rollup. May return an awaitable, to yield to other tasks while it works; it reads the
    state completely before its first await."""
    decode: Callable[[bytes], S | Awaitable[S]]


class StateLog(Replica[S]):
    """One process's view of the state stored on `log`, and the means to change it.

    `term`: 0 for writers that race as equals; a leader calls `lead(term)`.

    Every method may raise UnavailableError, ClosedError or CorruptError; those that write may also raise FencedError,
    upon which the caller steps down.
    """

    def __init__(
        self,
        consensus: Consensus,
        log: str,
        machine: StateMachine[S],
        rand: Rand,
        *,
        term: int = 0,
        rollup_after_records: int = 0,
    ) -> None:
        """Create the view without I/O.

        If `rollup_after_records` > 0, a proposer writes a rollup after that number of commands since the last one. A
        failed rollup is retried after the same number of further commands.
        """
        super().__init__(consensus, log, machine.initial, machine.apply, machine.decode)
        self.term = term
        self._encode = machine.encode
        self._rand = rand
        self._rollup_after = self._rollup_due = rollup_after_records
        self._rolling = False
        self._queue: deque[_Proposal[S]] = deque()
        self._in_flight: _InFlight[S] | None = None
        self._appending = asyncio.Lock()
        self._driver: asyncio.Task[None] | None = None
        self._tasks = Tasks(self._driver_failed)

    # writing -------------------------------------------------------------------------------------

    async def lead(self, term: int) -> S:
        """Fence the log at `term` and load everything before it. Raises FencedError if a newer term exists."""
        async with self._appending:
            await self._consensus.fence(self.log, term)
            self.term = term
            await self.catch_up()
            return self.state

    def propose_deferred(self, make: Callable[[S], bytes]) -> asyncio.Future[Applied[S]]:
        """Take a place in the queue now; `make(state)` creates the command when its append is assembled.

        Work that arrives until then can still be included in the command. The command shares its append with its
        neighbours, so `make` sees a state that may lack theirs; only `apply` checks the command.

        `make` is called again after an append that did not land; it may raise to withdraw, as in `propose`. The future
        fails with the error of `apply` or `make`, FencedError, UnavailableError (it did not happen), or
        UnknownOutcomeError (only if the log cannot be read, or was rolled up over the answer). Cancelling the future
        does not undo the command.
        """
        self._check_usable()
        future: asyncio.Future[Applied[S]] = asyncio.get_running_loop().create_future()
        self._enqueue_proposal(_Proposal(make, b"", future, alone=False))
        return future

    async def propose(self, command: bytes, *, check: Callable[[S], None] | None = None) -> int:
        """Append `command`; return its position once it is applied.

        `check(state)` raises to withdraw. It sees the state directly before the command, and is called again whenever
        another writer's command precedes it. Its refusal rests on a linearizable read.
        """
        if check is None:
            return (await self._enqueue(None, command)).position

        def decide(state: S) -> bytes:
            check(state)
            return command

        return (await self._enqueue(decide, b"")).position

    async def propose_from(self, decide: Callable[[S], bytes]) -> Applied[S]:
        """Propose the command that `decide(state)` makes from the state directly before it; else like `propose`."""
        return await self._enqueue(decide, b"")

    async def rollup(self) -> int:
        """Write the whole state as one append and truncate everything before it; return the rollup's position.

        UnknownOutcomeError and UnavailableError are harmless: a rollup that landed is like any other, and the next one
        truncates. So is InvalidError, for a state larger than one append: the log is not shortened.
        """
        async with self._appending:
            position, ours = await self._append_rollup()
        # Proposals continue concurrently: the records before the rollup may be truncated at any time.
        if ours:
            await self._consensus.truncate(self.log, position)
        return position

    async def _append_rollup(self) -> tuple[int, bool]:
        """Append a rollup: return (position, True), or False if another writer's was first. That writer truncates."""
        attempts = 0
        while True:
            if attempts or not self._loaded:
                await self.catch_up()
            if attempts and self.records_since_rollup == 0:
                return self._last_rollup, False
            # The append succeeds only if the log ends at `start`, so the state lacks nothing that is before the rollup.
            start, encoded = self.position, self._encode(self.state)
            records = encode_rollup(encoded if isinstance(encoded, bytes) else await encoded)
            nonce = self._rand.nonce()
            try:
                await self._consensus.append(self.log, self.term, start, records, nonce)
            except ConflictError:
                attempts += 1
                await self._pause(attempts)
                continue
            if not self._replay_own(start, records, nonce):
                await self.catch_up()
            return start, True

    async def aclose(self) -> None:
        """Stop. Proposals in flight end with UnknownOutcomeError, queued ones with ClosedError."""
        if self._broken is None:
            self._broken = ClosedError(f"the state log was closed: log={self.log!r}.")
        await self._tasks.aclose()
        self._fail_queue(self._broken)

    # the driver: one append at a time ------------------------------------------------------------

    def _enqueue(self, decide: Callable[[S], bytes] | None, command: bytes) -> asyncio.Future[Applied[S]]:
        self._check_usable()
        future: asyncio.Future[Applied[S]] = asyncio.get_running_loop().create_future()
        self._enqueue_proposal(_Proposal(decide, command, future))
        return future

    def _enqueue_proposal(self, proposal: _Proposal[S]) -> None:
        self._queue.append(proposal)
        if self._driver is None:
            self._driver = self._tasks.spawn(self._append_loop(), name=f"statelog {self.log}")

    async def _append_loop(self) -> None:
        losses = 0
        try:
            while self._queue:
                async with self._appending:
                    lost = await self._append_next_batch()
                losses = losses + 1 if lost else 0
                await self._pause(losses)
                if 0 < self._rollup_due <= self.records_since_rollup and not self._rolling:
                    self._rolling = True
                    self._tasks.spawn(self._try_rollup(), name=f"rollup {self.log}")
        finally:
            self._driver = None

    async def _append_next_batch(self) -> bool:
        """Append the next batch of the queue, or reject its first proposal. True if another writer was first."""
        try:
            if not self._loaded:
                await self.catch_up()
            batch = self._take_batch()
            if not batch:
                # The first proposal refused, or all were cancelled. Later arrivals belong to the next step.
                if self._queue:
                    await self._reject_if_still_refused(self._queue[0])
                return False
        except TidemillError as error:
            self._fail_queue(error)
            return False
        flight = self._in_flight = _InFlight(self._rand.nonce(), self.position, batch)
        try:
            return await self._append(flight)
        except BaseException as error:
            ended = (
                error
                if isinstance(error, TidemillError)
                else UnknownOutcomeError(f"an append was interrupted: log={self.log!r}.")
            )
            self._fail(batch, ended)
            raise
        finally:
            self._in_flight = None

    async def _append(self, flight: _InFlight[S]) -> bool:
        records = [encode_command(proposal.command) for proposal in flight.batch]
        try:
            await self._consensus.append(self.log, self.term, flight.expected, records, flight.nonce)
        except ConflictError:
            self._requeue(flight)
            await self._resolve_append(flight, landed=False)
            return True
        except UnknownOutcomeError:
            # Catching up recognises this append by its nonce; the backend ended the attempt before it raised.
            await self._resolve_append(flight, landed=None)
            return False
        except FencedError as error:
            self._fail(flight.batch, error)
            self._fail_queue(error)
            return False
        except TidemillError as error:
            self._fail(flight.batch, error)
            return False
        if not self._replay_own(flight.expected, records, flight.nonce):
            await self._resolve_append(flight, landed=True)
        return False

    def _replay_own(self, start: int, records: Sequence[bytes], nonce: str) -> bool:
        """Apply the records just appended at `start`. False while a reader is replaying: it applies them."""
        if self.position != start or self._reading.locked():
            return False
        for index, record in enumerate(records):
            self._replay(LogRecord(start + index, self.term, nonce, record))
        return True

    async def _resolve_append(self, flight: _InFlight[S], landed: bool | None) -> None:
        """Catch up past the position of the append. Proposals of the batch still without an outcome get one here."""
        for attempt in range(RESOLVE_ATTEMPTS):
            try:
                await self.catch_up()
                break
            except UnavailableError as error:
                if landed is False:
                    self._fail_queue(error)
                    return
                await self._pause(attempt + 2)
            except TidemillError as error:
                hidden = UnknownOutcomeError(f"the outcome of an append cannot be read: reason={error.message!r}.")
                self._fail(flight.batch, error if landed is False or isinstance(error, CorruptError) else hidden)
                self._fail_queue(error)
                return
        else:
            self._fail(
                flight.batch,
                UnknownOutcomeError(f"the log cannot be read for the outcome of an append: log={self.log!r}."),
            )
            return
        if landed is False or all(proposal.future.done() for proposal in flight.batch):
            return
        if landed or self._rolled_over > flight.expected:
            self._fail(
                flight.batch,
                UnknownOutcomeError(f"the log was rolled up over the outcome of an append: log={self.log!r}."),
            )
        else:
            self._requeue(flight)

    def _take_batch(self) -> list[_Proposal[S]]:
        """Remove the next batch from the queue. Proposals share an append, except those that must see the exact state.

        Empty if the first proposal's `decide` refused (it stays first), or if the queue is empty.
        """
        batch: list[_Proposal[S]] = []
        size_bytes = 0
        while self._queue and len(batch) < BATCH_COMMANDS and size_bytes < BATCH_BYTES:
            proposal = self._queue[0]
            if proposal.future.done():
                self._queue.popleft()
                continue
            if proposal.alone and batch:
                break
            if proposal.decide is not None:
                try:
                    proposal.command = proposal.decide(self.state)
                except Exception:
                    # A refusing first proposal is rejected next; otherwise the ones before it go first.
                    break
            batch.append(self._queue.popleft())
            size_bytes += len(proposal.command)
            if proposal.alone:
                break
        return batch

    async def _reject_if_still_refused(self, proposal: _Proposal[S]) -> None:
        """Reject a proposal whose `decide` refused, if it refuses on the newest state, too: stale state proves nothing.

        During the read, the proposal's caller may cancel, and another proposal may become the first one: this proposal
        is decided again, not the queue's current first.
        """
        await self.catch_up()
        if proposal.future.done() or proposal.decide is None:
            return
        try:
            proposal.decide(self.state)
        except Exception as error:
            proposal.future.set_exception(error)

    def _requeue(self, flight: _InFlight[S]) -> None:
        self._queue.extendleft(p for p in reversed(flight.batch) if not p.future.done())

    def _fail(self, proposals: Sequence[_Proposal[S]], error: Exception) -> None:
        for proposal in proposals:
            if not proposal.future.done():
                proposal.future.set_exception(error)

    def _fail_queue(self, error: Exception) -> None:
        self._fail(list(self._queue), error)
        self._queue.clear()

    def _driver_failed(self, name: str, error: BaseException) -> None:
        """Fail the queue after an unexpected error in a task of this log.

        Proposals in flight already have an outcome (`_append_next_batch`), and queued ones did not happen. The next
        proposal starts another driver. Only an unreliable state breaks the log.
        """
        _log.error("a state log's task failed", log=self.log, task=name, exc_info=error)
        failed = UnavailableError(f"the state log could not append: log={self.log!r} reason={error!r}.", fix="Retry.")
        self._fail_queue(error if isinstance(error, TidemillError) else failed)

    async def _try_rollup(self) -> None:
        """Write a rollup as an optimisation: a failure is logged, and retried after as many further commands."""
        due = self._rollup_after
        try:
            await self.rollup()
        except Exception as error:
            _log.warning("not rolled up", log=self.log, records=self.records_since_rollup, cause=str(error))
            due += self.records_since_rollup
        finally:
            self._rollup_due = due
            self._rolling = False

    async def _pause(self, attempts: int) -> None:
        if attempts > 1:
            await asyncio.sleep(self._rand.uniform(0, CONFLICT_PAUSE_S * min(attempts, 10)))

    def _on_replayed(self, record: LogRecord, refused: TidemillError | None) -> None:
        flight = self._in_flight
        if flight is None or flight.nonce != record.nonce:
            return
        future = flight.batch[record.position - flight.expected].future
        if future.done():
            return
        if refused is None:
            future.set_result(Applied(record.position, self.state))
        else:
            future.set_exception(refused)
