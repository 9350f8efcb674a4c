"""What to do with the batches whose turn has come: one command for the log, and a fate for each. Pure."""

from __future__ import annotations

from collections import deque

from tidemill.topics.partition.commands import PlaceBatches, Placeholder
from tidemill.topics.partition.holes import Holes
from tidemill.topics.partition.idempotence import Producer, Refusal, Remembered, judge, remember
from tidemill.topics.partition.pending import Pending
from tidemill.topics.partition.state import PartitionState


class Plan:
    """
    accepted    placed by `command`, with the base offset each will have
    duplicates  answered with the offsets of an earlier batch: committed, or `tentative` (in this very command)
    refused     by the sequence rules
    early       must wait for the retry of an earlier batch that failed here; the client is told to come again
    poisoned    a batch of the same producer before them did not reach the log
    """

    __slots__ = ("accepted", "at_ms", "command", "duplicates", "early", "members", "poisoned", "refused")

    def __init__(self, at_ms: int) -> None:
        self.at_ms = at_ms
        self.members: list[Pending] = []
        self.accepted: list[tuple[Pending, int]] = []
        self.duplicates: list[tuple[Pending, Remembered, bool]] = []
        self.refused: list[tuple[Pending, Refusal]] = []
        self.early: list[Pending] = []
        self.poisoned: list[Pending] = []
        self.command: PlaceBatches | None = None


def plan_group(
    state: PartitionState, queue: deque[Pending], holes: Holes, *, at_ms: int, now_s: float, limit: int
) -> Plan:
    """Take at most `limit` batches from the front of `queue`, in order, and decide against `state`."""
    plan = Plan(max(at_ms, state.last_at_ms))
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
        count = header.record_count
        if producer_id >= 0:
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
            if verdict is not None:
                plan.refused.append((pending, verdict))
                continue
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
            )
        )
        plan.accepted.append((pending, offset))
        offset += count
    if placeholders:
        plan.command = PlaceBatches(plan.at_ms, tuple(objects), tuple(placeholders))
    return plan
