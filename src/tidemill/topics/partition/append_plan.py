"""Decide what the next append of a partition contains. Pure.

`plan_group` decides the outcome of each batch whose turn has come, and builds one log command for those that are
accepted. `PendingAdvance` collects the requests for the other command, Advance. The module also builds the results and
errors of the decided batches, for the callers of `produce_nowait`.
"""

from __future__ import annotations

from collections import deque

from tidemill.base.errors import TidemillError, UnavailableError
from tidemill.topics.api import (
    InvalidProducerEpochError,
    InvalidTransactionError,
    OutOfOrderSequenceError,
    ProduceResult,
    ProducerStatus,
)
from tidemill.topics.partition.pending_batch import PendingBatch
from tidemill.topics.partition.sequence_gaps import SequenceGaps
from tidemill.topics.partition.state_machine.commands import Advance, PlaceBatches, Placeholder
from tidemill.topics.partition.state_machine.producer_state import (
    ProducerState,
    Refusal,
    RememberedBatch,
    judge_sequence,
    with_batch,
    with_marker,
)
from tidemill.topics.partition.state_machine.state import PartitionState
from tidemill.topics.partition.state_machine.transactions import COMMIT, OPEN_LIMIT, PLAIN, TransactionLedger
from tidemill.topics.partition.transaction_verification import TransactionVerification, transaction_snapshot


class AppendPlan:
    """Outcome of one group of batches.

    accepted    placed by `command`, with the base offset that each will have
    duplicates  answered with the offsets of an earlier batch: committed, or `tentative` (placed by this command)
    refused     by the sequence rules, or because no matching transaction is open
    needless    markers of transactions that are not open here
    early       must wait for the retry of an earlier batch that failed here; the client is asked to retry
    poisoned    an earlier batch of the same producer did not reach the log
    """

    __slots__ = ("accepted", "at_ms", "command", "duplicates", "early", "members", "needless", "poisoned", "refused")

    def __init__(self, at_ms: int) -> None:
        self.at_ms = at_ms
        self.members: list[PendingBatch] = []
        self.accepted: list[tuple[PendingBatch, int]] = []
        self.duplicates: list[tuple[PendingBatch, RememberedBatch, bool]] = []
        self.refused: list[tuple[PendingBatch, Refusal]] = []
        self.needless: list[PendingBatch] = []
        self.early: list[PendingBatch] = []
        self.poisoned: list[PendingBatch] = []
        self.command: PlaceBatches | None = None


def plan_group(
    state: PartitionState,
    queue: deque[PendingBatch],
    holes: SequenceGaps,
    permits: TransactionVerification,
    *,
    at_ms: int,
    now_s: float,
    limit: int,
) -> AppendPlan:
    """Remove at most `limit` batches from the front of `queue`, in order, and decide each against `state`."""
    plan = AppendPlan(max(at_ms, state.last_at_ms))
    ledger = TransactionLedger(state.transactions)
    tentative: dict[int, ProducerState] = {}
    blocked: set[int] = set()
    objects: dict[str, int] = {}
    placeholders: list[Placeholder] = []
    offset = state.high_watermark
    while queue and len(plan.members) < limit:
        pending = queue.popleft()
        if pending.abandoned:
            continue
        plan.members.append(pending)
        header = pending.header
        producer_id, epoch, sequence = header.producer_id, header.producer_epoch, header.base_sequence
        count, kind = header.record_count, pending.kind
        if kind >= COMMIT:
            if pending.here not in (
                None,
                transaction_snapshot(ledger.find(producer_id), permits.find_granted(producer_id)),
            ):
                plan.refused.append((pending, Refusal.OTHER_TRANSACTION))
                continue
            # Revoke before any later batch is judged: no batch may follow the marker of its transaction.
            permits.revoke(producer_id, pending.ends_below)
            if not ledger.has_transaction_below(producer_id, pending.ends_below):
                plan.needless.append(pending)
                continue
            known = tentative.get(producer_id) or state.live_producer(producer_id, plan.at_ms)
            ledger.end(producer_id, kind, offset)
            tentative[producer_id] = with_marker(known, epoch, plan.at_ms)
        elif producer_id >= 0:
            if producer_id in blocked or (pending.ticket is not None and pending.ticket.is_poisoned):
                plan.poisoned.append(pending)
                blocked.add(producer_id)
                continue
            known = tentative.get(producer_id) or state.live_producer(producer_id, plan.at_ms)
            verdict = judge_sequence(known, epoch, sequence, count)
            if isinstance(verdict, RememberedBatch):
                plan.duplicates.append((pending, verdict, verdict.base_offset >= state.high_watermark))
                continue
            hole = (verdict is None and known is None) or verdict is Refusal.OUT_OF_ORDER
            if hole and holes.is_blocked(producer_id, epoch, sequence, now_s):
                plan.early.append(pending)
                blocked.add(producer_id)
                continue
            if verdict is None and (kind != PLAIN or not ledger.is_idle):
                verdict = _transaction_refusal(ledger, pending, epoch)
            if verdict is not None:
                plan.refused.append((pending, verdict))
                continue
            if kind != PLAIN:
                ledger.place_batch(producer_id, epoch, offset, plan.at_ms)
            tentative[producer_id] = with_batch(known, epoch, sequence, count, offset, plan.at_ms)
        index = objects.setdefault(pending.object_key, len(objects))
        placeholders.append(
            Placeholder(
                index,
                pending.first_byte,
                pending.size_bytes,
                offset,
                count,
                producer_id,
                epoch,
                sequence,
                pending.max_timestamp_ms,
                kind,
            )
        )
        plan.accepted.append((pending, offset))
        offset += count
    if placeholders:
        plan.command = PlaceBatches(plan.at_ms, tuple(objects), tuple(placeholders))
    return plan


