"""From our errors to Kafka's codes, in one table, so that every handler answers alike.

What decides each line is what clients do with the code on a Produce, as measured by answering librdkafka 2.16
with each of them once:

    it did not happen           NOT_LEADER_OR_FOLLOWER, KAFKA_STORAGE_ERROR: retried, nothing lost
    it may have happened        REQUEST_TIMED_OUT: retried with the same sequence, the window removes the twin
    a true gap                  OUT_OF_ORDER_SEQUENCE_NUMBER: fatal to librdkafka, so never answered for less
    anything unknown to it      the message is lost to the application: no code of our own, never 89

Codes: https://kafka.apache.org/protocol#protocol_error_codes
"""

from __future__ import annotations

from typing import Final

from tidemill.base.errors import Closed, Conflict, Corrupt, Fenced, Invalid, Missing, Unavailable, Unknown
from tidemill.topics.front import (
    BatchTooLarge,
    CorruptBatch,
    InvalidProducerEpoch,
    InvalidRecords,
    NotLeader,
    OffsetOutOfRange,
    OutOfOrderSequence,
)

UNKNOWN_SERVER_ERROR: Final = -1
NONE: Final = 0
OFFSET_OUT_OF_RANGE: Final = 1
CORRUPT_MESSAGE: Final = 2
UNKNOWN_TOPIC_OR_PARTITION: Final = 3
LEADER_NOT_AVAILABLE: Final = 5
NOT_LEADER_OR_FOLLOWER: Final = 6
REQUEST_TIMED_OUT: Final = 7
MESSAGE_TOO_LARGE: Final = 10
OFFSET_METADATA_TOO_LARGE: Final = 12
COORDINATOR_NOT_AVAILABLE: Final = 15
INVALID_TOPIC_EXCEPTION: Final = 17
INVALID_REQUIRED_ACKS: Final = 21
UNKNOWN_MEMBER_ID: Final = 25
TOPIC_AUTHORIZATION_FAILED: Final = 29
UNSUPPORTED_VERSION: Final = 35
TOPIC_ALREADY_EXISTS: Final = 36
INVALID_PARTITIONS: Final = 37
INVALID_REPLICATION_FACTOR: Final = 38
INVALID_CONFIG: Final = 40
INVALID_REQUEST: Final = 42
POLICY_VIOLATION: Final = 44
OUT_OF_ORDER_SEQUENCE_NUMBER: Final = 45
INVALID_PRODUCER_EPOCH: Final = 47
TRANSACTIONAL_ID_AUTHORIZATION_FAILED: Final = 53
KAFKA_STORAGE_ERROR: Final = 56
INVALID_RECORD: Final = 87
UNKNOWN_TOPIC_ID: Final = 100

_CODES: Final[tuple[tuple[type[BaseException], int], ...]] = (
    # Subclasses first: the first line that matches wins.
    (NotLeader, NOT_LEADER_OR_FOLLOWER),
    (OutOfOrderSequence, OUT_OF_ORDER_SEQUENCE_NUMBER),
    (InvalidProducerEpoch, INVALID_PRODUCER_EPOCH),
    (InvalidRecords, INVALID_RECORD),
    (BatchTooLarge, MESSAGE_TOO_LARGE),
    (CorruptBatch, CORRUPT_MESSAGE),
    (OffsetOutOfRange, OFFSET_OUT_OF_RANGE),
    (Missing, UNKNOWN_TOPIC_OR_PARTITION),
    (Unknown, REQUEST_TIMED_OUT),
    (Unavailable, KAFKA_STORAGE_ERROR),
    (Fenced, NOT_LEADER_OR_FOLLOWER),
    (Closed, NOT_LEADER_OR_FOLLOWER),
    (Corrupt, KAFKA_STORAGE_ERROR),
    (Conflict, NOT_LEADER_OR_FOLLOWER),
    (Invalid, INVALID_REQUEST),
)


def code_of(error: BaseException) -> int:
    """The Kafka error code of a failed Produce, Fetch or ListOffsets partition.

    An error outside the table is a fault of ours whose outcome nobody knows: REQUEST_TIMED_OUT, so that
    the client tries again with the same sequence. Callers log it.
    """
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return REQUEST_TIMED_OUT


def is_expected(error: BaseException) -> bool:
    return any(isinstance(error, kind) for kind, _ in _CODES)
