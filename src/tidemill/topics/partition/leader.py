"""The leader of one partition, and the only module of this package that proposes commands.

    produce_nowait   reserve (plain call) ─► stage ─► upload (several in flight) ─► redeem, in order ─►
    commit loop      sequence rules ─► one append for everything queued ─► publish ─► acknowledge ─► wake fetches

A batch that fails anywhere before the log is abandoned, which poisons the later batches of its producer. Leadership
ends at the first refused or unresolvable append; the next leader, possibly this node, fences and replays.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable

import msgspec
import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import CorruptError, TidemillError, UnavailableError, UnknownOutcomeError
from tidemill.base.runtime.tasks import Tasks, error_sentence, is_own_fault_of_await
from tidemill.consensus.api import Consensus, LogHead
from tidemill.objects.store import Buffer, ObjectStore
from tidemill.topics.api import (
    ConfirmTransaction,
    CorruptBatchError,
    InvalidProducerEpochError,
    InvalidTransactionError,
    Marker,
    NotLeaderError,
    ProduceResult,
    ProduceTransaction,
    TransactionSnapshot,
)
from tidemill.topics.batch.control_batch import encode_marker
from tidemill.topics.batch.header import parse_header, patch_base_offset
from tidemill.topics.batch.validation import check_header
from tidemill.topics.config.configs import TopicConfig
from tidemill.topics.config.settings import TopicSettings
from tidemill.topics.l0.format import parse_writer
from tidemill.topics.l0.writer import L0Writer
from tidemill.topics.partition.append_plan import (
    AppendPlan,
    duplicate_result,
    plan_group,
    poisoned_error,
    refusal_error,
)
from tidemill.topics.partition.appender import Appender, LeadershipLostError
from tidemill.topics.partition.pending_batch import PendingBatch, apply_record_policy, fail_future
from tidemill.topics.partition.recovery import catch_up, partition_log
from tidemill.topics.partition.rollup import RollupScheduler
from tidemill.topics.partition.sequence_gaps import SequenceGaps
from tidemill.topics.partition.state_machine.apply import apply
from tidemill.topics.partition.state_machine.codec import encode_command
from tidemill.topics.partition.state_machine.commands import Advance, Command, Rollup
from tidemill.topics.partition.state_machine.producer_state import Refusal
from tidemill.topics.partition.state_machine.state import PartitionState
from tidemill.topics.partition.state_machine.transactions import PLAIN
from tidemill.topics.partition.transaction_verification import (
    Permit,
    TransactionVerification,
    reject_without_coordinator,
    transaction_snapshot,
)
from tidemill.topics.partition.watchers import Watchers
from tidemill.topics.produce import ProducerLine, ProducerQueue, Ticket
from tidemill.topics.produce.validator_pool import BatchValidator, ValidatedBatch

_log = structlog.get_logger()


class LeaderDeps(msgspec.Struct, frozen=True):
    """Dependencies that all partitions of one process share."""

    consensus: Consensus
    objects: ObjectStore
    writer: L0Writer
    checker: BatchValidator
    clock: Clock
    rand: Rand
    settings: TopicSettings
    tasks: Tasks
    appends: asyncio.Semaphore
    """Limits concurrent appends, so that one reply of consensus does not resume all partitions in one loop turn."""
    moved: Callable[[str, int], None] = lambda *_: None
    """Called with (topic id, partition) when its last stable offset moved, or it was opened here. A plain call."""
    confirm: ConfirmTransaction = reject_without_coordinator
    touched: Callable[[PartitionLeader], None] = lambda _: None
    """Called when the data behind the partition's stage status may have changed. A plain call."""


