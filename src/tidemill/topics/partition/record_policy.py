"""What a topic's config asks of a batch of records, beside what every batch must be."""

from __future__ import annotations

from tidemill.topics.api import BatchTooLargeError, InvalidTimestampError
from tidemill.topics.config.configs import TopicConfig
from tidemill.topics.partition.pending_batch import Pending
from tidemill.topics.partition.transactions import TRANSACTIONAL


def conform(pending: Pending, config: TopicConfig, now_ms: int) -> None:
    """Raises BatchTooLargeError, InvalidTimestampError; gives it append time where the topic has that."""
    if pending.kind > TRANSACTIONAL:
        return  # a marker, which nothing may refuse
    if pending.size_bytes > config.max_message_bytes:
        raise BatchTooLargeError(
            f"larger than the topic takes: bytes={pending.size_bytes} limit={config.max_message_bytes}."
        )
    if config.append_time:
        pending.stamp(now_ms)
    elif pending.max_timestamp_ms - config.ahead_max_ms > now_ms and not config.captured:
        # A captured record has the time of its commit: the database's clock may not stop its capture.
        raise InvalidTimestampError(
            f"a record's time is too far ahead: timestamp_ms={pending.max_timestamp_ms}"
            f" message.timestamp.after.max.ms={config.ahead_max_ms}."
        )
