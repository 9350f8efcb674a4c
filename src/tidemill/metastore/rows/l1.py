"""What lies in L1 (RFC 0005): extents of partitions, leader epochs, and the objects that hold them.

Unlike the rows of `partitions` and `extents`, which copy what partition logs say, these are the truth. All of a topic
lie in one domain with those copies, and `topics.l1.rules` says how they change.

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
"""Of what holds no batch."""

PREFIX = "l1/"


def l1_key(topic_id: str, object_id: str) -> str:
    """Of the object in the bucket."""
    return f"{PREFIX}{topic_id}/{object_id}"


class L1PartitionRow(msgspec.Struct, frozen=True):
    """Extents cover the offsets [start, next) without a gap; the first one may begin before `start`.
    `size_bytes` is that of all extents' batches."""

    topic_id: str
    partition: int
    start: int
    next: int
    size_bytes: int = 0
    extent_count: int = 0
    compaction_epoch: int = 0
    highest_timestamp_ms: int = NO_TIMESTAMP


class L1ExtentRow(msgspec.Struct, frozen=True):
    """Offsets base_offset to last_offset, both inclusive. `first_byte` and `size_bytes` of the batches, `index_byte`
    and `index_bytes` of their index, within the object. `highest_timestamp_ms`: over this extent and all before it."""

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
        """What it counts for in its object; never 0."""
        return self.size_bytes + self.index_bytes


class L1TermRow(msgspec.Struct, frozen=True):
    """The first offset that was placed in a term: Kafka's leader epochs."""

    topic_id: str
    partition: int
    term: int
    first_offset: int


class L1ObjectRow(msgspec.Struct, frozen=True):
    """`registered` false = announced before its upload, and not yet referred to. Bytes are those of its extents
    (`weight_bytes`); it is garbage when removed_bytes reaches total_bytes. `object_bytes`: its size in the bucket."""

    topic_id: str
    object_id: str
    total_bytes: int = 0
    removed_bytes: int = 0
    object_bytes: int = 0
    updated_ms: int = 0
    registered: bool = False


class L1CleanedRow(msgspec.Struct, frozen=True):
    """How far a partition has been compacted by key: of each key at most one record lies below `cleaned`.

    `tombstones`: (below, at_ms, count), ascending: those that lie below the offset `below`, and not below that of the
    entry before, have been the only record of their key since `at_ms`; so many of them are still there.
    `settled`: what was replaced below it, nobody reads any more.
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
