"""Mapping from internal errors to Kafka error codes, in one table, so that every handler answers alike.

The reaction of clients to the code of a Produce decides each line, as measured by answering librdkafka 2.16 with each
code once:

    not executed                NOT_LEADER_OR_FOLLOWER, KAFKA_STORAGE_ERROR: retried, nothing is lost
    possibly executed           REQUEST_TIMED_OUT: retried with the same sequence, deduplication removes the duplicate
    a real gap                  OUT_OF_ORDER_SEQUENCE_NUMBER: fatal to librdkafka, so never returned for less
    a code unknown to a client  the application loses the message: return no code of our own, and never 89

Codes: https://kafka.apache.org/protocol#protocol_error_codes
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final

from tidemill.base.errors import (
    ClosedError,
    ConflictError,
    CorruptError,
    FencedError,
    InvalidError,
    MissingError,
    TidemillError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidemill.topics.api import (
    BatchTooLargeError,
    ConcurrentTransactionsError,
    CorruptBatchError,
    InvalidProducerEpochError,
    InvalidRecordsError,
    InvalidTimestampError,
    InvalidTransactionError,
    NotLeaderError,
    OffsetOutOfRangeError,
    OutOfOrderSequenceError,
    RecordsStillNeededError,
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
COORDINATOR_LOAD_IN_PROGRESS: Final = 14
COORDINATOR_NOT_AVAILABLE: Final = 15
NOT_COORDINATOR: Final = 16
INVALID_TOPIC_EXCEPTION: Final = 17
INVALID_REQUIRED_ACKS: Final = 21
ILLEGAL_GENERATION: Final = 22
INCONSISTENT_GROUP_PROTOCOL: Final = 23
INVALID_GROUP_ID: Final = 24
UNKNOWN_MEMBER_ID: Final = 25
INVALID_SESSION_TIMEOUT: Final = 26
REBALANCE_IN_PROGRESS: Final = 27
TOPIC_AUTHORIZATION_FAILED: Final = 29
GROUP_AUTHORIZATION_FAILED: Final = 30
CLUSTER_AUTHORIZATION_FAILED: Final = 31
INVALID_TIMESTAMP: Final = 32
UNSUPPORTED_SASL_MECHANISM: Final = 33
ILLEGAL_SASL_STATE: Final = 34
UNSUPPORTED_VERSION: Final = 35
TOPIC_ALREADY_EXISTS: Final = 36
INVALID_PARTITIONS: Final = 37
INVALID_REPLICATION_FACTOR: Final = 38
INVALID_REPLICA_ASSIGNMENT: Final = 39
INVALID_CONFIG: Final = 40
INVALID_REQUEST: Final = 42
POLICY_VIOLATION: Final = 44
OUT_OF_ORDER_SEQUENCE_NUMBER: Final = 45
INVALID_PRODUCER_EPOCH: Final = 47
INVALID_TXN_STATE: Final = 48
INVALID_PRODUCER_ID_MAPPING: Final = 49
INVALID_TRANSACTION_TIMEOUT: Final = 50
CONCURRENT_TRANSACTIONS: Final = 51
TRANSACTIONAL_ID_AUTHORIZATION_FAILED: Final = 53
SECURITY_DISABLED: Final = 54
OPERATION_NOT_ATTEMPTED: Final = 55
KAFKA_STORAGE_ERROR: Final = 56
LOG_DIR_NOT_FOUND: Final = 57
SASL_AUTHENTICATION_FAILED: Final = 58
NON_EMPTY_GROUP: Final = 68
GROUP_ID_NOT_FOUND: Final = 69
FETCH_SESSION_ID_NOT_FOUND: Final = 70
INVALID_FETCH_SESSION_EPOCH: Final = 71
LISTENER_NOT_FOUND: Final = 72
MEMBER_ID_REQUIRED: Final = 79
GROUP_MAX_SIZE_REACHED: Final = 81
FENCED_INSTANCE_ID: Final = 82
ELECTION_NOT_NEEDED: Final = 84
NO_REASSIGNMENT_IN_PROGRESS: Final = 85
GROUP_SUBSCRIBED_TO_TOPIC: Final = 86
INVALID_RECORD: Final = 87
UNSTABLE_OFFSET_COMMIT: Final = 88
PRODUCER_FENCED: Final = 90
RESOURCE_NOT_FOUND: Final = 91
DUPLICATE_RESOURCE: Final = 92
UNACCEPTABLE_CREDENTIAL: Final = 93
UNKNOWN_TOPIC_ID: Final = 100
TRANSACTIONAL_ID_NOT_FOUND: Final = 105
FETCH_SESSION_TOPIC_ID_ERROR: Final = 106
FENCED_MEMBER_EPOCH: Final = 110
UNRELEASED_INSTANCE_ID: Final = 111
UNSUPPORTED_ASSIGNOR: Final = 112
STALE_MEMBER_EPOCH: Final = 113
TRANSACTION_ABORTABLE: Final = 120
INVALID_REGULAR_EXPRESSION: Final = 128
REBOOTSTRAP_REQUIRED: Final = 129

_NAMES: Final = {value: name for name, value in list(globals().items()) if name.isupper() and isinstance(value, int)}


def describe_code(code: int) -> str:
    """Return the text of a rejection without another text: the name of its code in words."""
    return f"{_NAMES.get(code, f'error_code_{code}').replace('_', ' ').capitalize()}."


_CODES: Final[tuple[tuple[type[BaseException], int], ...]] = (
    # Subclasses come first: the first line that matches wins.
    (NotLeaderError, NOT_LEADER_OR_FOLLOWER),
    (OutOfOrderSequenceError, OUT_OF_ORDER_SEQUENCE_NUMBER),
    (InvalidProducerEpochError, INVALID_PRODUCER_EPOCH),
    (InvalidTransactionError, INVALID_TXN_STATE),
    (InvalidRecordsError, INVALID_RECORD),
    (InvalidTimestampError, INVALID_TIMESTAMP),
    (BatchTooLargeError, MESSAGE_TOO_LARGE),
    (CorruptBatchError, CORRUPT_MESSAGE),
    (OffsetOutOfRangeError, OFFSET_OUT_OF_RANGE),
    (RecordsStillNeededError, POLICY_VIOLATION),
    (MissingError, UNKNOWN_TOPIC_OR_PARTITION),
    (UnknownOutcomeError, REQUEST_TIMED_OUT),
    (ConcurrentTransactionsError, CONCURRENT_TRANSACTIONS),
    (UnavailableError, KAFKA_STORAGE_ERROR),
    (FencedError, NOT_LEADER_OR_FOLLOWER),
    (ClosedError, NOT_LEADER_OR_FOLLOWER),
    (CorruptError, KAFKA_STORAGE_ERROR),
    (ConflictError, NOT_LEADER_OR_FOLLOWER),
    (InvalidError, INVALID_REQUEST),
)


def code_of(error: BaseException) -> int:
    """Return the Kafka error code of a failed Produce or ListOffsets partition.

    An error outside the table is an internal fault with an unknown outcome: it becomes REQUEST_TIMED_OUT, so that the
    client retries with the same sequence. Callers log it.
    """
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return REQUEST_TIMED_OUT


def fetch_code_of(error: BaseException) -> int:
    """Return `code_of` for Fetch: the Java client raises IllegalStateException at REQUEST_TIMED_OUT there, and asks
    again after KAFKA_STORAGE_ERROR (`FetchCollector.handleInitializeErrors`)."""
    code = code_of(error)
    return KAFKA_STORAGE_ERROR if code == REQUEST_TIMED_OUT else code


def is_expected(error: BaseException) -> bool:
    return any(isinstance(error, kind) for kind, _ in _CODES)


async def code_of_work(work: Awaitable[int], *, too_large: int = INVALID_REQUEST) -> int:
    """Return the code of a transaction's `work`, or COORDINATOR_NOT_AVAILABLE if it failed.

    Clients retry after that code even if the work was done: the repeated request finds its result.
    """
    try:
        return await work
    except InvalidError:
        return too_large
    except TidemillError:
        return COORDINATOR_NOT_AVAILABLE


def fenced_code(code: int, *, known: bool) -> int:
    """Return the code for the request's version: before KIP-588, which added PRODUCER_FENCED, it was
    INVALID_PRODUCER_EPOCH.
    """
    return INVALID_PRODUCER_EPOCH if code == PRODUCER_FENCED and not known else code
