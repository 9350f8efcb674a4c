"""The leader of one partition: the only async file of the room that proposes.

    produce_nowait   reserve (plain call) ─► stage ─► upload (several under way) ─► redeem, in order ─►
    commit loop      sequence rules ─► one append for all that queued ─► publish ─► acknowledge ─► wake fetches

A batch that fails anywhere before the log is abandoned, which poisons what its producer has in line behind it.
Leadership ends at the first refused or unresolvable append; the next leader, maybe this node, fences and replays.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec
import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import Corrupt, TidemillError, Unavailable, Unknown
from tidemill.base.tasks import Tasks
from tidemill.consensus.api import Consensus
from tidemill.objects.store import Buffer, ObjectStore
from tidemill.topics.batch.header import check_batch, patch
from tidemill.topics.front import (
    NotLeader,
    ProduceResult,
)
from tidemill.topics.l0.writer import L0Writer
from tidemill.topics.partition.appender import Appender, SteppedDown
from tidemill.topics.partition.apply import apply
from tidemill.topics.partition.codec import encode_command
from tidemill.topics.partition.commands import Command
from tidemill.topics.partition.holes import Holes
from tidemill.topics.partition.idempotence import Refusal
from tidemill.topics.partition.outcomes import duplicate, poisoned, refused
from tidemill.topics.partition.pending import Pending, fail_future
from tidemill.topics.partition.plan import Plan, plan_group
from tidemill.topics.partition.replay import catch_up, partition_log
from tidemill.topics.partition.rollup import forget_before, write_rollup
from tidemill.topics.partition.state import PartitionState
from tidemill.topics.queue import ProducerQueue
from tidemill.topics.settings import TopicSettings

_log = structlog.get_logger()

ROLLUP_RETRY_RECORDS = 256


class Surroundings(msgspec.Struct, frozen=True):
    """What every partition of one process shares."""

    consensus: Consensus
    objects: ObjectStore
    writer: L0Writer
    clock: Clock
    rand: Rand
    settings: TopicSettings
    tasks: Tasks


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
        self.is_open = False
        self.reserved_records = 0
        self._around = around
        self._holes = holes
        self._on_closed = on_closed
        self._log_name = partition_log(topic_id, partition)
        self._appender = Appender(around.consensus, self._log_name, around.clock, around.rand, around.settings)
        self._places = ProducerQueue(around.settings.anonymous_in_flight)
        self._live: dict[Pending, None] = {}
        """Every batch without a result, in reservation order."""
        self._by_identity: dict[tuple[int, int, int, int], Pending] = {}
        self._turned: deque[Pending] = deque()
        """Batches whose turn has come, in the order of the log to be."""
        self._plan: Plan | None = None
        self._committing = False
        self._rollup_from = 0
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watchers: set[asyncio.Future[None]] = set()

    # opening and closing --------------------------------------------------------------------------
    async def open(self) -> None:
        """Fence, replay, serve what was reserved meanwhile. On failure the partition closes itself; never raises it."""
        try:
            await self._appender.fence()
            state, head = await catch_up(self._around.consensus, self._around.objects, self._log_name, PartitionState())
            if head.term != self._appender.term:
                self.close(NotLeader(f"another node took over: log={self._log_name} term={head.term}."))
        except TidemillError as error:
            if isinstance(error, Corrupt):
                _log.error("a partition cannot be read", log=self._log_name, cause=str(error))
            self.close(Unavailable(f"a partition did not open: log={self._log_name} cause={error}", fix="Retry."))
        except BaseException as stop:
            self.close(NotLeader(f"a partition did not open: log={self._log_name} cause={stop!r}"))
            raise
        if self.closed_error is not None:
            return
        self.state = state
        self.is_open = True
        self._opened.set_result(None)
        for pending in list(self._live):
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
    def produce_nowait(self, buffer: Buffer) -> asyncio.Future[ProduceResult]:
        """See front.TopicLog. The place in line is taken before this returns."""
        future: asyncio.Future[ProduceResult] = asyncio.get_running_loop().create_future()
        try:
            header = check_batch(buffer)
        except TidemillError as error:
            fail_future(future, error)
            return future
        if self.closed_error is not None:
            fail_future(future, self.closed_error)
            return future
        pending = Pending(self, header, buffer, future)
        if header.producer_id >= 0:
            twin = self._by_identity.setdefault(pending.identity, pending)
            if twin is not pending:
                twin.futures.append(future)
                return future
        self._live[pending] = None
        self.reserved_records += header.record_count
        if not self._around.settings.reserve_after_upload:
            pending.ticket = self._places.reserve(header.producer_id)
        if self.is_open:
            self._stage(pending)
        return future

    def _stage(self, pending: Pending) -> None:
        if pending.header.producer_id < 0 and pending.ticket is not None:
            # No order: the turn is leave to go under way, so it comes before the upload.
            self._places.redeem(pending.ticket, lambda _: self._send(pending))
        else:
            self._send(pending)

    def _send(self, pending: Pending) -> None:
        if pending.abandoned:
            return
        try:
            self._around.writer.stage(pending)
        except TidemillError as error:
            self.batch_failed(pending, error)

    def batch_uploaded(self, pending: Pending) -> None:
        if pending.header.producer_id < 0:
            self._take_turn(pending)
            return
        if pending.ticket is None:
            pending.ticket = self._places.reserve(pending.header.producer_id)
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
        if not self._committing:
            self._committing = True
            self._around.tasks.spawn(self._commit(), name=f"commit {self._log_name}")

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
        try:
            while self._turned and self.closed_error is None:
                await self._commit_group()
                await self._roll_up()
        except SteppedDown as stop:
            self._step_down(stop)
        except asyncio.CancelledError:
            self._step_down(SteppedDown("the node is shutting down.", certain=False))
            raise
        except Exception as bug:
            # Every waiting request ends, also when we are wrong; the task group reports the bug.
            self._step_down(SteppedDown(f"an unexpected error: {bug!r}.", certain=False))
            raise
        finally:
            self._committing = False

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
        elif any(refusal is Refusal.OUT_OF_ORDER for _, refusal in plan.refused):
            # A gap is only a gap if nobody else has written here; an append would have proved that by itself.
            await self._appender.confirm(self.state.applied)
        self._plan = None
        self._settle(plan)

    async def _propose(self, command: Command) -> None:
        """Append, then apply what was appended. Raises SteppedDown."""
        position = self.state.applied
        await self._appender.append(position, encode_command(command))
        rejected = apply(self.state, command, position, self._appender.term)
        if rejected is not None:
            raise SteppedDown(f"a command was refused: log={self._log_name} {rejected.reason}.", certain=True)

    def _settle(self, plan: Plan) -> None:
        """Everything decided is durable: publish, then answer in log order, then let go of the places in line."""
        state = self.state
        for pending, base_offset in plan.accepted:
            if pending.data is not None:
                patch(pending.data, pending.first_byte, base_offset)
        if plan.accepted:
            self._wake()
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
        self.close(error)

    async def _roll_up(self) -> None:
        """Write the whole state to an object, name it in the log, forget the records before. Raises SteppedDown."""
        around, state = self._around, self.state
        due = state.rollup_position + max(around.settings.rollup_records, len(state) // 4)
        if state.applied < max(due, self._rollup_from):
            return
        command = await write_rollup(around.objects, state, self.topic_id, self.partition, around.rand.nonce())
        if command is None:
            self._rollup_from = state.applied + ROLLUP_RETRY_RECORDS
            return
        previous, position = state.rollup_key, state.applied
        await self._propose(command)
        await forget_before(around.consensus, around.objects, self._log_name, position, previous)

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
