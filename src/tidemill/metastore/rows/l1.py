"""Rows of L1 (RFC 0005): extents of partitions, leader epochs, and the objects that hold them.

Unlike the rows of `partitions` and `extents`, which copy the state of partition logs, these rows are the source of
truth. All rows of a topic are in one domain with those copies; `topics.l1.row_transitions` defines how they change.

l1 partition  13 | topic_id text | partition u32
              start, next, size_bytes, extent_count, compaction_epoch, highest_timestamp_ms
l1 extent     14 | topic_id text | partition u32 | base_offset u64
              last_offset, max_timestamp_ms, highest_timestamp_ms, object_id, first_byte, size_bytes, batch_count,
              index_byte, index_bytes
l1 term       15 | topic_id text | partition u32 | term u64
              first_offset
l1 object     16 | topic_id text | object_id text
              total_bytes, removed_bytes, object_bytes, updated_ms, registered
l1 cleaned    17 | topic_id text | partition u32
              cleaned, tombstones, settled
"""

from __future__ import annotations

import msgspec

from tidemill.metastore.rows.key_encoding import Column, Kind
from tidemill.metastore.rows.row_family import Family

NO_TIMESTAMP = -(2**63)
"""Value for an extent or partition without batches."""

PREFIX = "l1/"


def l1_key(topic_id: str, object_id: str) -> str:
    """Return the object's key in the bucket."""
    return f"{PREFIX}{topic_id}/{object_id}"


class L1PartitionRow(msgspec.Struct, frozen=True):
    """L1 part of a partition. Its extents cover the offsets [start, next) without a gap; the first one may begin before
    `start`. `size_bytes`: the batches of all extents."""

    topic_id: str
    partition: int
    start: int
    next: int
    size_bytes: int = 0
    extent_count: int = 0
    compaction_epoch: int = 0
    highest_timestamp_ms: int = NO_TIMESTAMP


class L1ExtentRow(msgspec.Struct, frozen=True):
    """One extent: offsets base_offset to last_offset, both inclusive. `first_byte` and `size_bytes` locate the batches,
    `index_byte` and `index_bytes` their index within the object. `highest_timestamp_ms`: over this extent and all
    before it."""

    topic_id: str
    partition: int
    base_offset: int
    last_offset: int
    max_timestamp_ms: int
    highest_timestamp_ms: int
    object_id: str
    first_byte: int
    size_bytes: int
    batch_count: int
    index_byte: int
    index_bytes: int

    @property
    def object_key(self) -> str:
        return l1_key(self.topic_id, self.object_id)

    @property
    def weight_bytes(self) -> int:
        """Bytes that the extent counts for in its object; never 0."""
        return self.size_bytes + self.index_bytes


class L1TermRow(msgspec.Struct, frozen=True):
    """First offset of a term: Kafka's leader epochs."""

    topic_id: str
    partition: int
    term: int
    first_offset: int


class L1ObjectRow(msgspec.Struct, frozen=True):
    """An L1 object. `registered` false = announced before its upload, not referred to yet. `total_bytes` and
    `removed_bytes` sum its extents' `weight_bytes`; the object is garbage when they are equal. `object_bytes`: its size
    in the bucket."""

    topic_id: str
    object_id: str
    total_bytes: int = 0
    removed_bytes: int = 0
    object_bytes: int = 0
    updated_ms: int = 0
    registered: bool = False


class L1CleanedRow(msgspec.Struct, frozen=True):
    """Progress of log compaction of a partition: below `cleaned` there is at most one record of each key.

    `tombstones`: (below, at_ms, count), ascending. The `count` tombstones below the offset `below`, and not below that
    of the entry before, have been the only record of their key since `at_ms`. `settled`: below it, no reader uses the
    replaced records any more.
    """

    topic_id: str
    partition: int
    cleaned: int
    tombstones: tuple[tuple[int, int, int], ...] = ()
    settled: int = 0


_PARTITION = (Column("topic_id", Kind.TEXT), Column("partition", Kind.U32))

L1_PARTITIONS = Family(0x13, "l1 partition", L1PartitionRow, *_PARTITION)
L1_EXTENTS = Family(0x14, "l1 extent", L1ExtentRow, *_PARTITION, Column("base_offset", Kind.U64))
L1_TERMS = Family(0x15, "l1 term", L1TermRow, *_PARTITION, Column("term", Kind.U64))
L1_OBJECTS = Family(0x16, "l1 object", L1ObjectRow, Column("topic_id", Kind.TEXT), Column("object_id", Kind.TEXT))
L1_CLEANED = Family(0x17, "l1 cleaned", L1CleanedRow, *_PARTITION)