def _transaction_refusal(ledger: TransactionLedger, pending: PendingBatch, epoch: int) -> Refusal | None:
    """Return why the transaction rules reject the batch, or None if they accept it."""
    producer_id = pending.header.producer_id
    confirmed = pending.permit is not None and not pending.permit.void
    if not ledger.allows_batch(producer_id, epoch, pending.kind, confirmed=confirmed):
        return Refusal.NO_TRANSACTION
    if pending.kind != PLAIN and ledger.is_full and ledger.find(producer_id) is None:
        return Refusal.TOO_MANY_TRANSACTIONS
    return None


class PendingAdvance:
    """The next Advance: what retention, L1 and time have requested since the last one. Requests only raise offsets, so
    any number of them becomes one log record."""

    def __init__(self) -> None:
        self.is_due = False
        self._log_start = 0
        """Log start that retention allows."""
        self._reconciled = 0
        """Offset below which L1 is known to hold everything."""
        self._aborted_start = 0
        self._placed_s: float | None = None
        """Time of the first batch placed since the last Advance."""

    def request_log_start(self, log_start: int) -> None:
        self._log_start = max(self._log_start, log_start)
        self.is_due = True

    def request_reconciled(self, offset: int, aborted_start: int) -> None:
        self._reconciled = max(self._reconciled, offset)
        self._aborted_start = max(self._aborted_start, aborted_start)
        self.is_due = True

    def request_if_placed(self, now_s: float, after_s: float) -> bool:
        """Request an Advance if the first batch since the last one was placed `after_s` ago; return whether."""
        if self._placed_s is None or now_s - self._placed_s < after_s:
            return False
        self.is_due = True
        return True

    def record_placed(self, now_s: float) -> None:
        if self._placed_s is None:
            self._placed_s = now_s

    def pop_command(self, state: PartitionState, now_ms: int, writer: str, below: int) -> Advance:
        """Return the command, and begin to collect the next one."""
        self.is_due, self._placed_s = False, None
        log_start = min(max(self._log_start, state.log_start), state.high_watermark)
        reconciled = min(max(self._reconciled, state.reconciled), state.high_watermark)
        aborted_start = min(max(self._aborted_start, state.aborted_start), reconciled)
        return Advance(max(now_ms, state.last_at_ms), log_start, writer, below, reconciled, aborted_start)


def duplicate_result(batch: RememberedBatch, state: PartitionState) -> ProduceResult:
    return ProduceResult(batch.base_offset, batch.base_offset + batch.record_count - 1, state.log_start, duplicate=True)


def producer_status(state: PartitionState, producer_id: int) -> ProducerStatus:
    producer, opened = state.producers[producer_id], state.transactions.get(producer_id)
    last = producer.batches[-1].last_sequence if producer.batches else -1
    first = opened.first_offset if opened is not None else -1
    return ProducerStatus(producer_id, producer.epoch, last, producer.updated_ms, first)


def poisoned_error(pending: PendingBatch) -> UnavailableError:
    return UnavailableError(
        f"an earlier batch of this producer did not reach the log: producer_id={pending.header.producer_id} "
        f"sequence={pending.header.base_sequence}.",
        fix="Send the batches again in order.",
    )


def refusal_error(pending: PendingBatch, refusal: Refusal) -> TidemillError:
    header = pending.header
    facts = (
        f"partition={pending.topic_id}/{pending.partition} producer_id={header.producer_id} "
        f"epoch={header.producer_epoch} sequence={header.base_sequence}"
    )
    if refusal is Refusal.STALE_EPOCH:
        return InvalidProducerEpochError(f"a newer epoch of this producer has written here: {facts}.")
    if refusal is Refusal.NO_TRANSACTION:
        return InvalidTransactionError(f"the batch is not part of an open transaction of its producer: {facts}.")
    if refusal is Refusal.TOO_MANY_TRANSACTIONS:
        return InvalidTransactionError(f"too many open transactions in the partition: limit={OPEN_LIMIT} {facts}.")
    if refusal is Refusal.OTHER_TRANSACTION:
        return UnavailableError(
            f"the open transaction changed before its marker was placed: {facts}.",
            fix="Check the transaction and retry.",
        )
    return OutOfOrderSequenceError(f"the batch does not follow the producer's last batch: {facts}.")
