"""The leader of one partition, and the only module of this package that proposes commands.

    open          fence ─► replay ─► stage what the intake reserved in the meantime
    commit loop   the batches whose turn has come ─► sequence rules ─► one append for all of them ─► publish
                  ─► acknowledge ─► wake fetches;  also Advance and Rollup

Leadership ends at the first refused or unresolvable append; the next leader, possibly this node, fences and replays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import structlog

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import CorruptError, TidemillError, UnavailableError, UnknownOutcomeError
from tidemill.base.runtime.tasks import Tasks, error_sentence, is_own_fault_of_await
from tidemill.consensus.api import Consensus, LogHead
from tidemill.objects.store import ObjectStore
from tidemill.topics.api import ConfirmTransaction, NotLeaderError, ProduceResult
from tidemill.topics.batch.header import patch_base_offset
from tidemill.topics.config.configs import TopicConfig
from tidemill.topics.config.settings import TopicSettings
from tidemill.topics.l0.format import parse_writer
from tidemill.topics.l0.writer import L0Writer
from tidemill.topics.partition.append_plan import (
    AppendPlan,
    PendingAdvance,
    duplicate_result,
    plan_group,
    poisoned_error,
    refusal_error,
)
from tidemill.topics.partition.appender import Appender, LeadershipLostError
from tidemill.topics.partition.batch_intake import BatchIntake
from tidemill.topics.partition.recovery import catch_up, partition_log
from tidemill.topics.partition.rollup import RollupScheduler
from tidemill.topics.partition.sequence_gaps import SequenceGaps
from tidemill.topics.partition.state_machine.apply import apply
from tidemill.topics.partition.state_machine.codec import encode_command
from tidemill.topics.partition.state_machine.commands import Command, Rollup
from tidemill.topics.partition.state_machine.producer_state import Refusal
from tidemill.topics.partition.state_machine.state import PartitionState
from tidemill.topics.partition.transaction_verification import reject_without_coordinator
from tidemill.topics.partition.watchers import Watchers
from tidemill.topics.produce.validator_pool import BatchValidator

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
        self.config = TopicConfig()
        """Config of the topic, as of the last read of the catalogue."""
        self._around = around
        self._holes = holes
        self._on_closed = on_closed
        self._log_name = partition_log(topic_id, partition)
        self._appender = Appender(around.consensus, self._log_name, around.clock, around.rand, around.settings)
        self.intake = BatchIntake(self, around, holes, self._commit_soon)
        self._reported_stable = 0
        self._plan: AppendPlan | None = None
        self._committing = False
        self._advance = PendingAdvance()
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
        self.is_open, self._reported_stable = True, state.last_stable
        self._opened.set_result(None)
        self._around.touched(self)
        self._around.moved(self.topic_id, self.partition)
        self.intake.stage_checked()

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
        self.intake.fail_all(error, self._plan)
        if not self._opened.done():
            self._opened.set_result(None)
        self.watchers.wake_all()
        self._around.touched(self)
        self._on_closed(self, error)

    def _commit_soon(self) -> None:
        if not self._committing and self.closed_error is None:
            self._committing = True
            self._around.tasks.spawn(self._commit(), name=f"commit {self._log_name}")

    # retention: plain calls -------------------------------------------------------------------------
    def advance_log_start(self, log_start: int) -> None:
        """Advance the log start to `log_start`, unless it is already later, with a separate log record."""
        if self.is_open and log_start > self.state.log_start:
            self._advance.request_log_start(log_start)
            self._commit_soon()

    @property
    def last_stable(self) -> int:
        """Offset below which every transaction has ended."""
        return self.state.last_stable

    def advance_reconciled(self, offset: int, aborted_start: int = 0) -> None:
        """Drop the batches below `offset`, which L1 holds, and transactions aborted wholly below `aborted_start`."""
        if self.is_open and offset > self.state.reconciled:
            self._advance.request_reconciled(offset, aborted_start)
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
        if self.is_open and self._advance.request_if_placed(self._around.clock.monotonic_s(), after_s):
            self._commit_soon()

    async def _append_advance(self) -> None:
        """Append an Advance. Raises LeadershipLostError."""
        around, state = self._around, self.state
        waiting = [parse_writer(pending.object_key)[1] for pending in self.intake.live if pending.object_key]
        # Read before the append: an object that is closed during it gets a higher number.
        below = min([*waiting, around.writer.first_open_number])
        advance = self._advance.pop_command(state, around.clock.now_ms(), around.writer.name, below)
        before = state.log_start
        await self._propose(advance)
        if state.log_start > before:
            self.watchers.wake_all()

    # commit ---------------------------------------------------------------------------------------
    async def _commit(self) -> None:
        """Append until nothing is left. Any failure ends this leadership and fails every waiting request."""
        try:
            while self.closed_error is None:
                rollup = self._rollups.take_ready_rollup()
                if rollup is None and not self.intake.turned and not self._advance.is_due:
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
        if self.intake.turned:
            await self._commit_group()
        if self._advance.is_due:
            await self._append_advance()

    async def _commit_group(self) -> None:
        around = self._around
        plan = plan_group(
            self.state,
            self.intake.turned,
            self._holes,
            self.intake.permits,
            at_ms=around.clock.now_ms(),
            now_s=around.clock.monotonic_s(),
            limit=around.settings.group_batches,
        )
        self._plan = plan
        if plan.command is not None:
            await self._propose(plan.command)
            self._advance.record_placed(around.clock.monotonic_s())
        elif plan.needless or any(refusal is not Refusal.STALE_EPOCH for _, refusal in plan.refused):
            # A gap or a missing transaction is proof only if no other leader has written; an append would show that.
            await self._appender.confirm_leadership(self.state.applied)
        self._plan = None
        self._publish_plan(plan)

    async def _propose(self, command: Command) -> None:
        """Append, then apply the appended command. Raises LeadershipLostError."""
        position = self.state.applied
        data = encode_command(command)
        await self._appender.append(position, data)
        rejected = apply(self.state, command, position, self._appender.term)
        if rejected is not None:
            refused = CorruptError(f"the appended command was rejected: log={self._log_name} {rejected.reason}.")
            raise LeadershipLostError(refused.message, certain=True, fault=refused)
        if not isinstance(command, Rollup):
            self._rollups.add_to_tail(command, len(data))

    def _publish_plan(self, plan: AppendPlan) -> None:
        """Publish the durable plan, then answer in log order, then release the queue slots."""
        state, live = self.state, self.intake.live
        for pending, base_offset in plan.accepted:
            if pending.data is not None:
                patch_base_offset(pending.data, pending.first_byte, base_offset)
        if plan.accepted:
            self.watchers.wake_all()
        if state.last_stable != self._reported_stable:
            self._reported_stable = state.last_stable
            self._around.moved(self.topic_id, self.partition)
        for pending, base_offset in plan.accepted:
            last_offset = base_offset + pending.header.record_count - 1
            result = ProduceResult(base_offset, last_offset, state.log_start, append_time_ms=pending.append_time_ms)
            live.succeed(pending, result)
        for pending in plan.needless:
            live.succeed(pending, ProduceResult(-1, -1, state.log_start, duplicate=True))
        for pending, batch, _ in plan.duplicates:
            live.succeed(pending, duplicate_result(batch, state))
        for pending, refusal in plan.refused:
            live.reject(pending, refusal_error(pending, refusal))
        for pending in plan.early + plan.poisoned:
            live.fail(pending, poisoned_error(pending))

    def _step_down(self, stop: LeadershipLostError) -> None:
        """Fail every undecided batch and close. Batches of an append that may have happened fail as unknown."""
        plan, self._plan, live = self._plan, None, self.intake.live
        error = NotLeaderError(f"this node stopped leading the partition: log={self._log_name} cause={stop.reason}")
        if plan is not None:
            unknown = UnknownOutcomeError(
                f"the outcome of an append is unknown: log={self._log_name} cause={stop.reason}", fix="Send it again."
            )
            doubtful = {pending for pending, _ in plan.accepted} if not stop.certain else set()
            doubtful |= {pending for pending, _, tentative in plan.duplicates if tentative and not stop.certain}
            for pending, batch, tentative in plan.duplicates:
                if not tentative:
                    live.succeed(pending, duplicate_result(batch, self.state))
            for pending in plan.members:
                if pending in live:
                    live.fail(pending, unknown if pending in doubtful else error)
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
