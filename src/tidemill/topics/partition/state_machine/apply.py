"""Apply a command to the state of a partition: check everything, then write. No clock, randomness, I/O or logging."""

from __future__ import annotations

from typing import assert_never

import msgspec

from tidemill.topics.partition.state_machine.commands import Advance, Command, PlaceBatches, Rollup
from tidemill.topics.partition.state_machine.producer_state import (
    ProducerState,
    judge_sequence,
    with_batch,
    with_marker,
)
from tidemill.topics.partition.state_machine.state import PartitionState, SettledMark
from tidemill.topics.partition.state_machine.transactions import ABORT, COMMIT, PLAIN, TransactionLedger


class Rejected(msgspec.Struct, frozen=True):
    """Result of a command that changed nothing, here and on every other reader; the proposer gets the reason."""

    reason: str


def apply(state: PartitionState, command: Command, position: int, term: int) -> Rejected | None:
    """Apply the command at `position` of the log, appended in `term`. Return None if it took effect.

    A rejected command still advances `applied`, because its position is used up.
    """
    if position != state.applied:
        raise ValueError(f"log positions must be applied in order: position={position} applied={state.applied}")
    match command:
        case PlaceBatches():
            outcome = _apply_batches(state, command, term)
        case Rollup():
            state.rollup_key, state.rollup_position = command.object_key, position
            outcome = None
        case Advance():
            outcome = _apply_advance(state, command, position)
        case _:
            assert_never(command)
    state.applied = position + 1
    return outcome


def _apply_batches(state: PartitionState, command: PlaceBatches, term: int) -> Rejected | None:
    offset = state.high_watermark
    changed: dict[int, ProducerState] = {}
    ledger = TransactionLedger(state.transactions)
    for batch in command.placeholders:
        if batch.base_offset != offset or batch.record_count < 1:
            return Rejected(f"offsets are not contiguous: base_offset={batch.base_offset} expected={offset}")
        if not 0 <= batch.object_index < len(command.objects):
            return Rejected(f"no such object in the command: object_index={batch.object_index}")
        producer_id = batch.producer_id
        if batch.kind in (COMMIT, ABORT):
            if not ledger.has_transaction_below(producer_id, batch.producer_epoch + 1):
                return Rejected(f"a marker has no open transaction to end: producer_id={producer_id}")
            known = changed.get(producer_id) or state.live_producer(producer_id, command.at_ms)
            ledger.end(producer_id, batch.kind, offset)
            changed[producer_id] = with_marker(known, batch.producer_epoch, command.at_ms)
        elif producer_id >= 0:
            known = changed.get(producer_id) or state.live_producer(producer_id, command.at_ms)
            verdict = judge_sequence(known, batch.producer_epoch, batch.base_sequence, batch.record_count)
            if verdict is not None:
                return Rejected(f"the sequence rules refuse a batch: producer_id={producer_id} verdict={verdict}")
            if not ledger.allows_batch(producer_id, batch.producer_epoch, batch.kind, confirmed=True):
                return Rejected(f"the batch has the wrong transaction: producer_id={producer_id} kind={batch.kind}")
            if batch.kind != PLAIN:
                ledger.place_batch(producer_id, batch.producer_epoch, offset, command.at_ms)
            changed[producer_id] = with_batch(
                known, batch.producer_epoch, batch.base_sequence, batch.record_count, offset, command.at_ms
            )
        offset += batch.record_count
    _store_batches(state, command, term)
    ledger.write(state.transactions, state.aborted)
    for producer_id, producer in changed.items():
        state.producers.pop(producer_id, None)
        state.producers[producer_id] = producer
    state.drop_idle_producers()
    return None


def _apply_advance(state: PartitionState, command: Advance, position: int) -> Rejected | None:
    if command.log_start > state.high_watermark:
        return Rejected(f"log start above the high watermark: log_start={command.log_start} end={state.high_watermark}")
    if command.reconciled > state.high_watermark:
        return Rejected(f"L1 above the high watermark: reconciled={command.reconciled} end={state.high_watermark}")
    if command.aborted_start > max(command.reconciled, state.reconciled):
        return Rejected(f"compaction is ahead of L1: aborted_start={command.aborted_start}")
    state.last_at_ms = max(state.last_at_ms, command.at_ms)
    state.settled = SettledMark(position, command.writer, command.below)
    state.reconciled = max(state.reconciled, command.reconciled)
    state.aborted_start = max(state.aborted_start, command.aborted_start)
    state.set_log_start(max(state.log_start, command.log_start))
    return None


def _store_batches(state: PartitionState, command: PlaceBatches, term: int) -> None:
    if command.placeholders and (not state.terms or state.terms[-1][0] != term):
        state.terms.append((term, state.high_watermark))
    state.last_at_ms = max(state.last_at_ms, command.at_ms)
    interned = [state.intern(key) for key in command.objects]
    highest = state.highest_timestamps[-1] if state.highest_timestamps else -(2**63)
    for batch in command.placeholders:
        state.bases.append(batch.base_offset)
        state.objects.append(interned[batch.object_index])
        state.first_bytes.append(batch.first_byte)
        state.sizes.append(batch.size_bytes)
        state.max_timestamps.append(batch.max_timestamp_ms)
        highest = max(highest, batch.max_timestamp_ms)
        state.highest_timestamps.append(highest)
        state.high_watermark += batch.record_count
