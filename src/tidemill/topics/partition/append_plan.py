"""Decide the outcome of each batch whose turn has come, and build one log command for those that are accepted. Pure."""

from __future__ import annotations

from collections import deque

from tidemill.topics.partition.commands import PlaceBatches, Placeholder
from tidemill.topics.partition.pending_batch import Pending
from tidemill.topics.partition.producer_state import Producer, Refusal, Remembered, judge, marked, remember
from tidemill.topics.partition.sequence_gaps import SequenceGaps
from tidemill.topics.partition.state import PartitionState
from tidemill.topics.partition.transaction_verification import TransactionVerification, as_seen
from tidemill.topics.partition.transactions import COMMIT, PLAIN, Ledger


class Plan:
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
        self.members: list[Pending] = []
        self.accepted: list[tuple[Pending, int]] = []
        self.duplicates: list[tuple[Pending, Remembered, bool]] = []
        self.refused: list[tuple[Pending, Refusal]] = []
        self.needless: list[Pending] = []
        self.early: list[Pending] = []
        self.poisoned: list[Pending] = []
        self.command: PlaceBatches | None = None


def plan_group(
    state: PartitionState,
    queue: deque[Pending],
    holes: SequenceGaps,
    permits: TransactionVerification,
    *,
    at_ms: int,
    now_s: float,
    limit: int,
) -> Plan:
    """Remove at most `limit` batches from the front of `queue`, in order, and decide each against `state`."""
    plan = Plan(max(at_ms, state.last_at_ms))
    ledger = Ledger(state.transactions)
    tentative: dict[int, Producer] = {}
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
            if pending.here not in (None, as_seen(ledger.of(producer_id), permits.granted(producer_id))):
                plan.refused.append((pending, Refusal.OTHER_TRANSACTION))
                continue
            # Revoke before any later batch is judged: no batch may follow the marker of its transaction.
            permits.void(producer_id, pending.ends_below)
            if not ledger.ends(producer_id, pending.ends_below):
                plan.needless.append(pending)
                continue
            known = tentative.get(producer_id) or state.producer(producer_id, plan.at_ms)
            ledger.end(producer_id, kind, offset)
            tentative[producer_id] = marked(known, epoch, plan.at_ms)
        elif producer_id >= 0:
            if producer_id in blocked or (pending.ticket is not None and pending.ticket.poisoned):
                plan.poisoned.append(pending)
                blocked.add(producer_id)
                continue
            known = tentative.get(producer_id) or state.producer(producer_id, plan.at_ms)
            verdict = judge(known, epoch, sequence, count)
            if isinstance(verdict, Remembered):
                plan.duplicates.append((pending, verdict, verdict.base_offset >= state.high_watermark))
                continue
            hole = (verdict is None and known is None) or verdict is Refusal.OUT_OF_ORDER
            if hole and holes.blocks(producer_id, epoch, sequence, now_s):
                plan.early.append(pending)
                blocked.add(producer_id)
                continue
            if verdict is None and (kind != PLAIN or not ledger.idle):
                verdict = _outside(ledger, pending, epoch)
            if verdict is not None:
                plan.refused.append((pending, verdict))
                continue
            if kind != PLAIN:
                ledger.place(producer_id, epoch, offset, plan.at_ms)
            tentative[producer_id] = remember(known, epoch, sequence, count, offset, plan.at_ms)
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


def _outside(ledger: Ledger, pending: Pending, epoch: int) -> Refusal | None:
    """Return why the transaction rules reject the batch, or None if they accept it."""
    producer_id = pending.header.producer_id
    confirmed = pending.permit is not None and not pending.permit.void
    if not ledger.takes(producer_id, epoch, pending.kind, confirmed=confirmed):
        return Refusal.NO_TRANSACTION
    if pending.kind != PLAIN and ledger.full and ledger.of(producer_id) is None:
        return Refusal.TOO_MANY_TRANSACTIONS
    return None
