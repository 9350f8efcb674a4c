"""The catalogue: topics, pipelines, nodes, and the names of all catalogue rows. Captures have their own module.

topic      01 | "" | name text                                 (layouts: rows.key_encoding, rows.row_family)
           topic_id, partitions, kind, created_ms, config map
topic id   02 | "" | topic_id text
           name
pipeline   04 | "" | name text
           tables map, dead_letters, derived map
node       05 | "" | name text
           host, kafka_port, http_url, node_id, started_ms
name       06 | "" | kind text | name text
           attempt

Both rows of a topic are written in one batch, so neither exists without the other. A node row exists for every name
under which a node ever ran; leases show which nodes are alive, these rows do not.

A name row holds the last writer of a catalogue row, and is written with every change, including deletions. It is never
deleted, so its seqno shows exactly whether a row was changed since it was read. The row itself cannot: it may have been
deleted and re-created. `attempt` is the nonce of the write: a writer that did not learn the outcome finds its nonce
there, or knows that the write did not happen.
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


class PipelineRow(msgspec.Struct, frozen=True):
    """A pipeline. tables: shard name → its source, for `status` and `verify`. Sources: `capture:<name>:<schema.table>`,
    `topic:<name>`, `derived`. derived: derived shard → its inputs in order → the columns that group the input (none:
    the whole input); a row of an older version names none. formats: shard of a topic → the format of its records
    (spark/formats/record_format.py); none: plain JSON objects."""

    name: str
    tables: dict[str, str] = {}
    dead_letters: str = ""
    derived: dict[str, dict[str, tuple[str, ...]]] = {}
    formats: dict[str, str] = {}


PIPELINES = Family(0x04, "pipeline", PipelineRow, Column("name", Kind.TEXT), own_entity=False)


def source_of(fed_by: str) -> str:
    """Return the source of bindings for a table's `capture:<name>:<table>` or `topic:<name>`."""
    kind, _, name = fed_by.partition(":")
    return f"{kind}/{name.partition(':')[0]}"


class NodeRow(msgspec.Struct, frozen=True):
    """A node. `node_id` is Kafka's broker id, permanent for a name. `started_ms`: its last start."""

    name: str
    host: str = ""
    kafka_port: int = 0
    http_url: str = ""
    node_id: int = -1
    started_ms: int = 0


NODES = Family(0x05, "node", NodeRow, Column("name", Kind.TEXT), own_entity=False)


class NameRow(msgspec.Struct, frozen=True):
    """Name row. kind: the name of the row's family."""

    kind: str
    name: str
    attempt: str


NAMES = Family(0x06, "name", NameRow, Column("kind", Kind.TEXT), Column("name", Kind.TEXT), own_entity=False)
