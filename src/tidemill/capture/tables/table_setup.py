"""Add one table to a capture and remove it: its row and its topic, and its description."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import suppress

from msgspec.structs import replace

from tidemill.base.errors import ConflictError, InvalidError, MissingError, UnavailableError, UnknownOutcomeError
from tidemill.capture.catalog.columns import TableAttributes
from tidemill.capture.catalog.table_choice import TableChoice
from tidemill.capture.catalog.table_discovery import TableInfo
from tidemill.capture.changes import Column, Relation
from tidemill.capture.config import CaptureConfig
from tidemill.capture.encode.debezium_json import EventSource
from tidemill.capture.naming import side_topic_name, split_name
from tidemill.capture.setup.publication import PublishedTable
from tidemill.capture.tables.table_reasons import refusal_for, topic_taken_refusal
from tidemill.capture.tables.table_states import TableStates
from tidemill.capture.topics.captured_table import CapturedTable
from tidemill.metastore.catalogue import CapturedColumn, CaptureTableRow, Catalogue, TopicRow

PRODUCER_ID_BASE = 1 << 62
"""Base of the producer ids of captures: far above those assigned to Kafka producers, a permanent one per capture name.
"""


MAX_EPOCH = (1 << 15) - 1


def stream_producer_id(config: CaptureConfig) -> int:
    return PRODUCER_ID_BASE | zlib.crc32(config.name.encode())


def copy_producer_id(config: CaptureConfig) -> int:
    """Return the producer id for copies. It differs from the stream's, whose sequences are offsets, because the
    sequences of a copy restart with each epoch (partition_writer.py).
    """
    return stream_producer_id(config) | 1 << 32


async def refuse_taken_topics(config: CaptureConfig, catalogue: Catalogue, choice: TableChoice) -> TableChoice:
    """Refuse, before anything is altered, each table whose topic name belongs to Kafka producers."""
    tables, refused = [], dict(choice.refused)
    for table in choice.tables:
        name = config.topic_name_of(table.schema, table.table)
        topic = await catalogue.get(TopicRow, name, fresh=False)
        if topic is not None and topic.kind != "capture":
            refused[table.name] = topic_taken_refusal(name)
        else:
            tables.append(table)
    return TableChoice(tuple(tables), refused)


async def start_table(
    config: CaptureConfig,
    catalogue: Catalogue,
    states: TableStates,
    table: TableInfo,
    relation: Relation,
    published: PublishedTable,
) -> TopicRow | None:
    """Write the table's row without a snapshot, and create its topic under a new id, so that it contains nothing of an
    earlier attempt. Returns None if the table is refused, which `states` reports. That includes a registry that does
    not answer, since nothing has been written then. Raises TableStateUnknownError, and the catalogue's errors.
    """

    earlier, now_ms = states.rows.get(table.name), states.clock.now_ms()
    if earlier is not None and earlier.oid != table.oid:
        await states.move_identities(earlier)
    columns = captured_columns_of(relation)
    try:
        # Before anything of an earlier copy is deleted.
        topic_name = (earlier.topic if earlier is not None else "") or config.topic_name_of(table.schema, table.table)
        schemas = await states.register_schemas(config.envelope, topic_name, columns)
    except (InvalidError, UnavailableError, UnknownOutcomeError) as error:
        await states.refuse_table(table.name, refusal_for(error), table.oid)
        return None

    def started(found: CaptureTableRow | None) -> CaptureTableRow:
        found = found or CaptureTableRow(config.name, table.name)
        return CaptureTableRow(
            config.name, table.name, found.topic or config.topic_name_of(table.schema, table.table),
            generation=found.generation + (found.columns != () or found.snapshot is not None), oid=table.oid,
            columns=columns, identities=found.identities, identities_asked=found.identities_asked,
            envelope=config.envelope, schemas=schemas,
            accepted=found.accepted if found.recopy or found.again_ms or found.snapshot is None else (),
            again_last_ms=now_ms if found.again_ms and not found.recopy else found.again_last_ms,
            identity="FULL" if config.requires_full_identity else table.identity, publication=published.rows,
            reason=found.reason if found.state == "captured" and found.snapshot is None else "",
        )  # fmt: skip

    try:
        row = await states.update_row(table.name, started)
        assert row is not None
        topic = await catalogue.get(TopicRow, row.topic)
        if topic is not None and topic.kind != "capture":
            await states.refuse_table(table.name, topic_taken_refusal(row.topic), table.oid)
            return None
        if topic is not None:
            await delete_found_topics(catalogue, [topic])
        return await catalogue.create_topic(row.topic, config.partitions, kind="capture", config=config.topic_config)
    except (InvalidError, ConflictError) as error:
        await states.refuse_table(table.name, refusal_for(error), table.oid)
        return None


def has_whole_rows(config: CaptureConfig, table: TableInfo) -> bool:
    """Return whether every UPDATE in the stream carries the whole old row."""
    return config.requires_full_identity or table.identity == "FULL"


async def resume_copy(
    config: CaptureConfig, catalogue: Catalogue, states: TableStates, table: TableInfo, relation: Relation
) -> TopicRow | None:
    """Return the topic of an interrupted copy, after raising the copy's epoch in the row for the session that resumes
    it (partition_writer.py). None = the copy starts over. Raises TableStateUnknownError.
    """
    row = states.rows.get(table.name)
    if row is None or row.copy is None or row.oid != table.oid or row.recopy or row.envelope != config.envelope:
        return None
    if not has_whole_rows(config, table) or captured_columns_of(relation) != row.columns or row.copy.epoch >= MAX_EPOCH:
        return None
    topic = await catalogue.get(TopicRow, row.topic)
    if topic is None or topic.topic_id != row.copy.topic_id:
        return None
    held, taken = row.copy, replace(row.copy, epoch=row.copy.epoch + 1)

    def with_next_epoch(found: CaptureTableRow | None) -> CaptureTableRow | None:
        if found is None or found.copy != held or found.recopy:
            return found
        reason = found.reason if found.state == "captured" else ""
        return replace(found, state="captured", reason=reason, fix="", since_ms=0, copy=taken)

    now = await states.update_row(table.name, with_next_epoch)
    return await update_topic_config(config, catalogue, topic) if now is not None and now.copy == taken else None


def event_source_of(config: CaptureConfig, row: CaptureTableRow, database: str) -> EventSource | None:
    """Return the source block of the table's events; None if its records are plain rows."""
    return EventSource(config.name, database, row.schemas) if row.envelope != "row" else None


