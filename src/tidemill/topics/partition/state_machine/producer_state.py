"""Idempotent producers, exactly as in Kafka 4 (KIP-98, KIP-360): pure rules over one producer's last batches.

- Same epoch, and the same first and last sequence as one of the last five batches: a duplicate, answered with the
  original offsets.
- Lower epoch: stale. Higher epoch: the first sequence must be 0.
- Same epoch otherwise: the sequence must follow the last one; 2³¹−1 is followed by 0.
- A producer without state (new, expired, its data deleted) may start at any sequence.
- A marker with a newer epoch than the producer's last batch fences it: the new epoch begins at sequence 0.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from tidemill.topics.batch.header import add_sequence

REMEMBERED_BATCHES = 5
"""Number of batches that Kafka's broker remembers, and the most a client may have in flight with idempotence on."""

PRODUCER_EXPIRY_MS = 24 * 3600 * 1000
"""Default of producer.id.expiration.ms in Kafka."""


class RememberedBatch(msgspec.Struct, frozen=True, array_like=True):
    first_sequence: int
    last_sequence: int
    base_offset: int
    record_count: int


class ProducerState(msgspec.Struct, frozen=True, array_like=True):
    """The newest batches of one producer id in one epoch, at most five, oldest first.

    Empty after a marker that began the epoch.
    """

    epoch: int
    batches: tuple[RememberedBatch, ...]
    updated_ms: int


class Refusal(Enum):
    STALE_EPOCH = "stale epoch"
    OUT_OF_ORDER = "out of order"
    NO_TRANSACTION = "not of an open transaction"
    TOO_MANY_TRANSACTIONS = "too many open transactions"
    OTHER_TRANSACTION = "a marker, and what is open is not what was"


def judge_sequence(
    producer: ProducerState | None, epoch: int, first_sequence: int, record_count: int
) -> RememberedBatch | Refusal | None:
    """Return None to append the batch, Remembered if it is a duplicate of that batch, or a Refusal."""
    if producer is None:
        return None
    if epoch < producer.epoch:
        return Refusal.STALE_EPOCH
    if epoch > producer.epoch:
        return None if first_sequence == 0 else Refusal.OUT_OF_ORDER
    if not producer.batches:
        return None if first_sequence == 0 else Refusal.OUT_OF_ORDER
    last_sequence = add_sequence(first_sequence, record_count - 1)
    for batch in producer.batches:
        if batch.first_sequence == first_sequence and batch.last_sequence == last_sequence:
            return batch
    if first_sequence == add_sequence(producer.batches[-1].last_sequence, 1):
        return None
    return Refusal.OUT_OF_ORDER


def with_batch(
    producer: ProducerState | None, epoch: int, first_sequence: int, record_count: int, base_offset: int, at_ms: int
) -> ProducerState:
    """Return the producer's state after an accepted batch; a new epoch drops the batches of the old one."""
    batch = RememberedBatch(first_sequence, add_sequence(first_sequence, record_count - 1), base_offset, record_count)
    if producer is None or producer.epoch != epoch:
        return ProducerState(epoch, (batch,), at_ms)
    return ProducerState(epoch, (*producer.batches, batch)[-REMEMBERED_BATCHES:], at_ms)


def with_marker(producer: ProducerState | None, epoch: int, at_ms: int) -> ProducerState:
    """Return the producer's state after a marker of `epoch`, which must not be below its own.

    A newer epoch fences the producer: it has no batches, so the next sequence must be 0.
    """
    if producer is None or producer.epoch != epoch:
        return ProducerState(epoch, (), at_ms)
    return ProducerState(epoch, producer.batches, at_ms)
