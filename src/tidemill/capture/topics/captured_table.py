"""A captured table as its topic is written: the encoders of its rows, one writer per partition, and which transactions
it already contains.
"""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable

import structlog

from tidemill.base.errors import InvalidError
from tidemill.base.limits import KAFKA_REQUEST_BYTES
from tidemill.base.runtime.tasks import error_sentence
from tidemill.capture.changes import LSN_NEVER, Relation
from tidemill.capture.decode.row_blocks import RowBlock
from tidemill.capture.encode.columnar_encoder import (
    ENCODE_PER_ROW,
    EncodedBlock,
    EventFormat,
    JsonEventFormat,
    encode_block,
)
from tidemill.capture.encode.debezium_avro import AvroEncoder
from tidemill.capture.encode.debezium_avro_columnar import AvroEventFormat
from tidemill.capture.encode.debezium_json import EventEncoder, EventSource
from tidemill.capture.encode.row_encoder import RowEncoder
from tidemill.capture.postgres.pg_snapshot import is_xid_visible
from tidemill.capture.topics.partition_writer import PartitionWriter
from tidemill.metastore.catalogue import TableSnapshot, TopicRow

log = structlog.get_logger()

MAX_ROW_BYTES = KAFKA_REQUEST_BYTES * 3 // 4
"""Maximum size of key and value of one record. A larger record could not be fetched by a Kafka client, and encoding it
needs several times its size, so it pauses its table.
"""


def is_in_snapshot(xid: int, commit_lsn: int, snapshot: TableSnapshot | None) -> bool:
    """Return whether the stream must skip this transaction, because the snapshot contains it.

    A transaction that the snapshot sees wrote its commit record before the snapshot was taken, so a commit at or after
    `lsn` is never in it. Below `lsn` the xid decides, since commit records precede visibility. The topic of a table
    that was copied with a side topic also contains everything up to the position where the table joined.
    """
    if snapshot is None or commit_lsn <= snapshot.joined_lsn:
        return snapshot is not None
    return commit_lsn < snapshot.lsn and is_xid_visible(xid, snapshot.xmin, snapshot.xmax, snapshot.xip)


class CapturedTable:
    """Topic of one table: its partition writers, which transactions it already contains, and which it must never
    contain (`paused_lsn`). `source`: origin for records that are events; None = records are rows.
    """

    def __init__(
        self, name: str, topic: TopicRow, producer_id: int, *, oid: int, paused_lsn: int = LSN_NEVER,
        source: EventSource | None = None, epoch: int = 0,
    ) -> None:  # fmt: skip
        self.name = name
        self.source = source
        self.oid = oid
        self.paused_lsn = paused_lsn
        self.topic = topic
        self.writers = [
            PartitionWriter(topic.name, topic.topic_id, p, producer_id, epoch) for p in range(topic.partitions)
        ]
        self.snapshot: TableSnapshot | None = None
        self.bound_lsn = -1
        self._encoder: RowEncoder | None = None
        self._events: EventEncoder | AvroEncoder | None = None

    def row_encoder(self, relation: Relation) -> RowEncoder:
        if self._encoder is None or self._encoder.relation is not relation:
            self._encoder = RowEncoder(relation)
        return self._encoder

    def event_encoder(self, relation: Relation) -> EventEncoder | AvroEncoder | None:
        """Return the encoder of events; None if the records are rows."""
        if self.source is not None and (self._events is None or self._events.relation is not relation):
            make = AvroEncoder if self.source.schemas else EventEncoder
            self._events = make(relation, self.source)
        return self._events

    def _columnar_format(self, relation: Relation) -> EventFormat | None:
        events = self.event_encoder(relation)
        return (
            AvroEventFormat(events)
            if isinstance(events, AvroEncoder)
            else JsonEventFormat()
            if events is not None
            else None
        )

    def encode_block(self, block: RowBlock) -> EncodedBlock | None:
        """Return the rows as records, encoded once for all transactions; None if they have to be written one by one."""
        if block.encoded is None:
            try:
                events = self._columnar_format(block.relation)
                block.encoded = encode_block(block, len(self.writers), MAX_ROW_BYTES, events) or ENCODE_PER_ROW
            except Exception as error:
                # For any error the per-row functions decide which row cannot be written.
                log.warning("rows are encoded one by one", table=self.name, cause=error_sentence(error), exc_info=error)
                block.encoded = ENCODE_PER_ROW
        return block.encoded if isinstance(block.encoded, EncodedBlock) else None

    def partition_of(self, key: bytes) -> PartitionWriter:
        return self.writers[zlib.crc32(key) % len(self.writers)] if len(self.writers) > 1 else self.writers[0]

    def check_size(self, key: bytes, value: bytes) -> None:
        """Raise InvalidError if a record of this key and value would be larger than MAX_ROW_BYTES."""
        if len(key) + len(value) > MAX_ROW_BYTES:
            of_avro = self.source is not None and self.source.schemas
            said = key[:200].hex() if of_avro else key[:200].decode(errors="replace")
            raise InvalidError(
                f"a row is too large for a record: table={self.name} key={said} bytes={len(key) + len(value)}"
                f" limit={MAX_ROW_BYTES}.",
                fix="Shorten it, then re-snapshot the table.",
            )

    def needs_no_writing(self, xid: int, lsn: int) -> bool:
        """Return whether the transaction needs no writing: it is already bound, part of the table's snapshot, or at or
        above the position where the table was paused.
        """
        return lsn <= self.bound_lsn or lsn >= self.paused_lsn or is_in_snapshot(xid, lsn, self.snapshot)


OnFault = Callable[[CapturedTable, int, BaseException], Awaitable[None]]
"""on_fault(table, commit LSN, error of its row): pause the table durably and call `TopicWriter.pause_table`."""
