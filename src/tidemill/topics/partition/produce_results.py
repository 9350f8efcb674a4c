"""Build the results and errors of decided batches for the callers of `produce_nowait`."""

from __future__ import annotations

from tidemill.base.errors import TidemillError, UnavailableError
from tidemill.topics.api import (
    InvalidProducerEpochError,
    InvalidTransactionError,
    OutOfOrderSequenceError,
    ProduceResult,
    ProducerStatus,
)
from tidemill.topics.partition.pending_batch import PendingBatch
from tidemill.topics.partition.producer_state import Refusal, RememberedBatch
from tidemill.topics.partition.state import PartitionState
from tidemill.topics.partition.transactions import OPEN_LIMIT


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
