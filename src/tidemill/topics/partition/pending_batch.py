"""One produced batch on its way from `produce_nowait` to its result; `apply_record_policy` checks it against its topic.

The check covers the limits of the topic's config. Checks for every batch are in `batch.validation`.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from tidemill.base.errors import TidemillError
from tidemill.objects.store import Buffer
from tidemill.topics.api import (
    BatchTooLargeError,
    InvalidTimestampError,
    Marker,
    ProduceResult,
    ProduceTransaction,
    TransactionSnapshot,
)
from tidemill.topics.batch.header import TRANSACTIONAL as IN_TRANSACTION
from tidemill.topics.batch.header import BatchHeader, parse_header, set_append_time
from tidemill.topics.config.configs import AS_SENT, TopicConfig
from tidemill.topics.partition.state_machine.transactions import ABORT, COMMIT, PLAIN, TRANSACTIONAL
from tidemill.topics.partition.transaction_verification import Permit
from tidemill.topics.produce import ProducerLine, Ticket


class BatchOwner(Protocol):
    """The partition leader that received the batch."""

    topic_id: str
    partition: int

    def batch_uploaded(self, pending: PendingBatch) -> None: ...

    def batch_failed(self, pending: PendingBatch, error: TidemillError) -> None: ...


class PendingBatch:
    """A batch that ends exactly once. Implements `l0.writer.StagedBatch`.

    `futures`: one entry per caller that shares the result.
    `checked`: validation has passed. Only then may the batch be staged, and only then is `max_timestamp_ms` known.
    `keyed`: validation included the check that each record has a key.
    `within`: the transaction of a data batch.
    `permit`: permission to begin that transaction here.
    """

    __slots__ = (
        "abandoned",
        "append_time_ms",
        "buffer",
        "checked",
        "data",
        "ends_below",
        "first_byte",
        "futures",
        "header",
        "here",
        "keyed",
        "kind",
        "line",
        "max_timestamp_ms",
        "object_key",
        "owner",
        "partition",
        "permit",
        "size_bytes",
        "staged_s",
        "ticket",
        "topic_id",
        "trailer",
        "within",
    )

    def __init__(
        self,
        owner: BatchOwner,
        header: BatchHeader,
        buffer: Buffer,
        future: asyncio.Future[ProduceResult],
        line: ProducerLine,
        *,
        within: ProduceTransaction | None = None,
        marker: Marker | None = None,
    ) -> None:
        self.owner = owner
        self.topic_id = owner.topic_id
        self.partition = owner.partition
        self.header = header
        self.line = line
        self.checked = False
        self.keyed = False
        self.max_timestamp_ms = 0
        self.append_time_ms = -1
        self.buffer: Buffer = buffer
        self.trailer = b""
        self.size_bytes = len(buffer)
        self.staged_s = 0.0
        self.futures = [future]
        self.ticket: Ticket | None = None
        self.abandoned = False
        self.object_key = ""
        self.first_byte = 0
        self.data: bytearray | None = None
        self.within = within
        self.permit: Permit | None = None
        self.ends_below = 0
        """First epoch whose transaction the marker does not end; 0 for data."""
        self.here: TransactionSnapshot | None = None
        """State that the marker expects to end, or None to end any open transaction."""
        if marker is not None:
            self.kind, self.ends_below = COMMIT if marker.commit else ABORT, marker.ends_below
        else:
            self.kind = TRANSACTIONAL if header.attributes & IN_TRANSACTION else PLAIN

    @property
    def is_idempotent(self) -> bool:
        """True if the batch has a place in its producer's sequence; a marker has none."""
        return self.header.producer_id >= 0 and self.kind < COMMIT

    @property
    def identity(self) -> tuple[int, int, int, int]:
        """Identity by which a retry is recognised: producer id, epoch, first sequence, record count."""
        h = self.header
        return (h.producer_id, h.producer_epoch, h.base_sequence, h.record_count)

    def add_trailer(self, trailer: bytes) -> None:
        """Store `trailer` behind the batch (batch/columns_trailer.py)."""
        self.trailer = trailer
        self.size_bytes += len(trailer)

    def accept_validation(self, max_timestamp_ms: int, rewritten: bytearray | None) -> None:
        """Record a passed validation.

        `rewritten`: the bytes to store instead of those received, with the same records and numbers.
        """
        self.checked, self.max_timestamp_ms = True, max_timestamp_ms
        if rewritten is not None:
            self.header, self.buffer = parse_header(rewritten), rewritten
            self.size_bytes = len(rewritten) + len(self.trailer)

    def matches_config(self, config: TopicConfig) -> bool:
        """Return whether the batch was validated for `config` and has its codec. A marker always suits."""
        return self.kind > TRANSACTIONAL or (
            (self.keyed or not config.requires_keys) and config.codec in (AS_SENT, self.header.codec)
        )

    def set_append_time(self, append_time_ms: int) -> None:
        """Set the append time on all records (message.timestamp.type=LogAppendTime).

        The buffer is changed in place if it is writable; the producer gets the time in the answer.
        """
        if memoryview(self.buffer).readonly:
            self.buffer = bytearray(self.buffer)
        set_append_time(self.buffer, append_time_ms)
        self.max_timestamp_ms = self.append_time_ms = append_time_ms

    def uploaded(self, object_key: str, first_byte: int, data: bytearray) -> None:
        self.object_key, self.first_byte, self.data = object_key, first_byte, data
        self.buffer = self.trailer = b""
        self.owner.batch_uploaded(self)

    def upload_failed(self, error: TidemillError) -> None:
        self.owner.batch_failed(self, error)

    def succeed(self, result: ProduceResult) -> None:
        self.abandoned = True
        for future in self.futures:
            if not future.done():
                future.set_result(result)

    def fail(self, error: TidemillError) -> None:
        self.abandoned = True
        self.buffer = self.trailer = b""
        for future in self.futures:
            fail_future(future, error)


def fail_future(future: asyncio.Future[ProduceResult], error: TidemillError) -> None:
    """Set the error and mark it as retrieved: a client that has disconnected is not worth a log line."""
    if not future.done():
        future.set_exception(error)
        future.exception()


def apply_record_policy(pending: PendingBatch, config: TopicConfig, now_ms: int) -> None:
    """Check size and timestamps, and set the append time if the topic uses it.

    Raises BatchTooLargeError, InvalidTimestampError.
    """
    if pending.kind > TRANSACTIONAL:
        return  # Nothing may reject a marker.
    if len(pending.buffer) > config.max_message_bytes:
        raise BatchTooLargeError(
            f"the batch is larger than the topic allows: bytes={len(pending.buffer)} limit={config.max_message_bytes}."
        )
    if config.append_time:
        pending.set_append_time(now_ms)
    elif pending.max_timestamp_ms - config.ahead_max_ms > now_ms and not config.captured:
        # A captured record has the time of its commit. A wrong clock of the database must not stop its capture.
        raise InvalidTimestampError(
            f"a record's time is too far ahead: timestamp_ms={pending.max_timestamp_ms}"
            f" message.timestamp.after.max.ms={config.ahead_max_ms}."
        )
