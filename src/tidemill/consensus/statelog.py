"""Replicated state on one fenced log: commands and rollups (`staterecords`), replayed by a pure `apply`.

SL1  `state` is exactly what `apply` makes of every command below `position`, and all of those are durable.
SL2  Proposals take effect in the order they were called; each learns its own outcome.
SL3  A command that `apply` refuses is in the log but changes nothing, here and at every replay; its proposer is told.
SL4  The log starts at position 0 or at a rollup, which holds everything before it. Nothing else truncates.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from tidemill.base.clock import Rand
from tidemill.base.errors import Closed, Conflict, Corrupt, Fenced, Missing, TidemillError, Unavailable, Unknown
from tidemill.base.limits import MIB
from tidemill.base.tasks import Tasks
from tidemill.consensus import staterecords
from tidemill.consensus.api import Consensus, LogRecord

S = TypeVar("S")

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
    __slots__ = ("command", "decide", "future")

    def __init__(self, decide: Callable[[S], bytes] | None, command: bytes, future: asyncio.Future[Applied[S]]) -> None:
        self.decide = decide
        self.command = command
        self.future = future


class _InFlight(NamedTuple, Generic[S]):
    nonce: str
    expected: int
    batch: list[_Proposal[S]]


class StateLog(Generic[S]):
    """One process's view of, and way to change, the state kept on `log`.

    initial   makes the empty state
    apply     (state, command, position) → state. Pure: no clock, randomness or I/O. Checks everything, then
              writes; may change and return the same object. A TidemillError refuses the command and must
              leave the state as it was (SL3). Any other exception is a bug and breaks the StateLog.
    encode    state → bytes, for rollups;  decode  bytes → state
    term      0 for writers that race as equals; a leader calls `lead(term)`

    Every method may raise Unavailable, Closed, Corrupt, and the writing ones Fenced (step down).
    """

    def __init__(
        self,
        consensus: Consensus,
        log: str,
        *,
        initial: Callable[[], S],
        apply: Callable[[S, bytes, int], S],
        encode: Callable[[S], bytes],
        decode: Callable[[bytes], S],
        rand: Rand,
        term: int = 0,
        rollup_after_records: int = 0,
    ) -> None:
        """`rollup_after_records` > 0: a proposer rolls up once so many commands follow the last rollup."""
        self._consensus = consensus
        self.log = log
        self.term = term
        self._apply = apply
        self._encode = encode
        self._decode = decode
        self._rand = rand
        self._rollup_after = rollup_after_records
        self.state: S = initial()
        self.position = 0
        self.records_since_rollup = 0
        self._loaded = False
        self._queue: deque[_Proposal[S]] = deque()
        self._in_flight: _InFlight[S] | None = None
        self._reading = asyncio.Lock()
        self._appending = asyncio.Lock()
        self._driver: asyncio.Task[None] | None = None
        self._tasks = Tasks(self._driver_failed)
        self._broken: TidemillError | None = None

    # reading -------------------------------------------------------------------------------------

    async def load(self) -> S:
        """Replay from the log's start. Same as the first `catch_up`."""
        await self.catch_up()
        return self.state

    async def catch_up(self) -> bool:
        """Apply everything durable as of now (a linearizable read); True if anything was new."""
        async with self._reading:
            self._check()
            before = self.position
            while True:
                try:
                    found = await self._consensus.read(self.log, self.position)
                except Missing:
                    await self._restart()
                    continue
                for record in found.records:
                    self._replay(record)
                if self.position >= found.head.next:
                    self._loaded = True
                    return self.position != before
                if not found.records:
                    raise self._break(f"The log has a gap: position={self.position} next={found.head.next}")

    async def wait(self, timeout_s: float) -> bool:
        """Wait until the log has more than was applied, then catch up; False after the timeout."""
        if not await self._consensus.wait(self.log, self.position, timeout_s):
            return False
        return await self.catch_up()

    async def until(self, reached: Callable[[S], bool], timeout_s: float) -> bool:
        """Follow the log until `reached(state)`; False after the timeout (caught up at least once)."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        await self.catch_up()
        while not reached(self.state):
            left_s = deadline_s - loop.time()
            if left_s <= 0:
                return False
            await self.wait(left_s)
        return True

    # writing -------------------------------------------------------------------------------------

    async def lead(self, term: int) -> S:
        """Fence the log at `term` and load everything before it. Raises Fenced when a newer term exists."""
        async with self._appending:
            await self._consensus.fence(self.log, term)
            self.term = term
            await self.catch_up()
            return self.state

    def propose_nowait(self, command: bytes) -> asyncio.Future[Applied[S]]:
        """Take a place in line now. Neighbours share one append; only `apply` checks the command (SL3).

        The future fails with what `apply` raised, Fenced, Unavailable (it did not happen), or Unknown (only when
        the log cannot be asked, or was rolled up over the answer). Cancelling it does not undo the command.
        """
        return self._enqueue(None, command)

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

        Unknown and Unavailable are harmless: a rollup that landed is like any other, the next one truncates.
        """
        async with self._appending:
            attempts = 0
            while True:
                await self.catch_up()
                if attempts and self.records_since_rollup == 0:
                    return self._last_rollup
                start, records = self.position, staterecords.encode_rollup(self._encode(self.state))
                try:
                    await self._consensus.append(self.log, self.term, start, records, self._rand.nonce())
                except Conflict:
                    attempts += 1
                    await self._pause(attempts)
                    continue
                await self._consensus.truncate(self.log, start)
                await self.catch_up()
                return start

    async def aclose(self) -> None:
        """Stop. A proposal under way ends as Unknown, waiting ones as Closed. The consensus stays open."""
        if self._broken is None:
            self._broken = Closed(f"The state log was closed: log={self.log!r}.")
        await self._tasks.aclose()
        self._fail_queue(self._broken)

    # the driver: one append at a time ------------------------------------------------------------

    def _enqueue(self, decide: Callable[[S], bytes] | None, command: bytes) -> asyncio.Future[Applied[S]]:
        self._check()
        future: asyncio.Future[Applied[S]] = asyncio.get_running_loop().create_future()
        self._queue.append(_Proposal(decide, command, future))
        if self._driver is None:
            self._driver = self._tasks.spawn(self._drive(), name=f"statelog {self.log}")
        return future

    async def _drive(self) -> None:
        losses = 0
        try:
            while self._queue:
                async with self._appending:
                    lost = await self._step()
                losses = losses + 1 if lost else 0
                await self._pause(losses)
                if 0 < self._rollup_after <= self.records_since_rollup:
                    await self._rollup_quietly()
        finally:
            self._driver = None

    async def _step(self) -> bool:
        """One append of what heads the line, or one refusal. True when another writer was first."""
        try:
            if not self._loaded:
                await self.catch_up()
            batch = self._take_batch()
            if not batch:
                await self._refuse_first()
                return False
        except TidemillError as error:
            self._fail_queue(error)
            return False
        flight = self._in_flight = _InFlight(self._rand.nonce(), self.position, batch)
        try:
            return await self._append(flight)
        except BaseException as error:
            ended = error if isinstance(error, TidemillError) else Unknown(f"An append was cut off: log={self.log!r}.")
            self._fail(batch, ended)
            raise
        finally:
            self._in_flight = None

    async def _append(self, flight: _InFlight[S]) -> bool:
        records = [staterecords.encode_command(proposal.command) for proposal in flight.batch]
        try:
            await self._consensus.append(self.log, self.term, flight.expected, records, flight.nonce)
        except Conflict:
            self._requeue(flight)
            await self._resolve(flight, landed=False)
            return True
        except Unknown:
            # Ours is recognised by nonce while catching up; the backend ended the attempt before it told us.
            await self._resolve(flight, landed=None)
            return False
        except Fenced as error:
            self._fail(flight.batch, error)
            self._fail_queue(error)
            return False
        except TidemillError as error:
            self._fail(flight.batch, error)
            return False
        if self.position == flight.expected and not self._reading.locked():
            for index, record in enumerate(records):
                self._replay(LogRecord(flight.expected + index, self.term, flight.nonce, record))
        else:
            # A reader is replaying, ours among the rest.
            await self._resolve(flight, landed=True)
        return False

    async def _resolve(self, flight: _InFlight[S], landed: bool | None) -> None:
        """Catch up over the place of the append; whoever of the batch is still without an outcome gets it here."""
        for attempt in range(RESOLVE_ATTEMPTS):
            try:
                await self.catch_up()
                break
            except Unavailable as error:
                if landed is False:
                    self._fail_queue(error)
                    return
                await self._pause(attempt + 2)
            except TidemillError as error:
                hidden = Unknown(f"The outcome of an append cannot be read: reason={error.message!r}.")
                self._fail(flight.batch, error if landed is False or isinstance(error, Corrupt) else hidden)
                self._fail_queue(error)
                return
        else:
            self._fail(flight.batch, Unknown(f"The log cannot be asked for an outcome: log={self.log!r}."))
            return
        if landed is False or all(proposal.future.done() for proposal in flight.batch):
            return
        if landed or self._rolled_over > flight.expected:
            self._fail(flight.batch, Unknown(f"The log was rolled up over an outcome: log={self.log!r}."))
        else:
            self._requeue(flight)

    def _take_batch(self) -> list[_Proposal[S]]:
        """Proposals without `decide` share an append; one with it goes alone, so that it sees the exact state.

        Empty when the first proposal's `decide` refused (it stays first) or nobody waits.
        """
        batch: list[_Proposal[S]] = []
        size_bytes = 0
        while self._queue and len(batch) < BATCH_COMMANDS and size_bytes < BATCH_BYTES:
            proposal = self._queue[0]
            if proposal.future.done():
                self._queue.popleft()
                continue
            if proposal.decide is not None:
                if batch:
                    break
                try:
                    proposal.command = proposal.decide(self.state)
                except Exception:
                    return []
            batch.append(self._queue.popleft())
            size_bytes += len(proposal.command)
            if proposal.decide is not None:
                break
        return batch

    async def _refuse_first(self) -> None:
        """A refusal by stale state proves nothing: it stands only if it repeats on the newest."""
        await self.catch_up()
        if not self._queue:
            return
        proposal = self._queue[0]
        assert proposal.decide is not None
        try:
            proposal.decide(self.state)
        except Exception as error:
            self._queue.popleft()
            if not proposal.future.done():
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
        broken = error if isinstance(error, TidemillError) else Closed(f"The state log broke: {name} reason={error!r}.")
        self._broken = self._broken or broken
        self._fail_queue(broken)

    async def _rollup_quietly(self) -> None:
        """A rollup is an economy: one that fails is tried again after the next command."""
        try:
            await self.rollup()
        except (Unavailable, Unknown, Fenced):
            return

    async def _pause(self, attempts: int) -> None:
        if attempts > 1:
            await asyncio.sleep(self._rand.uniform(0, CONFLICT_PAUSE_S * min(attempts, 10)))

    # replay --------------------------------------------------------------------------------------

    _following = 0
    """Parts of a rollup still to be passed."""

    _last_rollup = 0
    """Position of the last part of the newest rollup passed."""

    _rolled_over = 0
    """Start of the log when we last had to begin again from a rollup."""

    def _replay(self, record: LogRecord) -> None:
        """Apply one record and, if it is ours, tell its proposer. A plain function: no await splits it."""
        if record.position != self.position:
            raise self._break(f"A record is out of place: expected={self.position} got={record.position}")
        kind = record.data[0] if record.data else -1
        if kind == staterecords.ROLLUP:
            # Whoever has applied everything before a rollup already has its state.
            self._following, _ = staterecords.decode_part(record.data)
            self.records_since_rollup = 0
            self._last_rollup = self.position
            self.position += 1
            return
        if kind != staterecords.COMMAND or self._following:
            raise self._break(f"A record of unknown kind: position={record.position} kind={kind}")
        refused: TidemillError | None = None
        try:
            self.state = self._apply(self.state, record.data[1:], record.position)
        except TidemillError as error:
            refused = error
        except Exception as error:
            raise self._break(f"apply failed: position={record.position} reason={error!r}") from error
        self.position += 1
        self.records_since_rollup += 1
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

    async def _restart(self) -> None:
        """We were rolled over: take the state of the rollup at the log's start (SL4), all at once.

        Returns without effect when the log is rolled over again meanwhile; the caller comes back.
        """
        start = (await self._consensus.log_head(self.log)).start
        parts: list[bytes] = []
        following = -1
        position = start
        while following != 0:
            try:
                found = await self._consensus.read(self.log, position)
            except Missing:
                return
            for record in found.records:
                if not record.data or record.data[0] != staterecords.ROLLUP:
                    raise self._break(f"The log does not start with a rollup: start={start} position={position}")
                following, part = staterecords.decode_part(record.data)
                parts.append(part)
                position += 1
                if following == 0:
                    break
            if not found.records:
                raise self._break(f"The rollup is not whole: start={start} next={found.head.next}")
        self.state = self._decode(b"".join(parts))
        self.position = position
        self.records_since_rollup = 0
        self._following = 0
        self._rolled_over = start

    def _break(self, reason: str) -> Corrupt:
        """What this process holds can no longer be trusted: refuse everything from here on."""
        error = Corrupt(f"{reason} log={self.log!r}.", fix="Report it with the log's records; nothing was overwritten.")
        self._broken = self._broken or error
        return error

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken
