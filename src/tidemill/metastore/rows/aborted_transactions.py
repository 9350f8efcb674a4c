"""Aborted transactions of a partition: which records of which producer nobody may take for committed.

    aborted    12 | topic_id text | partition u32 | last_offset u64
               producer_id, first_offset, stable, others array of [producer_id, first_offset, stable]

`last_offset` is that of the marker that ended it; every transaction that was aborted later begins at or after `stable`.
`others`, in order, ended there too: a restore ends all that was open where its rows end, without markers.
Rows past the partition row's next offset wait for it, and mean nothing before.
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
