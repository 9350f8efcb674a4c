"""Batches of one led partition, from the call that produces them until it is their turn to be appended.

    produce_nowait        reserve (plain call) ─► validate ─► stage ─► upload (several in flight)
                          ─► redeem, in order ─► turned
    write_marker_nowait   reserve, in a separate queue ─► stage ─► upload ─► turned

A batch that fails on this way is abandoned, which poisons the later batches of its producer. The intake proposes
nothing: the leader decides the batches in `turned`, and ends each through `live`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from tidemill.base.errors import TidemillError
from tidemill.objects.store import Buffer
from tidemill.topics.api import (
    CorruptBatchError,
    InvalidProducerEpochError,
    InvalidTransactionError,
    Marker,
    ProduceResult,
    ProduceTransaction,
    TransactionSnapshot,
)
from tidemill.topics.batch.control_batch import encode_marker
from tidemill.topics.batch.header import parse_header
from tidemill.topics.batch.validation import check_header
from tidemill.topics.partition.append_plan import AppendPlan, poisoned_error
from tidemill.topics.partition.live_batches import LiveBatches
from tidemill.topics.partition.pending_batch import PendingBatch, apply_record_policy, fail_future
from tidemill.topics.partition.sequence_gaps import SequenceGaps
from tidemill.topics.partition.state_machine.transactions import PLAIN
from tidemill.topics.partition.transaction_verification import (
    PermitRequests,
    TransactionVerification,
    transaction_snapshot,
)
from tidemill.topics.produce import ProducerLine
from tidemill.topics.produce.validator_pool import ValidatedBatch

if TYPE_CHECKING:
    from tidemill.topics.partition.leader import LeaderDeps, PartitionLeader


class BatchIntake:
    """Intake of one leader. `turn_came`: a plain call after each batch that was added to `turned`."""

    def __init__(
        self, leader: PartitionLeader, around: LeaderDeps, holes: SequenceGaps, turn_came: Callable[[], None]
    ) -> None:
        self.topic_id = leader.topic_id
        self.partition = leader.partition
        self.live = LiveBatches(holes, around.writer, around.clock, lambda: around.touched(leader))
        self.turned: deque[PendingBatch] = deque()
        """Batches whose turn has come, in the order in which they will be appended."""
        self.permits = TransactionVerification()
        self._leader = leader
        self._around = around
        self._turn_came = turn_came
        self._places = self.live.places
        self._requests = PermitRequests(self.permits, around.tasks, around.confirm, leader.topic_id, leader.partition)

    def produce_nowait(
        self,
        buffer: Buffer,
        sender: Hashable = None,
        within: ProduceTransaction | None = None,
        trailer: bytes = b"",
    ) -> asyncio.Future[ProduceResult]:
        """Produce a batch; see `api.TopicLog`. The queue slot is reserved before this returns."""
        future: asyncio.Future[ProduceResult] = asyncio.get_running_loop().create_future()
        try:
            header = check_header(buffer, in_transaction=within is not None)
        except TidemillError as error:
            fail_future(future, error)
            return future
        if self._leader.closed_error is not None:
            fail_future(future, self._leader.closed_error)
            return future
        line = header.producer_id if header.producer_id >= 0 else self._line_of(sender)
        pending = PendingBatch(self, header, buffer, future, line, within=within)
        pending.add_trailer(trailer)
        if header.producer_id >= 0 and self.live.join_twin(pending):
            return future
        self.live.add(pending)
        pending.ticket = self._places.reserve(line)
        self._validate(pending, sender)
        return future

    def _line_of(self, sender: Hashable) -> ProducerLine:
        return ("sender", sender)

    def _validate(self, pending: PendingBatch, sender: Hashable) -> None:
        config = self._leader.config
        pending.keyed = config.requires_keys
        try:
            self._around.checker.validate(
                pending.header, pending.buffer, sender, lambda outcome: self._batch_checked(pending, outcome),
                keyed=pending.keyed, codec=config.codec,
            )  # fmt: skip
        except TidemillError as error:
            self.batch_failed(pending, error)

    def transaction_snapshot(self, producer_id: int) -> TransactionSnapshot:
        opened = self._leader.state.transactions.get(producer_id)
        return transaction_snapshot(opened, self.permits.find_granted(producer_id))

    def write_marker_nowait(
        self, marker: Marker, here: TransactionSnapshot | None = None
    ) -> asyncio.Future[ProduceResult]:
        """Append a transaction marker; see `api.TopicLog`. It does not wait in its producer's queue: a batch of the
        transaction that it overtakes is refused."""
        future: asyncio.Future[ProduceResult] = asyncio.get_running_loop().create_future()
        if self._leader.closed_error is not None:
            fail_future(future, self._leader.closed_error)
            return future
        at_ms = self._around.clock.now_ms()
        data = encode_marker(marker, at_ms)
        line = ("marker", marker.producer_id)
        pending = PendingBatch(self, parse_header(data), data, future, line, marker=marker)
        pending.here = here
        pending.checked, pending.max_timestamp_ms = True, at_ms
        self.live.add(pending)
        pending.ticket = self._places.reserve(line)
        if self._leader.is_open:
            self._stage(pending)
        return future

    def _batch_checked(self, pending: PendingBatch, outcome: ValidatedBatch | TidemillError) -> None:
        if pending.abandoned:
            return
        if isinstance(outcome, CorruptBatchError):
            self.live.reject(pending, outcome)
        elif isinstance(outcome, TidemillError):
            self.batch_failed(pending, outcome)
        else:
            pending.accept_validation(outcome.max_timestamp_ms, outcome.rewritten)
            if self._leader.is_open:
                self._stage(pending)

    def stage_checked(self) -> None:
        """Stage the batches that were reserved and validated before the partition was open."""
        for pending in list(self.live):
            if pending.checked:
                self._stage(pending)

    def _stage(self, pending: PendingBatch) -> None:
        leader = self._leader
        if pending.abandoned:
            return
        if not pending.matches_config(leader.config):
            self._validate(pending, pending.line)  # It arrived before the config was known.
            return
        try:
            apply_record_policy(pending, leader.config, self._around.clock.now_ms())
        except CorruptBatchError as error:
            self.live.reject(pending, error)
            return
        if pending.within is not None and pending.kind != PLAIN:
            pending.permit = self._requests.request(pending.header, pending.within, leader.state.transactions)
        try:
            self._around.writer.stage(pending)
        except TidemillError as error:
            self.batch_failed(pending, error)

    def batch_uploaded(self, pending: PendingBatch) -> None:
        if pending.permit is not None and not pending.permit.answer.done():
            pending.permit.answer.add_done_callback(lambda _: self._redeem(pending))
        else:
            self._redeem(pending)

    def _redeem(self, pending: PendingBatch) -> None:
        refusal = pending.permit.answer.exception() if pending.permit is not None else None
        if pending.abandoned or pending.ticket is None:
            return
        if isinstance(refusal, InvalidTransactionError | InvalidProducerEpochError):
            self.live.reject(pending, refusal)
        elif isinstance(refusal, TidemillError):
            self.batch_failed(pending, refusal)
        else:
            self._places.redeem(pending.ticket, lambda _: self._enqueue_for_commit(pending))

    def _enqueue_for_commit(self, pending: PendingBatch) -> None:
        if pending.abandoned:
            return
        if pending.ticket is not None and pending.ticket.is_poisoned:
            self.batch_failed(pending, poisoned_error(pending))
            return
        self.turned.append(pending)
        if pending.ticket is not None:
            self._places.place(pending.ticket)
        self._turn_came()

    def batch_failed(self, pending: PendingBatch, error: TidemillError) -> None:
        self.live.fail(pending, error)

    def fail_all(self, error: TidemillError, committing: AppendPlan | None) -> None:
        """Fail the batches that cannot be in the log: no append in flight contains them."""
        members = set(committing.members) if committing is not None else set()
        for pending in list(self.live):
            if pending not in members and pending in self.live:
                self.batch_failed(pending, error)
        self.turned.clear()
