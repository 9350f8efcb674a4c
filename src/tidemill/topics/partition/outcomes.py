"""What the callers of `produce_nowait` are told: results and errors of decided batches."""

from __future__ import annotations

from tidemill.base.errors import TidemillError, Unavailable
from tidemill.topics.front import InvalidProducerEpoch, OutOfOrderSequence, ProduceResult
from tidemill.topics.partition.idempotence import Refusal, Remembered
from tidemill.topics.partition.pending import Pending
from tidemill.topics.partition.state import PartitionState


def duplicate(batch: Remembered, state: PartitionState) -> ProduceResult:
    return ProduceResult(batch.base_offset, batch.base_offset + batch.record_count - 1, state.log_start, duplicate=True)


def poisoned(pending: Pending) -> Unavailable:
    return Unavailable(
        f"an earlier batch of this producer did not reach the log: producer_id={pending.header.producer_id} "
        f"sequence={pending.header.base_sequence}.",
        fix="Send the batches again in order.",
    )


def refused(pending: Pending, refusal: Refusal) -> TidemillError:
    header = pending.header
    facts = (
        f"partition={pending.topic_id}/{pending.partition} producer_id={header.producer_id} "
        f"epoch={header.producer_epoch} sequence={header.base_sequence}"
    )
    if refusal is Refusal.STALE_EPOCH:
        return InvalidProducerEpoch(f"a newer epoch of this producer has written here: {facts}.")
    return OutOfOrderSequence(f"the batch does not follow the producer's last one: {facts}.")
