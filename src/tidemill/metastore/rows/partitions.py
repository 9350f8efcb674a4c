"""Topic partitions: the counters and producers of a partition, without its batches (those are extents).

    partition  10 | topic_id text | partition u32
               log_start, next_offset, leader_term, log_position, last_at_ms, size_bytes, compaction_epoch,
               terms array of [term, first offset], producers bytes, transactions bytes, reconciled,
               aborted_start

`terms` are Kafka's leader epochs, ascending. `producers` and `transactions` belong to `topics`, the only reader:

    producers     msgpack array of [producer id, [epoch, [[first sequence, last sequence, base offset, record
                  count]…], updated_ms]], the longest idle first
    transactions  empty, or msgpack array of [producer id, first offset] of the open ones, by first offset
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
    last_at_ms      newest proposer time seen
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
