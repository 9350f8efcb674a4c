"""What feeds tables: a captured database or a stream topic, each with one remap that gives its records their time.

capture/<name>   every table of a captured database; bindings at transaction boundaries
topic/<name>     one stream topic; bindings by tick
"""

from __future__ import annotations

import msgspec

from tidemill.base.errors import Invalid
from tidemill.metastore.catalogue import CaptureRow, CaptureTableRow, Catalogue, TopicRow
from tidemill.shards.front import ShardSchema
from tidemill.shards.pgtypes import column_for
from tidemill.shards.schema import checked


class NotReady(Exception):
    """The feed does not exist yet, or its snapshot is not done: wait. `held_by` is the mark to look at; where it
    `tells`, it exists and says itself whether it moves."""

    def __init__(self, held_by: str, reason: str, *, tells: bool = False) -> None:
        super().__init__(reason)
        self.tells = tells
        self.held_by = held_by
        self.reason = reason


class TopicFeed(msgspec.Struct, frozen=True):
    """One topic as a table's input. `captured`: written by capture, else JSON of strangers. `table`: schema.table."""

    topic: str
    topic_id: str
    partitions: int
    captured: bool
    schema: ShardSchema
    table: str = ""


async def captured_feed(catalogue: Catalogue, capture: str, table: str) -> TopicFeed:
    """The topic of a captured table. Raises NotReady, Invalid (the capture has no such table)."""
    row = await catalogue.get(CaptureRow, capture)
    mark = f"capture:{capture}"
    if row is None:
        raise NotReady(mark, f"capture {capture} has not started")
    if not row.snapshot_done:
        raise NotReady(mark, f"capture {capture} is still taking its snapshot", tells=True)
    found = await catalogue.table(capture, table, fresh=False)
    if found is None:
        known = sorted(t.table for t in await catalogue.tables(capture, fresh=False))
        raise Invalid(
            f"captured database has no such table: capture={capture} table={table}.",
            fix=f"Captured are: {', '.join(known) or 'none'}.",
        )
    if not found.columns:
        raise NotReady(f"table:{capture}/{table}", found.reason or f"table {table} is not copied yet", tells=True)
    topic = await catalogue.get(TopicRow, found.topic)
    if topic is None:
        raise NotReady(mark, f"topic {found.topic} does not exist yet")
    return TopicFeed(topic.name, topic.topic_id, topic.partitions, True, captured_schema(found), table)


def captured_schema(row: CaptureTableRow) -> ShardSchema:
    """The shard of a captured table. Raises Invalid (no key)."""
    described = row.columns
    key = sorted((c for c in described if c.key_index >= 0), key=lambda c: c.key_index)
    if not key:
        raise Invalid(f"table has no primary key: capture={row.capture} table={row.table}.", fix="Give it one.")
    columns = tuple(column_for(c.name, c.type_name) for c in described)
    return checked(ShardSchema(columns, tuple(c.name for c in key)))


async def stream_feed(catalogue: Catalogue, topic: str, schema: ShardSchema) -> TopicFeed:
    """A stream topic. Raises NotReady."""
    row = await catalogue.get(TopicRow, topic)
    if row is None:
        raise NotReady(f"topic:{topic}", f"topic {topic} does not exist yet")
    return TopicFeed(row.name, row.topic_id, row.partitions, False, schema)