async def update_topic_config(config: CaptureConfig, catalogue: Catalogue, topic: TopicRow) -> TopicRow:
    """Return the topic of a table that continues, with the configs set to the current ones."""
    if topic.config == config.topic_config:
        return topic
    return await catalogue.change_topic(topic.name, lambda row: replace(row, config=config.topic_config))


def captured_columns_of(relation: Relation, found: TableAttributes | None = None) -> tuple[CapturedColumn, ...]:
    numbers = {c.name: c.attnum for c in found.columns} if found is not None else {}
    return tuple(
        CapturedColumn(c.name, c.type_name, c.key_index, c.type_oid, c.type_mod, numbers.get(c.name, 0))
        for c in relation.columns
    )


def relation_of_row(table: CaptureTableRow, now: Relation | None) -> Relation:
    """Return the relation as of its newest version. The catalogue adds what an older version did not store."""
    schema, name = split_name(table.table)
    known = {c.name: c for c in now.columns} if now is not None else {}
    columns = []
    for c in table.columns:
        other = known.get(c.name)
        oid, mod = (c.type_oid, c.type_mod) if c.type_oid or other is None else (other.type_oid, other.type_mod)
        columns.append(Column(c.name, oid, mod, c.type_name, c.key_index, other.not_null if other else False))
    return Relation(table.oid, schema, name, tuple(columns), table.version)


async def find_topics(catalogue: Catalogue, *names: str) -> list[TopicRow]:
    """Return the existing topics of captures among these names."""
    found = [await catalogue.get(TopicRow, name) for name in names if name]
    return [topic for topic in found if topic is not None and topic.kind == "capture"]


async def delete_found_topics(catalogue: Catalogue, topics: Sequence[TopicRow]) -> None:
    """Delete these topics, but no later topic of the same name. A topic that is already deleted is no error."""
    for topic in topics:
        with suppress(MissingError):
            await catalogue.delete_topic(topic)


async def delete_topic(catalogue: Catalogue, name: str) -> None:
    await delete_found_topics(catalogue, await find_topics(catalogue, name))


async def delete_topics(catalogue: Catalogue, name: str) -> None:
    """Delete the topic of a table and its side topic."""
    await delete_found_topics(catalogue, await find_topics(catalogue, *topics_of(name)))


def topics_of(name: str) -> tuple[str, ...]:
    """Return the names of a table's side topic and of its topic `name`; none for a table without topics."""
    return (side_topic_name(name), name) if name else ()


def create_copy_target(
    config: CaptureConfig, row: CaptureTableRow, topic: TopicRow, source: EventSource | None
) -> CapturedTable:
    """Return the topic of a table as the target of its copy."""
    epoch = row.copy.epoch if row.copy is not None else 0
    return CapturedTable(row.table, topic, copy_producer_id(config), oid=row.oid, source=source, epoch=epoch)
