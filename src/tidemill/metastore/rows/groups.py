"""Committed offsets of consumer groups. Keyed by topic id: a re-created topic starts without the old one's.

offset     30 | group text | topic_id text | partition u32
           offset, leader_epoch, metadata, commit_ms
"""

from __future__ import annotations

import msgspec

from tidemill.metastore.rows.family import Family
from tidemill.metastore.rows.keys import Column, Kind


class GroupOffsetRow(msgspec.Struct, frozen=True):
    group: str
    topic_id: str
    partition: int
    offset: int
    leader_epoch: int = -1
    metadata: str = ""
    commit_ms: int = 0


GROUP_OFFSETS = Family(
    0x30,
    "group offset",
    GroupOffsetRow,
    Column("group", Kind.TEXT),
    Column("topic_id", Kind.TEXT),
    Column("partition", Kind.U32),
)
