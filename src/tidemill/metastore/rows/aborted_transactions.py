"""Aborted transactions of a partition: which records of which producer are not committed.

    aborted    12 | topic_id text | partition u32 | last_offset u64
               producer_id, first_offset, stable, others array of [producer_id, first_offset, stable]

`last_offset` is that of the abort marker; every transaction that was aborted later begins at or after `stable`.
`others`, in order, ended at the same offset: a restore aborts all transactions that were open at the end of its rows,
without markers. Rows beyond the partition row's next offset have no meaning until that row catches up.
"""

from __future__ import annotations

import msgspec

from tidemill.metastore.rows.key_encoding import Column, Kind
from tidemill.metastore.rows.row_family import Family


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
