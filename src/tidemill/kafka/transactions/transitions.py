"""Transitions of a transactional id by requests. Pure: no clock, randomness or I/O; a rejection changes nothing.

            ┌────────── init ──────────┐
    EMPTY ──add──► ONGOING ──end───► PREPARE_x ──all marked──► COMPLETE_x ──add──► ONGOING
                      └─init, time-out─► PREPARE_ABORT, in the next epoch: its producer is fenced

In version 2 of transactions (KIP-890) every end moves the producer to the next epoch, so that late requests of one
transaction cannot affect the next one.

Codes are Kafka's: a fenced producer is PRODUCER_FENCED, a producer id that does not belong to the transactional id is
INVALID_PRODUCER_ID_MAPPING. NEEDS_ID is internal: the caller decides again with an unused producer id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Final

import msgspec
from msgspec.structs import replace

from tidemill.kafka import error_codes
from tidemill.kafka.transactions.state import EPOCH_LAST, Offsets, Places, State, Transaction


class Decision(msgspec.Struct, frozen=True):
    """Result of a transition. `next` must be stored before the request is answered; None if nothing changes."""

    code: int = 0
    next: Transaction | None = None


OK = Decision()
NEEDS_ID: Final = -2


def init(
    found: Transaction | None, *, fresh_id: int, timeout_ms: int, producer_id: int, epoch: int, now_ms: int
) -> Decision:
    """Decide InitProducerId: a new epoch, which fences the producer of the old one.

    With `producer_id` ≥ 0 the producer sends its identity (KIP-360), which is the current one, or the previous one if
    it missed the answer.
    """
    if found is None:
        return Decision(0, Transaction(fresh_id, 0, State.EMPTY, timeout_ms, updated_ms=now_ms))
    if found.state.prepared:
        return Decision(error_codes.CONCURRENT_TRANSACTIONS)
    own = (producer_id, epoch) == (found.producer_id, found.epoch)
    again = (producer_id, epoch) == (found.last_id, found.last_epoch)
    if producer_id >= 0 and not own and not again:
        return Decision(error_codes.PRODUCER_FENCED)
    if found.state is State.ONGOING:
        last = (found.producer_id, found.epoch) if producer_id >= 0 else (-1, -1)
        fenced = _prepared(found, State.PREPARE_ABORT, found.epoch + 1, now_ms)
        return Decision(error_codes.CONCURRENT_TRANSACTIONS, replace(fenced, last_id=last[0], last_epoch=last[1]))
    if producer_id >= 0 and again:
        return Decision(0, replace(found, state=State.EMPTY, timeout_ms=timeout_ms, updated_ms=now_ms))
    last = (producer_id, epoch) if producer_id >= 0 else (-1, -1)
    identity = (found.producer_id, found.epoch + 1) if found.epoch < EPOCH_LAST else (fresh_id, 0)
    begun = Transaction(*identity, State.EMPTY, timeout_ms, updated_ms=now_ms, last_id=last[0], last_epoch=last[1])
    return Decision(0, begun)


def add(
    found: Transaction | None,
    producer_id: int,
    epoch: int,
    *,
    partitions: Places | None = None,
    groups: Iterable[str] = (),
    now_ms: int,
) -> Decision:
    """Decide AddPartitionsToTxn and AddOffsetsToTxn: the first addition opens the transaction."""
    refusal = _refusal(found, producer_id, epoch)
    if refusal or found is None:
        return Decision(refusal)
    if found.state.prepared:
        return Decision(error_codes.CONCURRENT_TRANSACTIONS)
    is_open = found.state is State.ONGOING
    old = found.partitions if is_open else {}
    merged = {**old, **{t: tuple(sorted({*old.get(t, ()), *p})) for t, p in (partitions or {}).items()}}
    offsets = dict(found.offsets) if is_open else {}
    for group in groups:
        offsets.setdefault(group, {})
    if is_open and merged == old and offsets.keys() == found.offsets.keys():
        return OK
    return Decision(
        0,
        replace(
            found,
            state=State.ONGOING,
            partitions=merged,
            offsets=offsets,
            started_ms=found.started_ms if is_open else now_ms,
            number=found.number if is_open else found.number + 1,
            updated_ms=now_ms,
            last_id=-1,
            last_epoch=-1,
        ),
    )


def verify(found: Transaction | None, producer_id: int, epoch: int, topic_id: str, partition: int) -> Decision:
    """Decide whether the partition may contain records of the transaction."""
    refusal = _refusal(found, producer_id, epoch)
    if refusal or found is None:
        return Decision(refusal)
    if found.state is not State.ONGOING or not found.contains(topic_id, partition):
        return Decision(error_codes.INVALID_TXN_STATE)
    return OK


def commit_offsets(
    found: Transaction | None,
    producer_id: int,
    epoch: int,
    group: str,
    offsets: Offsets,
    *,
    adds: bool,
    now_ms: int,
) -> Decision:
    """Decide TxnOffsetCommit. `adds`: it also adds its group (version 2)."""
    if adds:
        opened = add(found, producer_id, epoch, groups=(group,), now_ms=now_ms)
        if opened.code:
            return opened
        found = opened.next or found
    refusal = _refusal(found, producer_id, epoch)
    if refusal or found is None:
        return Decision(refusal)
    if found.state is not State.ONGOING or group not in found.offsets:
        return Decision(error_codes.INVALID_TXN_STATE)
    mine = dict(found.offsets[group])
    for topic_id, partitions in offsets.items():
        mine[topic_id] = {**mine.get(topic_id, {}), **partitions}
    return Decision(0, replace(found, offsets={**found.offsets, group: mine}, updated_ms=now_ms))


def drop_group_offsets(
    found: Transaction | None, group: str, places: Set[tuple[str, int]] | None, now_ms: int
) -> Decision:
    """Remove deleted offsets of the group, all or these (topic id, partition), from its uncommitted offsets, as in
    Kafka.

    An open transaction still contains the group; a decided one does not wait for it any more.
    """
    if found is None or found.state not in (State.ONGOING, State.PREPARE_COMMIT):
        return OK
    left: Offsets = {}
    mine = found.offsets.get(group, {})
    for topic_id, partitions in mine.items() if places is not None else ():
        rest = {p: offset for p, offset in partitions.items() if (topic_id, p) not in (places or ())}
        if rest:
            left[topic_id] = rest
    if left == mine:
        return OK
    if found.state is State.ONGOING or left:
        return Decision(0, replace(found, offsets={**found.offsets, group: left}, updated_ms=now_ms))
    return record_progress(found, found, {}, (group,), now_ms)


def end(found: Transaction | None, producer_id: int, epoch: int, *, commit: bool, now_ms: int) -> Decision:
    """Decide EndTxn. A repeated request succeeds like the first one.

    Aborting without a transaction succeeds too: a producer whose partitions were rejected does it, and would fail
    fatally on INVALID_TXN_STATE.
    """
    refusal = _refusal(found, producer_id, epoch)
    if refusal or found is None:
        return Decision(refusal)
    if found.state is State.ONGOING:
        to = State.PREPARE_COMMIT if commit else State.PREPARE_ABORT
        return Decision(0, _prepared(found, to, found.epoch, now_ms))
    if found.state is State.EMPTY and not commit:
        return OK
    if found.state is (State.COMPLETE_COMMIT if commit else State.COMPLETE_ABORT):
        return OK
    if found.state is (State.PREPARE_COMMIT if commit else State.PREPARE_ABORT):
        return OK  # decided already: a repeated request waits for the same end
    return Decision(error_codes.INVALID_TXN_STATE)


def end_bumping(
    found: Transaction | None, producer_id: int, epoch: int, *, commit: bool, fresh_id: int, now_ms: int
) -> Decision:
    """Decide EndTxn of version 2.

    Aborting without a transaction gives a new epoch too, because the producer cannot know what it has added.
    """
    complete = State.COMPLETE_COMMIT if commit else State.COMPLETE_ABORT
    prepare = State.PREPARE_COMMIT if commit else State.PREPARE_ABORT
    if found is not None and (producer_id, epoch) == (found.last_id, found.last_epoch):
        return OK if found.state in (complete, prepare) else Decision(error_codes.INVALID_TXN_STATE)
    refusal = _refusal(found, producer_id, epoch)
    if refusal or found is None:
        return Decision(refusal)
    if found.state.prepared:
        return Decision(error_codes.CONCURRENT_TRANSACTIONS)
    if commit and found.state is not State.ONGOING:
        return Decision(error_codes.INVALID_TXN_STATE)
    used_up = epoch >= EPOCH_LAST
    if used_up and fresh_id < 0:
        return Decision(NEEDS_ID)
    next_id = fresh_id if used_up else -1
    issued = replace(found, last_id=producer_id, last_epoch=epoch, next_id=next_id)
    ending = _prepared(issued, prepare, epoch + 1, now_ms)
    return Decision(0, ending if found.state is State.ONGOING else _complete(ending, now_ms))


def expire(found: Transaction | None, now_ms: int) -> Decision:
    """Abort a transaction that was open for too long, and fence its producer."""
    if found is None or found.state is not State.ONGOING or now_ms < found.due_ms:
        return OK
    return Decision(0, _prepared(found, State.PREPARE_ABORT, found.epoch + 1, now_ms))


def abort(found: Transaction | None, now_ms: int) -> Decision:
    """Abort a transaction for an operator: like `expire`, regardless of the time."""
    if found is None:
        return Decision(error_codes.TRANSACTIONAL_ID_NOT_FOUND)
    if found.state is State.PREPARE_ABORT:
        return OK
    if found.state is not State.ONGOING:
        return Decision(error_codes.INVALID_TXN_STATE)
    return Decision(0, _prepared(found, State.PREPARE_ABORT, found.epoch + 1, now_ms))


def record_progress(
    found: Transaction | None,
    seen: Transaction,
    marked: Mapping[str, Iterable[int]],
    groups: Iterable[str],
    now_ms: int,
) -> Decision:
    """Record progress of the prepared transaction `seen`: partitions with its marker, and groups with its offsets.

    The last one completes the transaction.
    """
    if found is None or not is_same_transaction(found, seen) or not found.state.prepared:
        return OK  # another node completed it
    done = {(topic_id, partition) for topic_id, partitions in marked.items() for partition in partitions}
    left = {
        topic_id: rest
        for topic_id, partitions in found.partitions.items()
        if (rest := tuple(p for p in partitions if (topic_id, p) not in done))
    }
    gone = set(groups)
    offsets = {group: each for group, each in found.offsets.items() if group not in gone}
    if left or offsets:
        return Decision(0, replace(found, partitions=left, offsets=offsets, updated_ms=now_ms))
    return Decision(0, _complete(found, now_ms))


def is_same_transaction(found: Transaction, seen: Transaction) -> bool:
    """Return whether both are the same transaction in the same state."""
    return (found.producer_id, found.epoch, found.state, found.number) == (
        seen.producer_id,
        seen.epoch,
        seen.state,
        seen.number,
    )


def _refusal(found: Transaction | None, producer_id: int, epoch: int) -> int:
    if found is None or found.producer_id != producer_id:
        return error_codes.INVALID_PRODUCER_ID_MAPPING
    return error_codes.PRODUCER_FENCED if found.epoch != epoch else 0


def _complete(found: Transaction, now_ms: int) -> Transaction:
    state = State.COMPLETE_COMMIT if found.state is State.PREPARE_COMMIT else State.COMPLETE_ABORT
    producer_id, epoch = found.identity
    return replace(
        found,
        state=state,
        producer_id=producer_id,
        epoch=epoch,
        next_id=-1,
        partitions={},
        offsets={},
        started_ms=-1,
        updated_ms=now_ms,
    )


def _prepared(found: Transaction, state: State, epoch: int, now_ms: int) -> Transaction:
    """Return the prepared transaction, without the offsets of an abort and without groups that have no offsets."""
    offsets = {g: each for g, each in found.offsets.items() if each} if state is State.PREPARE_COMMIT else {}
    bumped = epoch != found.epoch
    return replace(found, state=state, epoch=epoch, bumped=bumped, offsets=offsets, updated_ms=now_ms)
