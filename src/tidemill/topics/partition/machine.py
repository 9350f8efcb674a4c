"""The leader of one partition: the only async file of the room that proposes.

    produce_nowait   reserve (plain call) ─► stage ─► upload (several under way) ─► redeem, in order ─►
    commit loop      sequence rules ─► one append for all that queued ─► publish ─► acknowledge ─► wake fetches

A batch that fails anywhere before the log is abandoned, which poisons what its producer has in line behind it.
Leadership ends at the first refused or unresolvable append; the next leader, maybe this node, fences and replays.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable

import msgspec
import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import Corrupt, TidemillError, Unavailable, Unknown
from tidemill.base.limits import KAFKA_REQUEST_BYTES
from tidemill.base.tasks import Tasks, is_own_fault, sentence
from tidemill.consensus.api import Consensus
from tidemill.objects.store import Buffer, ObjectStore
from tidemill.topics.batch.check import check_header
from tidemill.topics.batch.header import patch
from tidemill.topics.checking import Checker
from tidemill.topics.front import BatchTooLarge, CorruptBatch, NotLeader, ProduceResult
from tidemill.topics.l0.format import writer_of
from tidemill.topics.l0.writer import L0Writer
from tidemill.topics.partition.appender import Appender, SteppedDown
from tidemill.topics.partition.apply import apply
from tidemill.topics.partition.codec import encode_command
from tidemill.topics.partition.commands import Advance, Command, Rollup
from tidemill.topics.partition.holes import Holes
from tidemill.topics.partition.idempotence import Refusal
from tidemill.topics.partition.outcomes import duplicate, poisoned, refused
from tidemill.topics.partition.pending import Pending, fail_future
from tidemill.topics.partition.plan import Plan, plan_group
from tidemill.topics.partition.replay import catch_up, partition_log
from tidemill.topics.partition.rolling import RollUps
from tidemill.topics.partition.state import PartitionState
from tidemill.topics.queue import Line, ProducerQueue
from tidemill.topics.settings import TopicSettings

_log = structlog.get_logger()


class Surroundings(msgspec.Struct, frozen=True):
    """What every partition of one process shares."""

    consensus: Consensus
    objects: ObjectStore
    writer: L0Writer
    checker: Checker
    clock: Clock
    rand: Rand
    settings: TopicSettings
    tasks: Tasks
    appends: asyncio.Semaphore
    """Who appends at the same time: one answer of consensus may be all of theirs, to be followed in one turn."""
    moved: Callable[[str, int], None] = lambda *_: None
    """(topic id, partition): its high watermark moved, or it was opened here. A plain call."""


class LedPartition:
    """From the moment a node means to lead a partition until it stops. Never reopened: a new term is a new one."""

    def __init__(
        self,
        topic_id: str,
        partition: int,
        around: Surroundings,
        holes: Holes,
        on_closed: Callable[[LedPartition, TidemillError], None],
    ) -> None:
        self.topic_id = topic_id
        self.partition = partition
        self.state = PartitionState()
        self.closed_error: TidemillError | None = None
        self.fault: BaseException | None = None
        """What made it close, when that was no change of leadership: the unit failed, and is opened anew."""
        self.is_open = False
        self.reserved_records = 0
        self.batch_bytes_max = KAFKA_REQUEST_BYTES
        """The topic's max.message.bytes."""
        self._around = around
        self._holes = holes
        self._on_closed = on_closed
        self._log_name = partition_log(topic_id, partition)
        self._appender = Appender(around.consensus, self._log_name, around.clock, around.rand, around.settings)
        self._places = ProducerQueue()
        self._live: dict[Pending, None] = {}
        """Every batch without a result, in reservation order."""
        self._by_identity: dict[tuple[int, int, int, int], Pending] = {}
        self._turned: deque[Pending] = deque()
        """Batches whose turn has come, in the order of the log to be."""
        self._plan: Plan | None = None
        self._committing = False
        self._start_at = 0
        """Where retention lets the log start."""
        self._advance_due = False
        self._placed_s: float | None = None
        """When the first batch was placed of which no Advance tells yet."""
        self._rollups = RollUps(
            around.consensus,
            around.objects,
            around.rand,
            around.tasks,
            (self._log_name, topic_id, partition),
            around.settings.rollup_records,
            self._commit_soon,
        )
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watchers: set[asyncio.Future[None]] = set()

    # opening and closing --------------------------------------------------------------------------
    async def open(self) -> None:
        """Fence, replay, serve what was reserved meanwhile. On any failure the partition closes itself."""
        try:
            await self._appender.fence()
            state, head = await catch_up(self._around.consensus, self._around.objects, self._log_name, PartitionState())
            if head.term != self._appender.term:
                self.close(NotLeader(f"another node took over: log={self._log_name} term={head.term}."))
        except BaseException as error:
            if not is_own_fault(error):
                self.close(NotLeader(f"a partition did not open: log={self._log_name} cause={error!r}"))
                raise
            _log.error("a partition did not open", log=self._log_name, error=sentence(error))
            self.fault = error
            cause = sentence(error)
            self.close(Unavailable(f"a partition did not open: log={self._log_name} cause={cause}", fix="Retry."))
        if self.closed_error is not None:
            return
        self.state = state
        self.is_open = True
        self._opened.set_result(None)
        self._around.moved(self.topic_id, self.partition)
        for pending in list(self._live):
            if pending.checked:
                self._stage(pending)

    async def opened(self) -> None:
        """Wait until it is open. Raises what it closed with."""
        if not self._opened.done():
            await asyncio.shield(self._opened)
        if self.closed_error is not None:
            raise self.closed_error

    def close(self, error: TidemillError) -> None:
        """Stop leading. What certainly is not in the log fails with `error`; an append under way decides its own."""
        if self.closed_error is not None:
            return
        self.closed_error = error
        self.is_open = False
        committing = set(self._plan.members) if self._plan is not None else set()
        for pending in list(self._live):
            if pending not in committing and pending in self._live:
                self.batch_failed(pending, error)
        self._turned.clear()
        if not self._opened.done():
            self._opened.set_result(None)
        self._wake()
        self._on_closed(self, error)

    # produce: plain calls -------------------------------------------------------------------------
    def produce_nowait(self, buffer: Buffer, sender: Hashable = None) -> asyncio.Future[ProduceResult]:
        """See front.TopicLog. The place in line is taken before this returns, whatever the check takes."""
        future: asyncio.Future[ProduceResult] = asyncio.get_running_loop().create_future()
        try:
            header = check_header(buffer)
        except TidemillError as error:
            fail_future(future, error)
            return future
        if self.closed_error is not None:
            fail_future(future, self.closed_error)
            return future
        line = header.producer_id if header.producer_id >= 0 else self._line_of(sender)
        pending = Pending(self, header, buffer, future, line)
        if header.producer_id >= 0:
            twin = self._by_identity.setdefault(pending.identity, pending)
            if twin is not pending:
                twin.futures.append(future)
                return future
        self._live[pending] = None
        self.reserved_records += header.record_count
        if not self._around.settings.reserve_after_upload:
            pending.ticket = self._places.reserve(line)
        try:
            self._around.checker.check(header, buffer, sender, lambda outcome: self._batch_checked(pending, outcome))
        except TidemillError as error:
            self.batch_failed(pending, error)
        return future

    def _line_of(self, sender: Hashable) -> Line:
        return object() if self._around.settings.unordered_without_id else ("sender", sender)

    def _batch_checked(self, pending: Pending, outcome: int | TidemillError) -> None:
        if pending.abandoned:
            return
        if isinstance(outcome, CorruptBatch):
            self._refuse(pending, outcome)
        elif isinstance(outcome, TidemillError):
            self.batch_failed(pending, outcome)
        else:
            pending.checked, pending.max_timestamp_ms = True, outcome
            if self.is_open:
                self._stage(pending)

    def _refuse(self, pending: Pending, error: CorruptBatch) -> None:
        """Never to be stored, whoever sends it again: it leaves the line, and its successors are judged without it."""
        self._end(pending)
        pending.fail(error)
        self._release(pending)

    def _stage(self, pending: Pending) -> None:
        if pending.abandoned:
            return
        if pending.size_bytes > self.batch_bytes_max:
            self._refuse(
                pending,
                BatchTooLarge(f"larger than the topic takes: bytes={pending.size_bytes} limit={self.batch_bytes_max}."),
            )
            return
        try:
            self._around.writer.stage(pending)
        except TidemillError as error:
            self.batch_failed(pending, error)

    def batch_uploaded(self, pending: Pending) -> None:
        if pending.ticket is None:
            pending.ticket = self._places.reserve(pending.line)
        self._places.redeem(pending.ticket, lambda _: self._take_turn(pending))

    def _take_turn(self, pending: Pending) -> None:
        if pending.abandoned:
            return
        if pending.ticket is not None and pending.ticket.poisoned:
            self.batch_failed(pending, poisoned(pending))
            return
        self._turned.append(pending)
        if pending.ticket is not None:
            self._places.place(pending.ticket)
        self._commit_soon()

    def _commit_soon(self) -> None:
        if not self._committing and self.closed_error is None:
            self._committing = True
            self._around.tasks.spawn(self._commit(), name=f"commit {self._log_name}")

    # retention: plain calls -------------------------------------------------------------------------
    def start_at(self, log_start: int) -> None:
        """Let the log start there, if it does not start later: a record of its own, in line with the batches."""
        if self.is_open and log_start > self.state.log_start:
            self._start_at = max(self._start_at, log_start)
            self._advance_due = True
            self._commit_soon()

    def settle(self, after_s: float) -> None:
        """Say in the log what is decided, if something was placed `after_s` ago and nothing was said since. A
        partition without records writes nothing."""
        now_s = self._around.clock.monotonic_s()
        if self.is_open and self._placed_s is not None and now_s - self._placed_s >= after_s:
            self._advance_due = True
            self._commit_soon()

    async def _advance(self) -> None:
        """Raises SteppedDown."""
        around, state = self._around, self.state
        waiting = [writer_of(pending.object_key)[1] for pending in self._live if pending.object_key]
        # Read before the append: what is closed meanwhile has a number of its own.
        below = min([*waiting, around.writer.first_open])
        self._advance_due, self._placed_s = False, None
        at_ms = max(around.clock.now_ms(), state.last_at_ms)
        log_start = min(max(self._start_at, state.log_start), state.high_watermark)
        await self._propose(Advance(at_ms, log_start, around.writer.name, below))

    def batch_failed(self, pending: Pending, error: TidemillError) -> None:
        """It is not in the log, or may not be (Unknown): its producer must send it again before anything later."""
        header = pending.header
        if header.producer_id >= 0:
            now_s = self._around.clock.monotonic_s()
            self._holes.failed(header.producer_id, header.producer_epoch, header.base_sequence, now_s)
        self._end(pending)
        pending.fail(error)
        if pending.ticket is not None:
            self._places.abandon(pending.ticket)

    def _end(self, pending: Pending) -> None:
        if pending in self._live:
            del self._live[pending]
            self.reserved_records -= pending.header.record_count
            if self._by_identity.get(pending.identity) is pending:
                del self._by_identity[pending.identity]

    # commit ---------------------------------------------------------------------------------------
    async def _commit(self) -> None:
        """Until nothing is left to append. Whatever ends it ends this leadership, and every waiting request with it."""
        try:
            while self.closed_error is None:
                rollup = self._rollups.take()
                if rollup is None and not self._turned and not self._advance_due:
                    break
                async with self._around.appends:
                    if self.closed_error is not None:
                        break
                    await self._append_due(rollup)
                self._rollups.consider(self.state)
        except SteppedDown as stop:
            self._step_down(stop)
        except BaseException as error:
            if not is_own_fault(error):
                self._step_down(SteppedDown("the node is shutting down.", certain=False))
                raise
            _log.error("a partition failed", log=self._log_name, error=sentence(error), exc_info=error)
            self._step_down(SteppedDown(f"an unexpected error: {error!r}.", certain=False, fault=error))
        finally:
            self._committing = False

    async def _append_due(self, rollup: Rollup | None) -> None:
        if rollup is not None:
            previous, position = self.state.rollup_key, self.state.applied
            await self._propose(rollup)
            self._rollups.named(position, previous)
        if self._turned:
            await self._commit_group()
        if self._advance_due:
            await self._advance()

    async def _commit_group(self) -> None:
        around = self._around
        plan = plan_group(
            self.state,
            self._turned,
            self._holes,
            at_ms=around.clock.now_ms(),
            now_s=around.clock.monotonic_s(),
            limit=around.settings.group_batches,
        )
        self._plan = plan
        if plan.command is not None:
            await self._propose(plan.command)
            if self._placed_s is None:
                self._placed_s = around.clock.monotonic_s()
        elif any(refusal is Refusal.OUT_OF_ORDER for _, refusal in plan.refused):
            # A gap is only a gap if nobody else has written here; an append would have proved that by itself.
            await self._appender.confirm(self.state.applied)
        self._plan = None
        self._settle(plan)

    async def _propose(self, command: Command) -> None:
        """Append, then apply what was appended. Raises SteppedDown."""
        position = self.state.applied
        data = encode_command(command)
        await self._appender.append(position, data)
        rejected = apply(self.state, command, position, self._appender.term)
        if rejected is not None:
            refused = Corrupt(f"a command was refused: log={self._log_name} {rejected.reason}.")
            raise SteppedDown(refused.message, certain=True, fault=refused)
        if not isinstance(command, Rollup):
            self._rollups.placed(command, len(data))

    def _settle(self, plan: Plan) -> None:
        """Everything decided is durable: publish, then answer in log order, then let go of the places in line."""
        state = self.state
        for pending, base_offset in plan.accepted:
            if pending.data is not None:
                patch(pending.data, pending.first_byte, base_offset)
        if plan.accepted:
            self._wake()
            self._around.moved(self.topic_id, self.partition)
        for pending, base_offset in plan.accepted:
            last_offset = base_offset + pending.header.record_count - 1
            self._succeed(pending, ProduceResult(base_offset, last_offset, state.log_start))
        for pending, batch, _ in plan.duplicates:
            self._succeed(pending, duplicate(batch, state))
        for pending, refusal in plan.refused:
            self._end(pending)
            pending.fail(refused(pending, refusal))
            self._release(pending)
        for pending in plan.early + plan.poisoned:
            self.batch_failed(pending, poisoned(pending))

    def _succeed(self, pending: Pending, result: ProduceResult) -> None:
        self._end(pending)
        if pending.header.producer_id >= 0:
            header = pending.header
            self._holes.filled(header.producer_id, header.producer_epoch, header.base_sequence)
        pending.succeed(result)
        self._release(pending)

    def _release(self, pending: Pending) -> None:
        if pending.ticket is not None:
            self._places.release(pending.ticket)

    def _step_down(self, stop: SteppedDown) -> None:
        """What was being appended is not there for certain, or may be; the rest is not."""
        plan, self._plan = self._plan, None
        error = NotLeader(f"this node stopped leading the partition: log={self._log_name} cause={stop.reason}")
        if plan is not None:
            unknown = Unknown(
                f"the outcome of an append is unknown: log={self._log_name} cause={stop.reason}", fix="Send it again."
            )
            doubtful = {pending for pending, _ in plan.accepted} if not stop.certain else set()
            doubtful |= {pending for pending, _, tentative in plan.duplicates if tentative and not stop.certain}
            for pending, batch, tentative in plan.duplicates:
                if not tentative:
                    self._succeed(pending, duplicate(batch, self.state))
            for pending in plan.members:
                if pending in self._live:
                    self.batch_failed(pending, unknown if pending in doubtful else error)
        _log.info("partition leadership ended", log=self._log_name, term=self._appender.term, reason=stop.reason)
        self.fault = stop.fault
        self.close(error)

    async def prove(self) -> None:
        """Close unless the log says that this is its leader still: for an answer that another one may know better.

        Raises Unavailable.
        """
        head = await self._around.consensus.log_head(self._log_name)
        if self.is_open and head.term != self._appender.term:
            self.close(NotLeader(f"another node took over: log={self._log_name} term={head.term}."))

    # fetch ----------------------------------------------------------------------------------------
    def watch(self, future: asyncio.Future[None]) -> None:
        """Resolve `future` when the high watermark moves or leadership ends."""
        self._watchers.add(future)

    def unwatch(self, future: asyncio.Future[None]) -> None:
        self._watchers.discard(future)

    def _wake(self) -> None:
        watchers, self._watchers = self._watchers, set()
        for future in watchers:
            if not future.done():
                future.set_result(None)
