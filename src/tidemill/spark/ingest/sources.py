"""Sources of tables: a captured database or a stream topic, each with one remap shard that assigns times to its
records.

capture/<name>   every table of a captured database; bindings at transaction boundaries
topic/<name>     one stream topic; bindings by tick
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from tidemill.base.errors import InvalidError, MissingError, drop_table_command
from tidemill.base.pgtypes.avro import key_layout, row_layout
from tidemill.base.pgtypes.debezium import value_form
from tidemill.metastore.catalogue import (
    AcceptedSchemaChange,
    CapturedColumn,
    CaptureRow,
    CaptureTableRow,
    Catalogue,
    TopicRow,
)
from tidemill.shards.api import Column, ShardSchema
from tidemill.shards.nested.type_names import is_nested
from tidemill.shards.parts.pg_columns import columns_for
from tidemill.shards.parts.schema import check_schema
from tidemill.spark.decode.avro import AvroVersion
from tidemill.spark.formats.record_format import PLAIN, RecordFormat
from tidemill.spark.predicates.expectations import Expectations


class SourceNotReadyError(Exception):
    """The feed does not exist yet, or its snapshot is not complete: wait. `held_by` names the stage status of the
    blocker; if `tells`, that status exists and itself reports whether it moves. `absent`: the input has to
    be created first, so that waiting for it is no fault, however long."""

    def __init__(self, held_by: str, reason: str, *, tells: bool = False, absent: bool = False) -> None:
        super().__init__(reason)
        self.tells = tells
        self.absent = absent
        self.held_by = held_by
        self.reason = reason


class TopicFeed(msgspec.Struct, frozen=True):
    """One topic as a table's input.

    `captured`: written by capture, else by other producers. `table`: schema.table. `known`: the columns of each
    version of a captured table's description; empty = one version, the schema's. `forms`: of its columns, if its
    records are events; None = they are rows.
    """

    topic: str
    topic_id: str
    partitions: int
    captured: bool
    schema: ShardSchema
    table: str = ""
    known: tuple[tuple[Column, ...], ...] = ()
    accepted: tuple[AcceptedSchemaChange, ...] = ()
    """Shards of the table that may lose columns or be re-created (capture accept)."""
    forms: tuple[tuple[str, str], ...] | None = None
    avro: tuple[AvroVersion, ...] = ()
    """Avro schemas of each version of the description, if events are Avro."""
    record_format: RecordFormat = PLAIN
    """Format of the records, if they are not captured."""
    gone: str = ""
    """Reason why the table is no longer captured; "" = it is captured."""
    expectations: Expectations | None = None
    as_text: tuple[str, ...] = ()
    """Arrays of a captured table that are declared as text."""


async def captured_feed(
    catalogue: Catalogue, capture: str, table: str, as_text: Collection[str] | None = ()
) -> TopicFeed:
    """Return the topic of a captured table. `as_text`: columns whose arrays are read as text; None = all. Raises
    SourceNotReadyError, MissingError (the capture has no such table), InvalidError (the table has no such array)."""
    row = await catalogue.get(CaptureRow, capture)
    mark = f"capture:{capture}"
    if row is None:
        raise SourceNotReadyError(mark, f"capture {capture} has not started")
    if not row.snapshot_done:
        raise SourceNotReadyError(mark, f"capture {capture} is still taking its snapshot", tells=True)
    # A fresh read: the caller may have seen records of a newer version.
    found = await catalogue.table(capture, table)
    if found is None:
        captured = sorted(t.table for t in await catalogue.tables(capture, fresh=False))
        raise MissingError(
            f"captured database has no such table: capture={capture} table={table}.",
            fix=f"Use one of the captured tables: {', '.join(captured) or 'none'}.",
        )
    if not found.columns:
        raise SourceNotReadyError(
            f"table:{capture}/{table}", found.reason or f"table {table} is not copied yet", tells=True
        )
    topic = await catalogue.get(TopicRow, found.topic)
    if topic is None:
        raise SourceNotReadyError(mark, f"topic {found.topic} does not exist yet")
    _check_arrays(found, as_text or ())
    schema, known = captured_schema(found, as_text), known_versions(found, as_text)
    return TopicFeed(
        topic.name, topic.topic_id, topic.partitions, True, schema, table, known, found.accepted, column_forms(found),
        avro_versions(found), gone=found.reason if found.state == "dropped" else "", as_text=tuple(as_text or ()),
    )  # fmt: skip


def column_forms(row: CaptureTableRow) -> tuple[tuple[str, str], ...] | None:
    """Return the form of each column in the table's events, equal in all versions; None if its records are rows."""
    if row.envelope == "row":
        return None
    return tuple((c.name, value_form(c.type_oid, c.type_mod)) for c in row.columns)


