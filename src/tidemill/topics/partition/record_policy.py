"""Check a batch against the limits of its topic's config. Checks for every batch are in `batch.validation`."""

from __future__ import annotations

from tidemill.topics.api import BatchTooLargeError, InvalidTimestampError
from tidemill.topics.config.configs import TopicConfig
from tidemill.topics.partition.pending_batch import PendingBatch
from tidemill.topics.partition.transactions import TRANSACTIONAL


def apply_record_policy(pending: PendingBatch, config: TopicConfig, now_ms: int) -> None:
    """Check size and timestamps, and set the append time if the topic uses it.

    Raises BatchTooLargeError, InvalidTimestampError.
    """
    if pending.kind > TRANSACTIONAL:
        return  # Nothing may reject a marker.
    if pending.size_bytes > config.max_message_bytes:
        raise BatchTooLargeError(
            f"the batch is larger than the topic allows: bytes={pending.size_bytes} limit={config.max_message_bytes}."
        )
    if config.append_time:
        pending.set_append_time(now_ms)
    elif pending.max_timestamp_ms - config.ahead_max_ms > now_ms and not config.captured:
        # A captured record has the time of its commit. A wrong clock of the database must not stop its capture.
        raise InvalidTimestampError(
            f"a record's time is too far ahead: timestamp_ms={pending.max_timestamp_ms}"
            f" message.timestamp.after.max.ms={config.ahead_max_ms}."
        )
