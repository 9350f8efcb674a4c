"""Replicated state on one fenced log: commands and rollups (`codec`), replayed by a pure `apply`.

SL1  `state` is exactly what `apply` makes of every command below `position`, and all of those are durable.
SL2  Proposals take effect in the order they were called; each learns its own outcome.
SL3  A command that `apply` refuses is in the log but changes nothing, here and at every replay; its proposer is told.
SL4  The log starts at position 0 or at a rollup, which holds everything before it. Nothing else truncates.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
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
from tidemill.consensus.state_log import codec
from tidemill.consensus.state_log.replica import Replica, S

_log = structlog.get_logger()

BATCH_COMMANDS = 512
BATCH_BYTES = 4 * MIB

CONFLICT_PAUSE_S = 0.02
"""Racing equals pause for a random part of this, growing, after losing several times in a row."""

RESOLVE_ATTEMPTS = 8
"""How often the fate of an unknown append is asked for before its proposers are told Unknown."""


class Applied(NamedTuple, Generic[S]):
    """Where the command stands in the log, and the state right after it."""

    position: int
    state: S


class _Proposal(Generic[S]):
    """`alone`: its `decide` must see the state just before its own command, so it shares its append with nobody."""

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


class StateLog(Replica[S]):
    """One process's view of, and way to change, the state kept on `log`.

    initial   makes the empty state
    apply     (state, command, position, term) → state; the last two are those of the command's record.
              Pure: no clock, randomness or I/O. Checks everything, then writes; may change and return the
              same object. A TidemillError refuses the command and must leave the state as it was (SL3).
              Any other exception is a bug and breaks the StateLog.
    encode    state → bytes, for rollups;  decode  bytes → state. Either may give an awaitable instead, and let others
              have their turn while it works: `encode` has what it needs of the state before its first await.
    term      0 for writers that race as equals; a leader calls `lead(term)`

    Every method may raise UnavailableError, ClosedError, CorruptError, and the writing ones FencedError (step down).
    """

    def __init__(
        self,
        consensus: Consensus,
        log: str,
        *,
        initial: Callable[[], S],
        apply: Callable[[S, bytes, int, int], S],
        encode: Callable[[S], bytes | Awaitable[bytes]],
        decode: Callable[[bytes], S | Awaitable[S]],
        rand: Rand,
        term: int = 0,
        rollup_after_records: int = 0,
    ) -> None:
        """`rollup_after_records` > 0: a proposer rolls up once so many commands follow the last rollup, and one that
        failed is tried again after so many more."""
        super().__init__(consensus, log, initial, apply, decode)
        self.term = term
        self._encode = encode
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
        """Fence the log at `term` and load everything before it. Raises FencedError when a newer term exists."""
        async with self._appending:
            await self._consensus.fence(self.log, term)
            self.term = term
            await self.catch_up()
            return self.state

    def propose_late_nowait(self, make: Callable[[S], bytes]) -> asyncio.Future[Applied[S]]:
        """Take a place in line now; the command is made when its append is put together: what comes in until then can
        still go along. Neighbours share the append, so `make` sees a state that may lack theirs; only `apply` checks
        the command (SL3).

        `make` is asked again after an append that did not land; it may raise to withdraw, as in `propose`. The future
        fails with what `apply` or `make` raised, Fenced, Unavailable (it did not happen), or Unknown (only when the
        log cannot be asked, or was rolled up over the answer). Cancelling it does not undo the command.
        """
        self._check()
        future: asyncio.Future[Applied[S]] = asyncio.get_running_loop().create_future()
        self._line_up(_Proposal(make, b"", future, alone=False))
        return future

    async def propose(self, command: bytes, *, check: Callable[[S], None] | None = None) -> int:
        """Append `command`; returns its position once it is applied.

        `check(state)` raises to withdraw. It sees the state exactly as it is just before the command, and is
        asked again whenever another writer got in between; its refusal rests on a linearizable read.
        """
        if check is None:
            return (await self._enqueue(None, command)).position

        def decide(state: S) -> bytes:
            check(state)
            return command

        return (await self._enqueue(decide, b"")).position

    async def propose_from(self, decide: Callable[[S], bytes]) -> Applied[S]:
        """Like `propose`, with the command made by `decide(state)` from the state just before it."""
        return await self._enqueue(decide, b"")

    async def rollup(self) -> int:
        """Write the whole state as one append and forget what is before it; returns the rollup's position.

        Unknown and Unavailable are harmless: a rollup that landed is like any other, the next one truncates. So is
        Invalid, for a state larger than one append takes: the log stays as long as it is.
        """
        async with self._appending:
            position, ours = await self._append_rollup()
        # Proposals go on meanwhile: what the rollup made needless may be forgotten at any time.
        if ours:
            await self._consensus.truncate(self.log, position)
        return position

    async def _append_rollup(self) -> tuple[int, bool]:
        """Its position, and False when another writer was first: his rollup is as good, and he truncates."""
        attempts = 0
        while True:
            if attempts or not self._loaded:
                await self.catch_up()
            if attempts and self.records_since_rollup == 0:
                return self._last_rollup, False
            # Only where the log ends at `start` is the append taken: nothing that this state lacks is before it.
            start, encoded = self.position, self._encode(self.state)
            records = codec.encode_rollup(encoded if isinstance(encoded, bytes) else await encoded)
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
        """Stop. A proposal under way ends as Unknown, waiting ones as Closed. The consensus stays open."""
        if self._broken is None:
            self._broken = ClosedError(f"The state log was closed: log={self.log!r}.")
        await self._tasks.aclose()
        self._fail_queue(self._broken)

    # the driver: one append at a time ------------------------------------------------------------

    def _enqueue(self, decide: Callable[[S], bytes] | None, command: bytes) -> asyncio.Future[Applied[S]]:
        self._check()
        future: asyncio.Future[Applied[S]] = asyncio.get_running_loop().create_future()
        self._line_up(_Proposal(decide, command, future))
        return future

    def _line_up(self, proposal: _Proposal[S]) -> None:
        self._queue.append(proposal)
        if self._driver is None:
            self._driver = self._tasks.spawn(self._drive(), name=f"statelog {self.log}")

    async def _drive(self) -> None:
        losses = 0
        try:
            while self._queue:
                async with self._appending:
                    lost = await self._step()
                losses = losses + 1 if lost else 0
                await self._pause(losses)
                if 0 < self._rollup_due <= self.records_since_rollup and not self._rolling:
                    self._rolling = True
                    self._tasks.spawn(self._rollup_quietly(), name=f"rollup {self.log}")
        finally:
            self._driver = None

    async def _step(self) -> bool:
        """One append of what heads the line, or one refusal. True when another writer was first."""
        try:
            if not self._loaded:
                await self.catch_up()
            batch = self._take_batch()
            if not batch:
                # The first one refused, or everybody went away. What comes in from here on is the next step's.
                if self._queue:
                    await self._refuse(self._queue[0])
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
                else UnknownOutcomeError(f"An append was cut off: log={self.log!r}.")
            )
            self._fail(batch, ended)
            raise
        finally:
            self._in_flight = None

    async def _append(self, flight: _InFlight[S]) -> bool:
        records = [codec.encode_command(proposal.command) for proposal in flight.batch]
        try:
            await self._consensus.append(self.log, self.term, flight.expected, records, flight.nonce)
        except ConflictError:
            self._requeue(flight)
            await self._resolve(flight, landed=False)
            return True
        except UnknownOutcomeError:
            # Ours is recognised by nonce while catching up; the backend ended the attempt before it told us.
            await self._resolve(flight, landed=None)
            return False
        except FencedError as error:
            self._fail(flight.batch, error)
            self._fail_queue(error)
            return False
        except TidemillError as error:
            self._fail(flight.batch, error)
            return False
        if not self._replay_own(flight.expected, records, flight.nonce):
            await self._resolve(flight, landed=True)
        return False

    def _replay_own(self, start: int, records: Sequence[bytes], nonce: str) -> bool:
        """Apply what was just appended at `start`; False while a reader is replaying, ours among the rest."""
        if self.position != start or self._reading.locked():
            return False
        for index, record in enumerate(records):
            self._replay(LogRecord(start + index, self.term, nonce, record))
        return True

    async def _resolve(self, flight: _InFlight[S], landed: bool | None) -> None:
        """Catch up over the place of the append; whoever of the batch is still without an outcome gets it here."""
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
                hidden = UnknownOutcomeError(f"The outcome of an append cannot be read: reason={error.message!r}.")
                self._fail(flight.batch, error if landed is False or isinstance(error, CorruptError) else hidden)
                self._fail_queue(error)
                return
        else:
            self._fail(flight.batch, UnknownOutcomeError(f"The log cannot be asked for an outcome: log={self.log!r}."))
            return
        if landed is False or all(proposal.future.done() for proposal in flight.batch):
            return
        if landed or self._rolled_over > flight.expected:
            self._fail(flight.batch, UnknownOutcomeError(f"The log was rolled up over an outcome: log={self.log!r}."))
        else:
            self._requeue(flight)

    def _take_batch(self) -> list[_Proposal[S]]:
        """Proposals share an append, but for those that must see the exact state: they go alone.

        Empty when the first proposal's `decide` refused (it stays first) or nobody waits.
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
                    # First in line, it is refused next; behind others, they go first.
                    break
            batch.append(self._queue.popleft())
            size_bytes += len(proposal.command)
            if proposal.alone:
                break
        return batch

    async def _refuse(self, proposal: _Proposal[S]) -> None:
        """A refusal by stale state proves nothing: it stands only if it repeats on the newest.

        While that is read the proposal's caller may go away, and others come to stand where it stood: it is this
        proposal that is asked again, not whoever is first by then.
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
        """Something nobody foresaw, in a task of ours. What was under way knows it (`_step`); what waits did not
        happen; the next proposal starts another driver. Only a state that cannot be trusted breaks the log."""
        _log.error("a state log's task failed", log=self.log, task=name, exc_info=error)
        failed = UnavailableError(f"The state log could not append: log={self.log!r} reason={error!r}.", fix="Retry.")
        self._fail_queue(error if isinstance(error, TidemillError) else failed)

    async def _rollup_quietly(self) -> None:
        """A rollup is an economy: one that fails is said, and tried again after as many commands as it waited for."""
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

    def _replayed(self, record: LogRecord, refused: TidemillError | None) -> None:
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