def avro_versions(row: CaptureTableRow) -> tuple[AvroVersion, ...]:
    """Return how to read the records of each version; empty if they are not Avro."""
    described = [_columns_at_version(row.columns, version) for version in range(1, len(row.schemas) + 1)]
    return tuple(
        AvroVersion(*ids, key_layout(columns), row_layout(columns))
        for ids, columns in zip(row.schemas, described, strict=True)
    )


def _check_arrays(row: CaptureTableRow, as_text: Collection[str]) -> None:
    arrays = [c.name for c in row.columns if c.type_name.endswith("[]")]
    for name in as_text:
        if name not in arrays:
            raise InvalidError(
                f"the captured table has no such array: table={row.table} as_text={name}.",
                fix=f"Name columns of an array type: {', '.join(arrays)}." if arrays else "Remove as_text.",
            )


def as_text_error(name: str, as_text: Collection[str], have: ShardSchema) -> InvalidError | None:
    """Return the error of a declaration of text for a column that is an array in the existing table, or None."""
    found = [c for c in have.columns if c.name in as_text and is_nested(c.type)]
    if not found:
        return None
    difference = ", ".join(f"{c.name} {c.type}→string" for c in found)
    return InvalidError(
        f"table exists with another schema: table={name} difference=[{difference}].",
        fix=f"Remove the column from as_text, or re-create the table: {drop_table_command(name)}",
    )


def known_versions(row: CaptureTableRow, as_text: Collection[str] | None = ()) -> tuple[tuple[Column, ...], ...]:
    """Return the columns of each version of its description, with the values of older rows as defaults; empty if there
    is only one version."""
    return tuple(
        tuple(
            msgspec.structs.replace(column, default=c.default)
            for column, c in zip(columns_for(columns, as_text), columns, strict=True)
        )
        for columns in (_columns_at_version(row.columns, version) for version in range(1, row.version + 1))
        if row.version > 1
    )


def _columns_at_version(columns: tuple[CapturedColumn, ...], version: int) -> list[CapturedColumn]:
    """Return the columns as of a version of their description."""
    out = []
    for c in columns:
        former = next((f for f in c.was if version <= f.version), None)
        if c.version <= version:
            was = former or c
            out.append(
                msgspec.structs.replace(c, type_name=was.type_name, type_oid=was.type_oid, type_mod=was.type_mod)
            )
    return out


def captured_schema(row: CaptureTableRow, as_text: Collection[str] | None = ()) -> ShardSchema:
    """Return the shard schema of a captured table; `as_text` as in `captured_feed`. Raises InvalidError (no key)."""
    described = row.columns
    key = sorted((c for c in described if c.key_index >= 0), key=lambda c: c.key_index)
    if not key:
        raise InvalidError(
            f"table has no primary key: capture={row.capture} table={row.table}.", fix="Add a primary key."
        )
    return check_schema(ShardSchema(columns_for(described, as_text), tuple(c.name for c in key)))


async def stream_feed(
    catalogue: Catalogue, topic: str, schema: ShardSchema, record_format: RecordFormat = PLAIN
) -> TopicFeed:
    """Return a stream topic. Raises SourceNotReadyError."""
    row = await catalogue.get(TopicRow, topic)
    if row is None:
        reason = f"topic {topic} does not exist yet: produce to it, or run `tidemill topic create {topic}`"
        raise SourceNotReadyError(f"topic:{topic}", reason, absent=True)
    return TopicFeed(row.name, row.topic_id, row.partitions, False, schema, record_format=record_format)
