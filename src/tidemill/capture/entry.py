"""One table's entry into a capture, and its end: its row and its topic, how it was described, why it is refused."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from tidemill.base.errors import Conflict, Invalid, TidemillError
from tidemill.capture.changes import Column, Relation
from tidemill.capture.config import CaptureConfig
from tidemill.capture.desk import Desk
from tidemill.capture.naming import split_name
from tidemill.capture.publication import Blocked
from tidemill.capture.tables import Choice, Refusal, TableInfo
from tidemill.metastore.catalogue import CapturedColumn, CaptureTableRow, Catalogue, TopicRow

PRODUCER_ID_BASE = 1 << 62
"""Producer ids of captures: far above those handed to Kafka producers, one per capture name, for ever."""


def producer_id(config: CaptureConfig) -> int:
    return PRODUCER_ID_BASE | zlib.crc32(config.name.encode())


async def without_taken(config: CaptureConfig, catalogue: Catalogue, choice: Choice) -> Choice:
    """Before anything is altered: a table whose topic's name belongs to Kafka producers is refused."""
    tables, refused = [], dict(choice.refused)
    for table in choice.tables:
        name = config.topic_of(table.schema, table.table)
        topic = await catalogue.get(TopicRow, name, fresh=False)
        if topic is not None and topic.kind != "capture":
            refused[table.name] = _taken(name)
        else:
            tables.append(table)
    return Choice(tuple(tables), refused)


def _taken(topic: str) -> Refusal:
    return Refusal(
        "refused",
        f"a topic of this name belongs to Kafka producers: topic={topic}.",
        "Delete it, or rename the capture.",
    )


async def start_table(
    config: CaptureConfig, catalogue: Catalogue, desk: Desk, table: TableInfo, relation: Relation
) -> TopicRow | None:
    """Its row without a snapshot, and a new topic (a new id: nothing of an earlier attempt is in it). None when it is
    refused, which `desk` tells."""

    def started(found: CaptureTableRow | None) -> CaptureTableRow:
        found = found or CaptureTableRow(config.name, table.name)
        return CaptureTableRow(
            config.name, table.name, found.topic or config.topic_of(table.schema, table.table),
            generation=found.generation + (found.columns != () or found.snapshot is not None), oid=table.oid,
            columns=columns_of(relation),
        )  # fmt: skip

    try:
        row = await desk.change(table.name, started)
        assert row is not None
        topic = await catalogue.get(TopicRow, row.topic)
        if topic is not None and topic.kind != "capture":
            await desk.refuse(table.name, _taken(row.topic), table.oid)
            return None
        if topic is not None:
            await catalogue.delete(TopicRow, row.topic)
        return await catalogue.create_topic(row.topic, config.partitions, kind="capture")
    except (Invalid, Conflict) as error:
        await desk.refuse(table.name, refusal_of(error), table.oid)
        return None


def columns_of(relation: Relation) -> tuple[CapturedColumn, ...]:
    return tuple(CapturedColumn(c.name, c.type_name, c.key_index, c.type_oid, c.type_mod) for c in relation.columns)


def as_described(table: CaptureTableRow, now: Relation | None) -> Relation:
    """The relation as of the table's snapshot; what an older version did not store comes from the catalogue."""
    schema, name = split_name(table.table)
    known = {c.name: c for c in now.columns} if now is not None else {}
    columns = []
    for c in table.columns:
        other = known.get(c.name)
        oid, mod = (c.type_oid, c.type_mod) if c.type_oid or other is None else (other.type_oid, other.type_mod)
        columns.append(Column(c.name, oid, mod, c.type_name, c.key_index, other.not_null if other else False))
    return Relation(table.oid, schema, name, tuple(columns))


def refusal_of(error: TidemillError) -> Refusal:
    fix = error.fix or "Mend it; it is tried again by itself."
    return Refusal("refused", error.message, fix, error.held_by if isinstance(error, Blocked) else "")


def gone(row: CaptureTableRow, found: Iterable[TableInfo]) -> tuple[str, str]:
    """(reason, fix) of a table that is not captured any more."""
    drop = "take it out of its pipeline and drop its shard"
    for table in found:
        if table.name == row.table:
            return "the table is not captured any more", f"Name it in `tables` of this capture again, or {drop}."
        if table.oid == row.oid:
            return f"the table is now named {table.name}: its shard ends here", f"Rename it back, or {drop}."
    return (
        "the table is gone from the source: its shard ends here",
        f"Make it anew, and it is copied again; or {drop}.",
    )


async def delete_topic(catalogue: Catalogue, name: str) -> None:
    found = await catalogue.get(TopicRow, name) if name else None
    if found is not None and found.kind == "capture":
        await catalogue.delete(TopicRow, name)