class PartitionLeader:
    """One leadership of a partition, from the node's decision to lead until it stops. Never opened twice."""

    def __init__(
        self,
        topic_id: str,
        partition: int,
        around: LeaderDeps,
        holes: SequenceGaps,
        on_closed: Callable[[PartitionLeader, TidemillError], None],
    ) -> None:
        self.topic_id = topic_id
        self.partition = partition
        self.state = PartitionState()
        self.closed_error: TidemillError | None = None
        self.fault: BaseException | None = None
        """Error that closed it, if that was not a change of leadership. The unit failed, and is opened again."""
        self.is_open = False
        self.reserved_records = 0
        self.config = TopicConfig()
        """Config of the topic, as of the last read of the catalogue."""
        self._around = around
        self._holes = holes
        self._on_closed = on_closed
        self._log_name = partition_log(topic_id, partition)
        self._appender = Appender(around.consensus, self._log_name, around.clock, around.rand, around.settings)
        self._places = ProducerQueue()
        self._live: dict[PendingBatch, None] = {}
        """Batches without a result, in reservation order."""
        self._by_identity: dict[tuple[int, int, int, int], PendingBatch] = {}
        self._turned: deque[PendingBatch] = deque()
        """Batches whose turn has come, in the order in which they will be appended."""
        self._permits = TransactionVerification(lasting=around.settings.fault == "marker-before-data")
        self._told_stable = 0
        self._plan: AppendPlan | None = None
        self._committing = False
        self._start_at = 0
        """Log start that retention allows."""
        self._reconciled = 0
        """Offset below which L1 is known to hold everything."""
        self._aborted_start = 0
        self._advance_due = False
        self._placed_s: float | None = None
        """Time of the first batch placed since the last Advance."""
        self._rollups = RollupScheduler(
            around.consensus, around.objects, around.rand, around.tasks, (self._log_name, topic_id, partition),
            around.settings.rollup_records, self._commit_soon,
        )  # fmt: skip
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.watchers = Watchers()
        """Watchers to wake when the high watermark or the log start moves, or leadership ends."""

    # opening and closing --------------------------------------------------------------------------
    async def open(self) -> None:
        """Fence, replay, and stage the batches reserved during that. The partition closes itself on any failure."""
        try:
            fenced = await self._appender.fence()
            state, head = await catch_up(
                self._around.consensus, self._around.objects, self._log_name, PartitionState(), fenced
            )
            if self._appender.observe_head(head).is_overtaken(state.applied):
                self.close(self._takeover_error())
        except BaseException as error:
            if not is_own_fault_of_await(error):
                self.close(NotLeaderError(f"a partition did not open: log={self._log_name} cause={error!r}"))
                raise
            _log.error("a partition did not open", log=self._log_name, error=error_sentence(error))
            self.fault = error
            cause = error_sentence(error)
            self.close(UnavailableError(f"a partition did not open: log={self._log_name} cause={cause}", fix="Retry."))
        if self.closed_error is not None:
            return
        self.state = state
        self.is_open, self._told_stable = True, state.last_stable
        self._opened.set_result(None)
        self._around.touched(self)
        self._around.moved(self.topic_id, self.partition)
        for pending in list(self._live):
            if pending.checked:
                self._stage(pending)

    async def wait_open(self) -> None:
        """Wait until the partition is open. Raises the error that closed it."""
        if not self._opened.done():
            await asyncio.shield(self._opened)
        if self.closed_error is not None:
            raise self.closed_error

    def close(self, error: TidemillError) -> None:
        """Stop leading. Batches that cannot be in the log fail with `error`; an append in flight decides its own."""
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
        self.watchers.wake_all()
        self._around.touched(self)
        self._on_closed(self, error)

    # produce: plain calls -------------------------------------------------------------------------
    def produce_nowait(
        self, buffer: Buffer, sender: Hashable = None, within: ProduceTransaction | None = None
    ) -> asyncio.Future[ProduceResult]:
        """Produce a batch; see `api.TopicLog`. The queue slot is reserved before this returns."""
        future: asyncio.Future[ProduceResult] = asyncio.get_running_loop().create_future()
        try:
            header = check_header(buffer, in_transaction=within is not None)
        except TidemillError as error:
            fail_future(future, error)
            return future
        if self.closed_error is not None:
            fail_future(future, self.closed_error)
            return future
        line = header.producer_id if header.producer_id >= 0 else self._line_of(sender)
        pending = PendingBatch(self, header, buffer, future, line, within=within)
        if header.producer_id >= 0:
            twin = self._by_identity.setdefault(pending.identity, pending)
            if twin is not pending:
                twin.futures.append(future)
                return future
        self._live[pending] = None
        self.reserved_records += header.record_count
        self._around.touched(self)
        if self._around.settings.fault != "seed000":
            pending.ticket = self._places.reserve(line)
        self._validate(pending, sender)
        return future

    def _validate(self, pending: PendingBatch, sender: Hashable) -> None:
        pending.keyed, codec = self.config.requires_keys, self.config.codec
        try:
            self._around.checker.validate(
                pending.header, pending.buffer, sender, lambda outcome: self._batch_checked(pending, outcome),
                keyed=pending.keyed, codec=codec,
            )  # fmt: skip
        except TidemillError as error:
            self.batch_failed(pending, error)

    def transaction_snapshot(self, producer_id: int) -> TransactionSnapshot:
        return transaction_snapshot(self.state.transactions.get(producer_id), self._permits.find_granted(producer_id))

    def write_marker_nowait(
        self, marker: Marker, here: TransactionSnapshot | None = None
    ) -> asyncio.Future[ProduceResult]:
        """Append a transaction marker; see `api.TopicLog`. It does not wait in its producer's queue: a batch of the
        transaction that it overtakes is refused."""
        future: asyncio.Future[ProduceResult] = asyncio.get_running_loop().create_future()
        if self.closed_error is not None:
            fail_future(future, self.closed_error)
            return future
        at_ms = self._around.clock.now_ms()
        data = encode_marker(marker, at_ms)
        line = ("marker", marker.producer_id)
        pending = PendingBatch(self, parse_header(data), data, future, line, marker=marker)
        pending.here = here if self._around.settings.fault != "late-marker" else None
        pending.checked, pending.max_timestamp_ms = True, at_ms
        self._live[pending] = None
        self.reserved_records += 1
        pending.ticket = self._places.reserve(line)
        self._around.touched(self)
        if self.is_open:
            self._stage(pending)
        return future

    def _line_of(self, sender: Hashable) -> ProducerLine:
        return object() if self._around.settings.fault == "unordered-connection" else ("sender", sender)

    def _batch_checked(self, pending: PendingBatch, outcome: ValidatedBatch | TidemillError) -> None:
        if pending.abandoned:
            return
        if isinstance(outcome, CorruptBatchError):
            self._reject(pending, outcome)
        elif isinstance(outcome, TidemillError):
            self.batch_failed(pending, outcome)
        else:
            pending.accept_validation(outcome.max_timestamp_ms, outcome.rewritten)
            if self.is_open:
                self._stage(pending)

    def _reject(self, pending: PendingBatch, error: TidemillError) -> None:
        """Reject a batch permanently: it leaves the queue, and its successors are judged without it."""
        self._remove_live(pending)
        pending.fail(error)
        self._release(pending)

    def _stage(self, pending: PendingBatch) -> None:
        if pending.abandoned:
            return
        if not pending.matches_config(self.config):
            self._validate(pending, pending.line)  # It arrived before the config was known.
            return
        try:
            apply_record_policy(pending, self.config, self._around.clock.now_ms())
        except CorruptBatchError as error:
            self._reject(pending, error)
            return
        if pending.within is not None and pending.kind != PLAIN:
            self._request_permit(pending, pending.within)
        try:
            self._around.writer.stage(pending)
        except TidemillError as error:
            self.batch_failed(pending, error)

    def _request_permit(self, pending: PendingBatch, within: ProduceTransaction) -> None:
        """Ask the coordinator during the upload, once for all in-flight batches of the producer."""
        producer_id, epoch = pending.header.producer_id, pending.header.producer_epoch
        opened = self.state.transactions.get(producer_id)
        if opened is not None and opened.epoch == epoch:
            return
        pending.permit = self._permits.find(producer_id, epoch)
        if pending.permit is None:
            answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            pending.permit = self._permits.issue(producer_id, epoch, answer)
            asking = self._confirm(pending.permit, within, producer_id)
            self._around.tasks.spawn(asking, name=f"confirm {self._log_name}")

    async def _confirm(self, permit: Permit, within: ProduceTransaction, producer_id: int) -> None:
        error: TidemillError
        try:
            await self._around.confirm(within, producer_id, permit.epoch, self.topic_id, self.partition)
            permit.answer.set_result(None)
            return
        except TidemillError as refusal:
            error = refusal
        except BaseException as fault:
            error = UnavailableError(f"the coordinator was not asked: producer_id={producer_id} cause={fault!r}.")
            if not is_own_fault_of_await(fault):
                self._deny_permit(permit, producer_id, error)
                raise
            _log.error(
                "a transaction was not confirmed", log=self._log_name, error=error_sentence(fault), exc_info=fault
            )
        self._deny_permit(permit, producer_id, error)

    def _deny_permit(self, permit: Permit, producer_id: int, error: TidemillError) -> None:
        self._permits.drop_refused(producer_id, permit)
        permit.answer.set_exception(error)
        permit.answer.exception()  # Mark the exception as retrieved: the waiters may be gone.

    def batch_uploaded(self, pending: PendingBatch) -> None:
        if pending.ticket is None:
            pending.ticket = self._places.reserve(pending.line)
        if pending.permit is not None and not pending.permit.answer.done():
            pending.permit.answer.add_done_callback(lambda _: self._redeem(pending))
        else:
            self._redeem(pending)

    def _redeem(self, pending: PendingBatch) -> None:
        refusal = pending.permit.answer.exception() if pending.permit is not None else None
        if pending.abandoned or pending.ticket is None:
            return
        if isinstance(refusal, InvalidTransactionError | InvalidProducerEpochError):
            self._reject(pending, refusal)
        elif isinstance(refusal, TidemillError):
            self.batch_failed(pending, refusal)
        elif self._around.settings.fault == "fence-before-redeem":
            self._around.tasks.spawn(self._fenced_first(pending, pending.ticket), name=f"fence {self._log_name}")
        else:
            self._places.redeem(pending.ticket, lambda _: self._enqueue_for_commit(pending))

    async def _fenced_first(self, pending: PendingBatch, ticket: Ticket) -> None:
        async with self._around.appends:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._places.redeem(ticket, lambda _: turn.set_result(None))
            await turn
        self._enqueue_for_commit(pending)

    def _enqueue_for_commit(self, pending: PendingBatch) -> None:
        if pending.abandoned:
            return
        if pending.ticket is not None and pending.ticket.is_poisoned:
            self.batch_failed(pending, poisoned_error(pending))
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
    def advance_log_start(self, log_start: int) -> None:
        """Advance the log start to `log_start`, unless it is already later, with a separate log record."""
        if self.is_open and log_start > self.state.log_start:
            self._start_at = max(self._start_at, log_start)
            self._advance_due = True
            self._commit_soon()

    @property
    def last_stable(self) -> int:
        """Offset below which every transaction has ended."""
        return self.state.last_stable

    def advance_reconciled(self, offset: int, aborted_start: int = 0) -> None:
        """Drop the batches below `offset`, which L1 holds, and transactions aborted wholly below `aborted_start`."""
        if self.is_open and offset > self.state.reconciled:
            self._reconciled = max(self._reconciled, offset)
            self._aborted_start = max(self._aborted_start, aborted_start)
            self._advance_due = True
            self._commit_soon()

    async def advance_log_start_durably(self, log_start: int) -> None:
        """Advance the log start and wait until that is durable. Raises the error that closed the partition."""
        self.advance_log_start(log_start)
        while self.state.log_start < log_start:
            if self.closed_error is not None:
                raise self.closed_error
            await self.watchers.wait_moved()

    def settle_if_due(self, after_s: float) -> None:
        """Record in the log what is decided, if the first batch since the last such record was placed `after_s` ago. A
        partition without new batches writes nothing."""
        now_s = self._around.clock.monotonic_s()
        if self.is_open and self._placed_s is not None and now_s - self._placed_s >= after_s:
            self._advance_due = True
            self._commit_soon()

    async def _append_advance(self) -> None:
        """Append an Advance. Raises LeadershipLostError."""
        around, state = self._around, self.state
        waiting = [parse_writer(pending.object_key)[1] for pending in self._live if pending.object_key]
        # Read before the append: an object that is closed during it gets a higher number.
        below = min([*waiting, around.writer.first_open_number])
        self._advance_due, self._placed_s = False, None
        at_ms = max(around.clock.now_ms(), state.last_at_ms)
        log_start = min(max(self._start_at, state.log_start), state.high_watermark)
        reconciled = min(max(self._reconciled, state.reconciled), state.high_watermark)
        aborted_start = min(max(self._aborted_start, state.aborted_start), reconciled)
        before = state.log_start
        await self._propose(Advance(at_ms, log_start, around.writer.name, below, reconciled, aborted_start))
        if state.log_start > before:
            self.watchers.wake_all()

    def batch_failed(self, pending: PendingBatch, error: TidemillError) -> None:
        """Fail a batch that is not, or may not be, in the log. Its producer must send it again before later ones."""
        header, releases = pending.header, self._around.settings.fault == "release-failed"
        if pending.is_idempotent and not releases:
            now_s = self._around.clock.monotonic_s()
            self._holes.failed(header.producer_id, header.producer_epoch, header.base_sequence, now_s)
        self._remove_live(pending)
        pending.fail(error)
        if pending.ticket is not None:
            (self._places.release if releases else self._places.abandon)(pending.ticket)

    def _remove_live(self, pending: PendingBatch) -> None:
        if pending in self._live:
            del self._live[pending]
            self.reserved_records -= pending.header.record_count
            self._around.touched(self)
            self._around.writer.batch_answered(pending)
            if self._by_identity.get(pending.identity) is pending:
                del self._by_identity[pending.identity]

    # commit ---------------------------------------------------------------------------------------
    async def _commit(self) -> None:
        """Append until nothing is left. Any failure ends this leadership and fails every waiting request."""
        try:
            while self.closed_error is None:
                rollup = self._rollups.take_ready_rollup()
                if rollup is None and not self._turned and not self._advance_due:
                    break
                async with self._around.appends:
                    if self.closed_error is not None:
                        break
                    await self._append_due(rollup)
                self._rollups.start_if_due(self.state)
        except LeadershipLostError as stop:
            self._step_down(stop)
        except BaseException as error:
            if not is_own_fault_of_await(error):
                self._step_down(LeadershipLostError("the node is shutting down.", certain=False))
                raise
            _log.error("a partition failed", log=self._log_name, error=error_sentence(error), exc_info=error)
            self._step_down(LeadershipLostError(f"an unexpected error: {error!r}.", certain=False, fault=error))
        finally:
            self._committing = False

    async def _append_due(self, rollup: Rollup | None) -> None:
        if rollup is not None:
            previous, position = self.state.rollup_key, self.state.applied
            await self._propose(rollup)
            self._rollups.rollup_appended(position, previous)
        if self._turned:
            await self._commit_group()
        if self._advance_due:
            await self._append_advance()

    async def _commit_group(self) -> None:
        around = self._around
        plan = plan_group(
            self.state,
            self._turned,
            self._holes,
            self._permits,
            at_ms=around.clock.now_ms(),
            now_s=around.clock.monotonic_s(),
            limit=around.settings.group_batches,
        )
        self._plan = plan
        if plan.command is not None:
            await self._propose(plan.command)
            if self._placed_s is None:
                self._placed_s = around.clock.monotonic_s()
        elif plan.needless or any(refusal is not Refusal.STALE_EPOCH for _, refusal in plan.refused):
            # A gap or a missing transaction is proof only if no other leader has written; an append would show that.
            await self._appender.confirm_leadership(self.state.applied)
        self._plan = None
        self._publish_plan(plan)

    async def _propose(self, command: Command) -> None:
        """Append, then apply the appended command. Raises LeadershipLostError."""
        position = self.state.applied
        data = encode_command(command)
        if self._around.settings.fault == "told-early":
            apply(self.state, command, position, self._appender.term)
            self.watchers.wake_all()
            await self._appender.append(position, data)
            return
        await self._appender.append(position, data)
        rejected = apply(self.state, command, position, self._appender.term)
        if rejected is not None:
            refused = CorruptError(f"the appended command was rejected: log={self._log_name} {rejected.reason}.")
            raise LeadershipLostError(refused.message, certain=True, fault=refused)
        if not isinstance(command, Rollup):
            self._rollups.add_to_tail(command, len(data))

    def _publish_plan(self, plan: AppendPlan) -> None:
        """Publish the durable plan, then answer in log order, then release the queue slots."""
        state = self.state
        for pending, base_offset in plan.accepted:
            if pending.data is not None:
                patch_base_offset(pending.data, pending.first_byte, base_offset)
        if plan.accepted:
            self.watchers.wake_all()
        if state.last_stable != self._told_stable:
            self._told_stable = state.last_stable
            self._around.moved(self.topic_id, self.partition)
        for pending, base_offset in plan.accepted:
            last_offset = base_offset + pending.header.record_count - 1
            result = ProduceResult(base_offset, last_offset, state.log_start, append_time_ms=pending.append_time_ms)
            self._succeed(pending, result)
        for pending in plan.needless:
            self._succeed(pending, ProduceResult(-1, -1, state.log_start, duplicate=True))
        for pending, batch, _ in plan.duplicates:
            self._succeed(pending, duplicate_result(batch, state))
        for pending, refusal in plan.refused:
            self._remove_live(pending)
            pending.fail(refusal_error(pending, refusal))
            self._release(pending)
        for pending in plan.early + plan.poisoned:
            self.batch_failed(pending, poisoned_error(pending))

    def _succeed(self, pending: PendingBatch, result: ProduceResult) -> None:
        self._remove_live(pending)
        if pending.is_idempotent:
            header = pending.header
            self._holes.record_appended(
                header.producer_id, header.producer_epoch, header.base_sequence, header.record_count
            )
        pending.succeed(result)
        self._release(pending)

    def _release(self, pending: PendingBatch) -> None:
        if pending.ticket is not None:
            self._places.release(pending.ticket)

    def _step_down(self, stop: LeadershipLostError) -> None:
        """Fail every undecided batch and close. Batches of an append that may have happened fail as unknown."""
        plan, self._plan = self._plan, None
        error = NotLeaderError(f"this node stopped leading the partition: log={self._log_name} cause={stop.reason}")
        if plan is not None:
            unknown = UnknownOutcomeError(
                f"the outcome of an append is unknown: log={self._log_name} cause={stop.reason}", fix="Send it again."
            )
            doubtful = {pending for pending, _ in plan.accepted} if not stop.certain else set()
            doubtful |= {pending for pending, _, tentative in plan.duplicates if tentative and not stop.certain}
            for pending, batch, tentative in plan.duplicates:
                if not tentative:
                    self._succeed(pending, duplicate_result(batch, self.state))
            for pending in plan.members:
                if pending in self._live:
                    self.batch_failed(pending, unknown if pending in doubtful else error)
        _log.info("partition leadership ended", log=self._log_name, term=self._appender.term, reason=stop.reason)
        self.fault = stop.fault
        self.close(error)

    async def prove_leadership(self) -> None:
        """Close unless the log confirms that this node still leads. Raises UnavailableError."""
        self.observe_head(await self._around.consensus.log_head(self._log_name))

    def observe_head(self, head: LogHead) -> None:
        """Accept a head of the log, possibly an old one; close if it shows that another leader fenced or wrote."""
        self._appender.observe_head(head)
        # The append in flight may have landed.
        if self.is_open and self._appender.is_overtaken(self.state.applied + self._committing):
            self.close(self._takeover_error())

    def _takeover_error(self) -> NotLeaderError:
        return NotLeaderError(f"another node took over: log={self._log_name} term={self._appender.term}.")

    def is_at_end(self, offset: int) -> bool:
        """Return whether a reader at `offset` has read everything."""
        return self.closed_error is None and offset == self.state.high_watermark
