"""Topic partitions: their counters and producers, their batches that are not in L1, and their aborted transactions.

    partition  10 | topic_id text | partition u32
               log_start, next_offset, leader_term, log_position, last_at_ms, size_bytes, compaction_epoch,
               terms array of [term, first offset], producers bytes, transactions bytes, reconciled,
               aborted_start
    extent     11 | topic_id text | partition u32 | base_offset u64
               last_offset, max_timestamp_ms, object_key, first_byte, size_bytes, record_count, batches bytes
    aborted    12 | topic_id text | partition u32 | last_offset u64
               producer_id, first_offset, stable, others array of [producer_id, first_offset, stable]

`terms` are Kafka's leader epochs, ascending. An extent is the bytes of an object that hold a range of offsets: one
batch, or several that are contiguous in one object. `batches` locates each batch, so that every placeholder can be
written again unchanged. `producers`, `transactions` and `batches` belong to `topics`, the only reader:

    producers     msgpack array of [producer id, [epoch, [[first sequence, last sequence, base offset, record
                  count]…], updated_ms]], the longest idle first
    transactions  empty, or msgpack array of [producer id, first offset] of the open ones, by first offset
    batches       empty (the extent is one batch), or
                  msgpack array of [base_offset, first_byte, size_bytes, max_timestamp_ms], by base offset;
                  a batch's record count is the distance to the next base, the last one's to last_offset + 1

An aborted row says which records of which producer are not committed. `last_offset` is that of the abort marker; every
transaction that was aborted later begins at or after `stable`. `others`, in order, ended at the same offset: a restore
aborts all transactions that were open at the end of its rows, without markers. Rows beyond the partition row's next
offset have no meaning until that row catches up.
"""

from __future__ import annotations

import msgspec

from tidemill.metastore.rows.key_encoding import Column, Kind
from tidemill.metastore.rows.row_family import Family


class PartitionRow(msgspec.Struct, frozen=True):
    """State of a partition.

    log_start       first Kafka offset that may be read
    next_offset     the high watermark as of this row
    leader_term     newest term that placed a batch
    log_position    next position of the partition's fenced log as of this row
    last_at_ms      time of the newest append: of batches, or of an advance (retention, settling)
    reconciled      everything below it is in L1: extent rows hold the offsets from there on
    aborted_start   no row lists a transaction that was aborted wholly below it: compaction has removed its records
    """

    topic_id: str
    partition: int
    log_start: int
    next_offset: int
    leader_term: int = 0
    log_position: int = 0
    last_at_ms: int = 0
    size_bytes: int = 0
    compaction_epoch: int = 0
    terms: tuple[tuple[int, int], ...] = ()
    producers: bytes = b""
    transactions: bytes = b""
    reconciled: int = 0
    aborted_start: int = 0

    @property
    def hot_start(self) -> int:
        """First offset whose batch an extent row of this partition holds."""
        return max(self.log_start, self.reconciled)


PARTITIONS = Family(0x10, "partition", PartitionRow, Column("topic_id", Kind.TEXT), Column("partition", Kind.U32))


class ExtentRow(msgspec.Struct, frozen=True):
    """One extent: offsets base_offset to last_offset, both inclusive; `first_byte` and `size_bytes` within the
    object."""

    topic_id: str
    partition: int
    base_offset: int
    last_offset: int
    max_timestamp_ms: int
    object_key: str
    first_byte: int
    size_bytes: int
    record_count: int
    batches: bytes = b""


EXTENTS = Family(
    0x11,
    "extent",
    ExtentRow,
    Column("topic_id", Kind.TEXT),
    Column("partition", Kind.U32),
    Column("base_offset", Kind.U64),
)


class AbortedRow(msgspec.Struct, frozen=True):
    topic_id: str
    partition: int
    last_offset: int
    producer_id: int
    first_offset: int
    stable: int
    others: tuple[tuple[int, int, int], ...] = ()


ABORTED = Family(
    0x12,
    "aborted",
    AbortedRow,
    Column("topic_id", Kind.TEXT),
    Column("partition", Kind.U32),
    Column("last_offset", Kind.U64),
)
