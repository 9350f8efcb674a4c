"""Topics, by name and by id. Both rows of a topic are written in one batch, so neither exists without the other.

topic      01 | "" | name text                                 (layouts: rows.key_encoding, rows.row_family)
           topic_id, partitions, kind, created_ms, config map
topic id   02 | "" | topic_id text
           name
"""

from __future__ import annotations

import msgspec

from tidemill.metastore.rows.key_encoding import Column, Kind
from tidemill.metastore.rows.row_family import Family


class TopicRow(msgspec.Struct, frozen=True):
    """A topic. kind: `stream` (Kafka producers) or `capture` (written by capture only)."""

    name: str
    topic_id: str
    partitions: int
    kind: str = "stream"
    created_ms: int = 0
    config: dict[str, str] = {}


class TopicIdRow(msgspec.Struct, frozen=True):
    topic_id: str
    name: str


TOPICS = Family(0x01, "topic", TopicRow, Column("name", Kind.TEXT), own_entity=False)
TOPIC_IDS = Family(0x02, "topic id", TopicIdRow, Column("topic_id", Kind.TEXT), own_entity=False)
